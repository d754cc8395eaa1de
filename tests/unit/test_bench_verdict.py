"""Verdicts on scripted runs: each rule, and what is said with it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest

from outrider.bench.judgement import Judgement, judge
from outrider.bench.metrics import ServiceLevel
from outrider.bench.planning import power
from outrider.bench.records import BlockKind, Load, LoadKind, Losslessness, RequestRecord, RunData
from outrider.bench.verdict import JudgeSettings, Verdict
from outrider.errors import ParameterError, RecordError
from tests.scripted import ScriptedArm, change_requests, scripted_run

BASE = ScriptedArm("off", 0.010)
ONE, FOUR = Load(LoadKind.CLOSED, 1), Load(LoadKind.CLOSED, 4)


def arm(gain: float, **more) -> ScriptedArm:
    """An arm whose whole answers take 1 / gain of the baseline's time."""
    fields = {"name": "eagle3", "ttft_s": 0.05 / gain} | more
    return ScriptedArm(step_s=2 * 0.010 / gain * 47 / 48, tokens_per_step=2, **fields)


@cache
def judged(gain: float, noise: float = 0.01, num_blocks: int = 8) -> Judgement:
    data = scripted_run(
        [replace(BASE, noise=noise), arm(gain, noise=noise)], [ONE], num_blocks=num_blocks
    )
    return judge(data)


def test_a_clear_gain_is_go_and_says_workload_load_interval_and_losslessness():
    judgement = judged(1.4)

    assert (Verdict.GO, 0) == (judgement.verdict, judgement.verdict.exit_status)
    assert "eagle3" == judgement.winner.name
    for part in ("GO", "1.4", "1 user", "prompts.jsonl (#0123456789ab)", "exact by self-test"):
        assert part in judgement.headline
    assert str(judgement.cells[0].speedup) in judgement.headline


def test_a_clear_loss_and_a_gain_below_the_margin_are_no_go():
    slower, same = judged(0.8), judged(1.0, noise=0.002)

    assert [(Verdict.NO_GO, 1)] * 2 == [(j.verdict, j.verdict.exit_status) for j in (slower, same)]
    assert slower.winner is None
    assert "out of its interval" in slower.headline


def test_a_gain_within_the_noise_is_inconclusive_and_says_how_many_blocks_are_needed():
    judgement = judged(1.06, noise=0.05)
    cell = judgement.cells[0]

    assert (Verdict.INCONCLUSIVE, 2) == (judgement.verdict, judgement.verdict.exit_status)
    assert cell.blocks_needed is not None
    assert cell.blocks_needed > 8
    assert f"about {cell.blocks_needed - 8} more blocks are needed" in judgement.headline


def test_fewer_than_six_blocks_decide_nothing():
    judgement = judged(1.4, num_blocks=5)

    assert Verdict.INCONCLUSIVE is judgement.verdict
    assert 6 == judgement.cells[0].blocks_needed
    assert "measured 5 of at least 6 blocks" in judgement.headline


def test_a_void_cell_is_invalid_and_says_why():
    data = scripted_run([BASE, arm(1.4, num_tokens=30)], [ONE])
    judgement = judge(data)

    assert (Verdict.INVALID, 3) == (judgement.verdict, judgement.verdict.exit_status)
    assert judgement.winner is None
    assert "did not do the same work" in judgement.headline


@pytest.mark.parametrize(
    ("num_prompts", "expected"), [(8, "the same prompts' TTFT is 1.6"), (24, "p95 TTFT is 1.6")]
)
def test_a_longer_time_to_first_token_is_no_go_however_fast_the_rest(num_prompts, expected):
    """48 requests per arm are compared prompt by prompt, 144 have a 95th percentile."""
    slow = arm(1.4, ttft_s=0.08)
    judgement = judge(scripted_run([BASE, slow], [ONE], num_prompts=num_prompts))

    assert Verdict.NO_GO is judgement.verdict
    assert expected in judgement.headline


