"""Methods against each other: the simpler one wins a tie."""

from __future__ import annotations

import random
from dataclasses import replace

from outrider.bench.compare import is_tree, simplicity
from outrider.bench.judgement import Judgement, judge
from outrider.bench.records import Load, LoadKind
from tests.scripted import ScriptedArm, scripted_run

ONE = Load(LoadKind.CLOSED, 1)
BASE = ScriptedArm("off", 0.010, noise=0.004)


def arm(name: str, gain: float, **more) -> ScriptedArm:
    return ScriptedArm(
        name, 0.02 / gain * 47 / 48, tokens_per_step=2, ttft_s=0.05 / gain, noise=0.004, **more
    )


def run(*arms: ScriptedArm, loads=(ONE,)) -> Judgement:
    return judge(scripted_run([BASE, *arms], loads))


def test_the_linear_method_wins_a_tie_with_its_tree():
    judgement = run(arm("eagle3", 1.40), arm("eagle3-tree", 1.402))
    (contrast,) = judgement.contrasts

    assert contrast.is_tree_against_linear
    assert contrast.is_tie
    assert ("eagle3", "eagle3") == (contrast.winner.name, judgement.winner.name)
    assert "a tie, so eagle3" in contrast.text


def test_a_tree_that_is_clearly_faster_wins():
    judgement = run(arm("eagle3", 1.3), arm("eagle3-tree", 1.5))

    assert "eagle3-tree" == judgement.winner.name
    assert "eagle3-tree wins" in judgement.contrasts[0].text


def test_a_clearly_slower_tree_is_no_tie():
    contrast = run(arm("eagle3", 1.5), arm("eagle3-tree", 1.3)).contrasts[0]

    assert not contrast.is_tie
    assert "eagle3 wins" in contrast.text


def test_a_contrast_of_arms_whose_other_settings_differ_says_so():
    judgement = run(
        arm("eagle3", 1.3, speculation={"head": "a", "max_draft_len": 4}),
        arm("eagle3-tree", 1.5, speculation={"head": "b", "max_draft_len": 4}),
    )
    alike = run(
        arm("eagle3", 1.3, speculation={"head": "a"}),
        arm("eagle3-tree", 1.5, speculation={"head": "a", "max_total_draft_tokens": 16}),
    )

    assert "their other settings differ" in judgement.contrasts[0].text
    assert alike.contrasts[0].is_matched


def test_n_gram_needs_no_head_and_wins_a_tie_with_any():
    judgement = run(arm("medusa", 1.30), arm("ngram", 1.30), arm("eagle3-tree", 1.301))

    assert "ngram" == judgement.winner.name


def test_the_arm_that_pays_at_more_loads_is_deployed():
    """The tree is faster for one user, but loses at four."""
    loads = [ONE, Load(LoadKind.CLOSED, 4)]

    def heavy(users: int) -> float:
        return 1.0 if users == 1 else 1.6

    judgement = run(arm("eagle3", 1.3), arm("eagle3-tree", 1.5, slowdown=heavy), loads=loads)

    assert "eagle3" == judgement.winner.name
    assert "at 4 users" in judgement.headline


def test_without_go_nothing_is_deployed():
    assert run(arm("eagle3", 0.9)).winner is None


def test_the_order_of_simplicity():
    base = run(arm("eagle3", 1.3)).data.run.arms[1]
    names = ["ngram", "eagle3", "eagle3+ngram", "eagle3-tree", "eagle3-tree+ngram"]
    arms = [replace(base, name=name, method=name) for name in names]

    assert arms == sorted(random.Random(1).sample(arms, 5), key=simplicity)
    assert [False, False, False, True, True] == [is_tree(each) for each in arms]
    assert is_tree(replace(base, speculation={"use_dynamic_tree": True}))
