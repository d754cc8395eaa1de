"""Our plain and n-gram decoding beside transformers' ``generate``, plain and with prompt lookup.

Same weights, same prompt token ids, same output length, same threads, greedy, one request at a
time, all arms in one process. The arms take turns on every prompt and the order rotates, so that a
machine that drifts favours none. transformers runs in each asked precision; comparisons are made
with the better one. Ratios are of whole-request times, prompt included, per prompt; the interval is
a t interval on their logarithms.

    python benchmarks/peers.py --per-category 2 --max-tokens 64 --json > peers.json

Progress goes to stderr, the result to stdout. Needs transformers (``pip install outrider[peers]``).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measured import peak_memory, prompt_ids
from transformers_peer import Answer, Arm, load_transformers, their_arm

import outrider
from outrider import LLM, EngineConfig, Method, OutriderError, SamplingParams, SpeculationConfig
from outrider.bench.categories import (
    ALL,
    REPEATING,
    REPEATING_CATEGORIES,
    REST,
    SPEC_BENCH_REPEATING,
)
from outrider.bench.prompts import Prompt, load_prompts, prompt_set_hash
from outrider.bench.statistics import RatioInterval, ratio_interval
from outrider.commands.console import Stages, error, format_bytes, note, print_json, stdout, table
from outrider.models.loading.hub import DEFAULT_MODEL, resolve

SCHEMA_VERSION = 1
OURS_PLAIN, OURS_NGRAM = "outrider plain", "outrider n-gram"
THEIRS_PLAIN, THEIRS_LOOKUP = "transformers plain", "transformers prompt lookup"
GROUPS = (REPEATING, REST, ALL)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All arms' answers to one prompt."""

    prompt_id: str
    category: str
    group: str
    prompt_len: int
    order: tuple[str, ...]
    answers: dict[str, Answer]


def our_arm(llm: LLM) -> Arm:
    """An arm of this project."""

    def answer(prompt: list[int], max_tokens: int) -> Answer:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        completion = llm.generate([prompt], params)[0]
        total_s = time.perf_counter() - started
        return Answer(
            completion.token_ids, total_s, completion.timing.decode_s, completion.timing.num_first
        )

    return answer