def late_tail(record: RequestRecord) -> RequestRecord:
    """One prompt in eight begins late in the arm."""
    if record.arm == "off" or int(record.prompt_id[1:]) % 8:
        return record
    first = replace(record.chunks[0], at_s=record.chunks[0].at_s + 0.01)
    return replace(record, chunks=(first, *record.chunks[1:]))


def test_a_tail_is_judged_once_there_are_the_requests_for_one_and_until_then_said_not_to_be():
    few, many = (
        judge(
            change_requests(
                scripted_run([BASE, arm(1.4, ttft_s=0.048)], [ONE], num_prompts=num_prompts),
                late_tail,
            )
        )
        for num_prompts in (8, 24)
    )

    assert [Verdict.GO, Verdict.NO_GO] == [few.verdict, many.verdict]
    told = "p95 TTFT is not judged: 48 requests per arm of the 130 that it needs"
    assert told in few.headline
    assert told in few.cells[0].sentence
    assert "p95 TTFT is 1." in many.headline
    assert "not judged" not in many.headline


def test_eight_blocks_of_eight_requests_with_real_noise_reach_a_verdict():
    """TTFT that scatters by 8 % from request to request: its maximum would decide nothing."""
    source = random.Random(4)

    def scatter(record: RequestRecord) -> RequestRecord:
        first = record.chunks[0]
        late_s = (first.at_s - record.scheduled_s) * math.expm1(abs(source.gauss(0.0, 0.08)))
        return replace(
            record, chunks=(replace(first, at_s=first.at_s + late_s), *record.chunks[1:])
        )

    verdicts = [
        judge(
            change_requests(
                scripted_run(
                    [replace(BASE, noise=0.03), arm(1.3, ttft_s=0.05, noise=0.03)],
                    [ONE],
                    num_blocks=8,
                    num_aa=0,
                    seed=seed,
                ),
                scatter,
            )
        ).verdict
        for seed in range(20)
    ]

    assert 19 <= verdicts.count(Verdict.GO)


def test_a_time_to_first_token_that_may_be_longer_is_inconclusive():
    def jitter(record: RequestRecord) -> RequestRecord:
        shift = 0.03 * ((7 * record.block) % 5 - 2) if record.arm == "eagle3" else 0.0
        first = replace(record.chunks[0], at_s=record.chunks[0].at_s + max(-0.03, shift))
        return replace(record, chunks=(first, *record.chunks[1:]))

    judgement = judge(change_requests(scripted_run([BASE, arm(1.4)], [ONE]), jitter))

    assert Verdict.INCONCLUSIVE is judgement.verdict
    assert "the same prompts' TTFT" in judgement.headline


def test_goodput_that_falls_is_no_go():
    """Every latency limit is kept by the baseline; half of the arm's answers start too late."""

    def late(record: RequestRecord) -> RequestRecord:
        if record.arm == "off" or record.prompt_id in {"p0", "p1", "p2", "p3"}:
            return record
        first = replace(record.chunks[0], at_s=record.chunks[0].at_s + 0.019)
        return replace(record, chunks=(first, *record.chunks[1:]))

    settings = JudgeSettings(level=ServiceLevel(ttft_s=0.053), ttft_tolerance=0.9)
    data = scripted_run([BASE, arm(1.4)], [ONE])

    assert Verdict.GO is judge(data, settings).verdict
    told = judge(change_requests(data, late), settings)
    assert Verdict.NO_GO is told.verdict
    assert "goodput (TTFT <= 53 ms)" in told.headline


def test_a_go_without_audit_says_so():
    judgement = judge(scripted_run([BASE, arm(1.4, losslessness=Losslessness.NOT_AUDITED)], [ONE]))

    assert Verdict.GO is judgement.verdict
    assert "NOT audited for losslessness" in judgement.headline


def test_an_audited_arm_says_what_the_audit_found():
    data = scripted_run([BASE, arm(1.4, losslessness=Losslessness.AUDITED)], [ONE])

    assert "lossless: audited (scripted)" in judge(data).headline


