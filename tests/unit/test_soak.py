"""The soak script's judgement: what breaks a bound is said, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from soak import Figures, checks, thirds

GOOD = Figures(
    capacity_rps=3.0,
    offered_rps=6.0,
    overload_s=600.0,
    overload_ends={"200": 1800, "429": 1700},
    health_p99_ms=20.0,
    health_num_bad=0,
    slots_after_overload=0,
    rss_mib=(900.0, 1000.0, 1001.0),
    storm_ends={"200": 200, "left": 200},
    storm_free_s=0.1,
    slots_after_storm=0,
    drain_s=4.0,
    drain_exit_status=0,
    drain_ends={"200": 4},
    kill_s=0.1,
    kill_ends={"cut": 4},
    failed=0,
    faults=0,
)


def test_nothing_is_broken_where_all_went_well() -> None:
    assert all(check.holds for check in checks(GOOD, 30.0))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"overload_ends": {"200": 9, "429": 9, "500": 1}}, "overload: requests ended with"),
        ({"overload_ends": {"200": 9, "429": 9, "hung": 1}}, "overload: requests ended with"),
        ({"overload_ends": {"200": 9, "429": 9, "cut": 1}}, "overload: requests ended with"),
        ({"overload_ends": {"200": 9}}, "overload: some answered, some refused"),
        ({"health_p99_ms": 100.0}, "overload: /health p99"),
        ({"health_num_bad": 1}, "overload: /health p99"),
        ({"slots_after_overload": 3}, "overload: slots in use after it"),
        ({"rss_mib": (900.0, 1000.0, 1021.0)}, "overload: memory at start, middle, end"),
        ({"storm_ends": {"200": 200, "left": 199, "500": 1}}, "storm: requests ended with"),
        ({"storm_free_s": 1.5}, "storm: slots free after a full batch left"),
        ({"slots_after_storm": 1}, "storm: slots free after a full batch left"),
        ({"drain_ends": {"200": 3, "cut": 1}}, "drain: open streams ended with"),
        ({"drain_ends": {}}, "drain: open streams ended with"),
        ({"drain_s": 33.0}, "drain: SIGTERM to the end, exit status"),
        ({"drain_exit_status": 1}, "drain: SIGTERM to the end, exit status"),
        ({"drain_exit_status": None}, "drain: SIGTERM to the end, exit status"),
        ({"kill_ends": {"cut": 3, "200": 1}}, "kill: open streams ended with"),
        ({"kill_s": 2.5}, "kill: SIGKILL to the last stream's end"),
        ({"failed": 1}, "requests failed, steps that raised"),
        ({"faults": 1}, "requests failed, steps that raised"),
    ],
    ids=str,
)
def test_each_bound_that_is_broken_is_named(changes: dict, name: str) -> None:
    found = checks(replace(GOOD, **changes), 30.0)

    assert [name] == [check.name for check in found if not check.holds]


@pytest.mark.parametrize(
    ("mib", "expected"),
    [([5.0], (5.0, 5.0, 5.0)), ([1.0, 2.0, 4.0, 3.0, 6.0, 5.0], (2.0, 4.0, 6.0))],
)
def test_memory_is_told_by_the_highest_value_of_each_third(mib, expected) -> None:
    assert expected == thirds(mib)
