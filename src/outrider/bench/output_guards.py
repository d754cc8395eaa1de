"""Guards on what was answered: loops, lengths, texts, prompts, models, failures.

Owns the rules by which two arms did not do the same work. Reads the two sides of a comparison
(:mod:`outrider.bench.findings`); :mod:`outrider.bench.verdict` acts on what is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from outrider.bench.findings import Finding, Severity, Sides, in_order, requests_of
from outrider.bench.guards import ends_in_loop
from outrider.bench.metrics import BlockMetrics
from outrider.bench.records import Losslessness, SamplingRecord
from outrider.bench.statistics import mean_interval

MAX_LOOP_DIFFERENCE = 0.10  # of the requests, between the arms
MAX_LOOPS, MAX_QUIET_LOOPS = 0.5, 0.1  # of an arm's requests: void above, told above
MAX_LENGTH_RATIO = 1.10
MIN_TOKENS = 16  # median below which an answer's rate is mostly its first token
MAX_FAILED = 0.02


def loops(sides: Sides) -> Iterator[Finding]:
    """Texts that repeat themselves are drafted by anything, and faster in whichever arm loops."""
    shares = {name: _loop_share(blocks) for name, blocks in sides.named}
    (base, base_share), (arm, arm_share) = shares.items()
    seen = f"{base_share:.0%} of the answers of {base} and {arm_share:.0%} of {arm} end in a loop"
    if abs(arm_share - base_share) > MAX_LOOP_DIFFERENCE:
        yield Finding(
            "loops",
            Severity.VOID,
            f"{seen}: the arms did not write alike (allowed are {MAX_LOOP_DIFFERENCE:.0%} apart); "
            "compare their texts, or audit the arm",
        )
    elif max(shares.values()) > MAX_LOOPS:
        yield Finding(
            "loops",
            Severity.VOID,
            f"{seen}: repetition flatters every drafter (allowed are {MAX_LOOPS:.0%}); lower "
            "max_tokens, raise the temperature or take other prompts",
        )
    elif max(shares.values()) > MAX_QUIET_LOOPS:
        yield Finding("loops", Severity.WARNING, f"{seen}, which flatters every drafter")


def _loop_share(blocks: tuple[BlockMetrics, ...]) -> float:
    texts = [request.record.text for request in requests_of(blocks) if request.is_sound]
    return fmean(map(ends_in_loop, texts)) if texts else 0.0


def lengths(sides: Sides) -> Iterator[Finding]:
    """An arm that stops early, or goes on, does other work; answers too short have no rate."""
    logs = [math.log(right.num_tokens / left.num_tokens) for left, right in sides.pairs()]
    for name, blocks in sides.named:
        counts = [request.num_tokens for request in requests_of(blocks) if request.is_sound]
        if counts and median(counts) < MIN_TOKENS:
            yield Finding(
                "lengths",
                Severity.VOID,
                f"half of the answers of {name} have fewer than {MIN_TOKENS} tokens (median "
                f"{median(counts):g}): their rate is mostly their first token; raise max_tokens or "
                "take prompts with longer answers",
            )
    if not logs:
        return
    interval = mean_interval(logs, 0.99)
    is_clear = (
        interval.low is None or interval.high is None or interval.low > 0 or interval.high < 0
    )
    if abs(interval.mean) > math.log(MAX_LENGTH_RATIO) and is_clear:
        yield Finding(
            "lengths",
            Severity.VOID,
            f"answers of {sides.arm.name} have {math.exp(interval.mean):.2f} times the tokens of "
            f"the baseline's to the same prompts (allowed are 1/{MAX_LENGTH_RATIO} to "
            f"{MAX_LENGTH_RATIO}): the arms did not do the same work; look for stop strings, "
            "limits or a template that differ",
        )


def texts(sides: Sides) -> Iterator[Finding]:
    """The same prompt, sampled alike, has one text; an arm that is exact must write it."""
    if not is_repeatable(sides.run.sampling):
        return
    same = sameness(sides)
    if same.num_same == same.num_pairs:
        return
    seen = (
        f"{same.num_pairs - same.num_same} of {same.num_pairs} {same.kind} of {sides.arm.name} "
        "differ from the baseline's"
    )
    if sides.arm.losslessness is Losslessness.EXACT:
        yield Finding(
            "texts",
            Severity.VOID,
            f"{seen}, though it is said to be exact ({sides.arm.losslessness_detail}): one of the "
            "two is wrong; run outrider audit",
        )
    else:
        yield Finding(
            "texts",
            Severity.WARNING,
            f"{seen}: rounding of another batch shape, or loss; only an audit tells them apart",
        )


@dataclass(frozen=True, slots=True)
class Sameness:
    """How many answers of an arm are the baseline's to the same prompt.

    Compared by token ids where both servers tell them, else by text.
    """

    num_same: int
    num_pairs: int
    kind: str

    @property
    def text(self) -> str:
        """For people: ``all 48 token sequences are the baseline's``."""
        whole = self.num_same == self.num_pairs
        share = f"all {self.num_pairs}" if whole else f"{self.num_same} of {self.num_pairs}"
        return f"{share} {self.kind} are the baseline's"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {"num_same": self.num_same, "num_pairs": self.num_pairs, "kind": self.kind}


