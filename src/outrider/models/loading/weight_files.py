"""Which files of a Hugging Face folder hold its weights; without opening any of them.

A folder whose weights are pickles is refused, and so is a shard index that points outside the
folder. Apart from ``huggingface`` so that names can be looked up without importing torch.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from outrider.errors import CheckpointError, UnsafeFileError
from outrider.models.loading.fields import read_json

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``, in a fixed order.

    Raises:
        UnsafeFileError: the weights are pickles only.
        CheckpointError: there are no weights, or the index is damaged or points elsewhere.
    """
    index_path = folder / _INDEX
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not index_path.is_file():
        raise _no_weights(folder)
    shard_of = read_json(index_path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    shards = []
    for shard in sorted({str(shard) for shard in shard_of.values()}):
        is_name = PurePosixPath(shard).name == shard and "\\" not in shard
        if not is_name or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index_path}: shard {shard!r} is not the name of a safetensors file in the folder"
            )
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder}: shard {shard} is missing; fetch the checkpoint again")
        shards.append(folder / shard)
    return shards


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICKLES)
    if pickles:
        return UnsafeFileError(
            f"{folder}: the weights are pickles ({pickles[0]}), which can run code when opened; "
            "convert them to safetensors first"
        )
    return CheckpointError(f"{folder}: no weights; allowed: {_SINGLE}, {_INDEX} with its shards")
