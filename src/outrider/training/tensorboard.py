"""The training log once more, as TensorBoard reads it; only where that package is installed.

Owns which figures become which curves. Written by :mod:`outrider.training.loop` beside
:mod:`outrider.training.log`, which is what everything else reads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ParameterError

TENSORBOARD = "tensorboard"


def require_tensorboard() -> None:
    """Find out before hours of training that the package is missing.

    Raises:
        ParameterError: it is.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ParameterError(
            "--tensorboard: the tensorboard package is not installed; run pip install tensorboard, "
            "or leave the option out: log.jsonl has the same figures"
        )


class Scalars:
    """An event file with a curve for every figure of the log.

    Args:
        folder: of the event files.
        last_step: the step that the run goes on from; what was written of later ones is hidden.
    """

    def __init__(self, folder: Path, *, last_step: int) -> None:
        require_tensorboard()
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """What :meth:`outrider.training.log.JsonLines.append` is given."""
        for name, value in scalars(values):
            self._writer.add_scalar(name, value, step)

    def sync(self) -> None:
        """Write out what was appended."""
        self._writer.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._writer.close()


def scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A log line as named numbers: ``accuracy: [.5, .4]`` is ``accuracy/1`` and ``accuracy/2``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in scalars(value))
        elif isinstance(value, list):
            yield from ((f"{name}/{place}", number) for place, number in enumerate(value, 1))
        else:
            yield name, value
