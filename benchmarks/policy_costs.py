"""What served rounds cost on this machine, by users and rows: the ground under the simulator.

A drafter of wrong guesses makes rounds of any number of rows; each round is timed whole, as the
engine serves it, with everything but the drafting. A head's passes are timed apart, by users.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from outrider import LLM, SamplingParams, SpeculationConfig
from outrider.engine import Engine
from outrider.tree import DraftTree
from outrider.types import StepRecord

ROWS_EACH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of one request: its root and its drafts
MAX_ROWS = 128


class Fillers:
    """Drafts chains of one token, which are nearly always wrong: rows without progress."""

    captures = ()
    num_passes = 0

    def __init__(self) -> None:
        self.num_nodes = 0

    def admit(self, request: Any) -> None:
        """Nothing to prepare."""

    def adopt(self, request: Any, source_id: int, num_tokens: int, *, takes_over: bool) -> int:
        """Nothing is kept."""
        return num_tokens

    def prefill(self, request: Any, num_committed: int, hidden_TC: Any) -> None:
        """Nothing to learn."""

    def propose(
        self, requests: Sequence[Any], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        """A chain of ``num_nodes`` for each request."""
        trees = []
        for request, depth in zip(requests, max_depth, strict=True):
            tree = DraftTree.root(request.token_ids[-1])
            for node in range(min(depth, self.num_nodes)):
                tree.add(node, 1, 1.0)
            trees.append(tree)
        return trees

    def observe(self, *what: Any) -> None:
        """Nothing to learn."""

    def release(self, request: Any) -> None:
        """Nothing is kept."""


def new_engine(llm: LLM, drafter: Any, max_draft_tokens: int) -> Engine:
    """An engine that verifies whatever the drafter proposes."""
    return Engine(
        llm.target,
        decoder=llm.tokenizer,
        eos_ids=llm.tokenizer.eos_ids,
        config=llm.engine_config,
        max_model_len=llm.max_model_len,
        drafter=drafter,
        max_draft_tokens=max_draft_tokens,
        costs=None,
    )


def measure_rounds(llm: LLM, users: int, context: int, repeats: int) -> list[tuple[int, float]]:
    """(rows in all, seconds of a round), medians over interleaved rounds."""
    fillers = Fillers()
    engine = new_engine(llm, fillers, max(ROWS_EACH))
    start(engine, users, context)
    taken: dict[int, list[float]] = {
        rows: [] for rows in ROWS_EACH if rows <= 2 or users * rows <= MAX_ROWS
    }
    for turn in range(repeats + 1):
        for rows, times in taken.items():
            fillers.num_nodes = rows - 1
            record = step(engine)
            if turn and record.num_rows == users * rows:
                times.append(record.verify_s + record.rest_s)
    return [(users * rows, statistics.median(times)) for rows, times in taken.items()]


def measure_drafting(
    llm: LLM,
    speculation: SpeculationConfig,
    users: Sequence[int],
    context: int,
    repeats: int,
) -> Iterator[tuple[int, dict[str, float]]]:
    """For each number of users the passes and seconds of a round's drafting, medians."""
    for count in users:
        engine = llm.with_speculation(replace(speculation, adaptive=False)).engine
        start(engine, count, context)
        records = [step(engine) for _ in range(repeats)]
        yield (
            count,
            {
                "passes": statistics.median(record.draft_passes for record in records),
                "seconds": round(statistics.median(record.draft_s for record in records), 6),
            },
        )


def start(engine: Engine, users: int, context: int) -> None:
    """Bring so many requests past their prompts."""
    params = SamplingParams(max_tokens=10**6, ignore_eos=True)
    for user in range(users):
        prompt = [3 + (7 * user + place) % 997 for place in range(context)]
        engine.submit(engine.new_request(prompt, params))
    while engine.stats().running < users:
        engine.step()
    for _ in range(3):
        engine.step()


def step(engine: Engine) -> StepRecord:
    """One step, which must do something."""
    _, record = engine.step()
    assert record is not None, "requests run"
    return record
