"""All that a run writes down as it goes: its log, its times and, if wanted, TensorBoard's files.

Owns which of the processes that train together writes. Between :mod:`outrider.training.loop` and
the files (:mod:`outrider.training.log`, :mod:`outrider.training.tensorboard`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.training.log import LOG, TIMES, JsonLines
from outrider.training.tensorboard import TENSORBOARD, Scalars


class RunLog:
    """The files of one run folder, open to be appended to.

    Args:
        folder: of the run.
        last_step: the step that the run goes on from; what the files hold of later ones goes.
        is_written: False in a process that leaves all this to another.
        tensorboard: write TensorBoard's files too.

    Attributes:
        kept_step: of the last line of the log that was kept, 0 without any.

    Raises:
        CapacityError, CheckpointError: a file cannot be written; so do the methods.
        ParameterError: TensorBoard is not installed.
    """

    def __init__(
        self, folder: Path, *, last_step: int, is_written: bool = True, tensorboard: bool = False
    ) -> None:
        self._figures: list[JsonLines | Scalars] = []
        self._times: list[JsonLines] = []
        self.kept_step = last_step
        if not is_written:
            return
        log = JsonLines(folder / LOG, last_step=last_step)
        self.kept_step = log.kept_step
        self._figures.append(log)
        self._times.append(JsonLines(folder / TIMES, last_step=last_step))
        if tensorboard:
            self._figures.append(Scalars(folder / TENSORBOARD, last_step=last_step))

    def add_figures(self, step: int, values: Mapping[str, Any]) -> None:
        """What is a pure function of data and settings."""
        for file in self._figures:
            file.append(step, values)

    def add_times(self, step: int, values: Mapping[str, Any]) -> None:
        """What is not."""
        for file in self._times:
            file.append(step, values)

    def sync(self) -> None:
        """Put all that was added on disk; before the checkpoint that it belongs to."""
        for file in (*self._figures, *self._times):
            file.sync()

    def close(self) -> None:
        """Let go of the files."""
        for file in (*self._figures, *self._times):
            file.close()
