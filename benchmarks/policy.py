"""The load policy against fixed settings and a rule of tiers, on replayed acceptance.

    python benchmarks/policy.py record --out traces.json.gz   # what drafters would propose, where
    python benchmarks/policy.py costs --out costs.json        # what rounds take on this machine
    python benchmarks/policy.py compare traces.json.gz costs.json

``record`` and ``costs`` run the engine on the embedded model (minutes); ``compare`` replays, runs
no model, and prints for each world, drafter and number of users what every policy reaches: tokens
per second over plain decoding, and our policy over the best fixed setting chosen in hindsight.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from policy_costs import measure_drafting, measure_rounds
from policy_simulator import (
    HEAD_DEPTH,
    MAX_NODES,
    NUM_CHILDREN,
    Policy,
    Tiers,
    World,
    busy_hours,
    fixed_settings,
    gpu_world,
    measured_world,
    replay,
)
from policy_trace import Trace, read_traces, record, write_traces

from outrider import LLM, EngineConfig, Method, SamplingParams, SpeculationConfig
from outrider.bench.prompts import load_prompts
from outrider.budget import Budget
from outrider.costs import CostTable

USERS = (1, 2, 4, 8, 16, 32)
MAX_PROMPT = 400  # tokens of a prompt that is recorded
CONTEXT = 100  # tokens of each request when rounds are timed


def ours(world: World) -> Policy:
    """The product's policy, told what it would be told at the start."""
    return Budget(world.table, max_rows=world.table.rows[-1])


def worlds_of(costs: dict[str, Any]) -> list[World]:
    """The measured one, what may become of it, and an accelerator."""
    table = CostTable.from_json(costs["table"])
    measured = measured_world(costs, table)
    slow = CostTable(
        table.rows, table.contexts, tuple(tuple(4 * s for s in column) for column in table.seconds)
    )
    return [
        measured,
        replace(measured, name="noisy", noise=0.15),
        replace(measured, name="drifting", noise=0.05, slowdown=busy_hours),
        replace(measured, name="table 4x off", noise=0.05, table=slow),
        gpu_world(),
    ]


@dataclass(frozen=True, slots=True)
class Cell:
    """One world, drafter and number of users: rates over plain decoding's, and ours over the best.

    ``best`` names the best fixed setting in hindsight, ``asked`` is the share of our rounds that
    drafted.
    """

    best: str
    best_fixed: float
    tiers: float
    ours: float
    of_best: float
    asked: float


def compare(world: World, trace: Trace, users: int, tokens: int) -> Cell:
    """Replay every policy over the same texts."""
    fixed = {
        name: replay(new(), trace, world, users, tokens=tokens).rate
        for name, new in fixed_settings(trace).items()
    }
    plain = fixed["plain"]
    best = max(fixed, key=fixed.__getitem__)
    found = replay(ours(world), trace, world, users, tokens=tokens)
    tiers = replay(Tiers(HEAD_DEPTH), trace, world, users, tokens=tokens)
    return Cell(
        best=best,
        best_fixed=fixed[best] / plain,
        tiers=tiers.rate / plain,
        ours=found.rate / plain,
        of_best=found.rate / fixed[best],
        asked=found.asked / found.rounds,
    )


def record_command(options: argparse.Namespace) -> None:
    """Record what the drafters would propose along the bundled prompts' answers."""
    llm = open_llm(batch_size=8)
    prompts, seen = [], Counter[str]()
    wanted = range(options.skip, options.skip + options.per_category)
    for prompt in load_prompts(options.prompts):
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        if len(ids) < MAX_PROMPT:
            if seen[prompt.category] in wanted:
                prompts.append((prompt.category, list(ids)))
            seen[prompt.category] += 1
    params = [
        SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=place)
        for place in range(len(prompts))
    ]
    recorded = record(llm, drafters(), prompts, params)
    conditions = {"fingerprint": llm.fingerprint.text, "temperature": options.temperature}
    write_traces(options.out, recorded, conditions)


def costs_command(options: argparse.Namespace) -> None:
    """Time served rounds and drafting, by users."""
    llm = open_llm(batch_size=max(USERS))
    data = {
        "schema_version": 1,
        "fingerprint": llm.fingerprint.text,
        "context": CONTEXT,
        "children": NUM_CHILDREN,
        "table": asdict(llm.costs),
        "rounds": [
            {"users": users, "rows": rows, "seconds": round(seconds, 6)}
            for users in USERS
            for rows, seconds in measure_rounds(llm, users, CONTEXT, options.repeats)
        ],
        "drafting": [
            {"method": method, "users": users, "depth": depth} | measured
            for method in ("eagle3", "ngram")
            for depth in (1, HEAD_DEPTH)
            for users, measured in measure_drafting(
                llm, shaped(method, depth), USERS, CONTEXT, options.repeats
            )
        ],
    }
    options.out.write_text(json.dumps(data, indent=0))


def open_llm(batch_size: int) -> LLM:
    """The embedded model, nothing drafting."""
    engine = EngineConfig(max_batch_size=batch_size, max_model_len=1024)
    return LLM(engine=engine, speculation=SpeculationConfig(method=Method.OFF))


def drafters() -> dict[str, SpeculationConfig]:
    """What is recorded: shipped heads, and n-gram."""
    return {
        "eagle3": shaped(Method.EAGLE3),
        "mtp": shaped(Method.MTP),
        "ngram": shaped(Method.NGRAM),
    }


def shaped(method: str, depth: int = HEAD_DEPTH) -> SpeculationConfig:
    """A tree of a few children per node, so deep."""
    return SpeculationConfig(
        method=Method(method),
        use_dynamic_tree=True,
        dynamic_tree_max_topK=NUM_CHILDREN,
        max_draft_len=depth,
        max_total_draft_tokens=min(MAX_NODES, NUM_CHILDREN * depth),
    )


def compare_command(options: argparse.Namespace) -> None:
    """Replay every policy in every world, and print a table."""
    costs = json.loads(options.costs.read_text())
    shares = []
    print(
        "world          drafter  users   best fixed setting           tiers   ours  of best  asked"
    )
    for trace in read_traces(options.traces):
        for world in worlds_of(costs):
            for users in USERS:
                cell = compare(world, trace, users, options.tokens * max(1, users // 2))
                shares.append(cell.of_best)
                print(
                    f"{world.name:14} {trace.drafter:8} {users:4}  {cell.best_fixed:6.3f} "
                    f"{cell.best:20} {cell.tiers:6.3f} {cell.ours:6.3f}   {cell.of_best:6.3f} "
                    f"{cell.asked:6.2f}",
                    flush=True,
                )
    print(
        f"ours over the best fixed: median {statistics.median(shares):.3f}, least {min(shares):.3f}"
    )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record", help=record_command.__doc__)
    command.set_defaults(run=record_command)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--prompts", type=Path, help="JSONL; the bundled prompts without")
    command.add_argument("--per-category", type=int, default=2)
    command.add_argument("--skip", type=int, default=0, help="prompts of each category")
    command.add_argument("--max-tokens", type=int, default=64)
    command.add_argument("--temperature", type=float, default=0.0)
    command = commands.add_parser("costs", help=costs_command.__doc__)
    command.set_defaults(run=costs_command)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--repeats", type=int, default=7)
    command = commands.add_parser("compare", help=compare_command.__doc__)
    command.set_defaults(run=compare_command)
    command.add_argument("traces", type=Path)
    command.add_argument("costs", type=Path)
    command.add_argument("--tokens", type=int, default=4000, help="of each run, per two users")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
