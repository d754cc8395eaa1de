"""Records of runs and small settings, for the tests of measuring."""

from __future__ import annotations

from typing import Any

from outrider.bench.records import (
    ArmRecord,
    BlockKind,
    BlockRecord,
    ChunkRecord,
    Load,
    LoadKind,
    RequestRecord,
    RunRecord,
    SamplingRecord,
    TokenSource,
    WorkloadRecord,
)
from outrider.bench.workloads import Question

ONE_USER = Load(LoadKind.CLOSED, 1)


def sampling(max_tokens: int = 4, **more: Any) -> SamplingRecord:
    """Greedy settings with a seed."""
    fields = {"temperature": 0.0, "top_p": 1.0, "seed": 7, "ignore_eos": False}
    return SamplingRecord(max_tokens=max_tokens, **{**fields, **more})


def question(text: str = "Why?", name: str = "q") -> Question:
    """One user message."""
    return Question(name, "chat", (("user", text),))


def request(arm: str, index: int, position: int, **more: Any) -> RequestRecord:
    """A sound answer of two chunks."""
    fields: dict[str, Any] = {
        "load": ONE_USER,
        "prompt_id": "q",
        "category": "chat",
        "scheduled_s": 1.0,
        "sent_s": 1.25,
        "headers_s": 1.5,
        "chunks": (ChunkRecord(1.75, 1, 3), ChunkRecord(2.0, None, 2)),
        "ended_s": 2.0,
        "status": 200,
        "error": None,
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "token_source": TokenSource.CONTINUOUS_USAGE,
        "text": "Hello",
        "speculative": None,
    }
    return RequestRecord(arm=arm, block=index, position=position, **{**fields, **more})


def block(
    arm: str,
    index: int,
    position: int,
    kind: BlockKind = BlockKind.MEASURE,
    started_s: float = 1.0,
) -> BlockRecord:
    """A turn of one second."""
    return BlockRecord(index, position, arm, ONE_USER, kind, started_s, started_s + 1.0, None, None)


def run_record(*arms: str) -> RunRecord:
    """Conditions of a run; the first arm is the baseline."""
    return RunRecord(
        arms=tuple(
            ArmRecord(name, name, place == 0, f"http://127.0.0.1:{place}", "m")
            for place, name in enumerate(arms)
        ),
        workload=WorkloadRecord("bundled", "0" * 12, 1, {"chat": 1}, 4, 4.0, 4),
        sampling=sampling(),
        loads=(ONE_USER,),
        machine={"num_cores": 2},
        versions={"outrider": "0"},
        started="2026-01-01T00:00:00+00:00",
        settings={"num_blocks": 1},
        settings_hash="0" * 12,
        seeds={"sampling": 7},
    )
