"""A run's folder: what is written when, and how it is read back after any interruption.

Owns the files and nothing that is in them. Written by :mod:`outrider.bench.run`, block by block;
read by everything that judges::

    DIR/run.json                    the conditions, before the first request
    DIR/records/0007-1.jsonl.gz     index 7, position 1: a BlockRecord, then its RequestRecords
    DIR/servers/NAME.log            what a server that we started said
    DIR/summary.json, report.html   derived, written by others; may be deleted and made again

Each file appears whole or not at all, so a run that was killed is resumed from the files that are
there. An index counts once all its positions are there: a comparison with one side is none.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from outrider.bench.records import (
    SCHEMA_VERSION,
    BlockKind,
    BlockRecord,
    RequestRecord,
    RunData,
    RunRecord,
    from_json,
    to_json,
)
from outrider.errors import FailureError, ParameterError, RecordError

RUN_FILE, RECORDS, SERVERS = "run.json", "records", "servers"
_TURN = re.compile(r"(\d+)-(\d+)\.jsonl\.gz")


class RunFolder:
    """One run's folder, open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Refuse a folder that no run can go into, before anything was spent on measuring.

        Raises:
            ParameterError: it holds something else, or cannot be written.
        """
        try:
            if self.path.exists() and (not self.path.is_dir() or any(self._foreign())):
                raise ParameterError(
                    f"--out: {self.path} is there already and is no run that can be resumed; give "
                    "a new folder"
                )
            for name in (RECORDS, SERVERS):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ParameterError(
                f"--out: {self.path} cannot be written ({problem.strerror}); give another folder"
            ) from None

    def create(self, run: RunRecord) -> None:
        """Start a run here, in a folder that was checked.

        Raises:
            ParameterError: as :meth:`check`.
            FailureError: it cannot be written after all.
        """
        self.check()
        _write(self.path / RUN_FILE, to_json(run))

    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return _is_file(self.path / RUN_FILE)

    def log(self, arm: str) -> Path:
        """Where a started server's output goes."""
        return self.path / SERVERS / f"{re.sub(r'[^A-Za-z0-9.+_-]', '_', arm)}.log"

    def write_turn(self, block: BlockRecord, requests: Sequence[RequestRecord]) -> None:
        """Keep one arm's turn; a file of the same turn from an interrupted attempt is replaced.

        Raises:
            FailureError: it cannot be written.
        """
        lines = b"\n".join([to_json(block), *map(to_json, requests)]) + b"\n"
        name = f"{block.index:04d}-{block.position}.jsonl.gz"
        # No time of day in the file: the same records are the same bytes.
        _write(self.path / RECORDS / name, gzip.compress(lines, mtime=0))

    def last_index(self) -> int:
        """The highest index there is a file of; -1 without any."""
        return max((index for index, _ in _turn_files(self.path)), default=-1)

    def _foreign(self) -> list[Path]:
        """What is in the folder beside the empty ones of a run that never began, and its logs."""
        records = self.path / RECORDS
        measured = list(records.iterdir()) if records.is_dir() else []
        ours = (RECORDS, SERVERS)
        return [path for path in self.path.iterdir() if path.name not in ours] + measured


def read_run(path: Path) -> RunData:
    """All conditions and all complete blocks of a run, in the order they were measured.

    Raises:
        RecordError: no run is there, a file is damaged, or another version wrote it.
    """
    run_file = path / RUN_FILE
    if not _is_file(run_file):
        raise RecordError(
            f"{path}: holds no {RUN_FILE}; give the folder that outrider bench --out wrote"
        )
    run = from_json(RunRecord, _read(run_file), str(run_file))
    if run.schema_version != SCHEMA_VERSION:
        raise RecordError(
            f"{run_file}: schema version {run.schema_version}, and this version reads "
            f"{SCHEMA_VERSION}; use the outrider that measured it ({run.versions.get('outrider')})"
        )
    baselines = [arm.name for arm in run.arms if arm.is_baseline]
    if len(baselines) != 1:
        raise RecordError(
            f"{run_file}: one arm must be the baseline, not {' and '.join(baselines) or 'none'}; "
            "bring back the file as it was written"
        )
    complete = complete_indices(path, run)
    turns = [
        _read_turn(file, place, run)
        for place, file in _turn_files(path).items()
        if place[0] in complete
    ]
    turns.sort(key=lambda turn: turn[0].started_s)
    requests = tuple(request for _, of_turn in turns for request in of_turn)
    return RunData(run, tuple(block for block, _ in turns), requests)


