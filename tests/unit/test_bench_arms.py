from __future__ import annotations

import sys
from typing import Any

import pytest

from outrider.bench.arms import (
    PORT,
    ArmSpec,
    EngineFlags,
    engine_arms,
    given_arms,
    port_of,
    without_secrets,
)
from outrider.bench.records import Load, LoadKind
from outrider.bench.workloads import Question
from outrider.commands import bench_options
from outrider.commands.bench_options import ArmOptions, LoadOptions, WorkloadOptions
from outrider.commands.options import EngineOptions, SpeculationOptions
from outrider.commands.serve_options import Other
from outrider.commands.survey import Survey
from outrider.errors import ParameterError, UsageError

FLAGS = EngineFlags(model="m", threads=2)


def test_our_engine_has_an_arm_per_method_and_plain_decoding_first():
    arms = engine_arms(["ngram", "eagle3-tree", "off"], FLAGS, max_batch_size=4)

    assert ["off", "ngram", "eagle3-tree"] == [arm.name for arm in arms]
    assert [True, False, False] == [arm.is_baseline for arm in arms]
    assert {} == arms[0].speculation
    assert 16 == arms[2].speculation["max_total_draft_tokens"]


def test_one_process_serves_all_arms_of_our_engine_plain_decoding_without_a_drafter():
    flags = EngineFlags(model="m", dtype="float32", max_model_len=512, heads={"eagle3": "h"})
    arms = engine_arms(["eagle3-tree+ngram", "ngram"], flags, max_batch_size=4)
    expected = (
        f"{sys.executable} -m outrider.cli serve --port {PORT} --model m --max-batch-size 4 "
        "--no-prefix-cache --dtype float32 --max-model-len 512 --method off "
        f"--also {port_of('eagle3-tree+ngram')}=eagle3-tree+ngram=h --also {port_of('ngram')}=ngram"
    )

    assert {tuple(expected.split())} == {arm.command for arm in arms}
    assert {("off", "eagle3-tree+ngram", "ngram")} == {arm.process for arm in arms}
    assert {arm.served_with for arm in arms} == {arm.process for arm in arms}


def test_what_also_serves_is_what_the_method_alone_would():
    """One shape behind a name, whichever way a server is told of it."""
    (_, tree) = engine_arms(["eagle3-tree+ngram"], EngineFlags(model="m"), max_batch_size=4)
    (_, apart) = engine_arms(
        ["eagle3-tree+ngram"], EngineFlags(model="m"), max_batch_size=4, are_apart=True
    )
    command = list(apart.command or ())
    alone = SpeculationOptions(
        method="eagle3",
        tree="--tree" in command,
        with_ngram="--with-ngram" in command,
        max_draft_len=int(command[command.index("--max-draft-len") + 1]),
        dynamic_tree_max_topk=int(command[command.index("--dynamic-tree-max-topk") + 1]),
        max_total_draft_tokens=int(command[command.index("--max-total-draft-tokens") + 1]),
    ).config()

    assert Other.parse("8001=eagle3-tree+ngram").speculation == alone
    assert tree.speculation == apart.speculation


def test_apart_a_command_says_everything_in_which_arms_differ():
    off, tree = (
        arm.command or ()
        for arm in engine_arms(
            ["eagle3-tree+ngram"],
            EngineFlags(model="m", dtype="float32", max_model_len=512, heads={"eagle3": "h"}),
            max_batch_size=4,
            are_apart=True,
        )
    )
    shared = (
        f"{sys.executable} -m outrider.cli serve --port {PORT} --model m --max-batch-size 4 "
        "--no-prefix-cache --dtype float32 --max-model-len 512"
    ).split()

    assert (*shared, "--method", "off") == off
    drafting = (
        "--method eagle3 --max-draft-len 5 --head h --tree --dynamic-tree-max-topk 4 "
        "--max-total-draft-tokens 16 --with-ngram"
    )
    assert (*shared, *drafting.split()) == tree


