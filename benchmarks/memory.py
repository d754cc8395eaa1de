"""The peak memory of a command with all its processes, such as a whole bench run.

Owns the sampling: of every process that descends from the command, four times a second, its
proportional set size (PSS), in which a page that several processes share counts once between them.
Linux only::

    python benchmarks/memory.py outrider demo
    python benchmarks/memory.py --json outrider bench --methods ngram --blocks 6

Ends with the command's exit status. The figures are of the moment at which the sum was largest.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PERIOD_S = 0.25
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process: its proportional share of memory, and what it was started as."""

    pid: int
    pss_bytes: int
    command: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment with the largest sum; ``most_processes`` is of any moment."""

    processes: tuple[ProcessMemory, ...]
    most_processes: int

    @property
    def pss_bytes(self) -> int:
        """Of all processes together."""
        return sum(process.pss_bytes for process in self.processes)

    def joined(self, now: Sequence[ProcessMemory]) -> Peak:
        """With one more moment."""
        is_larger = sum(process.pss_bytes for process in now) > self.pss_bytes
        most = max(self.most_processes, len(now))
        return Peak(tuple(now) if is_larger else self.processes, most)


def sample(root: int) -> list[ProcessMemory]:
    """The process and all that descend from it, as they are now."""
    found = []
    for pid in _family(root):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        pss = _PSS.search(rollup)
        if pss is not None:
            command = b" ".join(words).decode("utf-8", "replace").strip()
            found.append(ProcessMemory(pid, int(pss[1]) * 1024, command))
    return found


def _family(root: int) -> list[int]:
    """The process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(path.parent.name))
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return family


def measure(command: Sequence[str]) -> tuple[int, Peak]:
    """Run the command to its end; its exit status and its peak."""
    peak = Peak((), 0)
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None:
                peak = peak.joined(sample(process.pid))
                time.sleep(PERIOD_S)
        except KeyboardInterrupt:  # the command has got it too
            process.wait()
    return process.returncode, peak


def main() -> int:
    """Measure, print; the command's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its flags")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("no command: give one, such as: outrider demo")
    status, peak = measure(arguments.command)
    if arguments.json:
        print(json.dumps({"status": status, "pss_bytes": peak.pss_bytes, **asdict(peak)}))
        return status
    for process in peak.processes:
        print(f"{process.pss_bytes / _MIB:8.1f} MiB  {process.command[:90]}")
    print(f"{peak.pss_bytes / _MIB:8.1f} MiB  at the peak; at most {peak.most_processes} processes")
    return status


if __name__ == "__main__":
    sys.exit(main())
