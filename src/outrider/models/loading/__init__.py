"""Reading checkpoints: the only place that knows file formats, tokenizers and model hubs.

::

    hub.resolve(name)  ->  path  ->  load(path)  ->  LoadedCheckpoint(config, weights, tokenizer)

    checkpoint                      load(): the one entry for all formats
    hub, wheel, cache, hashing      names, downloads, the user cache
    weight_files, huggingface,      safetensors folders
    safetensors_file, hf_config
    gguf_file, gguf_model           GGUF
    tokenizer, hf_tokenizer, gguf_tokenizer, chat_template
    fields, weights                 checked metadata, tensors read one at a time
    heads                           draft heads, in all published layouts; also writes them

Nothing read here is trusted: only data formats are opened, every size is bounded, and whatever is
wrong with a file is one :class:`~outrider.errors.CheckpointError` that names it. Sits below the
decoder and knows nothing of computation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOMES = {
    "DEFAULT_MODEL": "hub",
    "LazyWeights": "weights",
    "LoadedCheckpoint": "checkpoint",
    "ModelEntry": "hub",
    "Tokenizer": "tokenizer",
    "list_models": "hub",
    "load": "checkpoint",
    "pull": "hub",
    "resolve": "hub",
}

__all__ = [
    "DEFAULT_MODEL",
    "LazyWeights",
    "LoadedCheckpoint",
    "ModelEntry",
    "Tokenizer",
    "list_models",
    "load",
    "pull",
    "resolve",
]

if TYPE_CHECKING:
    from outrider.models.loading.checkpoint import LoadedCheckpoint as LoadedCheckpoint
    from outrider.models.loading.checkpoint import load as load
    from outrider.models.loading.hub import DEFAULT_MODEL as DEFAULT_MODEL
    from outrider.models.loading.hub import ModelEntry as ModelEntry
    from outrider.models.loading.hub import list_models as list_models
    from outrider.models.loading.hub import pull as pull
    from outrider.models.loading.hub import resolve as resolve
    from outrider.models.loading.tokenizer import Tokenizer as Tokenizer
    from outrider.models.loading.weights import LazyWeights as LazyWeights


def __getattr__(name: str) -> object:
    """Import a public name's home on first use: looking a model up must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
