"""One speculative step: propose, forward, judge, commit, emit.

Owns the order of the algorithm and nothing else. Called by the engine for all requests that decode;
a request that drafts nothing takes the same path with a tree of its root alone, which is plain
decoding. The first token after prefill too: prefill leaves the prompt's last tokens to the first
step, the very last as its root.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from outrider.budget import Budget
from outrider.drafters.base import Drafter
from outrider.draws import Draws
from outrider.kv_cache import KVCache
from outrider.models.decoder import Decoder, ForwardOutput
from outrider.models.layers import Segment
from outrider.rejection import verify
from outrider.request import Request
from outrider.sampling import argmax_rows, token_logprobs
from outrider.tree import DraftTree
from outrider.types import StepRecord, Verdict
from outrider.verify import walk
from outrider.warping import Constraint


def speculative_step(
    requests: Sequence[Request],
    target: Decoder,
    cache: KVCache,
    drafter: Drafter | None,
    budget: Budget,
    *,
    uses_blocks: bool = True,
) -> StepRecord:
    """Advance every request by at least one token; ended ones carry their ``finish_reason``.

    ``uses_blocks``: the ``rejection`` rule takes drawn chains as a whole.
    """
    started = time.perf_counter()
    passes_before = 0 if drafter is None else drafter.num_passes
    committed = [cache.committed(request.row) for request in requests]
    num_before = sum(len(request.token_ids) for request in requests)
    min_score = budget.min_score(committed)
    may_draft = any(request.speculates and request.max_depth > 0 for request in requests)
    was_asked = drafter is not None and may_draft and min_score is not None
    trees = propose(requests, drafter if was_asked else None, min_score or 0.0)
    num_silent = sum(len(r.token_ids) - 1 - n for r, n in zip(requests, committed, strict=True))
    trees = budget.prune(trees, committed, num_silent)
    num_passes = 0 if drafter is None else drafter.num_passes - passes_before
    drafted = time.perf_counter()

    segments = [_segment(*pair, cache) for pair in zip(requests, trees, strict=True)]
    output = target.forward(segments, cache, capture=() if drafter is None else drafter.captures)
    hidden = _split(output)
    verdicts = judge(requests, trees, output.logits_RV, uses_blocks)
    verified = time.perf_counter()

    for b, (request, segment, verdict) in enumerate(zip(requests, segments, verdicts, strict=True)):
        hidden[b] = _committed_states(hidden[b], segment.num_silent, verdict)
        cache.extend(request.row, segment.num_silent)
        cache.commit(request.row, verdict.path)
        num_emitted = request.emit(verdict)
        if request.prediction is not None:
            request.prediction.observe(trees[b], verdict, num_emitted)
        request.sampler.release(len(request.token_ids))
    speculating = [b for b, request in enumerate(requests) if request.speculates]
    if drafter is not None and speculating:
        drafter.observe(
            [requests[b] for b in speculating],
            [trees[b] for b in speculating],
            [verdicts[b] for b in speculating],
            [hidden[b] for b in speculating],
        )
    record = StepRecord(
        num_requests=len(requests),
        num_rows=sum(len(tree) for tree in trees),
        draft_s=drafted - started,
        verify_s=verified - drafted,
        rest_s=time.perf_counter() - verified,
        draft_passes=num_passes,
        num_tokens=sum(len(request.token_ids) for request in requests) - num_before,
        was_asked=was_asked,
    )
    _share(record, requests)
    budget.observe(record, committed, num_silent, [verdict.path for verdict in verdicts])
    return record


def propose(
    requests: Sequence[Request], drafter: Drafter | None, min_score: float
) -> list[DraftTree]:
    """One tree per request, no deeper than it can still use; the root alone where none drafts."""
    trees = [DraftTree.root(request.token_ids[-1]) for request in requests]
    speculating = [b for b, r in enumerate(requests) if r.speculates and r.max_depth > 0]
    if drafter is not None and speculating:
        drafting = [requests[b] for b in speculating]
        proposed = drafter.propose(drafting, [r.max_depth for r in drafting], min_score)
        for b, tree in zip(speculating, proposed, strict=True):
            trees[b] = tree
    return [_eligible(request, tree) for request, tree in zip(requests, trees, strict=True)]


def _eligible(request: Request, tree: DraftTree) -> DraftTree:
    """The tree with the caller's prediction in it, within the request's own limits."""
    if request.prediction is not None and request.max_depth > 0:
        expected = request.prediction.propose(
            request.token_ids, request.prompt_len, request.max_depth
        )
        if not request.params.uses_rejection:
            tree = tree.merged(expected)
        elif expected.num_drafted:
            tree = expected  # beside it, which drawn nodes stay would depend on what was drawn
    if request.params.max_draft_tokens is not None:
        tree = tree.best(request.params.max_draft_tokens)
    if request.constraint is not None and tree.num_drafted:
        output_ids = request.token_ids[request.prompt_len :]
        tree = _allowed(tree, request.constraint, output_ids)
    return tree


def _allowed(tree: DraftTree, constraint: Constraint, output_ids: Sequence[int]) -> DraftTree:
    """The nodes that the grammar allows: the target will pick no other.

    Only fixed guesses go. A drawn node stays, whatever it is: the ``rejection`` rule's other draws
    make up for its law, which a look at what was drawn would change.
    """
    keep: set[int] = set()
    for leaf in {*range(1, len(tree))}.difference(tree.parent):
        path = tree.path(leaf)
        num_valid = constraint.num_valid(output_ids, [tree.token[node] for node in path])
        keep.update(path[:num_valid])
        keep.update(takewhile(tree.drawn.__contains__, path[num_valid:]))
    return tree if len(keep) == tree.num_drafted else tree.keep(sorted(keep))


def judge(
    requests: Sequence[Request],
    trees: Sequence[DraftTree],
    logits_RV: torch.Tensor,
    uses_blocks: bool,
) -> list[Verdict]:
    """What each request's rule accepts of its tree, and what it emits.

    A drafted node whose logits are not finite spoils no other row, since none but its descendants
    reads what it left in the cache.
    """
    raw = argmax_rows(logits_RV)
    verdicts = []
    first = 0
    for request, tree in zip(requests, trees, strict=True):
        rows = slice(first, first + len(tree))
        first += len(tree)
        if request.params.uses_rejection:
            verdict = _reject(request, tree, logits_RV[rows], uses_blocks)
        elif request.sampler.is_raw_argmax:
            verdict = walk(tree, raw[rows])
        else:
            verdict = walk(tree, request.sampler.picks(logits_RV[rows], request.token_ids, tree))
        if request.params.logprobs is not None:
            verdict = _with_logprobs(verdict, logits_RV[rows], request.params.logprobs)
        verdicts.append(verdict)
    return verdicts


def _with_logprobs(verdict: Verdict, logits_NV: torch.Tensor, num_top: int) -> Verdict:
    """The verdict with the raw log-probabilities of each of its tokens."""
    nodes = (0, *verdict.path)
    pairs = zip(nodes, verdict.tokens, strict=False)  # the last node may have no token
    logprobs = [token_logprobs(logits_NV[node], token, num_top) for node, token in pairs]
    return replace(verdict, logprobs=tuple(logprobs))


def _reject(
    request: Request, tree: DraftTree, logits_NV: torch.Tensor, uses_blocks: bool
) -> Verdict:
    """The ``rejection`` rule, on draws that belong to this step alone."""
    laws = request.sampler.laws(logits_NV, request.token_ids, tree)
    num_tokens = len(request.token_ids)
    draws = Draws(request.sampler.seed, request.params.choice, num_tokens)
    return verify(tree, laws, draws, num_tokens=num_tokens, uses_blocks=uses_blocks)


def _split(output: ForwardOutput) -> list[torch.Tensor | None]:
    """Each request's captured states ``[T, C]``, where there are any."""
    if output.hidden_RC is None:
        return [None] * len(output.counts)
    return list(output.hidden_RC.split(output.counts))


def _committed_states(
    hidden_TC: torch.Tensor | None, num_silent: int, verdict: Verdict
) -> torch.Tensor | None:
    """The states of the rows that the verdict commits: silent ones, the root, the path."""
    if hidden_TC is None:
        return None
    nodes = [num_silent + node for node in (0, *verdict.path)]
    return hidden_TC[[*range(num_silent), *nodes]]


def _segment(request: Request, tree: DraftTree, cache: KVCache) -> Segment:
    """The tree behind those prompt tokens, if any, that prefill left to this step."""
    row = request.row
    prompt = request.token_ids[cache.committed(row) : -1]
    return Segment(
        row,
        prompt + tree.token,
        [*range(len(prompt)), *(len(prompt) + depth for depth in tree.depth)],
        tree.ancestor_mask(num_before=len(prompt)),
        num_silent=len(prompt),
    )


def _share(record: StepRecord, requests: Sequence[Request]) -> None:
    """Share the step's time among its requests."""
    for request in requests:
        request.draft_s += record.draft_s / len(requests)
        request.verify_s += record.verify_s / len(requests)
        request.draft_passes += record.draft_passes
