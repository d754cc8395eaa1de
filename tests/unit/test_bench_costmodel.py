"""The cost model: published values, a fit that finds its parameters, projections that miss."""

from __future__ import annotations

import json

import pytest

from outrider.bench.costmodel import LoadPoint, StepCost, held_out_places, project

TRUTH = StepCost(fixed_s=0.006, per_request_s=6e-5, draft_fixed_s=0.002, draft_token_s=2e-5)


def points(loads=(1, 4, 16, 64, 256), bend: float = 1.0, drafted: float = 3.0) -> list[LoadPoint]:
    """Exact steps of ``TRUTH``; beyond 16 users speculative ones cost ``bend`` times as much."""
    return [
        LoadPoint(
            users,
            TRUTH.plain_s(users),
            TRUTH.speculative_s(users, drafted) * (bend if users > 16 else 1.0),
            drafted,
            2.2,
        )
        for users in loads
    ]


@pytest.mark.parametrize(
    ("drafted", "users", "ratio"),
    [
        (3, 1, 1.66), (3, 16, 1.56), (3, 64, 1.38), (3, 128, 1.27), (3, 256, 1.18), (3, 512, 1.12),
        (7, 1, 1.86), (7, 16, 1.57), (7, 64, 1.19), (7, 128, 1.01), (7, 256, 0.88), (7, 512, 0.80),
    ],
)  # fmt: skip
def test_ratios_published_for_an_8b_model_with_eagle3(drafted: int, users: int, ratio: float):
    """Constants of a published simulator (8B on one H100, context 1,000), acceptance .6."""
    context = 1000
    cost = StepCost(
        fixed_s=5.886e-3 + 1.207e-3,
        per_request_s=3.926e-8 * context + 2.101e-5,
        draft_fixed_s=2.135e-3 + 8.41e-7 * (drafted + 1),
        draft_token_s=2.101e-5 + 2.378e-9 * context / drafted,
    )
    length = (1 - 0.6 ** (drafted + 1)) / (1 - 0.6)

    assert pytest.approx(ratio, abs=0.0051) == cost.ratio(users, drafted, length)


def test_a_fit_finds_the_parameters_it_was_made_from():
    projection = project(points())

    assert projection.is_shown
    cost = projection.cost
    assert cost is not None
    for name in StepCost.__dataclass_fields__:
        assert pytest.approx(getattr(TRUTH, name), rel=1e-6) == getattr(cost, name)
    assert {4, 64} == {users for users, (_, _, is_held) in projection.ratios.items() if is_held}


def test_a_model_that_misses_the_held_out_loads_is_hidden_and_says_by_how_much():
    projection = project(points((1, 2, 4, 8, 16, 32, 64), bend=3.0))

    assert not projection.is_shown
    assert projection.at(8) is None
    assert "on loads it had not seen" in projection.reason
    assert {"is_shown", "reason"} == projection.to_json().keys()


def test_few_loads_have_no_projection():
    projection = project(points((1, 4, 16)))

    assert not projection.is_shown
    assert "3 loads" in projection.reason


def test_nothing_is_projected_beyond_the_loads_measured():
    projection = project(points())

    assert projection.at(0.5) is None
    assert projection.at(512) is None
    assert pytest.approx(TRUTH.ratio(100, 3.0, 2.2)) == projection.at(100)
    assert json.loads(json.dumps(projection.to_json()))["is_shown"]


@pytest.mark.parametrize(
    ("count", "places"), [(4, {1, 2}), (5, {1, 3}), (6, {1, 3}), (7, {1, 3, 5})]
)
def test_the_ends_are_never_held_out_and_at_least_two_are(count: int, places: set[int]):
    assert places == held_out_places(count)


def test_no_part_of_a_step_costs_less_than_nothing():
    """A drafter that seems to save time: noise, not a negative cost."""
    odd = [LoadPoint(n, 0.01 + 1e-4 * n, 0.0099 + 1e-4 * n, 3.0, 1.5) for n in (1, 2, 4, 8)]
    cost = project(odd).cost

    assert cost is not None
    assert 0.0 == cost.draft_fixed_s == cost.draft_token_s
