"""Our decoding beside other engines on the same machine, one request at a time.

Same prompt token ids, same output length, same number of threads, greedy. transformers runs in
this process, in each asked precision; vLLM, OpenVINO GenAI and llama.cpp run each in a process of
an environment of their own whose Python is given. All arms stay loaded and take turns on every
prompt, and the order rotates, so that a machine that drifts favours none. Ratios are of
whole-request times, prompt included, per prompt; the interval is a t interval on their logarithms.

    python benchmarks/peers.py --per-category 2 --max-tokens 64 --json > peers.json

    python benchmarks/hf_folder.py --out smollm2-hf              # vLLM reads no GGUF file
    python benchmarks/peers.py --vllm ~/venv-vllm/bin/python --vllm-model smollm2-hf ...

Progress goes to stderr, the result to stdout. Needs transformers (``pip install outrider[peers]``).
How the parts share the work::

    peers          the command line, the arms, the turns
    peers_figures  rates, ratios, tables, JSON
    peer           what an arm is; a worker process on both of its sides
    outrider_peer, transformers_peer, vllm_peer, openvino_peer, llama_cpp_peer
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp_peer
import openvino_peer
import outrider_peer
import transformers_peer
import vllm_peer
from measured import peak_memory, prompt_ids
from peer import Answer, Arm, Launch, PeerError, Worker
from peers_figures import Measurement, print_tables, to_json

from outrider import LLM, EngineConfig, OutriderError
from outrider.bench.categories import (
    REPEATING,
    REPEATING_CATEGORIES,
    REST,
    SPEC_BENCH_REPEATING,
)
from outrider.bench.prompts import Prompt, load_prompts, prompt_set_hash
from outrider.commands.console import Stages, error, format_bytes, note, print_json
from outrider.models.loading.hub import DEFAULT_MODEL, resolve

CONTEXT = 2048  # tokens of prompt and answer, for every engine that reserves memory by it


def choose_prompts(
    llm: LLM, prompts: Sequence[Prompt], per_category: int | None, max_tokens: int
) -> list[tuple[Prompt, list[int]]]:
    """The first prompts of each category that fit the context, in file order, with their ids."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        ids = prompt_ids(llm, prompt)
        is_full = per_category is not None and taken.get(prompt.category, 0) >= per_category
        if is_full or len(ids) + max_tokens > min(CONTEXT, llm.max_model_len):
            continue
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        chosen.append((prompt, ids))
    return chosen


def measure(
    arms: Sequence[Arm],
    prompts: Sequence[tuple[Prompt, list[int]]],
    repeating: frozenset[str],
    max_tokens: int,
) -> list[Measurement]:
    """Answer every prompt with every arm; the arm that goes first rotates.

    Raises:
        PeerError: an engine ended, or wrote another number of tokens than asked for.
    """
    by_name = {arm.name: arm for arm in arms}
    names = list(by_name)
    note(f"peers: warming up {len(names)} arms")
    for arm in arms:
        _answer(arm, prompts[0][1], max_tokens)
    measurements = []
    for index, (prompt, ids) in enumerate(prompts):
        first = index % len(names)
        order = (*names[first:], *names[:first])
        answers = {name: _answer(by_name[name], ids, max_tokens) for name in order}
        for name, answer in answers.items():
            if len(answer.token_ids) != max_tokens:
                raise PeerError(
                    f"{name} wrote {len(answer.token_ids)} tokens for {prompt.id} instead of "
                    f"{max_tokens}: unequal lengths cannot be compared"
                )
        group = REPEATING if prompt.category in repeating else REST
        measurements.append(
            Measurement(prompt.id, prompt.category, group, len(ids), order, answers)
        )
        rates = ", ".join(f"{name} {answers[name].total_rate:.1f}" for name in names)
        note(f"peers: {index + 1}/{len(prompts)} {prompt.id}: {rates} tok/s")
    return measurements


def _answer(arm: Arm, prompt: list[int], max_tokens: int) -> Answer:
    answer = arm.answer(prompt, max_tokens)
    time.sleep(arm.settle_s)
    return answer


def other_launches(path: Path, threads: int, arguments: argparse.Namespace) -> list[Launch]:
    """Every engine whose Python was given, in each of its ways.

    Raises:
        PeerError: an engine needs a GGUF file, and the model is none.
    """
    found = []
    if arguments.vllm is not None:
        found += vllm_peer.launches(
            arguments.vllm, arguments.vllm_model, arguments.vllm_head, threads, CONTEXT
        )
    for python, peer in (
        (arguments.openvino, openvino_peer),
        (arguments.llama_cpp, llama_cpp_peer),
    ):
        if python is not None:
            found += peer.launches(python, _gguf(path), threads, CONTEXT)
    return found


