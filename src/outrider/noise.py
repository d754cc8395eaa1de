"""The shared noise: one Gumbel vector per (seed, choice, position), from a counter-based generator.

Owns the bit stream and its keys. The sampler adds the vector to the warped logits and takes the
argmax, which is a draw from their softmax; a drafter may look at the same vector. Knows nothing of
models, trees or parameters, so it cannot depend on the batch, the step or the draft.

The generator is Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
and one vector is laid out like this, so that token ``v`` has one fixed word whatever the
vocabulary's size::

    key      = (seed, purpose << 32 | choice)
    counter  = (1 + v // 4, 0, position, 0)          lane v % 4 of that block

``position`` is the absolute position that the drawn token will occupy, prompt included.

The ``rejection`` rule needs single uniforms instead, with a purpose of their own in the key::

    counter  = (1, 0, position, origin)              lane 0 of that block

``origin`` is the number of the request's tokens when the step began.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

# Vectors are computed in whole groups of this many tokens, so that a token's value can never
# depend on whether a SIMD loop met it in its body or in its tail.
_GROUP = 64


class Purpose(IntEnum):
    """What a stream of noise is for; part of the key, so that no two purposes share a word."""

    TARGET = 0  # the shared Gumbel vectors
    DRAFT = 1  # which token is drafted, where the draft is drawn
    COIN = 2  # whether a drawn draft is accepted
    RESIDUAL = 3  # the token that is emitted instead, and the bonus


def philox_key(seed: int, choice: int, purpose: Purpose = Purpose.TARGET) -> tuple[int, int]:
    """The generator's two 64-bit key words; different arguments always give different keys."""
    assert 0 <= seed < 2**64
    assert 0 <= choice < 2**32
    return seed, purpose << 32 | choice


def gumbel_vector(seed: int, choice: int, position: int, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise of every token at one position; float32 ``[V]``.

    A pure function of its arguments. The first n entries do not depend on ``vocab_size``, so a
    reduced or padded vocabulary lines up with the full one.
    """
    assert position >= 0
    philox = np.random.Philox(
        key=np.array(philox_key(seed, choice), dtype=np.uint64),
        counter=np.array([0, 0, position, 0], dtype=np.uint64),
    )
    num_words = -(-vocab_size // _GROUP) * _GROUP
    return gumbel_from_words(philox.random_raw(num_words))[:vocab_size]


def gumbel_from_words(words: np.ndarray) -> np.ndarray:
    """Turn uniform 64-bit words into Gumbel variates, float32 of the same shape.

    52 bits with a half-step offset give uniforms in the open interval (0, 1): noise between -3.61
    and 36.74. Fewer bits would cut the tail that large vocabularies still reach (24 bits: 16.6).
    """
    # (k + 1/2) * 2**-52 and its distance to 1 are exact in float64, hence plain logarithms are as
    # good near 1 as log1p. One rounding to float32, at the end.
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform)).astype(np.float32)


def uniform(seed: int, choice: int, purpose: Purpose, position: int, origin: int) -> float:
    """One number, uniform on the multiples of 2**-53 in [0, 1); a function of its arguments.

    ``origin`` is the number of the request's tokens when the step began. Block verification
    decides by the coins and drafts of depths that it then rejects, so what was drawn for a position
    in one step is no longer random in the next and must not be used there again.
    """
    assert purpose is not Purpose.TARGET, "the Gumbel vectors use those words"
    assert 0 <= origin <= position < 2**64
    philox = np.random.Philox(
        key=np.array(philox_key(seed, choice, purpose), dtype=np.uint64),
        counter=np.array([0, 0, position, origin], dtype=np.uint64),
    )
    return int(philox.random_raw() >> 11) * 2.0**-53


class GumbelNoise:
    """One request's noise: each position's vector is drawn once and kept while it is open."""

    def __init__(self, seed: int, choice: int, vocab_size: int) -> None:
        self._seed = seed
        self._choice = choice
        self._vocab_size = vocab_size
        self._open: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """The vector of a position, float32 ``[V]``; shared, so callers must not write to it."""
        noise_V = self._open.get(position)
        if noise_V is None:
            vector = gumbel_vector(self._seed, self._choice, position, self._vocab_size)
            noise_V = self._open[position] = torch.from_numpy(vector)
        return noise_V

    def release_before(self, position: int) -> None:
        """Forget the vectors of all earlier positions; asking again would redraw the same."""
        for old in [kept for kept in self._open if kept < position]:
            del self._open[old]
