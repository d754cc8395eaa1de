"""GGUF files: a bounds-checked reader of the header, and of one tensor at a time.

Owns the container format and nothing of what is in it (:mod:`.gguf_model` and
:mod:`.gguf_tokenizer` interpret it). The header is parsed here rather than by ``gguf.GGUFReader``:
that takes two seconds for a vocabulary of 49,152, and on a damaged file fails in any of a dozen
ways. The blocks of quantised tensors are decoded by ``gguf.quants``.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from outrider.errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME_BYTES = 2**16
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))

_Kind = GGMLQuantizationType
_PLAIN = {_Kind.F32: torch.float32, _Kind.F16: torch.float16, _Kind.BF16: torch.bfloat16}
_QUANTISED = (
    _Kind.Q8_0, _Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1,
    _Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K,
    _Kind.IQ4_NL, _Kind.IQ4_XS,
)  # fmt: skip

Value = bool | int | float | str | list


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is stored; ``shape`` is in torch's order, slowest first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open GGUF file: its metadata and where its tensors are."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    _data: mmap.mmap = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map the file and read its header.

        Raises:
            CheckpointError: not GGUF, truncated, or its header contradicts itself or the file.
            UnsupportedModelError: a GGUF version or tensor type that is not read here.
        """
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        try:
            return _parse(path, data)
        except BaseException:
            data.close()
            raise

    def read(self, name: str) -> Tensor:
        """One tensor: float32, float16 and bfloat16 as stored, quantised blocks as float32.

        Plain tensors are copied too, so that nothing refers to the map after ``close``.
        """
        info = self.tensors[name]
        end = info.start + info.num_bytes
        with memoryview(self._data) as whole, whole[info.start : end] as raw:
            owned = bytearray(raw)
        if info.kind in _PLAIN:
            return torch.frombuffer(owned, dtype=_PLAIN[info.kind]).reshape(info.shape)
        rows = np.frombuffer(owned, dtype=np.uint8).reshape(*info.shape[:-1], -1)
        with np.errstate(all="ignore"):  # a damaged scale is reported by the finite check
            return torch.from_numpy(dequantize(rows, info.kind)).reshape(info.shape)

    def close(self) -> None:
        """Unmap the file."""
        self._data.close()


class _Cursor:
    """Reads little-endian fields in order and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a sound GGUF file: {what} at byte {self.at}")

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self.size - self.at:
            raise self.fail(f"{what} of {num_bytes} bytes runs past the end ({self.size} bytes)")
        start, self.at = self.at, self.at + num_bytes
        return self.data[start : self.at]

    def scalar(self, code: str, what: str) -> int | float | bool:
        layout = struct.Struct("<" + code)
        return layout.unpack(self.take(layout.size, what))[0]

    def whole(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.whole("Q", f"length of {what}")
        if limit is not None and length > limit:
            raise self.fail(f"{what} is {length} bytes long (at most {limit})")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Value:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        raise self.fail(f"{what} has the unknown type {kind}")

    def array(self, what: str) -> list:
        kind = self.whole("I", f"element type of {what}")
        count = self.whole("Q", f"length of {what}")
        if kind in _SCALARS:
            item = struct.calcsize("<" + _SCALARS[kind])
            if count > (self.size - self.at) // item:
                raise self.fail(f"{what} declares {count} elements, more than the file holds")
            raw = self.take(count * item, what)
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", raw))
        if kind == _STRING:
            self.check_count(count, 8, what)
            return [self.string(what) for _ in range(count)]
        raise self.fail(f"{what} is an array of the unreadable type {kind}")

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count that could not fit, before anything loops over it."""
        if count > (self.size - self.at) // least_bytes:
            raise self.fail(f"{what} declares {count} entries, more than the file holds")


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(path, data)
    if cursor.take(min(4, cursor.size), "magic") != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
    version = cursor.whole("I", "version")
    if version not in VERSIONS:
        raise UnsupportedModelError(
            f"{path}: GGUF version {version} is not supported; supported: little-endian 2 and 3"
        )
    num_tensors = cursor.whole("Q", "tensor count")
    num_fields = cursor.whole("Q", "metadata count")
    cursor.check_count(num_fields, 13, "metadata")
    metadata: dict[str, Value] = {}
    for _ in range(num_fields):
        key = cursor.string("metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        kind = cursor.whole("I", f"type of {key!r}")
        metadata[key] = cursor.value(kind, repr(key))
    cursor.check_count(num_tensors, 24, "tensors")
    return GGUFFile(path, metadata, _tensor_table(cursor, num_tensors, metadata), data)


def _tensor_table(
    cursor: _Cursor, num_tensors: int, metadata: dict[str, Value]
) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment {alignment!r} is not a power of two")
    entries: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string("tensor name", MAX_NAME_BYTES)
        if name in entries:
            raise cursor.fail(f"tensor {name!r} appears twice")
        entries[name] = _tensor_entry(cursor, name)
    base = -(-cursor.at // alignment) * alignment
    table = {}
    for name, (shape, kind, offset) in entries.items():
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise cursor.fail(
                f"tensor {name!r}: rows of {shape[-1]} do not fill {kind.name} blocks"
            )
        num_bytes = prod(shape) // block * block_bytes
        if base + offset + num_bytes > cursor.size:
            raise CheckpointError(
                f"{cursor.path}: truncated: tensor {name!r} ends at byte "
                f"{base + offset + num_bytes}, the file has {cursor.size}"
            )
        table[name] = TensorInfo(name, shape, kind, base + offset, num_bytes)
    return table


def _tensor_entry(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
    num_dims = cursor.whole("I", f"rank of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions (1 to {MAX_DIMS})")
    shape = tuple(cursor.whole("Q", f"shape of {name!r}") for _ in range(num_dims))[::-1]
    if not all(shape):
        raise cursor.fail(f"tensor {name!r} has the empty shape {list(shape)}")
    number = cursor.whole("I", f"type of {name!r}")
    offset = cursor.whole("Q", f"offset of {name!r}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.fail(f"tensor {name!r} has the unknown type {number}") from None
    if kind not in _PLAIN and kind not in _QUANTISED:
        known = ", ".join(each.name for each in (*_PLAIN, *_QUANTISED))
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {name!r} is stored as {kind.name}; supported: {known}"
        )
    return shape, kind, offset
