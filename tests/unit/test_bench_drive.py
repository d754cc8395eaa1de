"""Turns against a scripted server: when requests are due, and what latencies count from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.bench.blocks import Turn, arm_order, block_questions, plan_turns
from outrider.bench.client import Client, Endpoint
from outrider.bench.drive import run_turn, warm_up_questions, warm_up_turn
from outrider.bench.mock_server import MockChunk, MockReply, MockServer
from outrider.bench.records import BlockKind, BlockRecord, Load, LoadKind, RequestRecord
from outrider.bench.schedule import arrival_times, read_trace
from outrider.errors import ParameterError
from tests.bench_runs import ONE_USER, question, sampling

QUESTIONS = [question(f"Number {place}?", f"q{place}") for place in range(6)]


def turn(load: Load, number: int = 0) -> Turn:
    return Turn(3, 1, "ngram", load, BlockKind.MEASURE, number)


def drive(
    load: Load, reply: MockReply, num_questions: int, **more: Any
) -> tuple[BlockRecord, tuple[RequestRecord, ...], list[Mapping[str, Any]]]:
    async def run():
        async with MockServer(lambda _: reply, **more) as server, Client() as client:
            block, requests = await run_turn(
                client,
                Endpoint(url=server.url, model="mock"),
                turn(load),
                QUESTIONS[:num_questions],
                sampling(),
                arrival_seed=5,
            )
            return block, requests, server.requests

    return asyncio.run(run())


def most_in_flight(requests: tuple[RequestRecord, ...]) -> int:
    events = sorted([(r.sent_s, 1) for r in requests] + [(r.ended_s, -1) for r in requests])
    return int(np.cumsum([step for _, step in events]).max())


def test_a_closed_load_keeps_its_slots_full_and_no_more():
    reply = MockReply(chunks=[MockChunk(0.1, "a")])
    block, requests, _ = drive(Load(LoadKind.CLOSED, 2), reply, 6)

    assert 2 == most_in_flight(requests)
    assert [f"q{place}" for place in range(6)] == [request.prompt_id for request in requests]
    assert 0.3 <= block.ended_s - block.started_s
    assert [block.started_s] * 2 == [request.scheduled_s for request in requests[:2]]
    # The rest are due when a slot got free.
    ended = {request.ended_s for request in requests}
    assert all(request.scheduled_s in ended for request in requests[2:])


def test_an_open_load_sends_on_time_however_slow_the_server_is():
    """Latency counts from the arrival, so nothing that makes requests wait can hide."""
    load = Load(LoadKind.POISSON, 40.0)
    reply = MockReply(chunks=[MockChunk(0.6, "a")])
    block, requests, _ = drive(load, reply, 5)
    expected = [block.started_s + at for at in arrival_times(load, 5, 5)]

    assert expected == [request.scheduled_s for request in requests]
    assert all(0 <= request.sent_s - request.scheduled_s < 0.4 for request in requests)
    assert 5 == most_in_flight(requests)


def test_records_carry_who_asked_what_under_which_load():
    reply = MockReply(chunks=[MockChunk(0, "a")])
    block, requests, _ = drive(ONE_USER, reply, 2, pages={"/metrics": "a_total 3\n"})

    assert ("ngram", 3, 1, ONE_USER) == (
        requests[0].arm,
        requests[0].block,
        requests[0].position,
        requests[0].load,
    )
    assert QUESTIONS[1].hash == requests[1].prompt_hash
    assert (3, 1, "ngram", BlockKind.MEASURE) == (
        block.index,
        block.position,
        block.arm,
        block.kind,
    )
    assert block.metrics_before is not None
    assert {"a_total": 3.0} == block.metrics_before.samples
    assert block.metrics_before.at_s <= block.started_s <= block.ended_s
    assert block.client_lag_s >= 0.0


def test_each_question_has_its_own_seed_and_the_same_in_every_arm():
    _, _, bodies = drive(ONE_USER, MockReply(chunks=[MockChunk(0, "a")]), 3)

    assert [7, 8, 9] == [body["seed"] for body in bodies]


def test_a_failed_request_is_a_record_and_the_turn_goes_on():
    _, requests, _ = drive(ONE_USER, MockReply(status=500, body="no"), 2)

    assert ["HTTP 500: no"] * 2 == [request.error for request in requests]


def test_a_server_whose_first_answers_all_fail_is_not_asked_the_rest():
    """Else each of them would wait for as long as a server may be silent."""
    _, requests, asked = drive(ONE_USER, MockReply(status=500, body="dead"), 6)

    assert 3 == len(asked) == len(requests)
    assert {"HTTP 500: dead"} == {request.error for request in requests}
    assert ["q0", "q1", "q2"] == [request.prompt_id for request in requests]


def test_warm_up_runs_at_the_measured_load_on_questions_of_its_own():
    warm = warm_up_turn(turn(Load(LoadKind.CLOSED, 2)), 40)

    assert (40, BlockKind.WARMUP, 2) == (warm.index, warm.kind, warm.load.concurrency)
    assert ["q5", "q4", "q3", "q2"] == [q.id for q in warm_up_questions(QUESTIONS, warm)]
    assert 12 == len(warm_up_questions(QUESTIONS[:1], turn(Load(LoadKind.CLOSED, 6))))


# --- the order of turns


@pytest.mark.parametrize("num_arms", [2, 3, 4])
def test_every_arm_stands_at_every_place_equally_often(num_arms: int):
    arms = [f"arm{place}" for place in range(num_arms)]
    orders = [arm_order(arms, number) for number in range(2 * num_arms)]

    for place in range(num_arms):
        assert [2] * num_arms == [[order[place] for order in orders].count(arm) for arm in arms]


def test_two_arms_are_interleaved_abba():
    orders = ["".join(arm_order("AB", number)) for number in range(8)]

    assert ["AB", "BA", "BA", "AB", "AB", "BA", "BA", "AB"] == orders


def test_the_plan_goes_load_by_load_with_the_noise_floor_spread_between():
    loads = (ONE_USER, Load(LoadKind.CLOSED, 4))
    turns = plan_turns(["off", "ngram", "mtp"], loads, num_blocks=4, num_aa_blocks=2)
    kinds = [t.kind for t in turns if t.position == 0]

    m, a = BlockKind.MEASURE, BlockKind.AA
    assert [m, m, a, m, m, a] * 2 == kinds
    assert list(range(12)) == [t.index for t in turns if t.position == 0]
    assert [("off", 0), ("off", 1)] == [(t.arm, t.position) for t in turns if t.index == 2]
    assert {"off", "ngram", "mtp"} == {t.arm for t in turns if t.index == 0}
    assert [ONE_USER] * 6 == [t.load for t in turns if t.position == 0][:6]


def test_a_plan_without_noise_floor_blocks_has_none():
    turns = plan_turns(["off", "ngram"], (ONE_USER,), num_blocks=3, num_aa_blocks=0)

    assert {BlockKind.MEASURE} == {t.kind for t in turns}
    assert 6 == len(turns)


def test_blocks_walk_through_the_prompts_and_begin_again():
    assert ["q0", "q1", "q2", "q3"] == [q.id for q in block_questions(QUESTIONS, 0, 4)]
    assert ["q4", "q5", "q0", "q1"] == [q.id for q in block_questions(QUESTIONS, 1, 4)]
    assert ["q0", "q0", "q0"] == [q.id for q in block_questions(QUESTIONS[:1], 5, 3)]


# --- arrivals


def test_poisson_arrivals_have_the_rate_and_the_spread_of_their_law():
    times = arrival_times(Load(LoadKind.POISSON, 4.0), 4001, seed=1)
    gaps = np.diff(times)

    assert 0.0 == times[0]
    assert pytest.approx(0.25, rel=0.05) == gaps.mean()
    assert pytest.approx(1.0, rel=0.06) == gaps.std() / gaps.mean()


def test_gamma_arrivals_come_in_bursts_at_the_same_rate():
    gaps = np.diff(arrival_times(Load(LoadKind.GAMMA, 4.0, 3.0), 20001, seed=1))

    assert pytest.approx(0.25, rel=0.08) == gaps.mean()
    assert pytest.approx(3.0, rel=0.08) == gaps.std() / gaps.mean()


def test_the_same_seed_gives_the_same_arrivals_and_another_one_others():
    load = Load(LoadKind.POISSON, 2.0)

    assert arrival_times(load, 9, 3) == arrival_times(load, 9, 3)
    assert arrival_times(load, 9, 3) != arrival_times(load, 9, 4)


def test_a_closed_load_has_no_arrival_times():
    with pytest.raises(ParameterError, match="closed:1: has no arrival times"):
        arrival_times(ONE_USER, 3, 1)


def trace(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows) + "\n")
    return path


def test_a_trace_is_replayed_from_its_first_arrival_at_any_speed(tmp_path: Path):
    path = trace(tmp_path, {"timestamp": 27000}, {"timestamp": 27500}, "", {"timestamp": 30000})

    assert (0.0, 0.5, 3.0) == read_trace(path)
    assert (0.0, 0.25) == arrival_times(Load(LoadKind.TRACE, 2.0, path=str(path)), 2, 1)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"at_s": 0}, {"at": 1}], "line 2: is no arrival"),
        ([{"at_s": True}], "line 1: is no arrival"),
        (["x"], "line 1: is no arrival"),
        ([{"at_s": 2}, {"at_s": 1}], "line 2: 1 s is before the line above it"),
        ([""], "holds no arrivals"),
    ],
)
def test_a_bad_trace_is_named_by_line(tmp_path: Path, rows: list[object], expected: str):
    with pytest.raises(ParameterError, match=expected):
        read_trace(trace(tmp_path, *rows))


def test_a_trace_shorter_than_a_block_is_refused(tmp_path: Path):
    load = Load(LoadKind.TRACE, 1.0, path=str(trace(tmp_path, {"at_s": 0})))

    with pytest.raises(ParameterError, match="has 1 arrivals and a block has 2 requests"):
        arrival_times(load, 2, 1)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ParameterError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