def test_a_baseline_that_differs_from_itself_voids_its_load():
    data = scripted_run([BASE, arm(1.4)], [ONE], num_aa=4)
    aa = {block.index for block in data.blocks if block.kind is BlockKind.AA}

    def slow_second_turn(record: RequestRecord) -> RequestRecord:
        if record.block not in aa or record.position == 0:
            return record
        chunks = tuple(
            replace(c, at_s=record.scheduled_s + 1.5 * (c.at_s - record.scheduled_s))
            for c in record.chunks
        )
        return replace(record, chunks=chunks)

    judgement = judge(change_requests(data, slow_second_turn))

    assert Verdict.INVALID is judgement.verdict
    assert "differed from itself" in judgement.headline


NOISE = 0.03  # of each arm's turn, so that a ratio scatters by sqrt(2) times as much


@cache
def repeated(truth: float) -> list[Judgement]:
    """100 small runs of eight blocks; whole answers of the arm take 1 / truth of the time."""
    base = replace(BASE, num_tokens=16, noise=NOISE)
    arm_ = replace(base, name="eagle3", step_s=BASE.step_s / truth, ttft_s=BASE.ttft_s / truth)
    settings = JudgeSettings(margin=0.0, ttft_tolerance=0.5)
    runs = (
        scripted_run([base, arm_], [ONE], num_blocks=8, num_aa=0, num_prompts=2, seed=seed)
        for seed in range(100)
    )
    return [judge(data, settings) for data in runs]


def intervals(judgements: list[Judgement]) -> list[tuple[float, float]]:
    """Of the only cell's ratio; none of them was void."""
    assert Verdict.INVALID not in [judgement.verdict for judgement in judgements]
    points = [judgement.cells[0].speedup.point() for judgement in judgements]
    return [(low, high) for _, low, high in points]


def test_the_same_server_twice_shows_no_difference_in_94_of_100_runs():
    found = intervals(repeated(1.0))

    assert 94 <= sum(low <= 1.0 <= high for low, high in found)
    assert [j.verdict for j in repeated(1.0)].count(Verdict.GO) <= 6


def test_a_planted_5_percent_is_go_with_the_announced_power():
    announced = power(8, NOISE * math.sqrt(2), math.log(1.05))
    found = [judgement.verdict for judgement in repeated(1.05)].count(Verdict.GO) / 100

    assert intervals(repeated(1.05))
    assert 0.7 < announced < 0.9, "neither hopeless nor certain, or nothing would be tested"
    assert pytest.approx(announced, abs=4 * math.sqrt(announced * (1 - announced) / 100)) == found


def test_several_arms_widen_each_interval():
    """Six arms share the baseline: each interval holds at 1 - 0.05 / 6."""
    arms = [arm(1.1, name=name) for name in ("ngram", "draft", "medusa", "mtp", "eagle3", "x")]
    alone = judge(scripted_run([BASE, arm(1.1)], [ONE]))
    together = judge(scripted_run([BASE, *arms], [ONE]))

    levels = [j.cells[0].speedup.to_json()["confidence"] for j in (alone, together)]
    assert pytest.approx([0.95, 1 - 0.05 / 6]) == levels


def test_one_go_among_many_comparisons_must_survive_holm():
    """By itself p = .02 is GO; among ten comparisons it is what chance may bring."""
    loads = [Load(LoadKind.CLOSED, n) for n in range(1, 11)]
    arms = [BASE, arm(1.0, noise=0.02)]
    data = scripted_run(arms, loads, num_blocks=6, num_aa=0, num_prompts=2)
    clean = judge(data)
    lucky = data
    for block in data.blocks:
        if block.load.name == "closed:3" and block.arm == "eagle3":
            gain = 1.05 if block.index % 2 else 1.16

            def faster(record: RequestRecord, index=block.index, gain=gain) -> RequestRecord:
                if record.block != index or record.arm == "off":
                    return record
                chunks = tuple(
                    replace(c, at_s=record.scheduled_s + (c.at_s - record.scheduled_s) / gain)
                    for c in record.chunks
                )
                return replace(record, chunks=chunks)

            lucky = change_requests(lucky, faster)
    judgement = judge(lucky)
    (cell,) = (cell for cell in judgement.cells if cell.load.name == "closed:3")

    assert Verdict.GO not in [cell.verdict for cell in clean.cells]
    assert Verdict.GO is cell.verdict
    assert 0.0025 < cell.p_value < 0.025
    assert Verdict.INCONCLUSIVE is judgement.verdict
    assert judgement.headline.startswith("INCONCLUSIVE: eagle3 is GO at 3 users by itself")
    assert "Holm" in judgement.headline


