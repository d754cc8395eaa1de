"""Draft heads of every option beside a random target, and what drives them as a drafter does.

Used by the parity tests of the heads; the references they are held against are in
:mod:`tests.parity.reference_heads`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from outrider.models.architecture import DecoderConfig, RopeConfig
from outrider.models.decoder import Decoder
from outrider.models.exactness import chain_segment, random_tokens, row_policies
from outrider.models.heads.config import Eagle3Config, HeadConfig, MedusaConfig, MtpConfig
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.mtp import MtpHead
from outrider.models.layers import Segment
from tests.models import random_weights, tiny_config
from tests.parity.reference_heads import (
    Drafted,
    ReferenceEagle3,
    ReferenceMedusa,
    ReferenceMtp,
    Rows,
    rms_norm,
)

TOLERANCE = 1e-5
GAIN = 0.7  # of a head's linears: above 1, float32's own rounding grows from node to node
LIVELY = 0.1  # least standard deviation of logits: smaller ones could agree by being near zero

TARGET = tiny_config(num_layers=4)
DRAFT_VOCAB = 150
LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_max_position=32)
YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position=32)

# Two trees of unequal shape and a chain; -1 is the last true row.
WIDE = Drafted((5, 6, 7, 8, 9, 5, 10, 11, 5, 3, 4), (-1, -1, -1, 0, 0, 2, 3, 3, 5, 6, 9))
NARROW = Drafted((20, 21, 22, 23), (-1, -1, 1, 2))
CHAIN = Drafted((30, 31, 32), (-1, 0, 1))
NOTHING = Drafted()


def layers(num_layers: int = 1, **changes: object) -> DecoderConfig:
    return tiny_config(num_layers=num_layers, **changes)


EAGLE3 = Eagle3Config(
    layers=layers(),
    target_hidden_size=TARGET.hidden_size,
    capture_layers=(0, 2, 3),
    draft_vocab_size=DRAFT_VOCAB,
)
NARROWER = layers(hidden_size=48, num_heads=4, mlp_size=64)
EAGLE3_CONFIGS = {
    "plain": EAGLE3,
    "norm_before_fc": replace(EAGLE3, norm_before_fc=True),
    "fc_norm": replace(EAGLE3, fc_norm=True),
    "norm_output": replace(EAGLE3, norm_output=True),
    "norm_before_residual": replace(EAGLE3, norm_before_residual=True),
    "EAGLE-3.1": replace(EAGLE3, fc_norm=True, norm_output=True),
    "speculators": replace(
        EAGLE3, norm_before_fc=True, norm_before_residual=True, norm_output=True
    ),
    "own embedding": replace(EAGLE3, has_own_embedding=True),
    "shared output head": replace(EAGLE3, has_own_head=False, draft_vocab_size=TARGET.vocab_size),
    "two layers": replace(EAGLE3, layers=layers(2)),
    "two layers, all norms": replace(
        EAGLE3, layers=layers(2), fc_norm=True, norm_before_residual=True, norm_output=True
    ),
    "another hidden size": replace(EAGLE3, layers=NARROWER, has_own_embedding=True),
    "another hidden size, fc_norm": replace(
        EAGLE3, layers=NARROWER, has_own_embedding=True, fc_norm=True
    ),
    "one state": replace(EAGLE3, capture_layers=(4,)),
    "four states": replace(EAGLE3, capture_layers=(0, 1, 3, 4), fc_norm=True),
    "head norms": replace(EAGLE3, layers=layers(qk_norm=True)),
    "biases": replace(
        EAGLE3, layers=layers(attention_bias=True, attention_out_bias=True, mlp_bias=True)
    ),
    "one kv head": replace(EAGLE3, layers=layers(num_kv_heads=1)),
    "theta": replace(EAGLE3, layers=layers(rope=RopeConfig(theta=500000.0))),
    "llama3 rope": replace(EAGLE3, layers=layers(rope=LLAMA3)),
    "yarn rope": replace(EAGLE3, layers=layers(rope=YARN)),
    "window": replace(EAGLE3, layers=layers(sliding_window=6, sliding_layers=(0,))),
}
MTP = MtpConfig(layers=layers())
MTP_CONFIGS = {
    "embedding first": MTP,
    "hidden first": replace(MTP, order="hidden_first"),
    "MiMo": replace(
        MTP, order="hidden_first", reads_raw_state=True, layers=layers(attention_bias=True)
    ),
    "own ends": replace(MTP, has_own_embedding=True, has_own_head=True),
    "own embedding, two layers": replace(MTP, layers=layers(2), has_own_embedding=True),
    "own head, hidden first, two layers": replace(
        MTP, layers=layers(2), order="hidden_first", has_own_head=True
    ),
    "head norms": replace(MTP, layers=layers(qk_norm=True)),
}
CONFIGS: dict[str, Eagle3Config | MtpConfig] = {
    **{f"EAGLE-3, {name}": config for name, config in EAGLE3_CONFIGS.items()},
    **{f"MTP, {name}": config for name, config in MTP_CONFIGS.items()},
}
MEDUSA = MedusaConfig(hidden_size=TARGET.hidden_size, vocab_size=TARGET.vocab_size, num_heads=3)
MEDUSA_CONFIGS = {
    f"{blocks} blocks, {'own' if own else 'shared'} output": replace(
        MEDUSA, num_layers=blocks, has_own_head=own
    )
    for blocks in (1, 2, 3)
    for own in (True, False)
}

Head = Eagle3Head | MtpHead
Reference = ReferenceEagle3 | ReferenceMtp


@cache
def target_weights(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in random_weights(TARGET).items()}


@cache
def target(dtype: torch.dtype = torch.float32) -> Decoder:
    policies = row_policies(TARGET, dtype, cache=None)
    return Decoder(TARGET, target_weights(dtype), dtype=dtype, policies=policies)


def head_weights(config: HeadConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random, by name: an option more leaves the other weights as they are."""
    weights = {}
    for name, shape in config.weight_shapes().items():
        if name == "d2t":  # the drafter's, not the head's
            weights[name] = torch.zeros(shape, dtype=torch.int64)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        fan_in = shape[-1] if len(shape) == 2 else 25
        noise = torch.randn(shape, generator=generator)
        scale = 1.0 if name == "embed.weight" else GAIN / fan_in**0.5
        weight = 1 + 0.3 * noise if "norm" in name else scale * noise
        weights[name] = weight.to(dtype)
    return weights


