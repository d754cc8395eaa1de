"""The verdict on one arm at one load: GO, NO-GO, INCONCLUSIVE or INVALID, and why.

Owns the rule. Reads the paired blocks (:mod:`outrider.bench.findings`), lets the guards speak
first, then the intervals; :mod:`outrider.bench.judgement` puts the cells of a run together. Pure
functions.

* INVALID: a guard voided the comparison, or the baseline differed from itself.
* GO: the interval's low end clears 1 + margin, TTFT and goodput are shown not to be worse.
* NO-GO: the high end does not clear 1 + margin, or TTFT or goodput are shown to be worse.
* INCONCLUSIVE: anything else, with the blocks that are probably still needed.

TTFT is judged at its 95th percentile where both arms have the requests for one. With fewer, the
slowest of a handful would decide, so the same prompts are compared with each other instead, and
the verdict says that the tail was not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import Any

from outrider.bench.arm_guards import ARM_GUARDS
from outrider.bench.findings import Finding, Severity, Sides, requests_of
from outrider.bench.metrics import BlockMetrics, ServiceLevel, pooled
from outrider.bench.output_guards import OUTPUT_GUARDS, Sameness, sameness
from outrider.bench.planning import MIN_BLOCKS, POWER, NoiseFloor, blocks_needed
from outrider.bench.records import ArmRecord, Load, Losslessness, RunRecord
from outrider.bench.samples import MIN_SAMPLES, is_printable
from outrider.bench.speedup import Speedup, conditions_of
from outrider.bench.statistics import (
    CONFIDENCE,
    MeanInterval,
    RatioInterval,
    log_interval,
    mean_interval,
    p_value_above,
    sign_flip_p,
    simultaneous_confidence,
)
from outrider.bench.timing_guards import TIMING_GUARDS
from outrider.errors import ParameterError

GUARDS = (*OUTPUT_GUARDS, *TIMING_GUARDS, *ARM_GUARDS)


class Verdict(StrEnum):
    """What a measurement says about deploying an arm."""

    GO = "GO"
    NO_GO = "NO-GO"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"

    @property
    def exit_status(self) -> int:
        """Of the command: 0 go, 1 no-go, 2 inconclusive, 3 invalid."""
        return list(Verdict).index(self)


class Metric(StrEnum):
    """What an arm is judged by; the name is what a reader sees."""

    STEADY = "output tokens/s (steady load)"
    WHOLE = "output tokens/s (whole blocks)"
    USER = "output tokens/s per user"

    def of(self, block: BlockMetrics) -> float | None:
        """Its value in one block."""
        match self:
            case Metric.STEADY:
                return block.steady_rate
            case Metric.WHOLE:
                return block.whole_rate
            case Metric.USER:
                return block.user_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """Thresholds, fixed before a run: ``margin`` is the least gain worth deploying for.

    Attributes:
        margin: gain below which speculation is not worth its memory and its risk.
        ttft_tolerance: how much longer TTFT may be; ``goodput_tolerance`` likewise, as a share of
            the baseline's goodput.
        tie_margin: how much faster the less simple of two methods must be shown to be.
        level: what a good request keeps; without any limit goodput is not judged.

    Raises:
        ParameterError: a value is out of range.
    """

    margin: float = 0.03
    confidence: float = CONFIDENCE
    power: float = POWER
    ttft_tolerance: float = 0.10
    goodput_tolerance: float = 0.05
    tie_margin: float = 0.01
    min_blocks: int = MIN_BLOCKS
    level: ServiceLevel = field(default_factory=ServiceLevel)

    def __post_init__(self) -> None:
        for name in ("margin", "ttft_tolerance", "goodput_tolerance", "tie_margin"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ParameterError(f"{name}: {value} is outside [0, 1); 0.03 is 3 %")
        for name in ("confidence", "power"):
            value = getattr(self, name)
            if not 0.5 <= value < 1.0:
                raise ParameterError(f"{name}: {value} is outside [0.5, 1)")
        if self.min_blocks < MIN_BLOCKS:
            raise ParameterError(
                f"min_blocks: {self.min_blocks} is below {MIN_BLOCKS}, the fewest that can show "
                "anything at 95 %"
            )

    @classmethod
    def from_run(cls, run: RunRecord) -> JudgeSettings:
        """Those kept under ``judging`` in a run's settings; what is missing has its default.

        Keys: this class's own, and ``slo_ttft_ms``, ``slo_tpot_ms``, ``slo_latency_ms``.

        Raises:
            ParameterError: a value is out of range, or a key is none of these.
        """
        kept = run.settings.get("judging") or {}
        if not isinstance(kept, Mapping):
            raise ParameterError(f"judging: {kept!r} is not an object of thresholds by name")
        kept = {name: value for name, value in kept.items() if value is not None}
        for name, value in kept.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ParameterError(f"judging: {name}: {value!r} is not a number")
        limits = {
            f"{name}_s": value / 1000
            for name in ("ttft", "tpot", "latency")
            if (value := kept.pop(f"slo_{name}_ms", None)) is not None
        }
        allowed = {field.name for field in fields(cls)} - {"level"}
        if unknown := sorted(kept.keys() - allowed):
            raise ParameterError(
                f"judging: {unknown[0]} is not one of {', '.join(sorted(allowed))}, slo_ttft_ms, "
                "slo_tpot_ms, slo_latency_ms"
            )
        return cls(**kept, level=ServiceLevel(**limits))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TtftChange:
    """Time to first token as a ratio to the baseline's, per-block logarithms with it.

    ``is_tail`` says whether it is of 95th percentiles, or of the same prompts' times.
    """

    is_tail: bool
    num_requests: int
    logs: tuple[float, ...]
    interval: RatioInterval

    @property
    def name(self) -> str:
        """What was compared."""
        return "p95 TTFT" if self.is_tail else "the same prompts' TTFT"

    @property
    def gap(self) -> str:
        """What could not be judged; empty where all was."""
        if self.is_tail:
            return ""
        return (
            f"p95 TTFT is not judged: {self.num_requests} requests per arm of the "
            f"{MIN_SAMPLES[95]} that it needs"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        fields = {"of": self.name, "num_requests": self.num_requests}
        return fields | self.interval.to_json()


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one load: the verdict, its reasons and everything it rests on.

    ``logs`` are the per-block logarithms of the primary metric's ratio, by block index. ``p_value``
    is one-sided against 1 + margin. ``blocks_needed`` is the total, None where no number helps.
    """

    arm: ArmRecord
    load: Load
    verdict: Verdict
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    metric: Metric
    sides: Sides
    logs: dict[int, float]
    speedup: Speedup | None = None
    ttft: TtftChange | None = None
    goodput: MeanInterval | None = None
    p_value: float = 1.0
    sign_flip_p: float = 1.0
    blocks_needed: int | None = None

    @property
    def same(self) -> Sameness:
        """How many of its answers are the baseline's."""
        return sameness(self.sides)

    @property
    def sentence(self) -> str:
        """The verdict and what it rests on, with workload and load."""
        told = f"{self.verdict}: {self.arm.name} at {self.load.text}"
        if self.speedup is not None and self.verdict is not Verdict.INVALID:
            told = f"{self.verdict}: {self.speedup}"
        parts = list(self.reasons)
        if self.verdict is Verdict.GO:
            parts += [self.ttft.gap] if self.ttft is not None and self.ttft.gap else []
            parts.append(lossless_sentence(self.arm))
        return f"{told}; {'; '.join(parts)}" if parts else told

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {
            "arm": self.arm.name,
            "load": self.load.name,
            "verdict": str(self.verdict),
            "reasons": list(self.reasons),
            "findings": [finding.to_json() for finding in self.findings],
            "metric": str(self.metric),
            "speedup": None if self.speedup is None else self.speedup.to_json(),
            "log_ratios": {str(index): value for index, value in self.logs.items()},
            "ttft_ratio": None if self.ttft is None else self.ttft.to_json(),
            "goodput_change": None if self.goodput is None else self.goodput.to_json(),
            "p_value": self.p_value,
            "sign_flip_p": self.sign_flip_p,
            "blocks_needed": self.blocks_needed,
            "same_answers": self.same.to_json(),
            "losslessness": str(self.arm.losslessness),
            "losslessness_detail": self.arm.losslessness_detail,
        }


