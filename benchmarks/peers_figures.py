"""What follows from the answers of ``peers.py``: rates, ratios with intervals, tables, JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider_peer import NAME as OURS
from outrider_peer import PLAIN
from peer import Answer, Arm

from outrider.bench.categories import ALL, REPEATING, REST
from outrider.bench.statistics import RatioInterval, ratio_interval
from outrider.commands.console import stdout, table

SCHEMA_VERSION = 2
GROUPS = (REPEATING, REST, ALL)
_DECODE = "decode only"

Ratios = dict[str, RatioInterval | None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """All arms' answers to one prompt."""

    prompt_id: str
    category: str
    group: str
    prompt_len: int
    order: tuple[str, ...]
    answers: dict[str, Answer]


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
    rates[_DECODE] = later / sum(answer.decode_s for answer in answers)
    return rates


def compare(measurements: Sequence[Measurement], faster: str, slower: str) -> Ratios:
    """Speed of one arm over another by group: the ratio of times, prompt by prompt."""
    result: Ratios = {}
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


def fastest(measurements: Sequence[Measurement], arms: Sequence[Arm]) -> Arm:
    """The fastest of some arms, by the geometric mean over prompts."""

    def mean_time(arm: Arm) -> float:
        return statistics.geometric_mean(item.answers[arm.name].total_s for item in measurements)

    return min(arms, key=mean_time)


def pairs(measurements: Sequence[Measurement], arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """The comparisons worth knowing, as (faster, slower) by hope.

    Against every other engine: plain against its fastest plain arm, and our fastest against its
    fastest, whatever it does. Among ours: each way to draft against plain.
    """
    ours = [arm for arm in arms if arm.engine == OURS]
    found = [(arm.name, PLAIN) for arm in ours if not arm.is_plain]
    best = fastest(measurements, ours).name
    for engine in dict.fromkeys(arm.engine for arm in arms if arm.engine != OURS):
        theirs = [arm for arm in arms if arm.engine == engine]
        plain = fastest(measurements, [arm for arm in theirs if arm.is_plain])
        found += [(PLAIN, plain.name), (best, fastest(measurements, theirs).name)]
    return list(dict.fromkeys(found))


def same_texts(measurements: Sequence[Measurement], name: str) -> int:
    """Prompts on which an arm wrote the very tokens of our plain decoding."""
    return sum(
        item.answers[name].token_ids == item.answers[PLAIN].token_ids for item in measurements
    )


def to_json(
    measurements: Sequence[Measurement], arms: Sequence[Arm], known: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result as one document, every prompt's figures included."""
    return {
        "schema_version": SCHEMA_VERSION,
        "conditions": dict(known),
        "arms": {
            arm.name: {
                "engine": arm.version,
                "weights": arm.weights,
                "tokens_per_s": arm_rates(measurements, arm.name),
                "same_texts_as_plain": same_texts(measurements, arm.name),
            }
            for arm in arms
        },
        "comparisons": [
            {
                "faster": above,
                "slower": below,
                "ratios": {
                    group: None if interval is None else interval.to_json()
                    for group, interval in compare(measurements, above, below).items()
                },
            }
            for above, below in pairs(measurements, arms)
        ],
        "measurements": [asdict(item) for item in measurements],
    }


def print_tables(
    measurements: Sequence[Measurement], arms: Sequence[Arm], known: Mapping[str, Any]
) -> None:
    """Rates, ratios and conditions for people."""
    out = stdout()
    columns = [*GROUPS, _DECODE]
    rows = []
    for arm in arms:
        rates = arm_rates(measurements, arm.name)
        cells = ["-" if rates[column] is None else f"{rates[column]:.1f}" for column in columns]
        same = f"{same_texts(measurements, arm.name)}/{len(measurements)}"
        rows.append((arm.name, arm.weights, *cells, same))
    title = "Tokens per second (whole requests, and decoding alone over all prompts)"
    headers = ("arm", "weights", *columns, "text as\nplain")
    out.print(table(headers, rows, title=title, numbers_from=2))
    rows = []
    for above, below in pairs(measurements, arms):
        ratios = compare(measurements, above, below)
        cells = ["-" if ratios[group] is None else str(ratios[group]) for group in GROUPS]
        rows.append((f"{above} / {below}", *cells))
    out.print(table(("speed ratio (95 % interval)", *GROUPS), rows))
    for version in dict.fromkeys(arm.version for arm in arms):
        out.print(version, soft_wrap=True, markup=False)
    out.print(" · ".join(f"{k} {v}" for k, v in known.items()), soft_wrap=True, markup=False)
