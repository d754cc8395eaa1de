"""Lossless speculative decoding that you can trust, measure and decide on.

The flow of one request, top to bottom; imports point down only::

    cli -> commands | server -> llm -> engine -> step | prefill -> scheduler | budget -> request
        -> drafters | verify | output -> models -> kv_cache | sampling -> noise | tree
        -> config | types -> errors

Public names are listed in ``__all__`` and loaded on first use, so ``import outrider`` is quick.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Weights in huge pages: must be set before torch is first imported, or it has no effect. Without
# it a decoding step takes about 1.5 times as long where transparent huge pages are on request.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# oneDNN keeps what it compiled for every shape, and every number of rows is a shape: by default
# 1,024 of them, of 0.6 MB each for the embedded model. A step needs five, and a mixed load's steps
# draw from so few padded numbers of rows that 256 are seldom too few. Read as torch is loaded.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "256")

__version__ = "0.1.0"

_HOMES = {
    "LLM": "outrider.llm",
    "Completion": "outrider.types",
    "AdmissionLimits": "outrider.config",
    "EngineConfig": "outrider.config",
    "EngineStats": "outrider.counters",
    "FinishReason": "outrider.types",
    "GrammarKind": "outrider.config",
    "GrammarSpec": "outrider.config",
    "Method": "outrider.config",
    "OutriderError": "outrider.errors",
    "PredictionStats": "outrider.types",
    "SamplingParams": "outrider.config",
    "SpeculationConfig": "outrider.config",
    "TextChunk": "outrider.types",
    "TokenLogprobs": "outrider.types",
}

__all__ = [
    "LLM",
    "AdmissionLimits",
    "Completion",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "GrammarKind",
    "GrammarSpec",
    "Method",
    "OutriderError",
    "PredictionStats",
    "SamplingParams",
    "SpeculationConfig",
    "TextChunk",
    "TokenLogprobs",
    "__version__",
]

if TYPE_CHECKING:
    from outrider.config import AdmissionLimits as AdmissionLimits
    from outrider.config import EngineConfig as EngineConfig
    from outrider.config import GrammarKind as GrammarKind
    from outrider.config import GrammarSpec as GrammarSpec
    from outrider.config import Method as Method
    from outrider.config import SamplingParams as SamplingParams
    from outrider.config import SpeculationConfig as SpeculationConfig
    from outrider.counters import EngineStats as EngineStats
    from outrider.errors import OutriderError as OutriderError
    from outrider.llm import LLM as LLM
    from outrider.types import Completion as Completion
    from outrider.types import FinishReason as FinishReason
    from outrider.types import PredictionStats as PredictionStats
    from outrider.types import TextChunk as TextChunk
    from outrider.types import TokenLogprobs as TokenLogprobs


def __getattr__(name: str) -> object:
    """Import a public name's home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Public names for completion."""
    return sorted(__all__)