@pytest.mark.parametrize(
    ("methods", "heads", "expected"),
    [
        (["off"], {}, "leaves nothing to compare with plain decoding"),
        (["warp"], {}, "--methods: 'warp' is not one of"),
        (["ngram", "ngram"], {}, "'ngram' is there twice"),
        (["ngram"], {"mtp": "d"}, "--head: mtp=d is used by none of --methods"),
    ],
)
def test_methods_that_are_no_comparison_are_refused(methods, heads, expected):
    with pytest.raises(ParameterError, match=expected):
        engine_arms(methods, EngineFlags(model="m", heads=heads), 1)


def test_servers_are_given_by_address_or_command():
    arms = given_arms(
        ["spec=http://127.0.0.1:8001/v1/"], [f"off=vllm serve 'my model' --port {PORT}"]
    )

    assert [("off", True), ("spec", False)] == [(arm.name, arm.is_baseline) for arm in arms]
    assert ("vllm", "serve", "my model", "--port", PORT) == arms[0].command
    assert "http://127.0.0.1:8001" == arms[1].url


@pytest.mark.parametrize(
    ("targets", "commands", "expected"),
    [
        (["http://127.0.0.1:8000"], [], "is not NAME=..., such as off=http"),
        (["off=127.0.0.1:8000"], [], "is no http address"),
        (["off=http://h:x"], [], "is no http address"),
        ([], ["off=vllm serve m"], "has no {port}"),
        ([], ["off='vllm {port}"], "is no command line"),
        (["a=http://h:1", "a=http://h:2"], [], "'a' is there twice"),
        (["a=http://h:1", "b=http://h:2"], [], "no baseline among a, b"),
        (["off=http://h:1"], [], "'off' is alone"),
        (["off=http://h:1", "b=http://h:1/v1"], [], "http://h:1 is given for two arms"),
    ],
)
def test_servers_that_are_no_comparison_are_refused(targets, commands, expected):
    with pytest.raises(ParameterError) as caught:
        given_arms(targets, commands)

    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm serve m --api-key s3cret --port {port}", "vllm serve m --api-key *** --port {port}"),
        ("env HF_TOKEN=s3cret srv --api_key=s3cret", "env HF_TOKEN=*** srv --api_key=***"),
        (
            "srv --max-num-batched-tokens 9 --token s3cret",
            "srv --max-num-batched-tokens 9 --token ***",
        ),
    ],
)
def test_keys_in_a_command_are_not_kept(line: str, expected: str):
    shown = " ".join(without_secrets(line.split()))

    assert expected == shown
    (arm, _) = given_arms(["a=http://h:1"], [f"off={line} {PORT}"])
    assert "s3cret" not in str(arm.to_json())
    assert "s3cret" in str(arm.command), "the server itself needs it"


def test_another_name_can_be_the_baseline():
    arms = given_arms(["spec=http://h:1", "plain=http://h:2"], [], baseline="plain")

    assert ["plain", "spec"] == [arm.name for arm in arms]


# --- the flags


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """What the model is asked for before a run; it has n-gram, and a longest prompt of 100."""
    questions: list[Any] = []

    def answer(*question: Any) -> Survey:
        questions.append(question)
        return Survey(["off", "ngram"], 100, 8192)

    monkeypatch.setattr(bench_options, "survey", answer)
    return questions


def specs(
    options: ArmOptions, loads=(), engine=None, max_tokens: int = 26, **more
) -> list[ArmSpec]:
    questions = [Question("q", "chat", (("user", "Why?"), ("assistant", "So.")))]
    engine = engine or EngineOptions()
    return list(options.specs(engine, loads, questions, lambda _: max_tokens, **more))


def value_of(command: tuple[str, ...] | None, flag: str) -> str | None:
    words = list(command or ())
    return words[words.index(flag) + 1] if flag in words else None


