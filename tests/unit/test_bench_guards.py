"""Every planted fault is found, by name; a clean run has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.bench.arm_guards import ARM_GUARDS
from outrider.bench.findings import Finding, Severity, Sides
from outrider.bench.guards import ends_in_loop
from outrider.bench.metrics import block_metrics
from outrider.bench.output_guards import OUTPUT_GUARDS, sameness
from outrider.bench.records import (
    BlockKind,
    ClientProof,
    Load,
    LoadKind,
    Losslessness,
    MetricsSnapshot,
    RequestRecord,
    RunData,
    SpeculativeCounts,
)
from outrider.bench.timing_guards import TIMING_GUARDS
from tests.scripted import (
    ScriptedArm,
    answer_text,
    change_blocks,
    change_requests,
    counters,
    scripted_run,
)

BASE = ScriptedArm("off", 0.010)
FAST = ScriptedArm("eagle3", 0.012, tokens_per_step=2)
USERS_4 = Load(LoadKind.CLOSED, 4)
SOUND_CLIENT = ClientProof(4, 1000, 0.0001, 0.0005, 50_000.0, is_sound=True)


def sides(data: RunData) -> Sides:
    baseline, arm = data.run.arms
    kept = [block for block in data.blocks if block.kind is BlockKind.MEASURE]
    left, right = (
        tuple(block_metrics(b, data.requests_of(b)) for b in kept if b.arm == name)
        for name in (baseline.name, arm.name)
    )
    return Sides(data.run, data.run.loads[0], baseline, arm, left, right)


def found(data: RunData) -> list[Finding]:
    guards = (*OUTPUT_GUARDS, *TIMING_GUARDS, *ARM_GUARDS)
    return [finding for guard in guards for finding in guard(sides(data))]


def voids(data: RunData) -> set[str]:
    return {finding.guard for finding in found(data) if finding.severity is Severity.VOID}


def warnings(data: RunData) -> set[str]:
    return {finding.guard for finding in found(data) if finding.severity is Severity.WARNING}


def run(base: ScriptedArm = BASE, arm: ScriptedArm = FAST, load: Load = USERS_4, **more) -> RunData:
    data = scripted_run([base, arm], [load], num_prompts=12, **more)
    return replace(data, run=replace(data.run, client=SOUND_CLIENT))


def test_a_clean_run_has_no_finding():
    assert [] == found(run())


def looping(prompt: str, num_tokens: int) -> str:
    return answer_text(prompt, 6) + " and so on" * num_tokens


def test_an_arm_that_loops_is_void():
    data = run(arm=replace(FAST, text=looping, losslessness=Losslessness.NOT_AUDITED))

    assert "loops" in voids(data)


def test_a_loop_in_both_arms_alike_is_told_and_voids_only_above_one_half():
    def some(prompt: str, num_tokens: int) -> str:
        is_looping = int(prompt[1:]) % 5 == 0
        return (looping if is_looping else answer_text)(prompt, num_tokens)

    everywhere = run(replace(BASE, text=looping), replace(FAST, text=looping))

    assert {"loops"} == voids(everywhere)
    assert {"loops"} == warnings(run(replace(BASE, text=some), replace(FAST, text=some)))


@pytest.mark.parametrize(
    "text",
    ["so it goes. " * 12, "a" * 300, "你好" * 40, "- the same line\n" * 10, "x = 1\n" * 20 + "x ="],
)
def test_loops_are_seen_in_texts_of_any_kind(text: str):
    assert ends_in_loop(f"First something else was said. {text}")


def test_a_numbered_list_and_prose_are_no_loops():
    assert not ends_in_loop("\n".join(f"{k}. {answer_text(str(k), 4)}" for k in range(20)))
    assert not ends_in_loop(answer_text("p", 200))


def test_an_arm_that_stops_early_is_void():
    assert "lengths" in voids(run(arm=replace(FAST, num_tokens=30)))


def test_answers_too_short_for_a_rate_are_void():
    assert "lengths" in voids(run(replace(BASE, num_tokens=8), replace(FAST, num_tokens=8)))


def bundled(record: RequestRecord, size: int) -> RequestRecord:
    """Chunks sent in groups of ``size``, when the last of the group is there."""
    groups = [record.chunks[i : i + size] for i in range(0, len(record.chunks), size)]
    chunks = tuple(
        replace(
            group[-1],
            num_tokens=sum(chunk.num_tokens or 0 for chunk in group),
            num_chars=sum(chunk.num_chars for chunk in group),
        )
        for group in groups
    )
    return replace(record, chunks=chunks)


def test_chunks_that_bundle_the_tokens_of_plain_decoding_are_void():
    data = change_requests(run(), lambda record: bundled(record, 8), arm="off")

    assert {"bundling"} == voids(data)


def test_a_whole_answer_in_one_chunk_is_void():
    data = change_requests(run(), lambda record: bundled(record, 100), arm="eagle3")

    assert "bundling" in voids(data)


def test_chunks_that_do_not_say_what_they_hold_are_told():
    def silent(record: RequestRecord) -> RequestRecord:
        chunks = tuple(replace(chunk, num_tokens=None) for chunk in record.chunks)
        return replace(record, chunks=chunks)

    assert ({"bundling"}, set()) == (
        warnings(change_requests(run(), silent, arm="eagle3")),
        voids(change_requests(run(), silent, arm="eagle3")),
    )


def lie(factor: float) -> Callable[[RequestRecord], RequestRecord]:
    def change(record: RequestRecord) -> RequestRecord:
        return replace(record, completion_tokens=round(factor * (record.completion_tokens or 0)))

    return change


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.5])
def test_usage_that_disagrees_with_chunks_is_void(factor: float):
    assert "usage" in voids(change_requests(run(), lie(factor), arm="eagle3"))


def test_an_end_token_that_is_in_no_chunk_is_no_disagreement():
    data = change_requests(
        run(), lambda r: replace(r, completion_tokens=(r.completion_tokens or 0) + 1)
    )
    sampling = replace(data.run.sampling, max_tokens=64)

    assert set() == voids(replace(data, run=replace(data.run, sampling=sampling)))


def test_usage_that_lies_where_chunks_are_silent_shows_in_characters_per_token():
    def silent_lie(record: RequestRecord) -> RequestRecord:
        chunks = tuple(replace(chunk, num_tokens=None) for chunk in record.chunks)
        return replace(lie(0.75)(record), chunks=chunks)

    data = change_requests(run(), silent_lie, arm="eagle3")

    assert any("characters" in finding.text for finding in found(data))
    assert "usage" in voids(data)


def test_more_tokens_than_were_asked_for_are_void():
    data = run()
    sampling = replace(data.run.sampling, max_tokens=32)

    assert {"usage"} == voids(replace(data, run=replace(data.run, sampling=sampling)))


def test_answers_without_usage_are_failures():
    data = change_requests(run(), lambda r: replace(r, completion_tokens=None), arm="off")

    assert "failures" in voids(data)
    assert any("without usage" in finding.text for finding in found(data))


def test_a_slow_client_is_void():
    data = change_blocks(run(), lambda block: replace(block, client_lag_s=0.4))

    assert {"client"} == voids(data)


def test_a_client_that_failed_its_own_test_or_is_near_its_limit_is_void():
    data = run()
    failed = replace(SOUND_CLIENT, is_sound=False, reason="gaps are off by 40 ms")
    weak = replace(SOUND_CLIENT, max_tokens_per_s=500.0)

    assert {"client"} == voids(replace(data, run=replace(data.run, client=failed)))
    assert {"client"} == voids(replace(data, run=replace(data.run, client=weak)))
    assert {"client"} == warnings(replace(data, run=replace(data.run, client=None)))


def test_a_semaphore_in_a_closed_loop_is_void_and_its_wait_is_in_the_latency():
    """Four users, but two connections: each request is sent half its latency late."""

    def held(record: RequestRecord) -> RequestRecord:
        wait_s = (record.ended_s - record.scheduled_s) / 2
        return replace(record, sent_s=record.scheduled_s + wait_s)

    data = change_requests(run(), held, arm="off")

    assert {"waits"} == voids(data)
    assert any("2.0 requests were in flight instead of 4" in f.text for f in found(data))
    request = sides(data).baseline[0].requests[0]
    assert request.ttft_s is not None
    assert request.ttft_s > 0.04
    assert request.queue_wait_s > 0.2


def test_due_times_that_follow_the_server_are_void():
    """Asked were 10 requests a second; they were due only when the last one had ended."""
    data = run(load=Load(LoadKind.POISSON, 10.0))

    def follows(record: RequestRecord) -> RequestRecord:
        shift = 4 * record.scheduled_s - record.scheduled_s
        chunks = tuple(replace(chunk, at_s=chunk.at_s + shift) for chunk in record.chunks)
        due = record.scheduled_s + shift
        return replace(
            record, scheduled_s=due, sent_s=due, chunks=chunks, ended_s=record.ended_s + shift
        )

    assert set() == voids(data)
    assert {"waits"} == voids(change_requests(data, follows))


def test_different_prompts_per_arm_are_void():
    data = run()
    other = change_requests(data, lambda r: replace(r, prompt_id=r.prompt_id + "x"), arm="eagle3")
    fewer = replace(data, requests=data.requests[1:])
    reworded = change_requests(data, lambda r: replace(r, prompt_hash="beef"), arm="off")

    assert ["prompts" in voids(each) for each in (other, fewer, reworded)] == [True] * 3


def test_prompts_with_other_token_counts_mean_another_model_or_template():
    data = change_requests(run(), lambda r: replace(r, prompt_tokens=31), arm="eagle3")

    assert {"prompts"} == voids(data)


def test_another_model_engine_or_precision_in_an_arm_is_void():
    served = change_requests(run(), lambda r: replace(r, served_model=f"model of {r.arm}"))
    data = run()
    base, arm = data.run.arms
    changed = [replace(arm, engine="vllm"), replace(arm, engine_version="2.0"),
               replace(arm, precision="float32")]  # fmt: skip

    assert {"models"} == voids(served)
    for other in changed:
        assert {"models"} == voids(replace(data, run=replace(data.run, arms=(base, other))))


def test_a_baseline_on_the_same_server_is_void():
    data = run()
    base, arm = data.run.arms
    same = replace(base, url=arm.url)

    assert {"plain baseline"} == voids(replace(data, run=replace(data.run, arms=(same, arm))))


def test_a_baseline_that_drafts_is_void():
    drafts = SpeculativeCounts(drafted=8, accepted=2, steps=4)
    said = change_requests(run(), lambda r: replace(r, speculative=drafts), arm="off")
    counted = change_blocks(
        run(),
        lambda block: replace(
            block, metrics_before=counters(0, 0, 0, 0), metrics_after=counters(1, 10, 40, 8)
        ),
        arm="off",
    )

    assert {"plain baseline"} == voids(said)
    assert {"plain baseline"} == voids(counted)


def test_a_baseline_with_speculation_merely_switched_off_is_void():
    """Its server knows the counters, at zero; our own engine always shows them."""

    def exposed(engine: str) -> RunData:
        data = run(replace(BASE, engine=engine), replace(FAST, engine=engine))
        idle = counters(0, 0, 0, 0)
        return change_blocks(
            data, lambda b: replace(b, metrics_before=idle, metrics_after=idle), arm="off"
        )

    assert {"plain baseline"} == voids(exposed("vllm"))
    assert set() == voids(exposed("outrider"))


def test_arms_of_one_process_are_a_comparison_unless_they_are_one_server():
    """A plain engine beside drafting ones is no engine with its drafting switched off."""
    together = ("off", "eagle3")

    def shared(**more: Any) -> RunData:
        data = run()
        arms = tuple(replace(arm, process=together, **more) for arm in data.run.arms)
        return replace(data, run=replace(data.run, arms=arms))

    drafted = change_blocks(
        shared(),
        lambda block: replace(
            block, metrics_before=counters(0, 0, 0, 0), metrics_after=counters(1, 10, 40, 8)
        ),
        arm="off",
    )

    assert set() == voids(shared())
    assert {"plain baseline"} == voids(shared(url="http://127.0.0.1:1"))
    assert {"plain baseline"} == voids(drafted)


def test_texts_that_differ_void_an_arm_that_claims_to_be_exact_and_warn_of_others():
    def other(prompt: str, num_tokens: int) -> str:
        return answer_text(prompt + "other" if prompt == "p3" else prompt, num_tokens)

    exact = run(arm=replace(FAST, text=other))
    unknown = run(arm=replace(FAST, text=other, losslessness=Losslessness.NOT_AUDITED))

    assert {"texts"} == voids(exact)
    assert ({"texts"}, set()) == (warnings(unknown), voids(unknown))
    assert any("6 of 72 texts" in finding.text for finding in found(exact))


def test_token_ids_are_compared_where_both_arms_tell_them():
    """The same text from other tokens is another answer; one arm's ids alone say nothing."""

    def told(record: RequestRecord) -> RequestRecord:
        is_other = record.arm == "eagle3" and record.prompt_id == "p3"
        return replace(record, token_hash="beef" if is_other else "cafe")

    both = change_requests(run(), told)
    one = change_requests(run(), told, arm="eagle3")

    assert {"texts"} == voids(both)
    assert any("6 of 72 token sequences" in finding.text for finding in found(both))
    assert set() == voids(one)
    assert "66 of 72 token sequences are the baseline's" == sameness(sides(both)).text
    assert "all 72 texts are the baseline's" == sameness(sides(one)).text


