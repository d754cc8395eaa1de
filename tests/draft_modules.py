"""Draft heads for tests: random ones beside a random target, and oracles in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from outrider.config import Method, SpeculationConfig
from outrider.drafters import Drafter, DraftSource, create_drafter
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.medusa import MedusaDrafter
from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.base import DraftOutput
from outrider.models.heads.config import Eagle3Config, MedusaConfig, MtpConfig
from outrider.models.layers import Segment, loud_rows
from tests.models import tiny_config

# (request's tokens so far, how many to foresee) -> the target's own next tokens
Foresight = Callable[[Sequence[int], int], list[int]]


def random_source(method: Method, target: Decoder, seed: int = 1) -> DraftSource:
    """A head or draft model with random weights, of sizes that fit the target."""
    config = head_config(method, target.config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        if name == "d2t":
            ids = torch.randperm(target.config.vocab_size, generator=generator)[: shape[0]]
            weights[name] = ids.sort().values - torch.arange(shape[0])
        elif "norm" in name:
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            fan_in = shape[-1] if len(shape) == 2 else 25
            weights[name] = torch.randn(shape, generator=generator) * 1.6 / fan_in**0.5
    return DraftSource(config, weights)


def head_config(
    method: Method, target: DecoderConfig
) -> DecoderConfig | Eagle3Config | MtpConfig | MedusaConfig:
    """Small, and with the options that the published checkpoints mostly have."""
    num_layers = target.num_layers
    layers = replace(target, num_layers=1, no_rope_layers=(), sliding_layers=())
    if method is Method.DRAFT:
        return tiny_config(num_layers=1, hidden_size=48, vocab_size=target.vocab_size)
    if method is Method.EAGLE3:
        published = (2, num_layers // 2, num_layers - 3)
        return Eagle3Config(
            layers=layers,
            target_hidden_size=target.hidden_size,
            capture_layers=published if num_layers >= 7 else (0, 1, 2),
            draft_vocab_size=target.vocab_size // 2,
        )
    if method is Method.MTP:
        return MtpConfig(layers=layers)
    assert method is Method.MEDUSA
    return MedusaConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_heads=3)


def random_drafter(
    method: Method,
    target: Decoder,
    speculation: SpeculationConfig,
    *,
    max_batch_size: int,
    max_model_len: int = 256,
) -> Drafter:
    """A drafter on random weights: hardly ever right."""
    drafter = create_drafter(
        speculation,
        source=random_source(method, target),
        target=target,
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
    )
    assert drafter is not None
    return drafter


def oracle_drafter(
    method: Method,
    target: Decoder,
    speculation: SpeculationConfig,
    futures: Sequence[Sequence[int]],
    *,
    max_batch_size: int,
    max_model_len: int = 256,
) -> Drafter:
    """The same drafter with logits that put the target's own next token far above all others.

    The module's own pass runs all the same, on its own cache. ``futures`` are whole texts.
    """
    drafter = random_drafter(
        method,
        target,
        speculation,
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
    )
    if isinstance(drafter, MedusaDrafter):
        _make_oracle(drafter, futures, target.config.vocab_size)
    else:
        assert isinstance(drafter, AutoregressiveDrafter)
        drafter.vocabulary = None
        drafter.module = _OracleModule(drafter.module, futures, target.config.vocab_size)
    return drafter


class _OracleModule:
    """Runs a module and replaces its logits by what the texts say comes next.

    A head never sees a text's first token, so texts are told apart from the second on.
    """

    def __init__(self, module, futures: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._module = module
        self._futures = [list(future)[module.token_shift :] for future in futures]
        self._vocab_size = vocab_size
        self._seen: dict[int, list[int]] = {}
        self._drafted: dict[int, list[int]] = {}
        self.captures, self.token_shift = module.captures, module.token_shift

    def new_cache(self, **sizes):
        return self._module.new_cache(**sizes)

    def forward(self, segments: Sequence[Segment], feature_RX, cache, *, from_target: bool):
        output = self._module.forward(segments, feature_RX, cache, from_target=from_target)
        paths = []
        for segment in segments:
            if from_target:
                paths.append(self._take_in(segment, cache))
            else:
                paths += self._drafted_paths(segment)
        if not loud_rows(segments):
            return output
        return DraftOutput(torch.stack([self._next(path) for path in paths]), output.feature_RD)

    def _drafted_paths(self, segment: Segment) -> list[list[int]]:
        """For each drafted row the tokens up to it."""
        drafted = self._drafted.setdefault(segment.cache_row, [])
        del drafted[segment.num_earlier :]
        drafted += segment.tokens
        mask = segment.ancestor_mask_TT
        return [
            [
                *self._seen[segment.cache_row],
                *(
                    token
                    for place, token in enumerate(drafted[: segment.num_earlier + node + 1])
                    if mask is None or mask[node, place]
                ),
            ]
            for node in range(len(segment.tokens))
        ]

    def _take_in(self, segment: Segment, cache) -> list[int]:
        start = cache.committed(segment.cache_row)
        seen = self._seen.setdefault(segment.cache_row, [])
        del seen[start:]
        seen += segment.tokens
        return seen

    def _next(self, tokens: Sequence[int]) -> torch.Tensor:
        logits_V = torch.zeros(self._vocab_size)
        for future in self._futures:
            if future[: len(tokens)] == list(tokens) and len(future) > len(tokens):
                logits_V[future[len(tokens)]] = 1e4
        return logits_V


def _make_oracle(drafter: MedusaDrafter, futures: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Let the heads look the drafting requests up in the texts."""
    heads_forward, propose = drafter.heads.forward, drafter.propose
    drafting: list = []

    def forward(state_RD: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
        heads_forward(state_RD, num_heads)
        logits = torch.zeros(num_heads, len(state_RD), vocab_size)
        for row, request in enumerate(drafting):
            tokens = request.token_ids
            for future in futures:
                if list(future[: len(tokens)]) == tokens:
                    for head, token in enumerate(future[len(tokens) :][:num_heads]):
                        logits[head, row, token] = 1e4
        return list(logits)

    def propose_known(requests, max_depth, min_score=0.0):
        pairs = zip(requests, max_depth, strict=True)
        drafting[:] = [r for r, depth in pairs if depth > 0 and r.request_id in drafter._state_of]
        return propose(requests, max_depth, min_score)

    drafter.heads.forward = forward  # type: ignore[method-assign]
    drafter.propose = propose_known  # type: ignore[method-assign]
