"""``outrider bench`` and ``demo``: measure, judge, show; and the way on when it is interrupted.

Owns the order of the two halves: :mod:`outrider.bench.run` measures into a folder,
:mod:`outrider.bench.judgement` judges what is in it. ``--from`` does the second half alone, so a
report can be made anew, elsewhere, by a later version. What a person sees meanwhile is
:mod:`outrider.commands.bench_display`'s.
"""

from __future__ import annotations

import asyncio
import datetime
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.bench.blocks import plan_turns
from outrider.bench.judgement import judge
from outrider.bench.records import RunData
from outrider.bench.run import BenchSettings, run_bench
from outrider.bench.store import RunFolder, complete_indices, read_run
from outrider.bench.workloads import Workload, load_workload
from outrider.commands import console
from outrider.commands.bench_display import Display
from outrider.commands.bench_options import WorkloadOptions
from outrider.errors import OutriderError, PromptError
from outrider.report.console import console_report
from outrider.report.files import write_report
from outrider.report.summary import summary_text

EXIT_INTERRUPTED = 130
_INTERRUPTED = "interrupted"
_DEMO_TOKENS, _MIN_DEMO_TOKENS, _MAX_DEMO_TOKENS = 130, 20, 64


def demo_tokens(num_arms: int) -> int:
    """Most tokens per answer with which a demonstration of so many arms takes under 10 minutes."""
    return min(max(_DEMO_TOKENS // num_arms, _MIN_DEMO_TOKENS), _MAX_DEMO_TOKENS)


def new_folder(verb: str) -> Path:
    """Where a run goes that was not told: a new folder here, named by the time."""
    return Path(f"outrider-{verb}-{datetime.datetime.now():%Y%m%d-%H%M%S}")


def read_prompts(options: WorkloadOptions) -> Workload:
    """The chosen prompts; random tokens, on which no drafter was made to work, only if meant.

    Raises:
        ParameterError: a choice is out of range.
        PromptError: a line is no prompt, none is left, or they look random and nobody said that
            this is meant.
    """
    workload = load_workload(options.prompts, options.selection())
    if workload.record.is_random and not options.allow_random_prompts:
        raise PromptError(
            f"{options.prompts}: the prompts look like random tokens, on which acceptance "
            "says nothing about real text; give real prompts, or --allow-random-prompts"
        )
    return workload


def run(
    settings: BenchSettings,
    workload: Workload,
    out: Path,
    typed: Sequence[str],
    *,
    json: bool = False,
    csv: bool = False,
) -> int:
    """Measure what is missing in ``out`` and show what it says; the exit status.

    Raises:
        OutriderError: as :func:`outrider.bench.run.run_bench` and :func:`present`.
    """
    data = measure(settings, workload, out, typed)
    return EXIT_INTERRUPTED if data is None else present(data, out, json=json, csv=csv)


def judge_again(folder: Path, *, json: bool, csv: bool) -> int:
    """Show what a folder's records say; the exit status.

    Raises:
        RecordError: it holds no run.
        OutriderError: as :func:`present`.
    """
    return present(read_run(folder), folder, json=json, csv=csv)


def measure(
    settings: BenchSettings, workload: Workload, out: Path, typed: Sequence[str]
) -> RunData | None:
    """Measure what is missing in ``out``; None when Ctrl-C or SIGTERM came first.

    Whatever ends it early, what is complete stays, and the way on is told.

    Raises:
        OutriderError: as :func:`outrider.bench.run.run_bench`.
    """
    begin = "goes on" if RunFolder(out).holds_run() else "begins"
    console.note(f"outrider: the run {begin} in {out}")
    try:
        with Display() as display:
            return asyncio.run(_until_told_to_stop(settings, workload, out, display))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _tell_way_on(settings, out, typed, _INTERRUPTED)
        return None
    except OutriderError:
        _tell_way_on(settings, out, typed, "stopped")
        raise


async def _until_told_to_stop(
    settings: BenchSettings, workload: Workload, out: Path, display: Display
) -> RunData:
    """Measure; SIGTERM and a closed terminal end it as Ctrl-C does, so that no server is left."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for sign in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(sign, task.cancel)
    return await run_bench(settings, workload, out, display)


def _tell_way_on(settings: BenchSettings, out: Path, typed: Sequence[str], what: str) -> None:
    """How many blocks are kept, and the command that goes on with the rest."""
    if not RunFolder(out).holds_run():
        if what == _INTERRUPTED:
            console.note(f"{what}: nothing was measured yet")
        return
    arms = [arm.name for arm in settings.arms]
    turns = plan_turns(arms, settings.loads, settings.num_blocks, settings.num_aa_blocks)
    planned = {turn.index for turn in turns}
    num_kept = len(planned & complete_indices(out, read_run(out).run))
    console.note(f"{what}: {num_kept} of {len(planned)} blocks are kept in {out}")
    console.note(f"go on: {resume_command(typed, out)}")
    console.note(f"report on what is there: outrider bench --from {shlex.quote(str(out))}")


def resume_command(typed: Sequence[str], out: Path) -> str:
    """The command line again, with the folder where it was not named."""
    words = list(typed)
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(out)]
    return shlex.join(["outrider", *words])


def present(data: RunData, folder: Path, *, json: bool, csv: bool) -> int:
    """Judge by the thresholds that were fixed before measuring, show it; the exit status.

    Raises:
        RecordError: there is not one block to judge by.
        ParameterError: the run's thresholds are out of range.
        FailureError: the report cannot be written; the verdict is shown by then.
    """
    judgement = judge(data)
    if json:
        sys.stdout.write(summary_text(judgement))
        sys.stdout.flush()
    else:
        for part in console_report(judgement):
            console.stdout().print(part)
    written = write_report(judgement, folder, csv=csv)
    console.note(f"written: {', '.join(str(path) for path in written)}")
    return judgement.verdict.exit_status
