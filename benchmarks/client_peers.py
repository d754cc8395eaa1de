r"""Our measuring client beside ``vllm bench serve``: the same figures of one server, twice over.

Both clients ask one running server the same prompts in the same order, greedy, for the same number
of tokens (end of sequence ignored), with the same number of requests in flight. They take turns in
an order that is mirrored from round to round, so that a machine that drifts favours neither; how
much a tool differs from itself between rounds is the noise within which the two should agree::

    vllm serve smollm2-hf --served-model-name target --port 8000 --no-enable-prefix-caching
    python benchmarks/client_peers.py --url http://127.0.0.1:8000 --vllm ~/venv-vllm/bin/vllm \
        --tokenizer smollm2-hf --users 4 --out run

Where definitions differ is explained in ``docs/measuring.md``. Only prompts of one user message
are asked, and vLLM's client gets them as ShareGPT conversations: of the shapes that it reads this
one needs no further package. Progress goes to stderr, the table (or JSON) to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import vllm_peer

from outrider import OutriderError
from outrider.bench.blocks import Turn
from outrider.bench.client import Client, Endpoint
from outrider.bench.drive import run_turn, warm_up_questions, warm_up_turn
from outrider.bench.metrics import BlockMetrics, block_metrics, pooled
from outrider.bench.probe import probe
from outrider.bench.records import BlockKind, Load, LoadKind, SamplingRecord
from outrider.bench.workloads import Question, Selection, load_workload
from outrider.commands.console import error, note, print_json, stdout, table
from outrider.errors import EndpointError, ParameterError

SCHEMA_VERSION = 1
OURS, THEIRS = "outrider", "vllm bench serve"
SERIES = ("TTFT", "TPOT", "gap")
_UNUSED = {"from": "gpt", "value": "-"}
_STATISTICS = ("mean", "median", "p99")
# Rows in the table's order, with their units.
FIGURES = {
    "requests/s": "",
    "output tokens/s": "",
    **{f"{series} {kind}": "ms" for series in SERIES for kind in _STATISTICS},
}

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Asked:
    """What both clients ask of which server."""

    url: str
    served_model: str
    questions: tuple[Question, ...]
    users: int
    max_tokens: int

    @property
    def sampling(self) -> SamplingRecord:
        """Greedy, and every answer equally long."""
        return SamplingRecord(
            temperature=0.0, top_p=1.0, max_tokens=self.max_tokens, seed=None, ignore_eos=True
        )

    @property
    def turn(self) -> Turn:
        """All questions once, with ``users`` in flight."""
        return Turn(0, 0, OURS, Load(LoadKind.CLOSED, self.users), BlockKind.MEASURE, 0)


def single_questions(path: Path | None, most: int) -> tuple[Question, ...]:
    """The first prompts that are one user message each, categories mixed.

    Raises:
        PromptError: as :func:`outrider.bench.workloads.load_workload`.
        ParameterError: fewer than ``most`` are.
    """
    everything = load_workload(path, Selection()).questions
    single = [q for q in everything if [role for role, _ in q.messages] == ["user"]]
    if len(single) < most:
        raise ParameterError(
            f"--num-prompts: {most} are more than the {len(single)} prompts of one user message "
            f"in {path or 'the bundled set'}"
        )
    return tuple(single[:most])


async def find_endpoint(client: Client, asked: Asked) -> Endpoint:
    """The server, asked who it is.

    Raises:
        EndpointError: it cannot be measured.
    """
    endpoint = Endpoint(url=asked.url, model=asked.served_model)
    return (await probe(client, "server", endpoint, asked.questions[0], asked.sampling)).endpoint


async def measure_ours(
    client: Client, endpoint: Endpoint, asked: Asked, *, is_warm_up: bool = False
) -> BlockMetrics:
    """One turn of our client.

    Raises:
        EndpointError: a request failed, or wrote another number of tokens than asked for.
    """
    turn, questions = asked.turn, list(asked.questions)
    if is_warm_up:
        questions, turn = warm_up_questions(questions, turn), warm_up_turn(turn, 1)
    block, requests = await run_turn(
        client, endpoint, turn, questions, asked.sampling, arrival_seed=1
    )
    for request in requests:
        if request.error is not None or request.completion_tokens != asked.max_tokens:
            what = request.error or f"wrote {request.completion_tokens} tokens"
            raise EndpointError(f"{asked.url}: prompt {request.prompt_id}: {what}")
    return block_metrics(block, requests)


def our_figures(block: BlockMetrics) -> Figures:
    """The table's column for a turn of ours."""
    figures = {
        "requests/s": len(block.sound) / block.elapsed_s,
        "output tokens/s": block.num_tokens / block.elapsed_s,
    }
    for series, name in zip(SERIES, ("ttft_s", "tpot_s", "chunk_gap_s"), strict=True):
        figures |= _statistics_of(series, [value * 1000 for value in pooled([block], name)])
    return figures


