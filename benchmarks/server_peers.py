"""Our server beside vLLM's on the processor: aggregate tokens/s at several numbers of users.

One run starts everything: our server plain and with ways to draft (the shipped head under the load
policy), and vLLM's plain and with n-gram drafts. All stay loaded and take turns, block by block, in
an order that turns and is mirrored, so only one computes at a time and a machine that drifts
favours none. Same prompts, same lengths (end of sequence ignored), greedy, same cores, prefix
caches off on both sides since blocks ask the same questions again. A block's figure is all its
output tokens over its whole time, prompts included; a ratio is the geometric mean over blocks with
a t interval.

    python benchmarks/hf_folder.py --out smollm2-hf
    python benchmarks/server_peers.py --vllm ~/venv-vllm/bin/vllm --vllm-model smollm2-hf --out run

The measuring is ``outrider bench``'s: ``--out`` keeps its records, and the same command goes on
with a run that was interrupted. Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

import vllm_peer

from outrider import OutriderError
from outrider.bench.arms import PORT, ArmSpec, EngineFlags
from outrider.bench.client import Client
from outrider.bench.metrics import BlockMetrics, block_metrics
from outrider.bench.records import BlockKind, Load, LoadKind, RunData, RunRecord, SamplingRecord
from outrider.bench.run import BenchSettings, Progress, run_bench
from outrider.bench.servers import Server
from outrider.bench.statistics import RatioInterval, ratio_interval
from outrider.bench.workloads import Selection, Workload, load_workload
from outrider.commands.console import Stages, error, note, print_json, stdout, table
from outrider.errors import ParameterError
from outrider.models.loading import DEFAULT_MODEL

SCHEMA_VERSION = 1
OURS, OURS_PLAIN = "outrider", "outrider-plain"
VLLM_PLAIN, VLLM_NGRAM = "vllm-plain", "vllm-ngram"
_SERVED = "target"  # the name under which every server offers the same weights


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one number of users: its blocks in the order of their index."""

    users: int
    arm: str
    blocks: tuple[BlockMetrics, ...]

    @property
    def rates(self) -> list[float]:
        """Aggregate output tokens/s of each block."""
        return [block.num_tokens / block.elapsed_s for block in self.blocks]


