from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from outrider import cli
from outrider.bench.prompts import Prompt
from outrider.commands import demo, demo_report
from outrider.commands.demo import DemoSettings, affordable_rounds, arm_order, balanced_rounds
from outrider.commands.demo_arms import open_arms
from outrider.commands.demo_figures import ALL, REPEATING, REPEATING_CATEGORIES, REST
from outrider.config import Method, SpeculationConfig
from outrider.errors import ParameterError
from tests.fake_llm import FakeLLM

ANSWER = "A long enough answer."  # 21 tokens, 20 after the first


def prompts(per_category: int = 3, categories=("chat", "rewrite", "maths", "answer")):
    return [
        Prompt(id=f"{name}/{index}", category=name, turns=(f"{name} {index}",))
        for name in categories
        for index in range(per_category)
    ]


HEADS = {Method.MTP: "mtp-dir", Method.EAGLE3: "eagle3-dir"}


def run(llm: FakeLLM, given=None, minutes: float = 3.0, heads=None, **options):
    """n-gram, and the best shape of the heads, against plain decoding."""
    settings = DemoSettings(minutes=minutes, max_tokens=32)
    arms = open_arms(llm, [], heads or {})
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    return demo.run(plain, arms, given or prompts(), settings, **options)


class StepClock:
    """Advances by a fixed number of seconds at every look."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now_s = step_s, 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_plain_and_ngram_answer_the_same_prompts_in_both_modes():
    llm = FakeLLM([ANSWER])
    result = run(llm)

    assert 24 == len(result.pairs)
    assert {"greedy": 12, "temperature 0.8": 12} == Counter(pair.mode for pair in result.pairs)
    assert all(pair.plain.method == "off" for pair in result.pairs)
    assert all(pair.speculative.method == "ngram" for pair in result.pairs)
    assert result.is_lossless


def test_every_method_answers_every_prompt_and_is_compared_with_the_same_plain_answer():
    result = run(FakeLLM([ANSWER]), heads=HEADS)

    methods = ["ngram", "mtp-tree", "eagle3-tree+ngram"]
    assert methods == result.methods
    assert dict.fromkeys(methods, 24) == Counter(pair.method for pair in result.pairs)
    asked = {
        method: [(pair.prompt_id, pair.mode) for pair in result.pairs if pair.method == method]
        for method in methods
    }
    assert asked["ngram"] == asked["mtp-tree"] == asked["eagle3-tree+ngram"]
    assert 24 == len({id(pair.plain) for pair in result.pairs})


def test_the_order_of_two_arms_alternates():
    """ABBA within a prompt, and the mirror image in the next one; warm-up is not counted."""
    llm = FakeLLM([ANSWER])
    run(llm, prompts(1, ("chat", "rewrite")), minutes=0.001)

    counted = llm.log[-8:]
    a, b = "off", "ngram"
    assert [a, b, b, a, b, a, a, b] == counted


def test_a_category_does_not_have_the_same_order_in_every_round():
    llm = FakeLLM([ANSWER])
    run(llm, prompts(2, ("chat", "rewrite")))

    first_of_prompts = llm.log[-16::4]
    assert ["off", "ngram", "ngram", "off"] == first_of_prompts


@pytest.mark.parametrize("num_arms", [2, 3, 6])
def test_no_arm_has_a_better_place_than_another(num_arms):
    orders = [
        arm_order(num_arms, turn, is_mirrored=is_mirrored)
        for turn in range(num_arms)
        for is_mirrored in (False, True)
    ]
    places = Counter((arm, order.index(arm)) for order in orders for arm in range(num_arms))
    before = Counter(
        (order[i], order[j]) for order in orders for i in range(num_arms) for j in range(i)
    )

    assert {2} == set(places.values())
    assert num_arms**2 == len(places)
    assert {num_arms} == set(before.values())


def test_a_whole_prompt_is_answered_by_all_arms_before_the_next():
    llm = FakeLLM([ANSWER])
    run(llm, heads=HEADS, minutes=0.001)

    arms = {"off", "ngram", "mtp", "eagle3"}
    turns = [llm.log[start : start + 4] for start in range(0, len(llm.log), 4)]
    assert all(arms == set(turn) for turn in turns)
    assert {"off", "ngram", "mtp", "eagle3"} == {turn[0] for turn in turns}


def test_sampled_arms_share_a_seed_and_prompts_do_not():
    llm = FakeLLM([ANSWER])
    result = run(llm)

    seeds = [pair.plain.seed for pair in result.pairs if pair.mode != "greedy"]
    assert seeds == [pair.speculative.seed for pair in result.pairs if pair.mode != "greedy"]
    assert len(seeds) == len(set(seeds))
    assert all(pair.plain.seed is None for pair in result.pairs if pair.mode == "greedy")


def test_figures_follow_from_the_scripted_clock():
    """The fake takes 20 ms per plain token and half of that with speculation."""
    result = run(FakeLLM([ANSWER], speed=2.0))
    rows = {(row.mode, row.group): row for row in result.rows}

    assert 6 == len(rows)
    for (_, group), row in rows.items():
        assert pytest.approx(50.0) == row.plain_rate
        assert pytest.approx(100.0) == row.speculative_rate
        assert row.ratio is not None
        assert pytest.approx(2.0) == row.ratio.ratio
        assert pytest.approx(2.0) == row.acceptance_length
        assert row.num_same == row.num_pairs == (12 if group == ALL else 6)


def test_each_method_has_figures_of_its_own():
    speeds = {Method.MTP: 1.25, Method.EAGLE3: 3.0}
    result = run(FakeLLM([ANSWER], speed=0.5, speeds=speeds), heads=HEADS)

    expected = {"ngram": 0.5, "mtp-tree": 1.25, "eagle3-tree+ngram": 3.0}
    assert 2 * 3 * 3 == len(result.rows)
    for row in result.rows:
        assert row.ratio is not None
        assert pytest.approx(expected[row.method]) == row.ratio.ratio
        assert pytest.approx(50.0 * expected[row.method]) == row.speculative_rate
        assert pytest.approx(50.0) == row.plain_rate
    for row in result.categories:
        assert row.ratio is not None
        assert pytest.approx(expected[row.method]) == row.ratio.ratio


def test_a_category_counts_each_prompt_once_and_a_group_comes_before_its_own():
    result = run(FakeLLM([ANSWER]))
    found = [(row.category, row.is_group, row.num_prompts) for row in result.categories]

    assert [
        (REPEATING, True, 6),
        ("rewrite", False, 3),
        ("answer", False, 3),
        (REST, True, 6),
        ("chat", False, 3),
        ("maths", False, 3),
    ] == found
    assert {3, 6} == {row.ratio.num_pairs for row in result.categories if row.ratio}


def test_a_prompts_ratio_is_the_geometric_mean_over_its_modes():
    result = run(FakeLLM([ANSWER]), prompts(2, ("chat", "rewrite")))
    faster = [
        with_decode_s(pair, 0.1) if pair.mode == "greedy" and pair.category == "chat" else pair
        for pair in result.pairs
    ]
    chat = next(
        row for row in replace(result, pairs=tuple(faster)).categories if row.category == "chat"
    )

    assert chat.ratio is not None
    assert pytest.approx((4.0 * 2.0) ** 0.5) == chat.ratio.ratio


def test_one_prompt_of_a_category_gives_a_dash():
    result = run(FakeLLM([ANSWER]), prompts(1))
    ratios = {row.category: row.ratio for row in result.categories}

    assert ratios["chat"] is None
    assert ratios["rewrite"] is None
    assert ratios[REST] is not None
    assert ratios[REPEATING] is not None


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


@pytest.mark.parametrize(("planned_s", "lengths"), [(25.0, [8, 8]), (7.5, [6]), (0.1, [4])])
def test_little_time_takes_part_of_a_round_and_both_groups(planned_s, lengths):
    names = ("chat", "rewrite", "maths", "answer", "code", "summarize", "translate", "code-edit")
    taken = affordable_rounds(balanced_rounds(prompts(3, names)), 1.25, planned_s)

    assert lengths == [len(one_round) for one_round in taken]
    for one_round in taken:
        repeating = [prompt.category in REPEATING_CATEGORIES for prompt in one_round]
        assert len(one_round) == 2 * sum(repeating)


def test_more_methods_take_fewer_prompts_in_the_same_time_and_all_arms_the_same():
    given, minutes = prompts(9), 16.1 * 2 * (0.41 + 0.21) / 60
    alone = run(FakeLLM([ANSWER]), given, minutes)
    together = run(FakeLLM([ANSWER]), given, minutes, heads=HEADS)

    assert 16 == alone.conditions["num_prompts"]
    assert 8 == together.conditions["num_prompts"]
    assert {16} == set(Counter(pair.method for pair in together.pairs).values())


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
    assert all(row.ratio is None for row in result.categories)
    assert "ngram ran at an unknown speed when greedy" in demo_report.verdict(result)
    assert json.loads(json.dumps(demo_report.to_json(result)))["rows"][0]["ratio"] is None


def with_decode_s(pair, decode_s: float):
    """The pair with another time for its speculative answer."""
    answer = pair.speculative
    return replace(
        pair, speculative=replace(answer, timing=replace(answer.timing, decode_s=decode_s))
    )


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
    assert "DIFFERENT TEXTS: rewrite/0 (ngram, greedy)" in out
    assert "only 23 of 24 texts" in out
    assert "11/12" in out


def test_the_verdict_does_not_claim_what_the_interval_does_not_show():
    faster = demo_report.verdict(run(FakeLLM([ANSWER], speed=1.5)))
    slower = demo_report.verdict(run(FakeLLM([ANSWER], speed=0.5)))
    one_prompt = run(FakeLLM([ANSWER]), prompts(1, ("chat",)))

    assert "ngram ran 1.50x as fast when greedy (faster)" in faster
    assert "0.50x as fast at temperature 0.8 (slower)" in slower
    assert "2.00x as fast when greedy (no clear difference)" in demo_report.verdict(one_prompt)
    assert "all 24 texts were the same" in faster


def test_the_verdict_names_every_method():
    speeds = {Method.MTP: 1.25, Method.EAGLE3: 3.0}
    verdict = demo_report.verdict(run(FakeLLM([ANSWER], speeds=speeds), heads=HEADS))

    assert "ngram ran 2.00x as fast when greedy (faster) and 2.00x" in verdict
    assert "mtp-tree ran 1.25x as fast when greedy" in verdict
    assert "eagle3-tree+ngram ran 3.00x as fast when greedy" in verdict
    assert "all 72 texts were the same" in verdict


def test_progress_runs_from_the_first_pair_to_the_last():
    seen = []
    run(FakeLLM([ANSWER]), on_progress=seen.append)

    assert [progress.num_done for progress in seen] == list(range(0, 25, 2))
    assert all(progress.num_pairs == 24 for progress in seen)
    assert [progress.left_s for progress in seen] == sorted(
        (progress.left_s for progress in seen), reverse=True
    )
    assert seen[-1].next_prompt is None
    assert "24/24 · done · tok/s: plain 50.0, ngram 100.0" == demo_report.progress_line(seen[-1])


def test_the_time_left_counts_every_arm_once():
    """At the first look 12 prompts are left, of which 2 answers by each of 4 arms are to come."""
    seen = []
    run(FakeLLM([ANSWER]), heads=HEADS, on_progress=seen.append)

    assert pytest.approx([n * 2 * (0.41 + 3 * 0.21) for n in range(12, -1, -1)]) == [
        progress.left_s for progress in seen
    ]


def test_without_a_terminal_progress_is_plain_lines_on_stderr(capsys):
    with demo_report.Display() as display:
        run(FakeLLM([ANSWER]), on_progress=display)

    captured = capsys.readouterr()
    assert "" == captured.out
    assert 14 == captured.err.count("\n")
    assert "\x1b" not in captured.err


@pytest.fixture
def opened(monkeypatch) -> FakeLLM:
    """What the command opens; its log tells which methods answered."""
    llm = FakeLLM([ANSWER], SpeculationConfig(method=Method.OFF))
    monkeypatch.setattr(cli, "open_llm", lambda *_, **__: llm)
    return llm


def test_the_command_prints_tables_conditions_and_verdict(opened, capsys):
    assert 0 == cli.main(["demo", "--minutes", "0.5"])
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    for group in (REPEATING, REST):
        assert group in out
    for title in ("greedy, 24 prompts", "temperature 0.8, 24 prompts"):
        assert title in out
    assert 2 == lines.count(["plain", "50.0"])
    assert 2 == lines.count(["ngram", "100.0", "2.00", "(2.00-2.00)", "2.00", "24/24"])
    assert ["code-edit", "3", "2.00"] in lines
    assert "ngram: chain of 8 tokens" in out
    assert "exactness L2" in out
    assert "peak memory" in out
    assert "2.00x as fast when greedy (faster)" in out


def test_the_command_measures_the_heads_it_is_given(opened, capsys):
    heads = ["--head", "eagle3=somewhere", "--head", "medusa=elsewhere"]

    assert 0 == cli.main(["demo", "--minutes", "0.5", "--json", *heads])
    document = json.loads(capsys.readouterr().out)
    speculation = document["conditions"]["speculation"]
    assert ["ngram", "medusa-tree", "eagle3-tree+ngram"] == list(speculation)
    assert "somewhere" == speculation["eagle3-tree+ngram"]["head"]
    assert set(speculation) == {row["method"] for row in document["rows"]}
    assert set(speculation) == {row["method"] for row in document["categories"]}
    assert set(speculation) == {pair["method"] for pair in document["pairs"]}


def test_the_command_measures_the_methods_it_is_given(opened, capsys):
    asked = ["--methods", "off,eagle3-tree,eagle3", "--head", "eagle3=somewhere"]

    assert 0 == cli.main(["demo", "--minutes", "0.1", *asked])
    out = capsys.readouterr().out
    assert {"off", "eagle3"} == set(opened.log)
    assert "eagle3-tree: tree of 16 tokens, 5 deep (head somewhere) · eagle3: chain of 5" in out
    assert "ngram" not in out


@pytest.mark.parametrize(("arguments", "expected"), [([], 3.0), (["--head", "mtp=somewhere"], 5.0)])
def test_several_methods_get_more_time(opened, monkeypatch, arguments, expected):
    settings = []

    def run_briefly(llm, arms, given, asked, **_):
        settings.append(asked)
        return measure(llm, arms, given, replace(asked, minutes=0.01))

    measure = demo.run
    monkeypatch.setattr(demo, "run", run_briefly)

    assert 0 == cli.main(["demo", *arguments])
    assert [expected] == [asked.minutes for asked in settings]


def test_what_the_check_of_a_head_found_is_told(opened, capsys):
    opened.warnings = ("accepts less than recorded",)

    assert 0 == cli.main(["demo", "--minutes", "0.1", "--head", "mtp=somewhere"])
    assert "warning: mtp-tree: accepts less than recorded" in capsys.readouterr().err


def test_the_command_exits_with_1_when_one_methods_text_differs(monkeypatch, capsys):
    class Liar(FakeLLM):
        def with_speculation(self, speculation):
            other = super().with_speculation(speculation)
            return replace(other, answers=["Other."]) if speculation.with_ngram else other

    llm = Liar([ANSWER], SpeculationConfig(method=Method.OFF))
    monkeypatch.setattr(cli, "open_llm", lambda *_, **__: llm)

    assert 1 == cli.main(["demo", "--minutes", "0.1", "--json", "--head", "eagle3=somewhere"])
    document = json.loads(capsys.readouterr().out)
    assert 2 == document["schema_version"]
    assert document["is_lossless"] is False
    assert {"ngram": True, "eagle3-tree+ngram": False} == {
        pair["method"]: pair["is_same"] for pair in document["pairs"]
    }


def test_bundled_categories_include_every_one_that_repeats_its_input():
    from outrider.bench.prompts import load_prompts

    assert {prompt.category for prompt in load_prompts()} >= REPEATING_CATEGORIES


@pytest.mark.parametrize("bad", [{"minutes": 0.0}, {"minutes": float("nan")}, {"max_tokens": 1}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ParameterError, match="is outside"):
        DemoSettings(**bad)
