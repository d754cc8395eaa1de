"""Acceptance and time split from scripted counters and answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.bench.acceptance import (
    acceptance_of,
    by_category,
    of_answers,
    of_counters,
)
from outrider.bench.records import (
    BlockKind,
    BlockRecord,
    Load,
    LoadKind,
    MetricsSnapshot,
    SpeculativeCounts,
)
from outrider.bench.step_time import time_split
from tests.scripted import counters, request

BLOCK = BlockRecord(
    0,
    0,
    "eagle3",
    Load(LoadKind.CLOSED, 1),
    BlockKind.MEASURE,
    0.0,
    9.0,
    counters(0.0, 100, 300, 120, 70, 40, 10),
    counters(9.0, 200, 600, 300, 160, 100, 40),
)


def test_counters_around_a_block_by_hand():
    """100 steps drafted 300 and accepted 180: 90 at the first place, 60 at the second, 30 third."""
    found = of_counters(BLOCK)

    assert found is not None
    assert pytest.approx(2.8) == found.length
    assert pytest.approx(0.6) == found.rate
    assert pytest.approx((0.9, 0.6, 0.3)) == found.marginal
    assert pytest.approx((0.9, 60 / 90, 0.5)) == found.conditional
    assert found.marginal is not None
    assert pytest.approx(found.length) == 1 + sum(found.marginal)
    assert found.is_consistent
    assert "2.80" == found.text


def test_positions_that_do_not_sum_to_the_whole_are_not_consistent():
    found = of_counters(replace(BLOCK, metrics_after=counters(9.0, 200, 600, 300, 160, 100, 20)))

    assert found is not None
    assert not found.is_consistent


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        (MetricsSnapshot(0.0, {}), MetricsSnapshot(1.0, {"up": 1.0})),
        (counters(0.0, 100, 300, 120), counters(9.0, 10, 30, 12)),  # started anew
        (counters(0.0, 0, 0, 0), counters(9.0, 0, 0, 0)),  # plain decoding
    ],
)
def test_without_counters_that_grew_acceptance_is_unavailable(before, after):
    assert of_counters(replace(BLOCK, metrics_before=before, metrics_after=after)) is None


def test_answers_are_summed_by_request_and_by_category():
    a = SpeculativeCounts(drafted=8, accepted=5, steps=4, accepted_per_position=(3, 2))
    b = SpeculativeCounts(drafted=6, accepted=1, steps=2, accepted_per_position=(1,))
    records = [
        request([0.1], [1], speculative=a, category="code"),
        request([0.1], [1], speculative=b, category="chat"),
        request([0.1], [1], category="chat"),
    ]
    found, groups = of_answers(records), by_category(records)

    assert found is not None
    assert (14, 6, 6, (4, 2)) == (found.drafted, found.accepted, found.steps, found.per_position)
    assert pytest.approx(2.0) == found.length
    assert ["chat", "code"] == list(groups)
    assert pytest.approx(1.5) == groups["chat"].length
    assert pytest.approx(2.25) == groups["code"].length


def test_counters_are_preferred_and_answers_stand_in_for_them():
    said = [request([0.1], [1], speculative=SpeculativeCounts(4, 2, 2))]
    silent = replace(BLOCK, metrics_before=None)

    from_counters, from_answers = acceptance_of([BLOCK], said), acceptance_of([silent], said)

    assert from_counters is not None
    assert from_answers is not None
    assert ("counters", "answers") == (from_counters.source, from_answers.source)
    assert acceptance_of([silent], [request([0.1], [1])]) is None


def test_without_steps_there_is_a_rate_but_no_length():
    found = of_answers([request([0.1], [1], speculative=SpeculativeCounts(8, 2))])

    assert found is not None
    assert (None, 0.25, "unavailable") == (found.length, found.rate, found.text)


def test_time_is_split_by_the_parts_that_the_server_names():
    before = {"outrider_step_seconds_total{part=\"draft\"}": 1.0,
              "outrider_step_seconds_total{part=\"verify\"}": 2.0}  # fmt: skip
    after = {key: value * 2 for key, value in before.items()}
    block = replace(
        BLOCK, metrics_before=MetricsSnapshot(0, before), metrics_after=MetricsSnapshot(1, after)
    )
    split = time_split([block, block])

    assert split is not None
    assert {"draft": 2.0, "verify": 4.0} == split.seconds
    assert pytest.approx(1 / 3) == split.shares["draft"]
    assert time_split([BLOCK]) is None
    assert time_split([replace(block, metrics_before=block.metrics_after)]) is None
