"""Engines on tiny random targets for tests: run requests, with any drafter, to the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import EngineConfig, SamplingParams
from outrider.costs import CostTable
from outrider.drafters import Drafter
from outrider.engine import Engine
from outrider.models.decoder import Decoder
from outrider.request import Request
from outrider.types import SpeculationStats


class LetterDecoder:
    """Token ids as letters: a text decoder with one character per token."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


@dataclass(frozen=True)
class Outcome:
    """What a run's observer could see of one request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error: str | None


def new_engine(
    target: Decoder,
    drafter: Drafter | None,
    *,
    max_batch_size: int = 1,
    max_model_len: int = 256,
    max_draft_tokens: int = 64,
    eos_ids: frozenset[int] = frozenset(),
    prefill_chunk: int = 16,
    costs: CostTable | None = None,
    **config: Any,
) -> Engine:
    return Engine(
        target,
        decoder=LetterDecoder(),
        eos_ids=eos_ids,
        config=EngineConfig(max_batch_size=max_batch_size, prefill_chunk=prefill_chunk, **config),
        max_model_len=max_model_len,
        drafter=drafter,
        max_draft_tokens=max_draft_tokens,
        costs=costs,
    )


def submit(engine: Engine, prompt: Sequence[int], params: SamplingParams, **more) -> Request:
    request = engine.new_request(prompt, params, **more)
    engine.submit(request)
    return request


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[list[Outcome], SpeculationStats]:
    """Run all prompts to the end; outcomes in prompt order and the summed statistics."""
    requests = [submit(engine, *pair) for pair in zip(prompts, params, strict=True)]
    while engine.has_work:
        engine.step()
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)
    return [outcome(request) for request in requests], stats


def outcome(request: Request) -> Outcome:
    assert request.finish_reason is not None
    return Outcome(
        tuple(request.token_ids[request.prompt_len :]),
        request.output.text,
        request.finish_reason,
        request.error,
    )