def commands(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The command line of every server by its arm's name; the baseline first."""
    most = max(arguments.users)
    context = str(arguments.context)
    flags = EngineFlags(
        model=arguments.model, threads=arguments.threads, max_model_len=arguments.context
    )
    name = ("--served-model-name", _SERVED)
    found = {OURS_PLAIN: (*flags.command(["off"], most), *name)} | {
        f"{OURS}-{method}": (*flags.command([method], most), *name) for method in arguments.methods
    }
    if arguments.vllm is not None:
        variables = vllm_peer.environment(arguments.vllm, arguments.threads).items()
        theirs = (
            *("env", "-u", "PYTHONPATH", "-u", "OMP_NUM_THREADS"),
            *(f"{name}={value}" for name, value in variables),
            *(str(arguments.vllm), "serve", str(arguments.vllm_model), "--host", "127.0.0.1"),
            *("--port", PORT, "--dtype", "bfloat16", "--max-num-seqs", str(most)),
            *("--max-model-len", context, *name, "--no-enable-prefix-caching"),
        )
        found[VLLM_PLAIN] = theirs
        if not arguments.no_ngram:
            found[VLLM_NGRAM] = (*theirs, "--speculative-config", dumps(vllm_peer.NGRAM))
    return found


async def measure(arguments: argparse.Namespace, workload: Workload) -> list[RunData]:
    """Start all servers, run one comparison per number of users, stop them.

    Raises:
        OutriderError: a server does not start or cannot be measured, or ``--out`` holds another
            run; what is complete stays.
    """
    sampling = SamplingRecord(
        temperature=0.0, top_p=1.0, max_tokens=arguments.max_tokens, seed=None, ignore_eos=True
    )
    logs = arguments.out / "servers"
    logs.mkdir(parents=True, exist_ok=True)
    runs = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        servers: dict[str, Server] = {}
        for arm, command in commands(arguments).items():
            note(f"starting {arm}")
            server = Server([arm], command, logs / f"{arm}.log")
            servers[arm] = await stack.enter_async_context(server)
            await server.wait_ready(client, arguments.start_timeout, lambda _: None)
        stages = stack.enter_context(Stages())
        for users in arguments.users:
            settings = BenchSettings(
                arms=tuple(
                    ArmSpec(
                        name=arm, method=arm, is_baseline=arm == OURS_PLAIN, url=server.url(arm)
                    )
                    for arm, server in servers.items()
                ),
                sampling=sampling,
                loads=(Load(LoadKind.CLOSED, users),),
                num_blocks=arguments.blocks,
                num_aa_blocks=0,
                requests=num_requests(users, arguments.rounds),
            )
            folder = arguments.out / f"users-{users}"
            runs.append(await run_bench(settings, workload, folder, partial(_show, stages)))
            for (above, below), interval in comparisons(cells(runs[-1])).items():
                note(f"{users} users: {above} / {below}: {interval}")
    return runs


def _show(stages: Stages, progress: Progress) -> None:
    """Show it; told before a turn begins, when nothing is in flight, also let vLLM come to rest."""
    if not progress.last:
        time.sleep(vllm_peer.SETTLE_S)
    done, all_turns = progress.num_done, progress.num_turns
    stages(f"{progress.stage} [{done} of {all_turns} turns]", done / all_turns)


def num_requests(users: int, rounds: int) -> int:
    """Questions of one block: so many per user, and enough that one user's block is no blink."""
    return max(4, rounds * users)


def cells(data: RunData) -> list[Cell]:
    """The measured blocks of one run by arm.

    Raises:
        ParameterError: a request failed, or wrote another number of tokens than asked for.
    """
    wanted = data.run.sampling.max_tokens
    for request in data.requests:
        if request.error is not None or request.completion_tokens != wanted:
            what = request.error or f"wrote {request.completion_tokens} tokens instead of {wanted}"
            raise ParameterError(
                f"{request.arm}, prompt {request.prompt_id}: {what}; unequal work cannot be "
                "compared"
            )
    measured = sorted(
        (block for block in data.blocks if block.kind is BlockKind.MEASURE),
        key=lambda block: block.index,
    )
    return [
        Cell(
            users=int(data.run.loads[0].value),
            arm=arm.name,
            blocks=tuple(
                block_metrics(block, data.requests_of(block))
                for block in measured
                if block.arm == arm.name
            ),
        )
        for arm in data.run.arms
    ]


def comparisons(at_load: Sequence[Cell]) -> dict[tuple[str, str], RatioInterval]:
    """The ratios worth knowing at one load: aggregate tokens/s, block by block."""
    rates = {cell.arm: cell.rates for cell in at_load}
    drafting = [arm for arm in rates if arm.startswith(OURS) and arm != OURS_PLAIN]
    pairs = [(arm, OURS_PLAIN) for arm in drafting]
    for theirs in (arm for arm in (VLLM_PLAIN, VLLM_NGRAM) if arm in rates):
        pairs += [(arm, theirs) for arm in (OURS_PLAIN, *drafting)]
    return {pair: ratio_interval(rates[pair[0]], rates[pair[1]]) for pair in pairs}


def to_json(runs: Sequence[Sequence[Cell]], known: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result as one document; raw records are in ``--out``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "conditions": dict(known),
        "loads": [
            {
                "users": at_load[0].users,
                "tokens_per_s": {cell.arm: cell.rates for cell in at_load},
                "comparisons": [
                    {"faster": above, "slower": below, **interval.to_json()}
                    for (above, below), interval in comparisons(at_load).items()
                ],
            }
            for at_load in runs
        ],
    }


def print_tables(runs: Sequence[Sequence[Cell]], known: Mapping[str, Any]) -> None:
    """Rates, ratios and conditions for people."""
    out = stdout()
    headers = [f"{at_load[0].users} users" for at_load in runs]
    rows = [
        (cell.arm, *(f"{statistics.geometric_mean(at_load[i].rates):.1f}" for at_load in runs))
        for i, cell in enumerate(runs[0])
    ]
    out.print(table(("arm", *headers), rows, title="Aggregate output tokens per second"))
    found = [comparisons(at_load) for at_load in runs]
    rows = [
        (f"{above} / {below}", *(str(at_load[above, below]) for at_load in found))
        for above, below in found[0]
    ]
    out.print(table(("ratio (95 % interval)", *headers), rows))
    out.print(" · ".join(f"{name} {value}" for name, value in known.items()), soft_wrap=True)


def conditions(arguments: argparse.Namespace, run: RunRecord) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "machine": ", ".join(f"{value}" for value in run.machine.values()),
        "threads": arguments.threads,
        "prompts": f"{run.workload.num_prompts} of {Path(run.workload.source).name} "
        f"(set {run.workload.prompt_hash})",
        "tokens per answer": arguments.max_tokens,
        "sampling": "greedy, end of sequence ignored",
        "requests per block and user": arguments.rounds,
        "blocks": arguments.blocks,
        "engines": "; ".join(f"{arm.name}: {arm.engine} {arm.engine_version}" for arm in run.arms),
        "started": run.started,
    }