def complete_indices(path: Path, run: RunRecord) -> frozenset[int]:
    """The blocks all of whose positions are there.

    Raises:
        RecordError: a file is damaged.
    """
    positions: dict[int, list[int]] = defaultdict(list)
    files = _turn_files(path)
    for index, position in files:
        positions[index].append(position)
    complete = set()
    for index, there in positions.items():
        first = (index, there[0])
        block, _ = _read_turn(files[first], first, run)
        needed = {BlockKind.AA: 2, BlockKind.WARMUP: 1}.get(block.kind, len(run.arms))
        if len(there) >= needed:
            complete.add(index)
    return frozenset(complete)


def _turn_files(path: Path) -> dict[tuple[int, int], Path]:
    found = {}
    folder = path / RECORDS
    for file in folder.iterdir() if folder.is_dir() else ():
        match = _TURN.fullmatch(file.name)
        if match is not None:
            found[int(match[1]), int(match[2])] = file
    return found


def _read_turn(
    file: Path, place: tuple[int, int], run: RunRecord
) -> tuple[BlockRecord, list[RequestRecord]]:
    """One turn, if it is whole, is what its name says, and could have been measured.

    Raises:
        RecordError: it is not; says what is wrong.
    """
    try:
        lines = gzip.decompress(_read(file)).splitlines()
    except (OSError, EOFError, zlib.error) as problem:
        raise _damaged(file, str(problem)) from None
    if len(lines) < 2:
        raise _damaged(file, "it holds no request")
    block = from_json(BlockRecord, lines[0], f"{file}, line 1")
    requests = [
        from_json(RequestRecord, line, f"{file}, line {number}")
        for number, line in enumerate(lines[1:], start=2)
    ]
    if block.arm not in {arm.name for arm in run.arms} or block.load not in run.loads:
        raise _damaged(file, f"{block.arm} at {block.load.text} is no part of the run")
    if (block.index, block.position) != place:
        raise _damaged(file, f"it holds turn {block.index}-{block.position}")
    for number, request in enumerate(requests, start=2):
        if (request.block, request.position, request.arm, request.load) != (
            *place,
            block.arm,
            block.load,
        ):
            raise _damaged(file, f"line {number} belongs to another turn")
        if not _could_be(request):
            raise _damaged(file, f"line {number} has times or counts that cannot be")
    return block, requests


def _could_be(request: RequestRecord) -> bool:
    """Due before sent, then the chunks in their order, then the end; no count below 0."""
    chunks = [chunk.at_s for chunk in request.chunks]
    times = [request.scheduled_s, request.sent_s, *chunks, request.ended_s]
    counts = [request.prompt_tokens, request.completion_tokens]
    counts += [chunk.num_tokens for chunk in request.chunks]
    return (
        all(map(math.isfinite, times))
        and all(before <= after for before, after in pairwise(times))
        and all(count is None or count >= 0 for count in counts)
    )


def _damaged(file: Path, what: str) -> RecordError:
    return RecordError(
        f"{file}: is damaged ({what}); delete it and resume the run to measure it again"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise RecordError(f"{path}: cannot be read ({problem.strerror})") from None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, also when the process or the machine stops in between.

    Raises:
        FailureError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise FailureError(
            f"{path}: cannot be written ({problem.strerror}); make room or access, and run the "
            "same command again: what is complete stays"
        ) from None
