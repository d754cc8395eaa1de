from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from outrider import cli
from outrider.bench.prompts import Prompt
from outrider.commands import demo, demo_report
from outrider.commands.demo import ALL, REPEATING, REST, DemoSettings, balanced_rounds
from outrider.errors import ParameterError
from tests.fake_llm import FakeLLM

ANSWER = "A long enough answer."  # 21 tokens, 20 after the first


def prompts(per_category: int = 3, categories=("chat", "rewrite", "maths", "answer")):
    return [
        Prompt(id=f"{name}/{index}", category=name, turns=(f"{name} {index}",))
        for name in categories
        for index in range(per_category)
    ]


def run(llm: FakeLLM, given=None, minutes: float = 3.0, **options):
    settings = DemoSettings(minutes=minutes, max_tokens=32)
    return demo.run(llm, given or prompts(), settings, **options)


class StepClock:
    """Advances by a fixed number of seconds at every look."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s = step_s, 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_both_arms_answer_the_same_prompts_in_both_modes():
    llm = FakeLLM([ANSWER])
    result = run(llm)

    assert 24 == len(result.pairs)
    assert {"greedy": 12, "temperature 0.8": 12} == Counter(pair.mode for pair in result.pairs)
    assert all(pair.plain.method == "off" for pair in result.pairs)
    assert all(pair.speculative.method == "ngram" for pair in result.pairs)
    assert result.is_lossless


def test_the_order_of_the_arms_alternates():
    """ABBA within a prompt, and the mirror image in the next one; warm-up is not counted."""
    llm = FakeLLM([ANSWER])
    run(llm, prompts(1, ("chat", "rewrite")), minutes=0.001)

    counted = llm.log[-8:]
    a, b = "plain", "speculative"
    assert [a, b, b, a, b, a, a, b] == counted


def test_sampled_arms_share_a_seed_and_prompts_do_not():
    llm = FakeLLM([ANSWER])
    result = run(llm)

    seeds = [pair.plain.seed for pair in result.pairs if pair.mode != "greedy"]
    assert seeds == [pair.speculative.seed for pair in result.pairs if pair.mode != "greedy"]
    assert len(seeds) == len(set(seeds))
    assert all(pair.plain.seed is None for pair in result.pairs if pair.mode == "greedy")


def test_figures_follow_from_the_scripted_clock():
    """The fake takes 20 ms per plain token and half of that with speculation."""
    rows = {(row.mode, row.group): row for row in run(FakeLLM([ANSWER], speed=2.0)).rows}

    assert 6 == len(rows)
    for (_, group), row in rows.items():
        assert pytest.approx(50.0) == row.plain_rate
        assert pytest.approx(100.0) == row.speculative_rate
        assert row.ratio is not None
        assert pytest.approx(2.0) == row.ratio.ratio
        assert pytest.approx(2.0) == row.acceptance_length
        assert row.num_same == row.num_pairs == (12 if group == ALL else 6)


def test_a_time_budget_takes_whole_rounds_of_every_category():
    """A round is 4 prompts x 4 answers: 0.01 s to the first token, then 0.4 or 0.2 s."""
    round_s = 4 * 2 * (0.41 + 0.21)
    result = run(FakeLLM([ANSWER]), prompts(9), minutes=2.5 * round_s / 60)

    counts = Counter(pair.category for pair in result.pairs)
    assert {"chat": 4, "rewrite": 4, "maths": 4, "answer": 4} == counts
    assert 8 == result.conditions["num_prompts"]
    assert 36 == result.conditions["num_prompts_available"]


def test_a_machine_slower_than_its_warm_up_stops_after_whole_rounds():
    """The clock says one second per look although the answers say they were quick."""
    result = run(FakeLLM([ANSWER]), prompts(9), minutes=2.0 / 60, clock=StepClock(1.0))

    counts = Counter(pair.category for pair in result.pairs)
    assert 1 == len(set(counts.values()))
    assert sum(counts.values()) < 36 * 2


def test_at_least_one_round_is_measured():
    result = run(FakeLLM([ANSWER]), minutes=1e-6)

    assert Counter(pair.category for pair in result.pairs) == dict.fromkeys(
        ("chat", "rewrite", "maths", "answer"), 2
    )


def test_rounds_take_one_prompt_of_each_category_and_mix_the_groups():
    given = [*prompts(3), Prompt(id="code/0", category="code", turns=("x",))]
    rounds = balanced_rounds(given)

    assert 1 == len(rounds)
    assert [
        "rewrite",
        "chat",
        "answer",
        "maths",
        "code",
    ] == [prompt.category for prompt in rounds[0]]


def test_prompts_that_do_not_fit_the_context_are_left_out():
    long = [Prompt(id=f"chat/{i}", category="chat", turns=("x" * 100,)) for i in range(2)]
    short = prompts(2, ("rewrite",))
    result = run(FakeLLM([ANSWER], max_model_len=80), long + short)

    assert {"rewrite"} == {pair.category for pair in result.pairs}
    with pytest.raises(ParameterError, match="too few for every prompt"):
        run(FakeLLM([ANSWER], max_model_len=80), long)


def test_one_token_answers_have_no_rate_and_break_nothing():
    result = run(FakeLLM(["A"]))

    assert all(row.ratio is None and row.plain_rate is None for row in result.rows)
    assert "at an unknown speed when greedy" in demo_report.verdict(result)
    assert json.loads(json.dumps(demo_report.to_json(result)))["rows"][0]["ratio"] is None


def spoiled(result, change):
    """The result with one speculative answer changed."""
    first, *rest = result.pairs
    changed = replace(first, speculative=replace(first.speculative, **change(first.speculative)))
    return replace(result, pairs=(changed, *rest))


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: {"text": answer.text + "!"},
        lambda answer: {"token_ids": (*answer.token_ids[:-1], 7)},
        lambda _: {"finish_reason": "length"},
        lambda _: {"error": "logits were not finite"},
    ],
)
def test_any_difference_is_seen_and_named(capsys, change):
    result = spoiled(run(FakeLLM([ANSWER])), change)
    demo_report.print_result(result)

    out = capsys.readouterr().out
    assert not result.is_lossless
    assert "DIFFERENT TEXTS: rewrite/0 (greedy)" in out
    assert "only 23 of 24 texts" in out
    assert "11/12" in out


def test_the_verdict_does_not_claim_what_the_interval_does_not_show():
    faster = demo_report.verdict(run(FakeLLM([ANSWER], speed=1.5)))
    slower = demo_report.verdict(run(FakeLLM([ANSWER], speed=0.5)))
    one_prompt_each = run(FakeLLM([ANSWER]), prompts(1, ("chat", "rewrite")))

    assert "1.50x as fast when greedy (faster)" in faster
    assert "0.50x as fast at temperature 0.8 (slower)" in slower
    assert "2.00x as fast when greedy (no clear difference)" in demo_report.verdict(one_prompt_each)
    assert "all 24 texts were the same" in faster


def test_progress_runs_from_the_first_pair_to_the_last():
    seen = []
    run(FakeLLM([ANSWER]), on_progress=seen.append)

    assert [progress.num_done for progress in seen] == list(range(0, 25, 2))
    assert all(progress.num_pairs == 24 for progress in seen)
    assert [progress.left_s for progress in seen] == sorted(
        (progress.left_s for progress in seen), reverse=True
    )
    assert seen[-1].next_prompt is None
    assert "plain 50.0 · n-gram 100.0 tok/s · done" in demo_report.progress_line(seen[-1])


def test_without_a_terminal_progress_is_plain_lines_on_stderr(capsys):
    with demo_report.Display() as display:
        run(FakeLLM([ANSWER]), on_progress=display)

    captured = capsys.readouterr()
    assert "" == captured.out
    assert 14 == captured.err.count("\n")
    assert "\x1b" not in captured.err


def test_the_command_prints_table_conditions_and_verdict(monkeypatch, capsys):
    monkeypatch.setattr(cli, "open_llm", lambda *_, **__: FakeLLM([ANSWER]))

    assert 0 == cli.main(["demo", "--minutes", "0.1"])
    out = capsys.readouterr().out
    for group in (REPEATING, REST, ALL):
        assert group in out
    assert "exactness L2" in out
    assert "peak memory" in out
    assert "2.00x as fast when greedy (faster)" in out


def test_the_command_exits_with_1_when_a_text_differs(monkeypatch, capsys):
    class Liar(FakeLLM):
        def with_speculation(self, speculation):
            return FakeLLM(["Another answer."], speculation, tokenizer=self.tokenizer)

    monkeypatch.setattr(cli, "open_llm", lambda *_, **__: Liar([ANSWER]))

    assert 1 == cli.main(["demo", "--minutes", "0.1", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert 1 == document["schema_version"]
    assert document["is_lossless"] is False
    assert all(not pair["is_same"] for pair in document["pairs"])


def test_bundled_categories_include_every_one_that_repeats_its_input():
    from outrider.bench.prompts import load_prompts

    assert {prompt.category for prompt in load_prompts()} >= demo.REPEATING_CATEGORIES


@pytest.mark.parametrize("bad", [{"minutes": 0.0}, {"minutes": float("nan")}, {"max_tokens": 1}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ParameterError, match="is outside"):
        DemoSettings(**bad)
