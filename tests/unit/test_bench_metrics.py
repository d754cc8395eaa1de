"""Metrics of scripted records equal values computed by hand."""

from __future__ import annotations

import pytest

from outrider.bench.metrics import (
    BlockMetrics,
    RequestMetrics,
    ServiceLevel,
    block_metrics,
    distribution,
    pooled,
)
from outrider.bench.records import BlockKind, BlockRecord, Load, LoadKind, TokenSource
from tests.scripted import ScriptedArm, request, scripted_run


def block(*requests, load=None) -> BlockMetrics:
    record = BlockRecord(
        0, 0, "off", load or Load(LoadKind.CLOSED, 1), BlockKind.MEASURE, 0.0, 9.0, None, None
    )
    return block_metrics(record, requests)


def test_one_request_by_hand():
    """Due at 1.0, sent at 1.2; 2 + 3 + 1 tokens at 1.5, 1.9, 2.5."""
    found = RequestMetrics(request([1.5, 1.9, 2.5], [2, 3, 1], scheduled_s=1.0, sent_s=1.2))

    assert pytest.approx(0.2) == found.queue_wait_s
    assert pytest.approx(0.5) == found.ttft_s
    assert pytest.approx((0.4, 0.6)) == found.chunk_gaps_s
    assert pytest.approx(1.5) == found.latency_s
    assert pytest.approx(6 / 1.5) == found.rate
    assert pytest.approx(1.0 / 4) == found.tpot_s  # four tokens after the first chunk


def test_tpot_is_a_bound_where_nobody_says_what_the_first_chunk_held():
    """Eight tokens in four chunks over 1.2 s: one in the first, or two."""
    found = RequestMetrics(
        request([0.3, 0.7, 1.1, 1.5], [None] * 4, completion_tokens=8, source=TokenSource.USAGE)
    )

    assert pytest.approx((1.2 / 7, 1.2 / 6)) == found.tpot_bounds_s
    assert pytest.approx(1.2 / 6) == found.tpot_s


def test_tokens_of_silent_chunks_are_shared_out_by_characters():
    record = request([0.1, 0.2], [None, None], completion_tokens=8, source=TokenSource.USAGE)
    uneven = request([0.1, 0.2], [1, 3], completion_tokens=8)

    assert [(0.1, 4.0), (0.2, 4.0)] == RequestMetrics(record).token_events()
    assert [(0.1, 2.0), (0.2, 6.0)] == RequestMetrics(uneven).token_events()


def test_a_request_without_text_usage_or_success_has_no_figures():
    silent = RequestMetrics(request([], [], completion_tokens=4))
    unsaid = RequestMetrics(request([0.1], [None], completion_tokens=0))
    failed = RequestMetrics(request([0.1, 0.2], [1, 1], error="the stream broke off"))

    assert [False] * 3 == [found.is_sound for found in (silent, unsaid, failed)]
    assert (None, None) == (silent.ttft_s, silent.rate)
    assert failed.rate is None
    assert unsaid.tpot_s is None


def test_one_chunk_has_a_first_token_but_no_time_per_token():
    found = RequestMetrics(request([0.4], [5]))

    assert pytest.approx(0.4) == found.ttft_s
    assert found.tpot_bounds_s is None
    assert () == found.chunk_gaps_s


def test_a_block_by_hand():
    """Two answers of 3 and 4 tokens between 0 and 2.5: 7 / 2.5; waited 1.0 + 2.0 s: 7 / 3."""
    found = block(
        request([0.5, 0.75, 1.0], [1, 1, 1]),
        request([0.8, 1.7, 2.5], [1, 2, 1], scheduled_s=0.5),
    )

    assert 7 == found.num_tokens
    assert pytest.approx(7 / 2.5) == found.whole_rate
    assert pytest.approx(7 / 3) == found.user_rate
    assert found.steady_rate is None  # one user has no ramp
    assert pytest.approx(0.4) == found.percentile("ttft_s", 50)  # of 0.5 and 0.3
    assert pytest.approx([0.25, 0.25, 0.9, 0.8]) == pooled([found], "chunk_gap_s")
    assert pytest.approx(2 / (0.5 / 2 + 1.7 / 3)) == found.decode_rate


def test_failed_requests_count_for_no_rate_and_against_goodput():
    level = ServiceLevel(ttft_s=0.6, tpot_s=0.5)
    found = block(
        request([0.5, 1.0], [1, 1]),
        request([0.5, 1.0], [1, 1], error="status 500"),
        request([0.7, 1.0], [1, 1]),  # too late a first token
    )

    assert 4 == found.num_tokens
    assert pytest.approx(1 / 1.0) == found.goodput(level)
    assert pytest.approx(1 / 3) == found.attainment(level)
    assert "TTFT <= 600 ms, TPOT <= 500 ms" == level.text
    assert not ServiceLevel().is_set


def test_the_steady_middle_leaves_out_ramp_and_end():
    """Two slots, eight answers of 1 s with tokens at .5 and 1: 1 s to 3 s hold 8 of 16 tokens."""
    load = Load(LoadKind.CLOSED, 2)
    found = block(
        *(request([t + 0.5, t + 1.0], [1, 1], scheduled_s=t) for t in (0, 0, 1, 1, 2, 2, 3, 3)),
        load=load,
    )

    assert pytest.approx(16 / 4) == found.whole_rate
    # From the end of the first two at 1.0 to the first that finds nothing at 4.0: 12 tokens in 3 s.
    assert pytest.approx(12 / 3) == found.steady_rate


def test_a_short_closed_loop_has_no_steady_middle():
    requests = [request([1.0, 2.0], [1, 1], scheduled_s=0.0) for _ in range(4)]

    assert block(*requests, load=Load(LoadKind.CLOSED, 4)).steady_rate is None


def test_bundled_chunks_leave_every_rate_as_it_is():
    """The same 12 tokens over the same time, one by one and in fours."""
    single = block(request([0.1 * k for k in range(1, 13)], [1] * 12))
    bundled = block(request([0.4, 0.8, 1.2], [4, 4, 4]))

    assert single.whole_rate == pytest.approx(bundled.whole_rate)
    assert single.user_rate == pytest.approx(bundled.user_rate)
    assert [pytest.approx(0.1)] * 2 == [b.requests[0].tpot_s for b in (single, bundled)]


def test_percentiles_of_pooled_samples():
    found = distribution([float(value) for value in range(1, 101)])

    assert found is not None
    assert (100, 50.5, 50.5) == (found.num_samples, found.mean, found.p50)
    assert pytest.approx((90.1, 95.05, 99.01)) == (found.p90, found.p95, found.p99)
    assert distribution([]) is None


def test_a_scripted_run_has_the_rates_it_was_given():
    """48 tokens, the first after 50 ms, 47 steps of 10 ms: 48 / 0.52 s."""
    data = scripted_run([ScriptedArm("off", 0.01, noise=0.0)])
    first = data.blocks[0]
    found = block_metrics(first, data.requests_of(first))

    assert [pytest.approx(48 / 0.52)] * 2 == [found.whole_rate, found.user_rate]
    assert pytest.approx(100.0) == found.decode_rate