def test_a_no_go_beside_a_void_cell_is_inconclusive_and_says_which():
    """What might be GO without its fault must not be counted as NO-GO."""
    slow, void = arm(0.8, name="ngram"), arm(1.4, num_tokens=30)
    judgement = judge(scripted_run([BASE, slow, void], [ONE]))

    assert [Verdict.NO_GO, Verdict.INVALID] == [cell.verdict for cell in judgement.cells]
    assert Verdict.INCONCLUSIVE is judgement.verdict
    assert judgement.headline.startswith("INCONCLUSIVE: what can be judged")
    assert "eagle3 at 1 user is void: " in judgement.headline


def test_an_open_loop_is_judged_by_what_a_user_sees():
    judgement = judge(scripted_run([BASE, arm(1.4)], [Load(LoadKind.POISSON, 0.5)]))

    assert "output tokens/s per user" in judgement.headline
    assert Verdict.GO is judgement.verdict


def test_a_run_without_a_comparison_is_refused():
    data = scripted_run([BASE, arm(1.4)], [ONE], num_blocks=2)
    half = RunData(data.run, tuple(b for b in data.blocks if b.arm == "off"), data.requests)

    with pytest.raises(RecordError, match="no block in which the baseline and another arm"):
        judge(half)


def test_blocks_that_one_arm_lacks_are_left_out():
    data = scripted_run([BASE, arm(1.4)], [ONE], num_blocks=7)
    cut = tuple(b for b in data.blocks if not (b.index == 6 and b.arm == "eagle3"))

    assert [0, 1, 2, 3, 4, 5] == list(judge(replace(data, blocks=cut)).cells[0].logs)


def test_thresholds_are_those_kept_with_the_run():
    data = scripted_run([BASE, arm(1.4)], [ONE], settings={"judging": {"margin": 0.6}})
    limits = {"slo_ttft_ms": 200.0, "slo_tpot_ms": None}
    other = scripted_run([BASE, arm(1.4)], [ONE], settings={"judging": limits})

    assert Verdict.NO_GO is judge(data).verdict
    assert ServiceLevel(ttft_s=0.2) == JudgeSettings.from_run(other.run).level


@pytest.mark.parametrize(("planned", "num_remarks"), [(8, 0), (12, 1)])
def test_a_verdict_before_the_runs_end_says_that_it_is_one(planned: int, num_remarks: int):
    settings = {"num_blocks": planned}
    told = judge(scripted_run([BASE, arm(1.4)], [ONE], num_blocks=8, settings=settings))

    assert Verdict.GO is told.verdict
    assert num_remarks == len(told.remarks)
    assert all("not complete: blocks measured are 8 of 12 at 1 user" in r for r in told.remarks)


@pytest.mark.parametrize(
    ("judging", "message"),
    [
        ({"margin": 3.0}, r"margin: 3.0 is outside \[0, 1\)"),
        ({"confidence": 0.2}, r"confidence: 0.2 is outside"),
        ({"min_blocks": 3}, "min_blocks: 3 is below 6"),
        ({"slo": 1}, "judging: slo is not one of"),
        ({"margin": "much"}, "judging: margin: 'much' is not a number"),
        ({"slo_ttft_ms": "200"}, "judging: slo_ttft_ms: '200' is not a number"),
        (["margin"], "judging: .* is not an object of thresholds by name"),
    ],
)
def test_thresholds_that_cannot_be_are_refused(judging, message):
    data = scripted_run([BASE, arm(1.4)], [ONE], num_blocks=1, settings={"judging": judging})

    with pytest.raises(ParameterError, match=message):
        JudgeSettings.from_run(data.run)