def test_flags_of_our_engine_and_other_servers_do_not_mix():
    with pytest.raises(UsageError, match="leave out one kind"):
        specs(ArmOptions(methods="ngram", target=["off=http://h:1"]))
    with pytest.raises(UsageError, match="--baseline: 'x' needs --target or --serve"):
        specs(ArmOptions(baseline="x"))


def test_our_servers_take_as_many_requests_as_the_loads_keep_in_flight(asked):
    loads = (Load(LoadKind.CLOSED, 4), Load(LoadKind.CLOSED, 24))
    (off, _) = specs(ArmOptions(methods="ngram"), loads)

    assert "24" == value_of(off.command, "--max-batch-size")


def test_the_caches_of_our_engine_are_as_large_as_the_longest_request_needs(asked):
    arms = ArmOptions(methods="ngram")
    (off, _) = specs(arms, max_tokens=26)

    assert "128" == value_of(off.command, "--max-model-len"), "126, in steps of 64"
    assert "192" == value_of(specs(arms, max_tokens=29)[0].command, "--max-model-len")
    longer = EngineOptions(max_model_len=4000)
    assert "4000" == value_of(specs(arms, engine=longer)[0].command, "--max-model-len")
    # The server's own default is the most, and its refusals are clearer than a guess of ours.
    assert value_of(specs(arms, max_tokens=1949)[0].command, "--max-model-len") is None
    assert (["ngram"], EngineOptions().model, {}) == asked[0][:3]


def test_a_context_is_never_larger_than_the_models(monkeypatch):
    answer = Survey(["off", "ngram"], 100, 128)
    monkeypatch.setattr(bench_options, "survey", lambda *_: answer)

    assert value_of(specs(ArmOptions(), max_tokens=26)[0].command, "--max-model-len") is None


def test_prompts_are_counted_as_they_will_be_asked(asked):
    specs(ArmOptions(methods="ngram"))
    specs(ArmOptions(methods="ngram"), is_chat=False)

    assert [[(("user", "Why?"), ("assistant", "So."))], ["Why?\n\nSo."]] == [
        question[3] for question in asked
    ]


def test_one_at_a_time_each_arm_has_a_process_of_its_own(asked):
    arms = specs(ArmOptions(methods="ngram", one_at_a_time=True))

    assert [(), ()] == [arm.process for arm in arms]
    assert 2 == len({arm.command for arm in arms})


def test_heads_are_given_once_per_method():
    for items in (["ngram=d"], ["eagle3"], ["mtp=a", "mtp=b"]):
        with pytest.raises(ParameterError, match="METHOD=DIR, once per method"):
            specs(ArmOptions(methods="mtp,eagle3", head=items))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["closed:1", "closed:4"]),
        ({"concurrency": "1,16"}, ["closed:1", "closed:16"]),
        ({"rate": "0.5,2"}, ["poisson:0.5", "poisson:2"]),
        ({"rate": "2", "burstiness": 2.5}, ["gamma:2:cv2.5"]),
        ({"concurrency": "2", "rate": "1"}, ["closed:2", "poisson:1"]),
    ],
)
def test_loads_are_lists_of_numbers(fields, names):
    assert names == [load.name for load in LoadOptions(**fields).loads()]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"concurrency": "1,x"}, "--concurrency: '1,x' is no comma-separated list of whole"),
        ({"concurrency": "1.5"}, "list of whole numbers"),
        ({"concurrency": "0"}, "load closed: 0"),
        ({"rate": "-1"}, "load poisson: -1.0"),
        ({"rate": "inf"}, "load poisson: inf"),
    ],
)
def test_a_load_that_is_no_number_is_refused(fields, expected):
    with pytest.raises(ParameterError, match=expected):
        LoadOptions(**fields).loads()


def test_sampling_is_checked_before_anything_starts():
    with pytest.raises(ParameterError, match="temperature"):
        WorkloadOptions(temperature=-1.0).sampling()
    with pytest.raises(ParameterError, match="--max-tokens: 1 leaves no token"):
        WorkloadOptions(max_tokens=1).sampling()