def parse_arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; wrong values end with exit status 2."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or GGUF file")
    parser.add_argument(
        "--methods", default="eagle3-tree+ngram", help="our ways to draft, by comma, beside plain"
    )
    parser.add_argument("--vllm", type=Path, help="vLLM's executable; without it ours alone")
    parser.add_argument("--vllm-model", type=Path, help="the same model as a Hugging Face folder")
    parser.add_argument("--no-ngram", action="store_true", help="leave vLLM's n-gram out")
    parser.add_argument("--prompts", type=Path, help="JSONL file instead of the bundled prompts")
    parser.add_argument("--max-prompts", type=_positive, help="prompts to use, categories mixed")
    parser.add_argument("--max-chars", type=_positive, help="longest prompt in characters")
    parser.add_argument("--users", type=_users, default="1,4,16", help="requests in flight")
    parser.add_argument("--max-tokens", type=_positive, default=64, help="tokens per answer")
    parser.add_argument("--blocks", type=_positive, default=6, help="blocks per number of users")
    parser.add_argument("--rounds", type=_positive, default=2, help="questions per user and block")
    parser.add_argument("--threads", type=_positive, default=2, help="compute threads of each")
    parser.add_argument("--context", type=_positive, default=2048, help="longest context")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds per server")
    parser.add_argument("--out", type=Path, required=True, help="folder for records and logs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parsed = parser.parse_args(command_line)
    parsed.methods = [method for method in parsed.methods.split(",") if method]
    if (parsed.vllm is None) != (parsed.vllm_model is None):
        parser.error("--vllm and --vllm-model go together: give both or neither")
    return parsed


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _users(text: str) -> list[int]:
    return [_positive(word) for word in text.split(",")]


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status."""
    arguments = parse_arguments(command_line)
    try:
        chosen = Selection(max_chars=arguments.max_chars, max_prompts=arguments.max_prompts)
        workload = load_workload(arguments.prompts, chosen)
        runs = asyncio.run(measure(arguments, workload))
        measured = [cells(run) for run in runs]
    except OutriderError as problem:
        error(problem)
        return problem.exit_status
    known = conditions(arguments, runs[0].run)
    if arguments.json:
        print_json(to_json(measured, known))
    else:
        print_tables(measured, known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
