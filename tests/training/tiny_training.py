"""A tiny target with its states over a few texts, and recipes with lively weights beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.exactness import chain_segment, random_tokens
from outrider.training.packing import Batch, TrainingSequence, pack
from outrider.training.recipes import Objective, Recipe, TargetEnds
from outrider.vocabulary import DraftVocabulary
from tests.models import random_weights, tiny_config
from tests.parity.head_cases import head_weights

CAPTURES = (0, 2, 3)
SHAPES = ((19, 7), (4, 1), (11, 11), (14, 3), (2, 1))  # (tokens, of which prompt)


@cache
def tiny_target(**changes: Any) -> Decoder:
    config = tiny_config(**{"num_layers": 4, **changes})
    return Decoder(config, random_weights(config), dtype=torch.float32, policies=None)


@cache
def tiny_ends(dtype: torch.dtype = torch.float32, **changes: Any) -> TargetEnds:
    config = tiny_target(**changes).config
    return TargetEnds.of(config, random_weights(config), dtype=dtype)


def tiny_vocabulary(size: int = 200, target_size: int = 331) -> DraftVocabulary:
    ids = np.random.default_rng(5).permutation(target_size)[:size]
    return DraftVocabulary(np.sort(ids), target_size)


def training_sequence(
    target: Decoder, length: int, prompt_len: int, *, seed: int = 0, captures: Sequence[int] = ()
) -> TrainingSequence:
    """Random tokens and the target's true float32 states over them."""
    tokens = random_tokens(target.config.vocab_size, length, seed=seed)
    kv_cache = target.new_cache(max_batch_size=1, num_slots=length)
    segment = chain_segment(kv_cache.allocate(), tokens)
    output = target.forward([segment], kv_cache, capture=(*captures, FINAL_STATE))
    assert output.hidden_RC is not None
    width = target.config.hidden_size
    states_TC, final_TD = output.hidden_RC.clone().split([len(captures) * width, width], dim=1)
    return TrainingSequence(tokens, prompt_len, states_TC if captures else None, final_TD)


def tiny_sequences(
    target: Decoder,
    captures: Sequence[int] = CAPTURES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> list[TrainingSequence]:
    return [
        training_sequence(target, length, prompt_len, seed=seed, captures=captures)
        for seed, (length, prompt_len) in enumerate(shapes)
    ]


def tiny_batch(
    target: Decoder,
    captures: Sequence[int] = CAPTURES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> Batch:
    return pack(tiny_sequences(target, captures, shapes))


def objective(num_steps: int = 3, **changes: Any) -> Objective:
    return Objective(**{"step_weights": tuple(0.8**k for k in range(num_steps)), **changes})


def make_lively(recipe: Recipe) -> dict[str, Tensor]:
    """Give every parameter a random value, so that nothing agrees by being 0 or 1."""
    config = recipe.head_config()
    assert not isinstance(config, DecoderConfig)
    drawn = head_weights(config)
    with torch.no_grad():
        for name, parameter in recipe.named_parameters():
            parameter.copy_(drawn[name])
    return recipe.weights()
