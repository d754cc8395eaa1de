"""How the commands talk: results on stdout, progress and messages on stderr.

Owns tables, progress displays, JSON output, number formats, the decoding of input and the
handling of Ctrl-C while an answer streams. Used by :mod:`outrider.cli` and all commands; knows
nothing about models. Without a terminal
everything degrades to plain lines.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal, Self, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from outrider.errors import PromptError
from outrider.types import Completion, TextChunk

MAX_PROMPT_BYTES = 16 << 20
RETELL_S = 15.0  # seconds between two lines of one stage, without a terminal
PLAIN_WIDTH = 110  # columns when the output is not a terminal
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def stdout() -> Console:
    """The console of results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console of progress and messages."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    """A console that leaves texts alone and does not fold tables to 80 columns in a file."""
    width = None if file.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def error(message: object) -> None:
    """One line ``outrider: error: ...`` on stderr, whatever the message's own line breaks."""
    line = Text("outrider: error: ", style="bold red").append(_one_line(message), style="default")
    stderr().print(line, soft_wrap=True)


def note(message: object) -> None:
    """One dim line on stderr."""
    stderr().print(Text(_one_line(message), style="dim"), soft_wrap=True)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def make_robust() -> None:
    """Let neither a closed stream nor a character that the encoding lacks stop the program."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller (>&-): nobody listens or speaks
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - until exit
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def read_limited(file: IO[bytes], source: str) -> bytes:
    """Read to the end, but no more than a prompt can be.

    Raises:
        PromptError: there is more than ``MAX_PROMPT_BYTES``.
    """
    data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise PromptError(
            f"{source}: more than {MAX_PROMPT_BYTES >> 20} MiB, which is more than a prompt can be"
        )
    return data


def write_text(text: str) -> None:
    """Write a piece of an answer to stdout at once; a terminal gets no control characters.

    An answer is untrusted text: escape sequences in it could rewrite the screen or the title.
    """
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def decode_text(data: bytes, source: str) -> str:
    """Text of UTF-8 bytes, without a byte order mark and one final line break.

    Raises:
        PromptError: names the source and the offset of the first bad byte.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise PromptError(
            f"{source}: byte 0x{data[problem.start]:02x} at offset {problem.start} is not UTF-8; "
            f"give the text in UTF-8"
        ) from None
    return text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout; refuses NaN and infinity, which JSON does not have."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers_from: int = 1
) -> Table:
    """A table whose columns are flush right from ``numbers_from`` on; no header without names."""
    result = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_header=any(columns),
    )
    for index, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if index >= numbers_from else "left"
        result.add_column(Text(name, justify=justify), justify=justify, overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def format_bytes(num_bytes: int) -> str:
    """Binary units with one decimal: ``258.8 MiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """``0.42 s``, ``12 s`` or ``3 min 05 s``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


class Stages:
    """Shows the stages of a longer job: a bar on a terminal, one line per stage elsewhere.

    The display goes away when the ``with`` block ends.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._due_s = 0.0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            self._progress = Progress(*columns, console=stderr(), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def __call__(self, stage: str, fraction: float | None) -> None:
        """Show that ``stage`` is done to this fraction; None when nobody knows."""
        if self._progress is None:
            self._tell(stage)
            return
        if self._task is None or stage != self._stage:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=None)
        self._stage = stage
        total = None if fraction is None else 1.0
        self._progress.update(self._task, total=total, completed=fraction or 0.0)

    def _tell(self, stage: str) -> None:
        """A line for a new stage; figures behind its colon are told again only now and then."""
        now = time.monotonic()
        is_new = stage.partition(":")[0] != self._stage.partition(":")[0]
        if is_new or (stage != self._stage and now >= self._due_s):
            note(f"outrider: {stage}")
            self._due_s = now + RETELL_S
        self._stage = stage


class Interrupt:
    """While active, the first Ctrl-C sets ``requested``; a second one raises KeyboardInterrupt.

    So the engine always finishes the step it is in: a KeyboardInterrupt out of the middle of one
    could leave its cache in between two states.
    """

    def __init__(self) -> None:
        self.requested = False
        self._restore: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGINT, self._handle)
            self._restore = lambda: signal.signal(signal.SIGINT, previous)
        return self

    def __exit__(self, *_: object) -> None:
        if self._restore is not None:
            self._restore()

    def _handle(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - fixed by signal
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def relay(
    stream: Iterator[TextChunk], write: Callable[[str], object]
) -> tuple[str, Completion | None]:
    """Hand each chunk's text to ``write``; the whole text, and the completion.

    The completion is None when Ctrl-C came first: the stream is then closed, which aborts the
    request, and the text is what came until then.
    """
    pieces: list[str] = []
    completion: Completion | None = None
    with Interrupt() as interrupt, contextlib.closing(stream) as chunks:  # type: ignore[type-var]  # a generator
        for chunk in chunks:
            pieces.append(chunk.text)
            write(chunk.text)
            completion = chunk.completion
            if interrupt.requested and completion is None:
                break
    return "".join(pieces), completion