def their_command(
    vllm: Path, tokenizer: Path, asked: Asked, model: str, *, prompts: Path, result: Path
) -> list[str]:
    """The command that has vLLM's own client measure the same."""
    return [
        *(str(vllm), "bench", "serve", "--backend", "openai-chat"),
        *("--base-url", asked.url, "--endpoint", "/v1/chat/completions"),
        *("--model", model, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "sharegpt", "--dataset-path", str(prompts), "--disable-shuffle"),
        *("--num-prompts", str(len(asked.questions)), "--no-oversample"),
        *("--max-concurrency", str(asked.users), "--sharegpt-output-len", str(asked.max_tokens)),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent)),
        *("--result-filename", result.name),
    ]


def write_prompts(path: Path, questions: Sequence[Question]) -> None:
    """The questions as ShareGPT conversations, whose second turn is there to be ignored."""
    rows = [
        {"conversations": [{"from": "human", "value": q.messages[0][1]}, _UNUSED]}
        for q in questions
    ]
    path.write_text(json.dumps(rows), "utf-8")


def measure_theirs(command: Sequence[str], result: Path, asked: Asked) -> Mapping[str, Any]:
    """Run vLLM's client; what it saved.

    Raises:
        EndpointError: it failed, or did other work than was asked for.
    """
    # Its environment is its own: our PYTHONPATH and thread limits are none of its business.
    mine = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    log = result.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(
            command, env=mine | quiet, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0 or not result.is_file():
        raise EndpointError(f"{THEIRS} ended with status {done.returncode}; see {log}")
    saved = json.loads(result.read_text("utf-8"))
    wanted = (len(asked.questions), len(asked.questions) * asked.max_tokens)
    done_work = (saved["completed"], saved["total_output_tokens"])
    if wanted != done_work:
        raise EndpointError(
            f"{THEIRS} had {done_work[0]} answers of {done_work[1]} tokens instead of {wanted[0]} "
            f"of {wanted[1]} (it leaves out prompts above 1024 tokens); see {log}"
        )
    return saved


def their_figures(saved: Mapping[str, Any]) -> Figures:
    """The table's column for a result of vLLM's client.

    Its first gap of each request lies between the role's announcement and the first text, which
    vLLM sends at once; ours begin at the first text, so that one is left out here.
    """
    gaps = [gap * 1000 for of_request in saved["itls"] for gap in of_request[1:]]
    figures = {
        "requests/s": saved["request_throughput"],
        "output tokens/s": saved["output_throughput"],
    }
    for series in ("ttft", "tpot"):
        for kind in _STATISTICS:
            figures[f"{series.upper()} {kind}"] = saved[f"{kind}_{series}_ms"]
    return figures | _statistics_of("gap", gaps)


def _statistics_of(series: str, values: Sequence[float]) -> dict[str, float]:
    found = (fmean(values), float(np.median(values)), float(np.percentile(values, 99)))
    return {f"{series} {kind}": value for kind, value in zip(_STATISTICS, found, strict=True)}


def rows_of(columns: Sequence[tuple[str, Figures]]) -> list[tuple[str, ...]]:
    """A row per figure: every turn's, the tools' difference, and how much each repeats itself."""
    ours, theirs = ([f for tool, f in columns if tool == which] for which in (OURS, THEIRS))
    rows = []
    for name, unit in FIGURES.items():
        means = [fmean(figures[name] for figures in of_tool) for of_tool in (ours, theirs)]
        rows.append(
            (
                f"{name}, {unit}" if unit else name,
                *(f"{figures[name]:.2f}" for _, figures in columns),
                f"{means[0] / means[1] - 1:+.1%}",
                *(spread_text([figures[name] for figures in tool]) for tool in (ours, theirs)),
            )
        )
    return rows


def spread_text(values: Sequence[float]) -> str:
    """Largest over smallest, as a share; nothing for a single turn."""
    return f"{max(values) / min(values) - 1:.1%}" if len(values) > 1 else "-"


def order(rounds: int) -> list[str]:
    """Who measures when: ours, theirs, theirs, ours, ..."""
    pairs = ((OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS) for number in range(rounds))
    return [tool for pair in pairs for tool in pair]


async def measure(arguments: argparse.Namespace, asked: Asked) -> list[tuple[str, Figures]]:
    """All turns in their order.

    Raises:
        OutriderError: the server cannot be measured, or vLLM's client failed.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    prompts = arguments.out / "prompts.json"
    write_prompts(prompts, asked.questions)
    columns: list[tuple[str, Figures]] = []
    async with Client() as client:
        endpoint = await find_endpoint(client, asked)
        await measure_ours(client, endpoint, asked, is_warm_up=True)
        for number, tool in enumerate(order(arguments.rounds)):
            note(f"turn {number + 1} of {2 * arguments.rounds}: {tool}")
            time.sleep(vllm_peer.SETTLE_S)  # nothing is in flight; the server comes to rest
            if tool == OURS:
                columns.append((tool, our_figures(await measure_ours(client, endpoint, asked))))
                continue
            result = arguments.out / f"vllm-{number}.json"
            command = their_command(
                arguments.vllm,
                arguments.tokenizer,
                asked,
                endpoint.model,
                prompts=prompts,
                result=result,
            )
            columns.append((tool, their_figures(measure_theirs(command, result, asked))))
    return columns


def parse_arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; wrong values end with exit status 2."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="the running server, without /v1")
    parser.add_argument("--served-model", default="", help="where the server has several")
    parser.add_argument("--vllm", type=Path, required=True, help="vLLM's executable")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's folder")
    parser.add_argument("--prompts", type=Path, help="JSONL file instead of the bundled prompts")
    parser.add_argument("--num-prompts", type=int, default=48, help="requests per turn")
    parser.add_argument("--users", type=int, default=4, help="requests in flight")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each client")
    parser.add_argument("--out", type=Path, required=True, help="folder for prompts and results")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parsed = parser.parse_args(command_line)
    for name, least in (("num_prompts", 1), ("users", 1), ("max_tokens", 2), ("rounds", 1)):
        if getattr(parsed, name) < least:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: {getattr(parsed, name)} is below {least}")
    if parsed.users > parsed.num_prompts:
        parser.error(f"--users: {parsed.users} are never in flight of {parsed.num_prompts} prompts")
    return parsed


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status."""
    arguments = parse_arguments(command_line)
    try:
        asked = Asked(
            url=arguments.url.rstrip("/").removesuffix("/v1"),
            served_model=arguments.served_model,
            questions=single_questions(arguments.prompts, arguments.num_prompts),
            users=arguments.users,
            max_tokens=arguments.max_tokens,
        )
        columns = asyncio.run(measure(arguments, asked))
    except OutriderError as problem:
        error(problem)
        return problem.exit_status
    if arguments.json:
        turns = [{"client": tool, **figures} for tool, figures in columns]
        print_json({"schema_version": SCHEMA_VERSION, "users": asked.users, "turns": turns})
        return 0
    names = [tool for tool, _ in columns]
    headers = ("figure", *names, f"{OURS} over {THEIRS}", f"{OURS} repeats", f"{THEIRS} repeats")
    title = (
        f"Two clients, one server: {asked.users} users, {len(asked.questions)} prompts, "
        f"{asked.max_tokens} tokens each"
    )
    stdout().print(table(headers, rows_of(columns), title=title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
