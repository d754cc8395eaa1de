"""Scripted records of a benchmark run: every time and count is chosen, so results are known.

``scripted_run`` plays a whole run on a virtual clock: arms with a given seconds per token, at given
loads, block by block. Faults are planted by changing one argument, or one record afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.bench.records import (
    ArmRecord,
    BlockKind,
    BlockRecord,
    ChunkRecord,
    Load,
    LoadKind,
    Losslessness,
    MetricsSnapshot,
    RequestRecord,
    RunData,
    RunRecord,
    SamplingRecord,
    SpeculativeCounts,
    TokenSource,
    WorkloadRecord,
)

WORDS = ("red", "ox", "ran", "far", "hill", "saw", "one", "old", "man", "hat", "two", "dogs")


def request(
    at: Sequence[float],
    tokens: Sequence[int | None],
    *,
    completion_tokens: int | None = None,
    scheduled_s: float = 0.0,
    sent_s: float | None = None,
    source: TokenSource = TokenSource.CONTINUOUS_USAGE,
    load: Load | None = None,
    **more: Any,
) -> RequestRecord:
    """One answer whose chunks arrive at ``at``; usage is their sum unless given."""
    known = [count for count in tokens if count is not None]
    fields: dict[str, Any] = {
        "arm": "off",
        "block": 0,
        "position": 0,
        "prompt_id": "p0",
        "category": "chat",
        "headers_s": None,
        "ended_s": at[-1] if at else scheduled_s,
        "status": 200,
        "error": None,
        "finish_reason": "length",
        "prompt_tokens": 20,
        "text": "text",
        "speculative": None,
    }
    return RequestRecord(
        load=load or Load(LoadKind.CLOSED, 1),
        scheduled_s=scheduled_s,
        sent_s=scheduled_s if sent_s is None else sent_s,
        chunks=tuple(
            ChunkRecord(t, count, 4 * (count or 1)) for t, count in zip(at, tokens, strict=True)
        ),
        completion_tokens=sum(known) if completion_tokens is None else completion_tokens,
        token_source=source,
        **(fields | more),
    )


def answer_text(prompt: str, num_tokens: int) -> str:
    """A text without loops, the same for the same prompt."""
    source = random.Random(prompt)
    return " ".join(f"{source.choice(WORDS)}{source.randrange(1000)}" for _ in range(num_tokens))


@dataclass(frozen=True)
class ScriptedArm:
    """An arm that decodes ``step_s`` per step at one user, ``tokens_per_step`` tokens a step.

    ``slowdown`` multiplies the step by load (users): what a batch costs.
    """

    name: str
    step_s: float
    tokens_per_step: int = 1
    ttft_s: float = 0.05
    slowdown: Callable[[int], float] = lambda users: 1.0
    method: str | None = None
    losslessness: Losslessness = Losslessness.EXACT
    engine: str = "outrider"
    text: Callable[[str, int], str] = answer_text
    num_tokens: int = 48
    speculation: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.01

    def record(self, *, is_baseline: bool) -> ArmRecord:
        return ArmRecord(
            name=self.name,
            method=self.method or self.name,
            is_baseline=is_baseline,
            url=f"http://127.0.0.1/{self.name}",
            model="tiny",
            speculation=self.speculation,
            engine=self.engine,
            engine_version="1.0",
            precision="bfloat16",
            losslessness=self.losslessness,
            losslessness_detail="scripted",
        )


def play_block(
    arm: ScriptedArm,
    load: Load,
    index: int,
    position: int,
    start_s: float,
    num_prompts: int,
    source: random.Random,
    kind: BlockKind = BlockKind.MEASURE,
) -> tuple[BlockRecord, list[RequestRecord]]:
    """One turn: a closed loop keeps its users busy, an open one sends every 1 / rate seconds."""
    users = load.concurrency or 1
    factor = arm.slowdown(users) * 2.718281828 ** source.gauss(0.0, arm.noise)
    step_s, records = arm.step_s * factor, []
    free = [start_s] * users
    for i in range(num_prompts):
        if load.kind is LoadKind.CLOSED:
            slot = min(range(users), key=free.__getitem__)
            scheduled = free[slot]
        else:
            slot, scheduled = 0, start_s + i / load.value
        steps = -(-(arm.num_tokens - 1) // arm.tokens_per_step)
        counts = [1, *[arm.tokens_per_step] * steps]
        counts[-1] -= sum(counts) - arm.num_tokens
        at = [scheduled + arm.ttft_s * factor + k * step_s for k in range(len(counts))]
        free[slot] = at[-1]
        accepted = arm.num_tokens - 1 - steps
        drafts = SpeculativeCounts(
            drafted=4 * steps,
            accepted=accepted,
            steps=steps,
            acceptance_length=1 + accepted / steps,
        )
        records.append(
            request(
                at,
                counts,
                scheduled_s=scheduled,
                load=load,
                arm=arm.name,
                block=index,
                position=position,
                prompt_id=f"p{i}",
                category=("chat", "code")[i % 2],
                text=arm.text(f"p{i}", arm.num_tokens),
                speculative=drafts if arm.tokens_per_step > 1 else None,
            )
        )
    ended = max(record.ended_s for record in records)
    block = BlockRecord(index, position, arm.name, load, kind, start_s, ended, None, None)
    return block, records


def scripted_run(
    arms: Sequence[ScriptedArm],
    loads: Sequence[Load] = (Load(LoadKind.CLOSED, 1),),
    *,
    num_blocks: int = 6,
    num_aa: int = 2,
    num_prompts: int = 8,
    seed: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> RunData:
    """A whole run; the first arm is the baseline. Order within a block turns round (ABBA)."""
    source, clock, index = random.Random(seed), 0.0, 0
    blocks: list[BlockRecord] = []
    requests: list[RequestRecord] = []

    def play(order: Sequence[ScriptedArm], load: Load, kind: BlockKind) -> None:
        nonlocal clock, index
        for position, arm in enumerate(order):
            block, records = play_block(
                arm, load, index, position, clock, num_prompts, source, kind
            )
            blocks.append(block)
            requests.extend(records)
            clock = block.ended_s + 0.1
        index += 1

    for load in loads:
        for turn in range(num_blocks):
            play(arms if turn % 2 == 0 else arms[::-1], load, BlockKind.MEASURE)
        for _ in range(num_aa):
            play((arms[0], arms[0]), load, BlockKind.AA)
    run = RunRecord(
        arms=tuple(arm.record(is_baseline=k == 0) for k, arm in enumerate(arms)),
        workload=WorkloadRecord(
            source="prompts.jsonl",
            prompt_hash="0123456789ab",
            num_prompts=num_prompts,
            categories={"chat": (num_prompts + 1) // 2, "code": num_prompts // 2},
            num_chars_min=40,
            num_chars_median=80.0,
            num_chars_max=200,
        ),
        sampling=SamplingRecord(0.0, 1.0, 48, 0, ignore_eos=False),
        loads=tuple(loads),
        machine={"processor": "a test", "num_cores": 2, "memory_bytes": 3 << 30},
        versions={"outrider": "0.1.0"},
        started="2026-12-01T10:00:00+00:00",
        settings=settings or {},
        settings_hash="abcdef012345",
        seeds={"order": seed},
    )
    return RunData(run, tuple(blocks), tuple(requests))


def change_requests(
    data: RunData, change: Callable[[RequestRecord], RequestRecord], *, arm: str | None = None
) -> RunData:
    """The run with each request of an arm (or all) replaced."""
    changed = tuple(
        change(record) if arm in (None, record.arm) else record for record in data.requests
    )
    return replace(data, requests=changed)


def change_blocks(
    data: RunData, change: Callable[[BlockRecord], BlockRecord], *, arm: str | None = None
) -> RunData:
    """The run with each block of an arm (or all) replaced."""
    changed = tuple(change(block) if arm in (None, block.arm) else block for block in data.blocks)
    return replace(data, blocks=changed)


def counters(at_s: float, steps: int, drafted: int, accepted: int, *by_position: int) -> Any:
    """A scrape of a server with vLLM's speculation counters."""
    label = '{model_name="tiny"}'
    samples = {
        f"vllm:spec_decode_num_drafts_total{label}": float(steps),
        f"vllm:spec_decode_num_draft_tokens_total{label}": float(drafted),
        f"vllm:spec_decode_num_accepted_tokens_total{label}": float(accepted),
    }
    for place, count in enumerate(by_position):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        samples[f'{name}{{model_name="tiny",position="{place}"}}'] = float(count)
    return MetricsSnapshot(at_s, samples)
