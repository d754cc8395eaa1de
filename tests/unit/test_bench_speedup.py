"""A speed-up is never told bare."""

from __future__ import annotations

import json

import pytest

from outrider.bench.judgement import judge
from outrider.bench.speedup import Speedup
from outrider.bench.statistics import RatioInterval
from tests.scripted import ScriptedArm, scripted_run


@pytest.fixture(scope="module")
def speedup() -> Speedup:
    arms = [
        ScriptedArm("off", 0.01),
        ScriptedArm("eagle3", 0.012, tokens_per_step=2, speculation={"max_draft_len": 4}),
    ]
    found = judge(scripted_run(arms)).cells[0].speedup
    assert found is not None
    return found


@pytest.mark.parametrize("tell", [str, repr, lambda s: f"{s}", "{}".format])
def test_one_line_has_workload_and_load(speedup: Speedup, tell):
    text = tell(speedup)

    assert "prompts.jsonl (#0123456789ab)" in text
    assert "at 1 user" in text
    assert "eagle3 over off" in text


@pytest.mark.parametrize(
    "bare",
    [lambda s: f"{s:.2f}", float, lambda s: round(s, 2), lambda s: s * 2],
)
def test_a_bare_number_is_a_type_error(speedup: Speedup, bare):
    with pytest.raises(TypeError):
        bare(speedup)


def test_it_cannot_be_built_without_conditions():
    with pytest.raises(TypeError, match="needs its Conditions"):
        Speedup("output tokens/s", None, RatioInterval(1.4, 1.3, 1.5, 6))  # type: ignore[arg-type]


def test_the_short_form_needs_a_caption_with_workload_and_load(speedup: Speedup):
    short = speedup.within("prompts.jsonl (#0123456789ab), at 1 user")

    assert short.startswith("1.")
    assert short.endswith(")")
    for caption in ("", "at 1 user", "prompts.jsonl (#0123456789ab)", "#0123456789ab, 21 users"):
        with pytest.raises(TypeError, match="does not say"):
            speedup.within(caption)


def test_json_carries_every_condition(speedup: Speedup):
    document = json.loads(json.dumps(speedup.to_json()))
    conditions = document["conditions"]

    assert {"target", "draft", "method", "speculation", "sampling", "workload", "prompt_hash",
            "prompt_len", "output_len", "load", "machine", "precision", "engine", "engine_version",
            "num_blocks", "losslessness"} <= conditions.keys()  # fmt: skip
    assert ("closed:1", 6, {"max_draft_len": 4}, 48, 20) == tuple(
        conditions[key] for key in ("load", "num_blocks", "speculation", "output_len", "prompt_len")
    )
    assert {"metric", "ratio", "low", "high"} <= document.keys()


def test_a_table_of_conditions_names_all_of_them(speedup: Speedup):
    rows = dict(speedup.conditions.rows)

    assert "max_draft_len=4" == rows["settings"]
    assert "greedy, at most 48 tokens" == rows["sampling"]
    assert "processor a test, cores 2" == rows["machine"]
    assert "exact by self-test (scripted)" == rows["losslessness"]
    assert "6" == rows["blocks"]