@dataclass(frozen=True)
class Request:
    """A text and, for each of its positions, the target's captured states, one per layer."""

    tokens: list[int]
    states: list[Tensor]

    def rows(self, start: int, stop: int) -> tuple[list[int], list[Tensor]]:
        """Tokens t + 1 and states at t, for t from ``start`` to before ``stop``."""
        return self.tokens[start + 1 : stop + 1], [state[start:stop] for state in self.states]


def target_states(
    tokens: Sequence[int], capture: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The residual state that enters each layer, one pass per layer."""
    states = []
    for layer in capture:
        kv_cache = target(dtype).new_cache(max_batch_size=1, num_slots=len(tokens))
        segment = chain_segment(kv_cache.allocate(), list(tokens))
        output = target(dtype).forward([segment], kv_cache, capture=(layer,))
        assert output.hidden_RC is not None
        states.append(output.hidden_RC)
    return states


def final_state(state_TD: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The state behind the target's final norm, by the reference's own norm."""
    weight_D = target_weights(dtype)["norm.weight"].double()
    return rms_norm(state_TD.double(), weight_D, TARGET.norm_eps).to(dtype)


@cache
def make_request(
    config: Eagle3Config | MtpConfig,
    length: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Request:
    tokens = random_tokens(TARGET.vocab_size, length, seed=seed)
    if isinstance(config, Eagle3Config):
        return Request(tokens, target_states(tokens, config.capture_layers, dtype))
    (state,) = target_states(tokens, (TARGET.num_layers,), dtype)
    return Request(tokens, [state if config.reads_raw_state else final_state(state, dtype)])


@cache
def make_head(config: Eagle3Config | MtpConfig, dtype: torch.dtype = torch.float32) -> Head:
    weights = head_weights(config, dtype)
    if isinstance(config, Eagle3Config):
        return Eagle3Head(config, weights, target(dtype))
    return MtpHead(config, weights, target(dtype))


def make_reference(
    config: Eagle3Config | MtpConfig,
    kind: type[Reference] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Reference:
    if kind is None:
        kind = ReferenceEagle3 if isinstance(config, Eagle3Config) else ReferenceMtp
    shared = target_weights(dtype)
    return kind(
        config,  # type: ignore[arg-type]
        head_weights(config, dtype),
        embedding=shared["embed.weight"],
        output=shared["lm_head.weight"],
    )


def medusa_states(dtype: torch.dtype = torch.float32) -> Tensor:
    tokens = random_tokens(TARGET.vocab_size, 12, seed=3)
    return final_state(target_states(tokens, (TARGET.num_layers,), dtype)[0], dtype)


def make_medusa(
    config: MedusaConfig,
    kind: type[ReferenceMedusa] = ReferenceMedusa,
    dtype: torch.dtype = torch.float32,
) -> ReferenceMedusa:
    weights, output = head_weights(config, dtype), target_weights(dtype)["lm_head.weight"]
    return kind(config, weights, output=output)


class Driver:
    """Runs a head as its drafter does and keeps every request's rows."""

    def __init__(self, head: Head, num_requests: int = 1, num_slots: int = 96) -> None:
        self.head = head
        self.cache = head.new_cache(max_batch_size=num_requests, num_slots=num_slots)
        self.rows = [self.cache.allocate() for _ in range(num_requests)]

    def take_in(
        self, parts: Sequence[tuple[list[int], list[Tensor]]], *, is_silent: bool = False
    ) -> list[Rows]:
        """Commit each request's next true rows; rows before the last give nothing if silent."""
        segments, features = [], []
        for row, (tokens, states) in zip(self.rows, parts, strict=True):
            num_silent = len(tokens) - 1 if is_silent else 0
            segments.append(Segment(row, tokens, range(len(tokens)), num_silent=num_silent))
            features.append(torch.cat(states, dim=1))
        output = self.head.forward(segments, torch.cat(features), self.cache, from_target=True)
        for row, (tokens, _) in zip(self.rows, parts, strict=True):
            self.cache.extend(row, len(tokens))
        counts = [len(segment.tokens) - segment.num_silent for segment in segments]
        return split(output.logits_RW, output.feature_RD, counts)

    def grow(self, roots: Sequence[Rows], trees: Sequence[Drafted]) -> list[Rows]:
        """Every node of each request's tree, one pass per depth, in the trees' own order."""
        depths = [node_depths(tree) for tree in trees]
        done = [{-1: (root.logits_RW[-1], root.feature_RD[-1])} for root in roots]
        orders: list[list[int]] = [[] for _ in trees]
        for depth in range(1 + max(max(depth, default=0) for depth in depths)):
            segments, features, owners = [], [], []
            for b, tree in enumerate(trees):
                nodes = [node for node, at in enumerate(depths[b]) if at == depth]
                if not nodes:
                    continue
                orders[b] += nodes
                segments.append(tree_segment(self.rows[b], tree, depths[b], orders[b], len(nodes)))
                features += [done[b][tree.parents[node]][1] for node in nodes]
                owners += [(b, node) for node in nodes]
            output = self.head.forward(
                segments, torch.stack(features), self.cache, from_target=False
            )
            assert output.feature_RD is not None
            rows = zip(owners, output.logits_RW, output.feature_RD, strict=True)
            for (b, node), logits_W, feature_D in rows:
                done[b][node] = (logits_W, feature_D)
        return [
            Rows(
                torch.stack([nodes[node][0] for node in range(len(tree.tokens))]),
                torch.stack([nodes[node][1] for node in range(len(tree.tokens))]),
            )
            for nodes, tree in zip(done, trees, strict=True)
        ]


def split(logits_RW: Tensor, feature_RD: Tensor | None, counts: list[int]) -> list[Rows]:
    assert feature_RD is not None
    pieces = zip(logits_RW.split(counts), feature_RD.split(counts), strict=True)
    return [Rows(logits, feature) for logits, feature in pieces]


def node_depths(tree: Drafted) -> list[int]:
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree_segment(
    row: int, tree: Drafted, depths: list[int], order: list[int], num_new: int
) -> Segment:
    """The newest ``num_new`` nodes of ``order``, which lie behind the earlier ones."""
    new = order[-num_new:]
    mask = torch.zeros(num_new, len(order), dtype=torch.bool)
    for i, node in enumerate(new):
        ancestor = node
        while ancestor >= 0:
            mask[i, order.index(ancestor)] = True
            ancestor = tree.parents[ancestor]
    is_chain = all(parent == node - 1 for node, parent in enumerate(tree.parents))
    return Segment(
        row,
        [tree.tokens[node] for node in new],
        [depths[node] for node in order],
        None if is_chain else mask,
    )


def assert_same(expected: Rows, rows: Rows, tolerance: float = TOLERANCE) -> None:
    assert expected.logits_RW.std() > LIVELY
    torch.testing.assert_close(rows.logits_RW.double(), expected.logits_RW, rtol=0, atol=tolerance)
    size = max(1.0, expected.feature_RD.std().item())  # a residual stream has no fixed scale
    torch.testing.assert_close(
        rows.feature_RD.double(), expected.feature_RD, rtol=0, atol=size * tolerance
    )


def part(rows: Rows, start: int, stop: int | None = None) -> Rows:
    return Rows(rows.logits_RW[start:stop], rows.feature_RD[start:stop])


def join(pieces: Sequence[Rows]) -> Rows:
    return Rows(
        torch.cat([piece.logits_RW for piece in pieces]),
        torch.cat([piece.feature_RD for piece in pieces]),
    )
