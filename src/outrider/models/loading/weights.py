"""A checkpoint's weights, read one tensor at a time, and the check that all of them are there.

Owns no file format: :mod:`.huggingface`, :mod:`.gguf_file` and :mod:`.heads` hand in one reader per
tensor under the names of :mod:`outrider.models.architecture` or
:mod:`outrider.models.heads.config`. Reading on access keeps the peak memory of a load
at one tensor above what the decoder keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import CheckpointError

MAX_NAMED = 8


class LazyWeights(Mapping[str, Tensor]):
    """Weights by name; each is read, and checked to be finite, when it is asked for.

    A tensor may share memory with the mapped file, so a caller that changes it in place, or keeps
    it longer than the file, copies it first. Nothing is cached: asking twice reads twice.
    """

    def __init__(
        self,
        path: Path,
        readers: Mapping[str, Callable[[], Tensor]],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._readers = dict(readers)
        self._close = close

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor, in its stored float type (quantised GGUF blocks: float32).

        Raises:
            KeyError: no weight of that name, or the weights were closed.
            CheckpointError: the tensor cannot be read, or holds a NaN or an infinity.
        """
        tensor = self._readers[name]()
        if not _is_finite(tensor):
            raise CheckpointError(
                f"{self._path}: weight {name} holds a NaN or an infinity; fetch it again"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def close(self) -> None:
        """Let go of the file; the weights can no longer be read."""
        self._readers.clear()
        self._close()


def check_weights(
    needed: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
    *,
    unexpected: Iterable[str] = (),
    source: str = "config",
) -> None:
    """Compare the file's tensors with the shapes that are needed, before any is read.

    Args:
        needed: what the decoder or head needs, under our names.
        shapes: the file's tensors, under our names.
        path: named in the error.
        unexpected: the file's names of tensors that have no place.
        source: what the needed shapes follow from; named in the error.

    Raises:
        CheckpointError: names every missing, unexpected and wrongly shaped tensor.
    """
    missing = [name for name in needed if name not in shapes]
    extra = [name for name in shapes if name not in needed] + list(unexpected)
    wrong = [
        f"{name} is {list(shapes[name])}, {source} says {list(shape)}"
        for name, shape in needed.items()
        if name in shapes and shapes[name] != shape
    ]
    found = {"missing": missing, "unexpected": extra, "wrong shape": wrong}
    problems = [f"{kind}: {listed(names)}" for kind, names in found.items() if names]
    if problems:
        raise CheckpointError(f"{path}: weights do not fit the {source}; {'; '.join(problems)}")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:MAX_NAMED])
    left = len(names) - MAX_NAMED
    return f"{shown} and {left} more" if left > 0 else shown


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():  # a vocabulary map
        return True
    # One pass without a temporary; a finite tensor whose sum overflows gets the slow test.
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