def lossless_sentence(arm: ArmRecord) -> str:
    """How it is known that an arm's output is its target's; said with every GO."""
    match arm.losslessness:
        case Losslessness.EXACT:
            return f"lossless: exact by self-test ({arm.losslessness_detail})"
        case Losslessness.AUDITED:
            return f"lossless: audited ({arm.losslessness_detail})"
        case Losslessness.NOT_AUDITED:
            return (
                "NOT audited for losslessness: that its texts are the target's own is unproven; "
                "run outrider audit before you deploy"
            )


def primary_metric(load: Load, blocks: Iterable[BlockMetrics]) -> Metric:
    """What all arms are judged by at a load.

    An open loop's aggregate rate is the rate of arrivals, so there it is what a user sees. A closed
    loop is judged in its steady middle where every block has one, else over whole blocks.
    """
    if load.concurrency is None:
        return Metric.USER
    has_middle = all(block.steady_rate is not None for block in blocks)
    return Metric.STEADY if has_middle and load.concurrency > 1 else Metric.WHOLE


def paired_logs(sides: Sides, value: Callable[[BlockMetrics], float | None]) -> dict[int, float]:
    """ln(arm / baseline) of a value by block index; blocks that lack it on a side are left out."""
    logs: dict[int, float] = {}
    for base, other in zip(sides.baseline, sides.speculative, strict=True):
        below, above = value(base), value(other)
        if below and above and below > 0.0 and above > 0.0:
            logs[base.block.index] = math.log(above / below)
    return logs