def sameness(sides: Sides) -> Sameness:
    """Compare every sound answer with the baseline's."""
    pairs = [(left.record, right.record) for left, right in sides.pairs()]
    by_ids = bool(pairs) and all(a.token_hash and b.token_hash for a, b in pairs)
    num_same = sum(a.token_hash == b.token_hash if by_ids else a.text == b.text for a, b in pairs)
    return Sameness(num_same, len(pairs), "token sequences" if by_ids else "texts")


def is_repeatable(sampling: SamplingRecord) -> bool:
    """Whether the same request has the same text again: greedy, or with a seed."""
    return sampling.temperature == 0.0 or sampling.seed is not None


def prompts(sides: Sides) -> Iterator[Finding]:
    """Both arms must have got the same prompts in the same order, and read them alike."""
    for base, other in zip(sides.baseline, sides.speculative, strict=True):
        left, right = (
            [(r.record.prompt_id, r.record.prompt_hash) for r in in_order(block)]
            for block in (base, other)
        )
        if left != right:
            place = next(
                (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
                min(len(left), len(right)),
            )
            yield Finding(
                "prompts",
                Severity.VOID,
                f"block {base.block.index}: the arms did not get the same prompts (request "
                f"{place + 1} differs, of {len(left)} and {len(right)}); measure again",
            )
            return
    differing = {
        left.record.prompt_id: (left.record.prompt_tokens, right.record.prompt_tokens)
        for left, right in sides.pairs()
        if None not in (left.record.prompt_tokens, right.record.prompt_tokens)
        and left.record.prompt_tokens != right.record.prompt_tokens
    }
    if differing:
        prompt_id, (base_count, arm_count) = next(iter(differing.items()))
        yield Finding(
            "prompts",
            Severity.VOID,
            f"{len(differing)} prompts have other token counts in {sides.arm.name} than in the "
            f"baseline ({prompt_id}: {arm_count} and {base_count}): another model, tokeniser or "
            "chat template; serve both arms alike",
        )


def models(sides: Sides) -> Iterator[Finding]:
    """Arms may differ in speculation only: one model, engine, version and precision."""
    served = [
        ", ".join(sorted({r.record.served_model or "" for r in requests_of(blocks)} - {""}))
        for _, blocks in sides.named
    ]
    pairs = [
        ("model", *served),
        *(
            (field, getattr(sides.baseline_arm, field), getattr(sides.arm, field))
            for field in ("engine", "engine_version", "precision")
        ),
    ]
    for what, base, other in pairs:
        if base and other and base != other:
            yield Finding(
                "models",
                Severity.VOID,
                f"{what.replace('_', ' ')}: the baseline has {base}, {sides.arm.name} {other}; "
                "arms may differ in speculation only",
            )


def failures(sides: Sides) -> Iterator[Finding]:
    """Requests that failed, or came without text or usage, are missing from every figure."""
    for name, blocks in sides.named:
        requests = requests_of(blocks)
        bad = [request for request in requests if not request.is_sound]
        if not requests:
            yield Finding("failures", Severity.VOID, f"{name}: no request at all; measure again")
        elif bad:
            reasons = [request.record.error or _missing(request.record) for request in bad]
            most = max(set(reasons), key=reasons.count)
            is_void = len(bad) > MAX_FAILED * len(requests)
            yield Finding(
                "failures",
                Severity.VOID if is_void else Severity.WARNING,
                f"{name}: {len(bad)} of {len(requests)} requests failed (allowed are "
                f"{MAX_FAILED:.0%}), most often: {most}",
            )


def _missing(record) -> str:
    return "the answer has no text" if not record.chunks else "the answer came without usage"


def random_prompts(sides: Sides) -> Iterator[Finding]:
    """Random tokens are no text: what follows them says nothing about a drafter."""
    if sides.run.workload.is_random:
        yield Finding(
            "random prompts",
            Severity.VOID,
            f"{sides.run.workload.source} holds random tokens, on which no draft model was made to "
            "work; measure with prompts of your own traffic",
        )


OUTPUT_GUARDS = (random_prompts, prompts, models, failures, loops, lengths, texts)
