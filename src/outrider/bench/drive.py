"""Carries one turn out: sends each question when it is due, and waits for the last answer.

Owns the two ways in which requests become due. A *closed* load has slots: the next question is due
the moment a slot's answer ended. An *open* load has arrival times and waits for nobody, so a slow
server meets a queue and its latencies show it: they count from the arrival, never from when the
client got round to sending (which would hide the queue; "coordinated omission").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from outrider.bench.blocks import Turn
from outrider.bench.client import Client, Endpoint, LoopLag
from outrider.bench.records import (
    BlockKind,
    BlockRecord,
    RequestRecord,
    SamplingRecord,
)
from outrider.bench.schedule import arrival_times
from outrider.bench.workloads import Question

_MIN_FAILED = 3  # answers, without a sound one, after which a server is not waited for any longer
_Ask = Callable[[int, Question, float], Coroutine[Any, Any, RequestRecord]]


async def run_turn(
    client: Client,
    endpoint: Endpoint,
    turn: Turn,
    questions: Sequence[Question],
    sampling: SamplingRecord,
    *,
    arrival_seed: int,
) -> tuple[BlockRecord, tuple[RequestRecord, ...]]:
    """Ask all questions under the turn's load; the records in the order of the questions.

    A closed load gives up a server of which the first answers all failed: fewer records then.
    Question ``i`` uses the sampling's seed plus ``i``. A load's arrivals depend on
    ``arrival_seed`` and the block, not on the arm.
    """

    async def ask(index: int, question: Question, due_s: float) -> RequestRecord:
        seed = None if sampling.seed is None else sampling.seed + index
        answer = await client.ask(endpoint, question, sampling, seed)
        return RequestRecord.of(
            answer,
            arm=turn.arm,
            block=turn.index,
            position=turn.position,
            load=turn.load,
            prompt_id=question.id,
            category=question.category,
            scheduled_s=due_s,
            prompt_hash=question.hash,
        )

    before = await client.metrics(endpoint)
    async with LoopLag(client.clock) as lag:
        started_s = client.clock()
        concurrency = turn.load.concurrency
        if concurrency is not None:
            requests = await _closed(ask, questions, concurrency, started_s)
        else:
            times = arrival_times(turn.load, len(questions), arrival_seed + turn.number)
            requests = await _open(client, ask, questions, [started_s + at for at in times])
        ended_s = client.clock()
    after = await client.metrics(endpoint)
    block = BlockRecord(
        index=turn.index,
        position=turn.position,
        arm=turn.arm,
        load=turn.load,
        kind=turn.kind,
        started_s=started_s,
        ended_s=ended_s,
        metrics_before=before,
        metrics_after=after,
        client_lag_s=lag.worst_s,
    )
    return block, requests


def warm_up_turn(turn: Turn, index: int) -> Turn:
    """The turn that brings a server to temperature before this one: same arm, same load."""
    return Turn(index, 0, turn.arm, turn.load, BlockKind.WARMUP, 0)


def warm_up_questions(questions: Sequence[Question], turn: Turn) -> list[Question]:
    """Two rounds of every slot, from the end of the list: what the first block does not ask.

    An open load has no slots; four questions wake a server up.
    """
    num_slots = turn.load.concurrency or 2
    return [questions[-1 - place % len(questions)] for place in range(2 * num_slots)]


async def _closed(
    ask: _Ask, questions: Sequence[Question], concurrency: int, started_s: float
) -> tuple[RequestRecord, ...]:
    waiting = iter(enumerate(questions))
    done: dict[int, RequestRecord] = {}

    async def slot() -> None:
        due_s = started_s
        for index, question in waiting:  # shared: whoever is free takes the next one
            done[index] = await ask(index, question, due_s)
            due_s = done[index].ended_s
            if len(done) >= _MIN_FAILED and all(r.error is not None for r in done.values()):
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(slot())
    return tuple(done[index] for index in sorted(done))


async def _open(
    client: Client, ask: _Ask, questions: Sequence[Question], due_s: Sequence[float]
) -> tuple[RequestRecord, ...]:
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, (question, at_s) in enumerate(zip(questions, due_s, strict=True)):
            wait_s = at_s - client.clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(ask(index, question, at_s)))
    return tuple(task.result() for task in tasks)
