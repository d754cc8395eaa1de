"""Ratios by kind of prompt: of the same prompts, over blocks, groups before their categories."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outrider.bench.categories import (
    REPEATING,
    REST,
    CategoryRatio,
    category_ratios,
    group_of,
)
from outrider.bench.judgement import judge
from outrider.bench.records import RequestRecord, RunData
from outrider.bench.statistics import log_interval
from outrider.bench.verdict import Verdict
from tests.scripted import ScriptedArm, change_requests, scripted_run

BASE = ScriptedArm("off", 0.010, noise=0.0)
FAST = ScriptedArm("ngram", 0.014, tokens_per_step=2, noise=0.0)


def stretched(record: RequestRecord, factor: float) -> RequestRecord:
    """The same answer, ``factor`` times as long under way."""
    chunks = tuple(
        replace(c, at_s=record.scheduled_s + factor * (c.at_s - record.scheduled_s))
        for c in record.chunks
    )
    return replace(record, chunks=chunks)


def run() -> RunData:
    """n-gram gains twice as much on rewriting as on chat, and a little less in every block."""

    def change(record: RequestRecord) -> RequestRecord:
        category = {"chat": "chat", "code": "rewrite"}[record.category]
        record = replace(record, category=category)
        if record.arm == "off":
            return record
        return stretched(record, (0.5 if category == "rewrite" else 1.0) * 1.01**record.block)

    return change_requests(scripted_run([BASE, FAST]), change)


def ratios(data: RunData) -> dict[str, CategoryRatio]:
    (cell,) = judge(data).cells
    return {ratio.name: ratio for ratio in category_ratios(cell)}


def test_each_group_and_category_has_the_mean_of_its_blocks_with_their_interval():
    """48 tokens: .05 + 47 x .01 s plainly, .05 + 24 x .014 s with pairs."""
    plain_s, fast_s = 0.05 + 47 * 0.010, 0.05 + 24 * 0.014
    logs = [math.log(plain_s / (fast_s * 1.01**block)) for block in range(6)]
    expected = {
        "chat": log_interval(logs),
        "rewrite": log_interval([x + math.log(2) for x in logs]),
    }
    found = ratios(run())

    assert [REPEATING, "rewrite", REST, "chat"] == list(found)
    for name, group in (("chat", REST), ("rewrite", REPEATING)):
        interval = (expected[name].ratio, expected[name].low, expected[name].high)
        for shown in (name, group):
            assert pytest.approx(interval) == found[shown].speedup.point()
        assert (4, False, True) == (
            found[name].num_prompts,
            found[name].is_group,
            found[group].is_group,
        )


def test_a_ratio_says_what_it_is_of():
    told = str(ratios(run())["rewrite"].speedup)

    for part in ("per user", "1 user", "rewrite of prompts.jsonl (#0123456789ab)"):
        assert part in told


def test_one_kind_of_prompt_is_the_whole_and_is_not_told_again():
    data = change_requests(run(), lambda record: replace(record, category="chat"))

    assert {} == ratios(data)


def test_two_categories_of_one_group_are_told_without_the_group():
    assert ["chat", "code"] == list(ratios(scripted_run([BASE, FAST])))


def test_a_void_cell_has_no_ratios():
    data = scripted_run([BASE, replace(FAST, num_tokens=30)])

    assert Verdict.INVALID is judge(data).cells[0].verdict
    assert {} == ratios(data)


def test_answers_that_repeat_their_prompt_are_known_by_category():
    assert [REPEATING, REPEATING, REST, REST] == [
        group_of(name) for name in ("code-edit", "rag", "chat", "1000+ chars")
    ]
