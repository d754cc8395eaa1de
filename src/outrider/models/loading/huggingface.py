"""A Hugging Face folder's weights, in one safetensors file or in shards.

Which files those are, :mod:`~outrider.models.loading.weight_files` says. Weights come out under the
names of :mod:`outrider.models.architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.loading.fields import Fields, read_json
from outrider.models.loading.weights import LazyWeights, check_weights

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{part}_proj": part for part in "qkvo"},
    **{f"self_attn.{part}_norm": f"{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": part for part in ("gate", "up", "down")},
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.([\w.]+)\.(weight|bias)")
# Buffers that old exports saved along; they follow from the config.
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.attn\.masked_bias")


def open_weights(files: Iterable[Path], config: DecoderConfig, folder: Path) -> LazyWeights:
    """Open the files and check every tensor's name and shape against ``config``.

    Raises:
        CheckpointError: a damaged file, or weights that do not fit; names file and tensors.
        UnsupportedModelError: weights stored in another type than F32, F16 or BF16.
    """
    readers: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    unexpected: list[str] = []
    with ExitStack() as opened:
        for path in files:
            file = _open(path, opened)
            for stored in file.keys():  # noqa: SIM118 - safe_open is no mapping
                name = _our_name(stored)
                if name is None or (name == "lm_head.weight" and config.tied_embeddings):
                    if name is None and not _HARMLESS.fullmatch(stored):
                        unexpected.append(stored)
                    continue
                if name in shapes:
                    raise CheckpointError(f"{path}: tensor {stored} is in an earlier file too")
                shapes[name] = _shape(path, file, stored)
                readers[name] = partial(_read, path, file, stored)
        check_weights(config, shapes, folder, unexpected=unexpected)
        return LazyWeights(folder, readers, opened.pop_all().close)
    raise AssertionError("unreachable: the stack swallows no exception")


def _open(path: Path, opened: ExitStack) -> Any:
    try:
        return opened.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _shape(path: Path, file: Any, stored: str) -> tuple[int, ...]:
    try:
        view = file.get_slice(stored)
        kind = view.get_dtype()
        shape = tuple(view.get_shape())
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, error) from None
    if kind not in _DTYPES:
        raise UnsupportedModelError(
            f"{path}: tensor {stored} is stored as {kind}; supported: {', '.join(_DTYPES)}"
        )
    return shape


def _read(path: Path, file: Any, stored: str) -> Tensor:
    try:
        return file.get_tensor(stored)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:200]
    return CheckpointError(f"{path}: not a sound safetensors file: {reason}; fetch it again")


def _our_name(stored: str) -> str | None:
    if stored in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[stored]
    if (match := _LAYER.fullmatch(stored)) and match[2] in _PARTS:
        return f"layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"
    return None


def read_config_fields(folder: Path) -> Fields:
    """The parsed ``config.json`` of ``folder``.

    Raises:
        CheckpointError: missing or damaged.
    """
    path = folder / "config.json"
    return Fields(path, read_json(path))
