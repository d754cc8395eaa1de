"""What a person sees while a run measures: a bar on a terminal, a line per block elsewhere.

Owns words and rhythm; :mod:`outrider.bench.run` says where it is. A bar is drawn when something
happened and never by a thread of its own, which would take time from the very processor that is
being measured, and at a different share of each arm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Self

from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column

from outrider.bench.records import BlockKind, RequestRecord
from outrider.bench.run import Progress
from outrider.commands import console


class Display:
    """The live display of a run; use as a context manager, call it with every progress."""

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None
        self._task: TaskID | None = None
        self._block: tuple[int, str] = (-1, "")
        self._rates: list[str] = []
        self._told = ""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            line = Column(no_wrap=True, overflow="ellipsis")
            self._bar = ProgressBar(
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False, table_column=line),
                console=console.stderr(),
                transient=True,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __call__(self, progress: Progress) -> None:
        """Show where the run is."""
        if progress.turn is not None and progress.turn.index != self._block[0]:
            self._block, self._rates = (progress.turn.index, block_text(progress)), []
        if progress.turn is not None and progress.last:
            rate = turn_rate(progress.last)
            self._rates.append(f"{progress.turn.arm} {'-' if rate is None else f'{rate:.1f}'}")
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                total=progress.num_turns or None,
                completed=progress.num_done,
                description=self._line(progress),
            )
            self._bar.refresh()
        elif progress.is_block_done:
            console.note(self._line(progress))
        elif progress.turn is None:
            self._tell_stage(progress.stage)

    def _line(self, progress: Progress) -> str:
        """Which block, how fast its arms were, how much is left."""
        if progress.turn is None:
            return progress.stage
        rates = f": {', '.join(self._rates)} tokens/s" if self._rates else ""
        left = ""
        if progress.left_s is not None and progress.num_done < progress.num_turns:
            left = f" (about {console.format_seconds(progress.left_s)} left)"
        return f"{self._block[1]}{rates}{left}"

    def _tell_stage(self, stage: str) -> None:
        """A line once for each; what stands behind its colon only moves."""
        name = stage.partition(":")[0]
        if name != self._told:
            console.note(f"outrider: {name}")
        self._told = name


def block_text(progress: Progress) -> str:
    """The block by its load and number: ``4 users, block 3 of 8``."""
    assert progress.turn is not None
    turn, count = progress.turn, f"{progress.turn.number + 1} of {progress.num_of_kind}"
    if turn.kind is BlockKind.AA:
        return f"{turn.load.text}, {turn.arm} against itself {count}"
    return f"{turn.load.text}, block {count}"


def turn_rate(requests: Sequence[RequestRecord]) -> float | None:
    """Output tokens over the time of a turn; a glimpse, not a figure."""
    num_tokens = sum(request.completion_tokens or 0 for request in requests)
    if not num_tokens:
        return None
    seconds = max(r.ended_s for r in requests) - min(r.sent_s for r in requests)
    return num_tokens / seconds if seconds > 0.0 else None