def choose_prompts(
    llm: LLM, prompts: Sequence[Prompt], per_category: int | None, max_tokens: int
) -> list[tuple[Prompt, list[int]]]:
    """The first prompts of each category that fit the context, in file order, with their ids."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        ids = prompt_ids(llm, prompt)
        is_full = per_category is not None and taken.get(prompt.category, 0) >= per_category
        if is_full or len(ids) + max_tokens > llm.max_model_len:
            continue
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        chosen.append((prompt, ids))
    return chosen


def measure(
    arms: dict[str, Arm],
    prompts: Sequence[tuple[Prompt, list[int]]],
    repeating: frozenset[str],
    max_tokens: int,
) -> list[Measurement]:
    """Answer every prompt with every arm; the arm that goes first rotates."""
    names = list(arms)
    note(f"peers: warming up {len(names)} arms")
    for arm in arms.values():
        arm(prompts[0][1], min(8, max_tokens))
    measurements = []
    for index, (prompt, ids) in enumerate(prompts):
        first = index % len(names)
        order = (*names[first:], *names[:first])
        answers = {name: arms[name](ids, max_tokens) for name in order}
        for name, answer in answers.items():
            if len(answer.token_ids) != max_tokens:
                raise SystemExit(
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


def of_group(measurements: Sequence[Measurement], group: str) -> list[Measurement]:
    """The measurements of one group, or all."""
    return [item for item in measurements if group in (ALL, item.group)]


def arm_rates(measurements: Sequence[Measurement], name: str) -> dict[str, float | None]:
    """Tokens per second of whole requests by group, and of decoding alone over all prompts."""
    rates: dict[str, float | None] = {}
    for group in GROUPS:
        answers = [item.answers[name] for item in of_group(measurements, group)]
        seconds = sum(answer.total_s for answer in answers)
        rates[group] = sum(len(a.token_ids) for a in answers) / seconds if answers else None
    answers = [item.answers[name] for item in measurements]
    later = sum(len(answer.token_ids) - answer.num_first for answer in answers)
    rates["decode only"] = later / sum(answer.decode_s for answer in answers)
    return rates


def compare(
    measurements: Sequence[Measurement], faster: str, slower: str
) -> dict[str, RatioInterval | None]:
    """Speed of one arm over another by group: the ratio of times, prompt by prompt."""
    result: dict[str, RatioInterval | None] = {}
    for group in GROUPS:
        chosen = of_group(measurements, group)
        result[group] = (
            ratio_interval(
                [item.answers[slower].total_s for item in chosen],
                [item.answers[faster].total_s for item in chosen],
            )
            if chosen
            else None
        )
    return result


def better(measurements: Sequence[Measurement], kind: str, dtypes: Sequence[str]) -> str:
    """The precision in which transformers is faster, by the geometric mean over prompts."""

    def mean_time(dtype: str) -> float:
        name = f"{kind} {dtype}"
        return statistics.geometric_mean(item.answers[name].total_s for item in measurements)

    return f"{kind} {min(dtypes, key=mean_time)}"


def comparisons(
    measurements: Sequence[Measurement], dtypes: Sequence[str]
) -> list[tuple[str, str, dict[str, RatioInterval | None]]]:
    """The ratios worth knowing, each against transformers' better precision."""
    plain = better(measurements, THEIRS_PLAIN, dtypes)
    lookup = better(measurements, THEIRS_LOOKUP, dtypes)
    pairs = (
        (OURS_PLAIN, plain),
        (OURS_NGRAM, OURS_PLAIN),
        (OURS_NGRAM, lookup),
        (OURS_NGRAM, plain),
        (lookup, plain),
    )
    return [(fast, slow, compare(measurements, fast, slow)) for fast, slow in pairs]


def same_texts(measurements: Sequence[Measurement], name: str) -> int:
    """Prompts on which an arm wrote the very tokens of our plain decoding."""
    return sum(
        item.answers[name].token_ids == item.answers[OURS_PLAIN].token_ids for item in measurements
    )