def _gguf(path: Path) -> Path:
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if len(files) != 1 or files[0].suffix != ".gguf":
        raise PeerError(f"{path}: --openvino and --llama-cpp need --model to be one GGUF file")
    return files[0]


def conditions(llm: LLM, arguments: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    """What the figures hold for."""
    prompts = load_prompts(arguments.prompts)
    name = "bundled" if arguments.prompts is None else arguments.prompts.name
    return {
        "machine": llm.fingerprint.text,
        "prompts": f"{num_prompts} of {name} (set {prompt_set_hash(prompts)})",
        "tokens per answer": arguments.max_tokens,
        "transformers' prompt lookup": f"{arguments.lookup_tokens} tokens",
        "sampling": "greedy, end of sequence ignored",
        "users": 1,
        "peak memory of this process": format_bytes(peak_memory()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; wrong values end with exit status 2."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or GGUF file")
    parser.add_argument("--prompts", type=Path, help="JSONL file instead of the bundled prompts")
    parser.add_argument("--per-category", type=_positive, help="prompts per category; all if unset")
    parser.add_argument("--max-tokens", type=_positive, default=128, help="tokens per answer")
    parser.add_argument("--threads", type=_positive, help="compute threads of every arm")
    parser.add_argument("--dtype", default="auto", help="our precision")
    parser.add_argument("--methods", default="ngram", help="our ways to draft, by comma")
    parser.add_argument(
        "--peer-dtypes", default="bfloat16,float32", help="transformers' precisions, by comma"
    )
    parser.add_argument(
        "--lookup-tokens", type=_positive, default=10, help="prompt_lookup_num_tokens"
    )
    parser.add_argument("--assistant", type=Path, help="draft model for transformers: a folder")
    parser.add_argument("--vllm", type=Path, help="python of an environment with vLLM for CPU")
    parser.add_argument("--vllm-model", type=Path, help="the model as a Hugging Face folder")
    parser.add_argument("--vllm-head", type=Path, help="an EAGLE-3 head for vLLM: a folder")
    parser.add_argument("--openvino", type=Path, help="python with openvino-genai")
    parser.add_argument("--llama-cpp", type=Path, help="python with xllamacpp")
    parser.add_argument(
        "--repeating",
        default=",".join(sorted(REPEATING_CATEGORIES | SPEC_BENCH_REPEATING)),
        help="categories whose answers repeat their prompt, by comma",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parsed = parser.parse_args(arguments)
    parsed.peer_dtypes = parsed.peer_dtypes.split(",")
    parsed.methods = [method for method in parsed.methods.split(",") if method]
    if unknown := set(parsed.peer_dtypes) - {"bfloat16", "float32"}:
        parser.error(f"--peer-dtypes: {sorted(unknown)} not among bfloat16, float32")
    if parsed.max_tokens < 2:
        parser.error("--max-tokens: needs at least 2 to have something to decode")
    if (parsed.vllm is None) != (parsed.vllm_model is None):
        parser.error("--vllm and --vllm-model go together: give both or neither")
    if parsed.vllm_head is not None and parsed.vllm is None:
        parser.error("--vllm-head: there is no --vllm to use it")
    return parsed


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status."""
    arguments = parse_arguments(command_line)
    repeating = frozenset(arguments.repeating.split(","))
    try:
        prompts = load_prompts(arguments.prompts)
        engine = EngineConfig(dtype=arguments.dtype, threads=arguments.threads)
        with ExitStack() as stack:
            with Stages() as stages:
                path = resolve(arguments.model, pull=True, on_progress=stages)
                llm, arms = outrider_peer.load(path, arguments.methods, engine, stages)
            chosen = choose_prompts(llm, prompts, arguments.per_category, arguments.max_tokens)
            if not chosen:
                error("no prompt fits the context together with --max-tokens; lower it")
                return 2
            for dtype in arguments.peer_dtypes:
                note(f"peers: loading transformers in {dtype}")
                arms += transformers_peer.arms(
                    path, dtype, arguments.lookup_tokens, arguments.assistant
                )
            logs = Path(tempfile.mkdtemp(prefix="peers-"))
            for launch in other_launches(path, llm.fingerprint.threads, arguments):
                note(f"peers: starting {launch.name}")
                arms.append(launch.arm(stack.enter_context(Worker(launch, logs))))
            measurements = measure(arms, chosen, repeating, arguments.max_tokens)
    except OutriderError as problem:
        error(problem)
        return problem.exit_status
    except PeerError as problem:
        error(problem)
        return 1
    known = conditions(llm, arguments, len(chosen))
    if arguments.json:
        print_json(to_json(measurements, arms, known))
    else:
        print_tables(measurements, arms, known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