def test_texts_sampled_without_a_seed_may_differ():
    data = run(arm=replace(FAST, text=lambda prompt, n: answer_text(prompt + "other", n)))
    sampling = replace(data.run.sampling, temperature=0.8, seed=None)

    assert "texts" not in voids(replace(data, run=replace(data.run, sampling=sampling)))


def test_requests_that_failed_warn_and_void_above_2_percent():
    def failing(*prompt_ids: str) -> RunData:
        def change(record: RequestRecord) -> RequestRecord:
            is_hit = record.prompt_id in prompt_ids and record.block == 0
            return replace(record, error="the stream broke off") if is_hit else record

        return change_requests(run(), change, arm="eagle3")

    assert ({"failures"}, set()) == (warnings(failing("p1")), voids(failing("p1")))
    assert {"failures"} == voids(failing("p1", "p2", "p3"))
    assert any("the stream broke off" in finding.text for finding in found(failing("p1")))


def test_random_prompts_are_void():
    data = run()
    workload = replace(data.run.workload, is_random=True)

    assert {"random prompts"} == voids(replace(data, run=replace(data.run, workload=workload)))


@pytest.mark.parametrize(
    ("base", "arm", "told", "void"),
    [
        (0, 0, set(), set()),
        (80, 80, {"reused prompts"}, set()),
        (80, 60, set(), {"reused prompts"}),
    ],
)
@pytest.mark.parametrize(
    "name", ["vllm:prefix_cache_hits_total", "outrider_prefix_hit_tokens_total"]
)
def test_prompts_from_a_prefix_cache_are_told_and_void_if_the_arms_differ(
    name, base, arm, told, void
):
    """A block has 12 prompts of 20 tokens: 80 are a third."""

    def scraped(block):
        hits = float(base if block.arm == "off" else arm)
        return replace(
            block,
            metrics_before=MetricsSnapshot(0, {name: 7.0}),
            metrics_after=MetricsSnapshot(1, {name: 7.0 + hits}),
        )

    data = change_blocks(run(), scraped)

    assert (told, void) == (warnings(data), voids(data))