def conditions(llm: LLM, arguments: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    """What the figures hold for."""
    import torch
    import transformers

    return {
        "fingerprint": llm.fingerprint.to_json(),
        "conditions": llm.fingerprint.text,
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        "prompt_lookup_num_tokens": arguments.lookup_tokens,
        "speculation": str(asdict(llm.speculation)),
        "num_prompts": num_prompts,
        "prompt_set_hash": prompt_set_hash(load_prompts(arguments.prompts)),
        "prompts": "bundled" if arguments.prompts is None else arguments.prompts.name,
        "max_tokens": arguments.max_tokens,
        "sampling": "greedy, end of sequence ignored",
        "concurrency": 1,
        "peak_memory_bytes": peak_memory(),
        "outrider": outrider.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def to_json(
    measurements: Sequence[Measurement], dtypes: Sequence[str], known: dict[str, Any]
) -> dict[str, Any]:
    """The whole result as one document, every prompt's figures included."""
    names = list(measurements[0].answers)
    return {
        "schema_version": SCHEMA_VERSION,
        "conditions": known,
        "arms": {
            name: {
                "tokens_per_s": arm_rates(measurements, name),
                "same_texts_as_plain": same_texts(measurements, name),
            }
            for name in names
        },
        "comparisons": [
            {
                "faster": fast,
                "slower": slow,
                "ratios": {
                    group: None if interval is None else interval.to_json()
                    for group, interval in ratios.items()
                },
            }
            for fast, slow, ratios in comparisons(measurements, dtypes)
        ],
        "measurements": [asdict(item) for item in measurements],
    }


def print_tables(
    measurements: Sequence[Measurement], dtypes: Sequence[str], known: dict[str, Any]
) -> None:
    """Rates, ratios and conditions for people."""
    out = stdout()
    columns = [*GROUPS, "decode only"]
    rows = []
    for name in measurements[0].answers:
        rates = arm_rates(measurements, name)
        cells = ["-" if rates[column] is None else f"{rates[column]:.1f}" for column in columns]
        rows.append((name, *cells, f"{same_texts(measurements, name)}/{len(measurements)}"))
    title = "Tokens per second (whole requests, and decoding alone over all prompts)"
    out.print(table(("arm", *columns, "text as\nplain"), rows, title=title))
    rows = [
        (f"{fast} / {slow}", *("-" if ratios[g] is None else str(ratios[g]) for g in GROUPS))
        for fast, slow, ratios in comparisons(measurements, dtypes)
    ]
    out.print(table(("speed ratio (95 % interval)", *GROUPS), rows))
    line = (
        f"{known['conditions']} · transformers {known['transformers']}, prompt lookup of "
        f"{known['prompt_lookup_num_tokens']} tokens · {known['num_prompts']} {known['prompts']} "
        f"prompts (set {known['prompt_set_hash']}) x {known['max_tokens']} tokens, "
        f"{known['sampling']}, one request at a time · peak memory "
        f"{format_bytes(known['peak_memory_bytes'])} · outrider {known['outrider']} · "
        f"{known['date']}"
    )
    out.print(line, soft_wrap=True)


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
    parser.add_argument(
        "--peer-dtypes", default="bfloat16,float32", help="transformers' precisions, by comma"
    )
    parser.add_argument(
        "--lookup-tokens", type=_positive, default=10, help="prompt_lookup_num_tokens"
    )
    parser.add_argument(
        "--repeating",
        default=",".join(sorted(REPEATING_CATEGORIES | SPEC_BENCH_REPEATING)),
        help="categories whose answers repeat their prompt, by comma",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parsed = parser.parse_args(arguments)
    parsed.peer_dtypes = parsed.peer_dtypes.split(",")
    if unknown := set(parsed.peer_dtypes) - {"bfloat16", "float32"}:
        parser.error(f"--peer-dtypes: {sorted(unknown)} not among bfloat16, float32")
    if parsed.max_tokens < 2:
        parser.error("--max-tokens: needs at least 2 to have something to decode")
    return parsed


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def build_arms(llm: LLM, path: Path, arguments: argparse.Namespace) -> dict[str, Arm]:
    """Every arm by name, all loaded side by side."""
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    arms = {OURS_PLAIN: our_arm(plain), OURS_NGRAM: our_arm(llm)}
    for dtype in arguments.peer_dtypes:
        note(f"peers: loading transformers in {dtype}")
        model = load_transformers(path, dtype)
        arms[f"{THEIRS_PLAIN} {dtype}"] = their_arm(model, None)
        arms[f"{THEIRS_LOOKUP} {dtype}"] = their_arm(model, arguments.lookup_tokens)
    return arms


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status."""
    arguments = parse_arguments(command_line)
    try:
        prompts = load_prompts(arguments.prompts)
        engine = EngineConfig(dtype=arguments.dtype, threads=arguments.threads)
        with Stages() as stages:
            path = resolve(arguments.model, pull=True, on_progress=stages)
            speculation = SpeculationConfig(method=Method.NGRAM)
            llm = LLM(path, speculation=speculation, engine=engine, on_progress=stages)
        chosen = choose_prompts(llm, prompts, arguments.per_category, arguments.max_tokens)
        if not chosen:
            error("no prompt fits the context together with --max-tokens; lower it")
            return 2
        arms = build_arms(llm, path, arguments)
    except OutriderError as problem:
        error(problem)
        return problem.exit_status
    repeating = frozenset(arguments.repeating.split(","))
    measurements = measure(arms, chosen, repeating, arguments.max_tokens)
    known = conditions(llm, arguments, len(chosen))
    if arguments.json:
        print_json(to_json(measurements, arguments.peer_dtypes, known))
    else:
        print_tables(measurements, arguments.peer_dtypes, known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