def judge_cell(
    sides: Sides,
    metric: Metric,
    noise: NoiseFloor | None,
    settings: JudgeSettings,
    *,
    num_arms: int,
) -> Cell:
    """The verdict on one arm at one load; ``num_arms`` share its baseline, itself included."""
    findings = [finding for guard in GUARDS for finding in guard(sides)]
    if noise is not None and not noise.is_fair:
        findings.append(
            Finding(
                "noise",
                Severity.VOID,
                f"the baseline differed from itself: {noise.interval}, though A/A blocks should "
                "contain 1; measure on a quieter machine",
            )
        )
    logs = paired_logs(sides, metric.of)
    voids = tuple(f.text for f in findings if f.severity is Severity.VOID)
    base = Cell(sides.arm, sides.load, Verdict.INVALID, voids, tuple(findings), metric, sides, logs)
    if not logs:
        return replace(base, reasons=voids or ("no block has figures on both sides",))
    values = list(logs.values())
    interval = log_interval(values, simultaneous_confidence(num_arms, settings.confidence))
    judged = replace(
        base,
        speedup=_speedup(sides, metric, interval),
        p_value=p_value_above(values, 1.0 + settings.margin),
        sign_flip_p=sign_flip_p(values),
        ttft=_ttft(sides, settings),
        goodput=_goodput(sides, settings),
    )
    if voids:
        return judged
    if len(values) < settings.min_blocks:
        return replace(
            judged,
            verdict=Verdict.INCONCLUSIVE,
            reasons=(f"measured {len(values)} of at least {settings.min_blocks} blocks",),
            blocks_needed=settings.min_blocks,
        )
    return _weigh(judged, interval, values, settings)


