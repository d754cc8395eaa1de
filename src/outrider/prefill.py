"""One prefill pass: the next tokens of new prompts, ahead of their first step.

Owns how a prompt gets into the caches, chunk by chunk, and which request a fault in it is to blame
on; a fault of the drafter is none (:mod:`outrider.drafters.guarded`). Called by the engine beside
``step``, in the same engine step; a prompt's last tokens are left to ``step``.
No row of a pass depends on the others, so how prompts are cut into chunks changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.kv_cache import KVCache
from outrider.models.decoder import Decoder
from outrider.models.layers import Segment
from outrider.request import Request


@dataclass(slots=True)
class Prefilled:
    """What came of it: tokens computed, passes that raised, and the requests that are to blame."""

    num_tokens: int = 0
    num_faults: int = 0
    failed: list[tuple[Request, Exception]] = field(default_factory=list)


def prefill(
    shares: Sequence[tuple[Request, int]],
    target: Decoder,
    cache: KVCache,
    drafter: Drafter | None,
) -> Prefilled:
    """Compute the next ``count`` tokens of each request, in one pass if that goes well.

    Nothing of a pass that raises is committed, so its requests are then tried one by one.
    """
    outcome = Prefilled()
    if not shares:
        return outcome
    segments = [_chunk(request, count, cache) for request, count in shares]
    drafts = drafter is not None and any(request.speculates for request, _ in shares)
    captures = drafter.captures if drafter is not None and drafts else ()
    try:
        output = target.forward(segments, cache, capture=captures)
    except Exception as error:
        if len(shares) == 1:
            return Prefilled(0, 1, [(shares[0][0], error)])
        outcome.num_faults = 1
        for share in shares:
            alone = prefill([share], target, cache, drafter)
            outcome.num_tokens += alone.num_tokens
            outcome.num_faults += alone.num_faults
            outcome.failed += alone.failed
        return outcome
    hidden: Sequence[Tensor | None] = [None] * len(shares)
    if output.hidden_RC is not None:
        hidden = output.hidden_RC.split(output.counts)
    for (request, count), hidden_TC in zip(shares, hidden, strict=True):
        cache.extend(request.row, count)
        outcome.num_tokens += count
        if drafter is not None and request.speculates:
            drafter.prefill(request, cache.committed(request.row), hidden_TC)
    return outcome


def _chunk(request: Request, count: int, cache: KVCache) -> Segment:
    """The next ``count`` tokens behind what is committed, none of which needs logits."""
    start = cache.committed(request.row)
    tokens = request.token_ids[start : start + count]
    return Segment(request.row, tokens, range(count), num_silent=count)
