"""A speed-up is never told bare."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outrider.bench.judgement import judge
from outrider.bench.speedup import Speedup, conditions_of, machine_text
from outrider.bench.statistics import RatioInterval
from tests.bench_runs import ONE_USER, run_record
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

    assert "max_draft_len 4" == rows["settings"]
    assert "greedy, at most 48 tokens" == rows["sampling"]
    assert "a test, 2 cores, 3 GiB memory" == rows["machine"]
    assert "exact by self-test (scripted)" == rows["losslessness"]
    assert "6" == rows["blocks"]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({}, "unknown"),
        ({"num_cores": 1}, "1 core"),
        ({"num_cores": 8, "num_usable_cores": 2}, "2 of 8 cores"),
        (
            {
                "processor": "AMD EPYC",
                "num_cores": 2,
                "num_usable_cores": 2,
                "memory_bytes": 25276502016,
                "system": "Linux 6.18",
                "load_average": [0.1, 0.2, 0.3],
            },
            "AMD EPYC, 2 cores, 23.5 GiB memory",
        ),
        (
            {"processor": "Xeon", "gpus": [{"name": "H200"}, {"name": "H200"}, {"name": "T4"}]},
            "Xeon, 2 x H200, T4",
        ),
    ],
)
def test_a_machine_is_said_as_a_person_would(machine, expected: str):
    assert expected == machine_text(machine)


def conditions(url: str, **speculation: object):
    """Those of an arm at this address with these settings."""
    run = run_record("off", "fast")
    arm = replace(run.arms[1], url=url, speculation=speculation)
    return conditions_of(run, arm, ONE_USER, num_blocks=6, prompt_len=None, output_len=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_on_this_machine_has_its_conditions(host: str):
    assert "2 cores" == conditions(f"http://{host}:8000").machine


def test_of_a_server_elsewhere_the_machine_is_not_known():
    told = conditions("http://gpu.example:8000").machine

    assert "that of http://gpu.example:8000, unknown here (client: 2 cores)" == told


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({"method": "eagle3", "head": "my-head"}, "my-head"),
        ({"method": "eagle3", "head": None}, "the eagle3 head that ships for the target"),
        (
            {"method": "mtp", "with_ngram": True},
            "the mtp head that ships for the target, and n-gram",
        ),
        ({"method": "ngram"}, "none; words of prompt and answer that came before"),
        ({}, "as the server named fast was started"),
    ],
)
def test_the_draft_is_named_as_far_as_it_is_known(speculation, expected: str):
    assert expected == conditions("http://127.0.0.1:1", **speculation).draft


def test_switches_are_said_as_yes_and_no_and_the_method_once():
    rows = dict(conditions("http://127.0.0.1:1", method="ngram", adaptive=True, tree=False).rows)

    assert "adaptive yes, tree no" == rows["settings"]
