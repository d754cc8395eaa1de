"""``outrider bench``: measure, judge, show; and what a person sees meanwhile.

Owns the progress, the interruption and the order of the two halves: :mod:`outrider.bench.run`
measures into a folder, :mod:`outrider.bench.judgement` judges what is in it. ``--from`` does the
second half alone, so a report can be made anew, elsewhere, by a later version.
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
from outrider.bench.records import RequestRecord, RunData
from outrider.bench.run import BenchSettings, Progress, run_bench
from outrider.bench.store import RunFolder, complete_indices, read_run
from outrider.bench.workloads import Workload
from outrider.commands import console
from outrider.errors import OutriderError, PromptError
from outrider.report.console import console_report
from outrider.report.files import write_report
from outrider.report.summary import summary_text

EXIT_INTERRUPTED = 130


def default_folder() -> Path:
    """Where a run goes that was not told: a new folder here, named by the time."""
    return Path(f"outrider-bench-{datetime.datetime.now():%Y%m%d-%H%M%S}")


def refuse_random(workload: Workload, *, is_allowed: bool) -> None:
    """Random tokens depress acceptance as no user's text does.

    Raises:
        PromptError: the prompts look random, and nobody said that this is meant.
    """
    if workload.record.is_random and not is_allowed:
        raise PromptError(
            f"{workload.record.source}: the prompts look like random tokens, on which acceptance "
            "says nothing about real text; give real prompts, or --allow-random-prompts"
        )


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
        with console.Stages() as stages:
            return asyncio.run(_until_told_to_stop(settings, workload, out, stages))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _tell_way_on(settings, out, typed, "interrupted")
        return None
    except OutriderError:
        _tell_way_on(settings, out, typed, "stopped")
        raise


async def _until_told_to_stop(
    settings: BenchSettings, workload: Workload, out: Path, stages: console.Stages
) -> RunData:
    """Measure; SIGTERM and a closed terminal end it as Ctrl-C does, so that no server is left."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for sign in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(sign, task.cancel)
    return await run_bench(settings, workload, out, lambda progress: _show(stages, progress))


def progress_text(progress: Progress) -> str:
    """One line: what is going on, how far, how long it will take."""
    text = f"{progress.stage} [{progress.num_done} of {progress.num_turns} turns"
    if progress.left_s is not None and progress.num_done < progress.num_turns:
        text += f", about {console.format_seconds(progress.left_s)} left"
    text += "]"
    rate = _rate(progress.last)
    return text if rate is None else f"{text} {rate:.1f} tokens/s"


def _show(stages: console.Stages, progress: Progress) -> None:
    fraction = progress.num_done / progress.num_turns if progress.num_turns else None
    stages(progress_text(progress), fraction)


def _rate(requests: Sequence[RequestRecord]) -> float | None:
    """Output tokens over the time of a turn; a glimpse, not a figure."""
    num_tokens = sum(request.completion_tokens or 0 for request in requests)
    if not num_tokens:
        return None
    seconds = max(r.ended_s for r in requests) - min(r.sent_s for r in requests)
    return num_tokens / seconds if seconds > 0.0 else None


def _tell_way_on(settings: BenchSettings, out: Path, typed: Sequence[str], what: str) -> None:
    """How many blocks are kept, and the command that goes on with the rest."""
    if not RunFolder(out).holds_run():
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