def _weigh(
    cell: Cell, interval: RatioInterval, logs: Sequence[float], settings: JudgeSettings
) -> Cell:
    """The verdict of a valid cell from its intervals."""
    wanted = 1.0 + settings.margin
    assert interval.low is not None  # two blocks at least
    assert interval.high is not None
    against, unclear, needed = [], [], []
    if interval.high < wanted:
        against.append(f"a gain of {settings.margin:.0%} is out of its interval")
    elif interval.low <= wanted:
        unclear.append(f"a gain of {settings.margin:.0%} is within its interval")
        needed.append(_needed(logs, math.log(wanted), interval.confidence, settings))
    ttft = None if cell.ttft is None else cell.ttft.interval
    if cell.ttft is not None and ttft is not None and None not in (ttft.low, ttft.high):
        allowed = 1.0 + settings.ttft_tolerance
        seen = f"{cell.ttft.name} is {ttft} times the baseline's (allowed {allowed:.2f})"
        if (ttft.low or 0.0) > allowed:
            against.append(seen)
        elif (ttft.high or 0.0) > allowed:
            unclear.append(seen)
            bound = math.log(allowed)
            needed.append(_needed(cell.ttft.logs, bound, settings.confidence, settings))
    if cell.goodput is not None and cell.goodput.low is not None and cell.goodput.high is not None:
        seen = f"goodput ({settings.level.text}) changed by {cell.goodput.mean:+.0%}"
        if cell.goodput.high < -settings.goodput_tolerance:
            against.append(seen)
        elif cell.goodput.low < -settings.goodput_tolerance:
            unclear.append(f"{seen}, between {cell.goodput.low:+.0%} and {cell.goodput.high:+.0%}")
            changes = _goodput_changes(cell.sides, settings)
            bound = -settings.goodput_tolerance
            needed.append(_needed(changes, bound, settings.confidence, settings))
    if against:
        return replace(cell, verdict=Verdict.NO_GO, reasons=tuple(against))
    if unclear:
        total = None if None in needed else max(number for number in needed if number is not None)
        left = (
            "too close to call with any number of blocks"
            if total is None
            else f"about {max(1, total - len(logs))} more blocks are needed"
        )
        return replace(
            cell,
            verdict=Verdict.INCONCLUSIVE,
            reasons=(*unclear, left),
            blocks_needed=None if total is None else max(total, len(logs) + 1),
        )
    return replace(cell, verdict=Verdict.GO, reasons=())


def _needed(
    values: Sequence[float], bound: float, confidence: float, settings: JudgeSettings
) -> int | None:
    """Blocks that tell the mean from a bound, if it is where it was seen to be."""
    return blocks_needed(
        stdev(values),
        fmean(values) - bound,
        confidence=confidence,
        wanted_power=settings.power,
        at_least=settings.min_blocks,
    )


def _p95_ttft(block: BlockMetrics) -> float | None:
    return block.percentile("ttft_s", 95)


def _ttft(sides: Sides, settings: JudgeSettings) -> TtftChange | None:
    """At the 95th percentile if both arms have the requests for one, else prompt by prompt."""
    num_requests = min(len(pooled(blocks, "ttft_s")) for _, blocks in sides.named)
    is_tail = is_printable(num_requests, 95)
    logs = list(paired_logs(sides, _p95_ttft).values()) if is_tail else _ttft_logs(sides)
    if not logs:
        return None
    return TtftChange(is_tail, num_requests, tuple(logs), log_interval(logs, settings.confidence))


def _ttft_logs(sides: Sides) -> list[float]:
    """Per block, the mean logarithm of the ratio over the same prompts."""
    by_block: dict[int, list[float]] = {}
    for left, right in sides.pairs():
        if left.ttft_s and right.ttft_s and min(left.ttft_s, right.ttft_s) > 0.0:
            of_block = by_block.setdefault(left.record.block, [])
            of_block.append(math.log(right.ttft_s / left.ttft_s))
    return [fmean(logs) for logs in by_block.values()]


def _goodput_changes(sides: Sides, settings: JudgeSettings) -> list[float]:
    """Per block, the change of goodput as a share of the baseline's mean over all blocks."""
    pairs = [
        (before, after)
        for base, other in zip(sides.baseline, sides.speculative, strict=True)
        if (before := base.goodput(settings.level)) is not None
        and (after := other.goodput(settings.level)) is not None
    ]
    usual = fmean(before for before, _ in pairs) if pairs else 0.0
    return [(after - before) / usual for before, after in pairs] if usual > 0.0 else []


def _goodput(sides: Sides, settings: JudgeSettings) -> MeanInterval | None:
    """None without a service level, and where the baseline keeps it never: nothing to lose."""
    changes = _goodput_changes(sides, settings) if settings.level.is_set else []
    return mean_interval(changes, settings.confidence) if changes else None


def _speedup(sides: Sides, metric: Metric, interval: RatioInterval) -> Speedup:
    requests = [r for r in requests_of((*sides.baseline, *sides.speculative)) if r.is_sound]
    prompts = [r.record.prompt_tokens for r in requests if r.record.prompt_tokens is not None]
    outputs = [r.num_tokens for r in requests]
    conditions = conditions_of(
        sides.run,
        sides.arm,
        sides.load,
        num_blocks=interval.num_pairs,
        prompt_len=median(prompts) if prompts else None,
        output_len=median(outputs) if outputs else None,
    )
    return Speedup(str(metric), conditions, interval)
