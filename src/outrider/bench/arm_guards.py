"""Guards on the arms: a plain baseline, no reused prompts, acceptance as we mean it, no drift.

Owns the rules by which an arm is not what it is called. Reads the two sides of a comparison
(:mod:`outrider.bench.findings`); :mod:`outrider.bench.verdict` acts on what is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from outrider.bench.acceptance import DRAFTED, STEPS, acceptance_of
from outrider.bench.findings import Finding, Severity, Sides, requests_of
from outrider.bench.metrics import BlockMetrics
from outrider.bench.samples import trend

MAX_DRIFT = math.log(1.10)
MAX_LENGTH_ERROR = 0.02
MAX_REUSED, MAX_REUSED_DIFFERENCE = 0.05, 0.05  # of the prompts' tokens: told above, void above
# Prompt tokens that were not computed again: vLLM's counter, and ours.
REUSED = ("vllm:prefix_cache_hits_total", "outrider_prefix_hit_tokens_total")
OWN_ENGINE = "outrider"  # its counters exist, at zero, without speculation too


def plain_baseline(sides: Sides) -> Iterator[Finding]:
    """The baseline is a server started without speculation, not one that has it switched off.

    Switched off it may still hold the drafter's memory, larger graphs and another scheduler.
    """
    baseline = sides.baseline_arm
    advice = "start it without any speculation setting"
    if baseline.url == sides.arm.url:
        yield Finding(
            "plain baseline",
            Severity.VOID,
            f"baseline and {sides.arm.name} are one server, {baseline.url}: a baseline with "
            "speculation merely switched off; start a second one without any speculation setting",
        )
    drafted = sum(
        (request.record.speculative.drafted or 0)
        for request in requests_of(sides.baseline)
        if request.record.speculative is not None
    )
    grown = sum(_growth(block, DRAFTED) for block in sides.baseline)
    if drafted or grown:
        yield Finding(
            "plain baseline",
            Severity.VOID,
            f"the baseline drafted {max(drafted, round(grown))} tokens: {advice}",
        )
    elif not (baseline.engine or "").startswith(OWN_ENGINE) and any(
        block.block.metrics_after is not None and block.block.metrics_after.total(STEPS) is not None
        for block in sides.baseline
    ):
        yield Finding(
            "plain baseline",
            Severity.VOID,
            "the baseline's server counts drafts, though none were made: speculation is switched "
            f"off, not absent; {advice}",
        )


def _growth(block: BlockMetrics, name: str) -> float:
    before, after = block.block.metrics_before, block.block.metrics_after
    if before is None or after is None:
        return 0.0
    return max(0.0, (after.total(name) or 0.0) - (before.total(name) or 0.0))


def reused_prompts(sides: Sides) -> Iterator[Finding]:
    """Blocks ask their questions again, A/A blocks only the baseline: a prefix cache shows it."""
    shares = {name: _reused_share(blocks) for name, blocks in sides.named}
    (base, base_share), (arm, arm_share) = shares.items()
    if max(base_share, arm_share) <= MAX_REUSED:
        return
    is_void = abs(base_share - arm_share) > MAX_REUSED_DIFFERENCE
    yield Finding(
        "reused prompts",
        Severity.VOID if is_void else Severity.WARNING,
        f"{base} took {base_share:.0%} of its prompts' tokens from its prefix cache and {arm} "
        f"{arm_share:.0%} (allowed are {MAX_REUSED_DIFFERENCE:.0%} apart): repeated prompts hide "
        "the prefill; start the servers without a prefix cache (vLLM: --no-enable-prefix-caching)",
    )


def _reused_share(blocks: tuple[BlockMetrics, ...]) -> float:
    num_reused = sum(_growth(block, name) for block in blocks for name in REUSED)
    num_tokens = sum(request.record.prompt_tokens or 0 for request in requests_of(blocks))
    return num_reused / num_tokens if num_tokens else 0.0


def acceptance_meaning(sides: Sides) -> Iterator[Finding]:
    """Counts that contradict each other, and servers that define the length otherwise."""
    records = [request.record for request in requests_of(sides.speculative)]
    found = acceptance_of((block.block for block in sides.speculative), records)
    if found is not None and not found.is_consistent:
        yield Finding(
            "acceptance",
            Severity.WARNING,
            f"{sides.arm.name}: accepted tokens by position sum to "
            f"{sum(found.per_position or ())}, the total says {found.accepted}: another request "
            "ran, or the server counts otherwise",
        )
    other = 0
    for record in records:
        said = record.speculative
        if said is None or not said.steps or None in (said.accepted, said.acceptance_length):
            continue
        ours = 1.0 + (said.accepted or 0) / said.steps
        other += abs((said.acceptance_length or 0.0) - ours) > MAX_LENGTH_ERROR * ours
    if other:
        yield Finding(
            "acceptance",
            Severity.WARNING,
            f"{sides.arm.name}: its own acceptance length is not 1 + accepted / steps in {other} "
            "answers; ours is shown",
        )


def drift(sides: Sides) -> Iterator[Finding]:
    """A machine that gets slower or faster is balanced by the order, but should be known."""
    logs = [math.log(block.whole_rate) for block in sides.baseline if block.whole_rate]
    line = trend(logs)
    if line is not None and line.is_clear and abs(line.change) > MAX_DRIFT:
        yield Finding(
            "drift",
            Severity.WARNING,
            f"the baseline changed by {math.expm1(line.change):+.0%} from the first block to the "
            "last: heat, other work or a growing cache; the ratio is of neighbouring blocks",
        )


ARM_GUARDS = (plain_baseline, reused_prompts, acceptance_meaning, drift)
