"""MEDUSA heads: ``{i}.{j}.linear.*`` are residual blocks, ``{i}.{num_layers}.weight`` the output.

The published config.json of MEDUSA says 2 heads beside the tensors of 5, so both counts come from
the tensors. Where no head has an output layer (the first releases), the target's is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from outrider.config import Method
from outrider.errors import CheckpointError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import MedusaConfig
from outrider.models.loading.fields import MAX_LAYERS, Fields
from outrider.models.loading.heads.eagle3_config import OURS
from outrider.models.loading.heads.loaded import LoadedHead, loaded_head
from outrider.models.loading.heads.source import HeadSource
from outrider.models.loading.safetensors_file import StoredTensor

_NUMBER = r"(0|[1-9]\d{0,5})"
_NAME = re.compile(rf"(?:medusa_head\.)?{_NUMBER}\.{_NUMBER}\.(linear\.)?(weight|bias)")


def is_medusa(names: Iterable[str]) -> bool:
    """Whether there are tensors of MEDUSA heads among these names."""
    return any(_NAME.fullmatch(name) for name in names)


def load_medusa(source: HeadSource, target: DecoderConfig) -> LoadedHead:
    """Read MEDUSA heads.

    Raises:
        CheckpointError: tensors that do not fit each other or the target; names them.
    """
    parsed = {name: _NAME.fullmatch(name) for name in source.tensors}
    blocks: dict[tuple[int, int, str], StoredTensor] = {}
    for name, match in parsed.items():
        if match and match[3]:
            blocks[int(match[1]), int(match[2]), match[4]] = source.tensors[name]
    num_layers = len({block for _, block, _ in blocks})
    outputs: dict[int, StoredTensor] = {}
    unexpected = []
    for name, match in parsed.items():
        if match and not match[3] and int(match[2]) == num_layers and match[4] == "weight":
            outputs[int(match[1])] = source.tensors[name]
        elif not (match and match[3]):
            unexpected.append(name)
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=len({head for head, _, _ in blocks} | set(outputs)),
        num_layers=num_layers,
        has_own_head=bool(outputs),
    )
    _check_sizes(source, blocks, outputs, target)
    found = {f"heads.{head}.blocks.{j}.{kind}": t for (head, j, kind), t in blocks.items()}
    found |= {f"heads.{head}.lm_head.weight": tensor for head, tensor in outputs.items()}
    weights = source.lazy_weights(config.weight_shapes(), found, unexpected=unexpected, readers={})
    return loaded_head(
        source,
        method=Method.MEDUSA,
        config=config,
        weights=weights,
        layout="MEDUSA",
        conventions=_conventions(source.fields, config),
        recorded_acceptance=source.fields.sub(OURS).positive("recorded_acceptance", None),
    )


def _check_sizes(
    source: HeadSource,
    blocks: dict[tuple[int, int, str], StoredTensor],
    outputs: dict[int, StoredTensor],
    target: DecoderConfig,
) -> None:
    """Heads for another target: one clear sentence instead of every shape."""
    widths = {tensor.shape[-1] for tensor in blocks.values() if tensor.shape}
    if len(widths) == 1 and widths != {target.hidden_size}:
        raise CheckpointError(
            f"{source.path}: the heads are {widths.pop()} wide, the target's hidden size is "
            f"{target.hidden_size}"
        )
    vocabularies = {tensor.shape[0] for tensor in outputs.values() if tensor.shape}
    if len(vocabularies) == 1 and vocabularies != {target.vocab_size}:
        raise CheckpointError(
            f"{source.path}: the heads' vocabulary is {vocabularies.pop()}, the target's is "
            f"{target.vocab_size}"
        )


def _conventions(fields: Fields, config: MedusaConfig) -> list[str]:
    notes = []
    for name, what, found in (
        ("medusa_num_heads", "heads", config.num_heads),
        ("medusa_num_layers", "residual blocks per head", config.num_layers),
    ):
        stated = fields.whole(name, 0, MAX_LAYERS, found)
        if stated != found:
            notes.append(f"the published config says {stated} {what}, the tensors hold {found}")
    if not config.has_own_head:
        notes.append("no output layers: the target's output head is used")
    return notes
