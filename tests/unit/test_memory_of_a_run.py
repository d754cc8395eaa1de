"""What a run takes with all its processes: the sampling, and the demonstration's own bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import memory
import pytest
from memory import Peak, ProcessMemory, measure, sample

MIB = 1 << 20
# As the suite was started: a session's fixture may point the cache at an empty folder by then.
ENVIRONMENT = dict(os.environ)
# A process with a child, each of which holds 64 MiB that nobody else has.
FAMILY = """
import subprocess, sys, time
held = bytearray(b"x" * (64 << 20))
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", sys.stdin.read(), "child"])
else:
    print("up", flush=True)
    time.sleep(30)
"""


def test_a_process_and_its_child_are_both_counted():
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(FAMILY)
        process.stdin.close()
        process.stdout.readline()
        family = sample(process.pid)
        for member in reversed(family):
            subprocess.run(["kill", str(member.pid)], check=False)

    assert 2 == len(family)
    assert process.pid == family[0].pid
    assert family[1].command.endswith("child")
    for member in family:
        assert 64 * MIB < member.pss_bytes < 128 * MIB


def test_a_peak_is_the_largest_sum_and_the_most_processes_of_any_moment():
    small = [ProcessMemory(number, MIB, "a") for number in range(3)]
    large = [ProcessMemory(9, 5 * MIB, "b")]
    peak = Peak((), 0).joined(large).joined(small).joined([])

    assert 5 * MIB == peak.pss_bytes
    assert 3 == peak.most_processes


def test_a_command_keeps_its_exit_status():
    status, peak = measure(
        [sys.executable, "-c", "import time; time.sleep(0.3); raise SystemExit(7)"]
    )

    assert 7 == status
    assert 1 == peak.most_processes
    assert peak.pss_bytes > MIB


@pytest.mark.embedded
@pytest.mark.alone
def test_every_method_side_by_side_is_three_processes_under_1_5_gb(tmp_path: Path):
    """The demonstration's arms and loads, with fewer blocks: client, guardian and one server."""
    command = [sys.executable, "-m", "outrider.cli", "bench", "--concurrency", "1,4"]
    command += ["--blocks", "1", "--aa-blocks", "0", "--requests", "4", "--max-tokens", "6"]
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, memory.__file__, "--json", *command, "--out", str(out)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    arms = json.loads((out / "run.json").read_text())["arms"]

    assert len(arms) >= 5
    assert {tuple(arm["name"] for arm in arms)} == {tuple(arm["process"]) for arm in arms}
    assert 3 == len(found["processes"]), "while it measures; before, the model is looked at"
    assert 300 * MIB < found["pss_bytes"] < 1.5e9