def test_another_definition_of_the_acceptance_length_is_told():
    def without_bonus(record: RequestRecord) -> RequestRecord:
        said = record.speculative
        assert said is not None
        assert said.acceptance_length is not None
        return replace(
            record, speculative=replace(said, acceptance_length=said.acceptance_length - 1)
        )

    assert {"acceptance"} == warnings(change_requests(run(), without_bonus, arm="eagle3"))


def test_counters_that_contradict_each_other_are_told():
    data = change_blocks(
        run(),
        lambda b: replace(
            b,
            metrics_before=counters(0, 0, 0, 0, 0, 0),
            metrics_after=counters(1, 100, 300, 150, 60, 30),
        ),
        arm="eagle3",
    )

    assert {"acceptance"} == warnings(data)


def test_a_machine_that_gets_slower_is_told():
    data = run()
    starts = {(block.index, block.position): block.started_s for block in data.blocks}

    def slower(record: RequestRecord) -> RequestRecord:
        start_s, factor = starts[record.block, record.position], 1.0 + 0.05 * record.block
        chunks = tuple(
            replace(c, at_s=start_s + factor * (c.at_s - start_s)) for c in record.chunks
        )
        return replace(record, chunks=chunks)

    assert "drift" in warnings(change_requests(data, slower))


def test_every_finding_says_what_is_allowed_or_what_to_do():
    data = run(arm=replace(FAST, num_tokens=30))

    assert all(len(finding.text) > 40 for finding in found(data))
    assert {"guard", "severity", "text"} == set(found(data)[0].to_json())
