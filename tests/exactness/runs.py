"""Prompts, settings and plain runs that the identity tests compare with."""

from __future__ import annotations

from outrider.config import SamplingParams
from outrider.models.decoder import Decoder
from outrider.models.exactness import random_tokens
from outrider.types import SpeculationStats
from tests.engines import Outcome, new_engine, run

LENGTHS = (1, 23, 7, 40, 12)  # of the prompts; unequal, one of a single token
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.8, "seed": 7},
    "hot": {"temperature": 1.0, "seed": 2**64 - 1},
    "top-k": {"temperature": 1.0, "top_k": 7, "seed": 1},
    "top-p": {"temperature": 1.0, "top_p": 0.7, "seed": 2},
    "min-p": {"temperature": 1.2, "min_p": 0.05, "seed": 3},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "seed": 4,
    },
    "greedy penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "bias": {"temperature": 0.7, "logit_bias": {5: 4.0, 9: -100.0}, "seed": 5},
}


def prompts_of(target: Decoder) -> list[list[int]]:
    vocab_size = target.config.vocab_size
    return [random_tokens(vocab_size, length, seed=31 * length) for length in LENGTHS]


def params_of(name: str, **changes: object) -> list[SamplingParams]:
    """One per prompt, each with its own seed."""
    settings = {"max_tokens": 40, **SAMPLING[name], **changes}
    seed = settings.get("seed")
    return [
        SamplingParams(**{**settings, "seed": None if seed is None else (seed + i) % 2**64})
        for i in range(len(LENGTHS))
    ]


# The target is kept beside its texts: an id may be given anew once its object is gone.
_PLAIN: dict[tuple[object, ...], tuple[Decoder, list[Outcome]]] = {}


def plain(target: Decoder, prompts, params) -> list[Outcome]:
    """Each request alone, one token a step; decoded once per target and parameters."""
    key = (id(target), repr(prompts), repr(params))
    if key not in _PLAIN:
        engine = new_engine(target, None)
        pairs = zip(prompts, params, strict=True)
        outcomes = [run(engine, [prompt], [param])[0][0] for prompt, param in pairs]
        _PLAIN[key] = target, outcomes
    return _PLAIN[key][1]


def assert_speculated(stats: SpeculationStats, *, accepted: bool, rejected: bool) -> None:
    assert stats.drafted > 0
    assert (stats.accepted > 0) == accepted
    assert (stats.drafted > stats.accepted) == rejected
