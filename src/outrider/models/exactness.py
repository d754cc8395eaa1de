"""The start-up self-test: does this machine give bit-identical logits for every way of decoding?

Owns the row ranges of the model's linears and the whole-model test; both are remembered in the user
cache by :mod:`~outrider.models.machine`. The engine runs it once per machine, model, precision and
thread count; a level is never assumed:

====  ===================================================================================
L2    identical token ids with speculation on, off, or another drafter, greedy and sampled
      (L1 is its greedy half); shown here by ``torch.equal`` on the target's logits
L3    the self-test found differing bits: every text difference is then a numeric near tie
====  ===================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.layers import Segment, linear_shapes
from outrider.models.linear import RowPolicy, probe_rows
from outrider.models.machine import ResultCache, machine_key
from outrider.types import ProgressCallback


def row_policies(
    config: DecoderConfig,
    dtype: torch.dtype,
    cache: ResultCache | None,
    on_progress: ProgressCallback | None = None,
) -> dict[tuple[int, int, bool], RowPolicy]:
    """The row range of every linear shape of the model, probed or remembered."""
    policies = {}
    shapes = linear_shapes(config)
    for done, shape in enumerate(shapes):
        key = f"rows {shape} {machine_key(dtype)}"
        known = cache.get(key, _policy) if cache else None
        if known is not None:
            policies[shape] = known
            continue
        if on_progress is not None:
            on_progress("self-test: matrix kernels", done / len(shapes))
        out_size, in_size, adds = shape
        policies[shape] = probe_rows(out_size, in_size, dtype, adds=adds)
        if cache is not None:
            cache.put(key, asdict(policies[shape]))
    return policies


def _policy(known: dict[str, Any]) -> RowPolicy:
    return RowPolicy(int(known["min_rows"]), int(known["max_rows"]), bool(known["is_exact"]))


def _result(known: dict[str, Any]) -> bool:
    return bool(known["is_exact"])


def self_test(decoder: Decoder, on_progress: ProgressCallback | None = None) -> bool:
    """Compare the model's logits bit for bit between one-token decoding and every other way.

    Random tokens; 40 positions decoded one by one are the reference. Then: prefill in chunks, the
    whole as chains of several lengths, as trees with the true path scattered among random
    siblings and committed, as one of several requests in a batch, and behind a prompt prefilled in
    passes wider than any block. Takes a few seconds.
    """
    return all(
        passed
        for done, check in enumerate(CHECKS)
        for passed in [_report(check, decoder, done, on_progress)]
    )


PREFIX_LEN, NUM_STEPS = 24, 40


def _report(
    check: Callable[[Decoder, list[int], Tensor], bool],
    decoder: Decoder,
    done: int,
    on_progress: ProgressCallback | None,
) -> bool:
    if on_progress is not None:
        on_progress("self-test: exact logits", done / len(CHECKS))
    tokens = random_tokens(decoder.config.vocab_size, PREFIX_LEN + NUM_STEPS, seed=1)
    return check(decoder, tokens, reference_logits(decoder, tokens, PREFIX_LEN))


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """Reproducible token ids."""
    return [random.Random(seed + i).randrange(vocab_size) for i in range(count)]


def chain_segment(row: int, tokens: Sequence[int]) -> Segment:
    """A segment whose tokens follow one another."""
    return Segment(row, tokens, range(len(tokens)))


def prefill(decoder: Decoder, cache, row: int, tokens: Sequence[int], chunk: int) -> None:
    """Commit tokens to a cache row in chunks, without logits."""
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        segment = Segment(row, piece, range(len(piece)), num_silent=len(piece))
        decoder.forward([segment], cache)
        cache.extend(row, len(piece))


def reference_logits(decoder: Decoder, tokens: Sequence[int], prefix_len: int) -> Tensor:
    """Logits ``[len(tokens) - prefix_len, V]`` of the tokens behind the prefix, one at a time."""
    cache = decoder.new_cache(max_batch_size=1, num_slots=len(tokens))
    row = cache.allocate()
    prefill(decoder, cache, row, tokens[:prefix_len], chunk=16)
    logits = []
    for token in tokens[prefix_len:]:
        logits.append(decoder.forward([chain_segment(row, [token])], cache).logits_RV)
        cache.extend(row, 1)
    return torch.cat(logits)


def check_chains(decoder: Decoder, tokens: list[int], expected_RV: Tensor) -> bool:
    """Chains of 2 to 40 rows, behind prefixes prefilled in other chunk sizes."""
    for count, chunk in ((2, 1), (5, 7), (8, 16), (17, 24), (33, 3), (40, 512)):
        cache = decoder.new_cache(max_batch_size=1, num_slots=len(tokens))
        row = cache.allocate()
        prefill(decoder, cache, row, tokens[:PREFIX_LEN], chunk)
        for start in range(0, NUM_STEPS - count + 1, count):
            piece = tokens[PREFIX_LEN + start : PREFIX_LEN + start + count]
            output = decoder.forward([chain_segment(row, piece)], cache)
            if not torch.equal(output.logits_RV, expected_RV[start : start + count]):
                return False
            cache.extend(row, count)
    return True


def check_trees(decoder: Decoder, tokens: list[int], expected_RV: Tensor) -> bool:
    """Trees of 8 to 64 nodes: the true path lies scattered among siblings, then is committed."""
    rng = random.Random(2)
    for num_nodes in (8, 16, 33, 64):
        depth = min(6, num_nodes - 1)
        slots = len(tokens) + num_nodes
        cache = decoder.new_cache(max_batch_size=1, num_slots=slots)
        row = cache.allocate()
        prefill(decoder, cache, row, tokens[:PREFIX_LEN], chunk=16)
        start = 0
        while start + depth + 1 <= NUM_STEPS:
            true_tokens = tokens[PREFIX_LEN + start :][: depth + 1]
            segment, path = scattered_tree(row, true_tokens, num_nodes, decoder, rng)
            logits_RV = decoder.forward([segment], cache).logits_RV
            if not torch.equal(logits_RV[path], expected_RV[start : start + depth + 1]):
                return False
            cache.commit(row, path[1:])
            start += depth + 1
    return True


def scattered_tree(
    row: int, true_tokens: Sequence[int], num_nodes: int, decoder: Decoder, rng: random.Random
) -> tuple[Segment, list[int]]:
    """A tree whose true path sits at random places among random other nodes.

    Returns the segment and the path's node indices, root included.
    """
    path = [0, *sorted(rng.sample(range(1, num_nodes), len(true_tokens) - 1))]
    parents, depths, tokens = [-1], [0], [true_tokens[0]]
    for node in range(1, num_nodes):
        if node in path:
            place = path.index(node)
            parent, token = path[place - 1], true_tokens[place]
        else:
            parent, token = rng.randrange(node), rng.randrange(decoder.config.vocab_size)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(token)
    mask_TT = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        mask_TT[node] |= mask_TT[parents[node]]
    return Segment(row, tokens, depths, mask_TT), path


def check_batches(decoder: Decoder, tokens: list[int], expected_RV: Tensor) -> bool:
    """The same request as one of 2, 4 and 8 of unequal lengths and widths."""
    rng = random.Random(3)
    for num_requests in (2, 4, 8):
        cache = decoder.new_cache(max_batch_size=num_requests, num_slots=3 * len(tokens))
        mine = rng.randrange(num_requests)
        for row in range(num_requests):
            assert cache.allocate() == row
            length = PREFIX_LEN if row == mine else rng.randrange(1, 2 * len(tokens))
            prompt = random_tokens(decoder.config.vocab_size, length, seed=100 * row + 7)
            prefill(decoder, cache, row, tokens[:PREFIX_LEN] if row == mine else prompt, 32)
        for start, count in ((0, 1), (1, 3), (4, 16)):
            segments = [
                chain_segment(row, random_tokens(decoder.config.vocab_size, 1 + row % 5, seed=row))
                for row in range(num_requests)
            ]
            segments[mine] = chain_segment(mine, tokens[PREFIX_LEN + start :][:count])
            output = decoder.forward(segments, cache)
            first = sum(output.counts[:mine])
            if not torch.equal(
                output.logits_RV[first : first + count], expected_RV[start : start + count]
            ):
                return False
            cache.extend(mine, count)
    return True


def check_wide_passes(decoder: Decoder, tokens: list[int], expected_RV: Tensor) -> bool:
    """A prompt in one pass wider than any block of the linears, and the same in small chunks."""
    prompt = random_tokens(decoder.config.vocab_size, 300, seed=5)
    for chunk in (300, 130, 16):
        cache = decoder.new_cache(max_batch_size=1, num_slots=len(prompt) + len(tokens))
        row = cache.allocate()
        prefill(decoder, cache, row, prompt, chunk)
        logits_RV = decoder.forward([chain_segment(row, tokens[:1])], cache).logits_RV
        if chunk == 300:
            expected_RV = logits_RV
        elif not torch.equal(logits_RV, expected_RV):
            return False
    return True


CHECKS = (check_chains, check_trees, check_batches, check_wide_passes)


def is_exact(
    decoder: Decoder,
    weights_hash: str,
    cache: ResultCache | None,
    on_progress: ProgressCallback | None = None,
) -> bool:
    """The self-test's result for this model on this machine, run or remembered."""
    if not all(policy.is_exact for policy in decoder.policies.values()):
        return False
    key = _exact_key(weights_hash, decoder.dtype, decoder.policies)
    known = cache.get(key, _result) if cache else None
    if known is not None:
        return known
    result = self_test(decoder, on_progress)
    if cache is not None:
        cache.put(key, {"is_exact": result})
    return result


def _exact_key(
    weights_hash: str, dtype: torch.dtype, policies: Mapping[tuple[int, int, bool], RowPolicy]
) -> str:
    listed = sorted((shape, asdict(policy)) for shape, policy in policies.items())
    return f"exact {weights_hash} {machine_key(dtype)} {listed}"


def remembered_exactness(
    config: DecoderConfig, dtype: torch.dtype, weights_hash: str, cache: ResultCache
) -> bool | None:
    """What an earlier self-test of this model on this machine found; None when there was none."""
    policies: dict[tuple[int, int, bool], RowPolicy] = {}
    for shape in linear_shapes(config):
        known = cache.get(f"rows {shape} {machine_key(dtype)}", _policy)
        if known is None:
            return None
        policies[shape] = known
    if not all(policy.is_exact for policy in policies.values()):
        return False
    return cache.get(_exact_key(weights_hash, dtype, policies), _result)
