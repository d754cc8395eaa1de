"""Requests as a drafter sees them, for tests without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import SamplingParams
from outrider.sampling import RequestSampler


@dataclass
class BareRequest:
    """A text so far and its sampler; the test appends what a target would emit."""

    request_id: int
    token_ids: list[int]
    prompt_len: int
    sampler: RequestSampler


def bare_request(
    token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    vocab_size: int,
    request_id: int = 0,
    eos_ids: frozenset[int] = frozenset(),
) -> BareRequest:
    """A request whose tokens are all its prompt's."""
    sampler = RequestSampler(
        params or SamplingParams(), vocab_size=vocab_size, prompt_ids=token_ids, eos_ids=eos_ids
    )
    return BareRequest(request_id, list(token_ids), len(token_ids), sampler)
