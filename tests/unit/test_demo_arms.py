from __future__ import annotations

import json

import pytest

from outrider import cli
from outrider.commands.demo_arms import (
    ArmName,
    available_heads,
    choose_arms,
    open_arms,
    parse_heads,
    parse_methods,
)
from outrider.config import METHODS_WITH_HEAD, Method, SpeculationConfig
from outrider.errors import CapacityError, ParameterError
from outrider.models.loading.heads.shipped import MANIFEST
from outrider.models.memory import MemoryItem, MemoryPlan
from tests.fake_llm import FakeLLM


def names(arms) -> list[str]:
    return [str(arm) for arm in arms]


def ship(root, method: Method, weights_hash: str) -> None:
    """A manifest as the package keeps it; choosing reads no more than that."""
    folder = root / "model" / method
    folder.mkdir(parents=True)
    target = {"weights_hash": weights_hash, "tokenizer": "fake tokenizer"}
    (folder / MANIFEST).write_text(json.dumps({"meta": {"method": method, "target": target}}))


@pytest.fixture
def assets(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.models.loading.heads.shipped.assets_root", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", SpeculationConfig()),
        ("draft", SpeculationConfig(method=Method.DRAFT, max_draft_len=5)),
        ("mtp+ngram", SpeculationConfig(method=Method.MTP, max_draft_len=5, with_ngram=True)),
        (
            "medusa-tree",
            SpeculationConfig(
                method=Method.MEDUSA,
                max_draft_len=5,
                use_dynamic_tree=True,
                max_total_draft_tokens=16,
            ),
        ),
        (
            "eagle3-tree+ngram",
            SpeculationConfig(
                method=Method.EAGLE3,
                max_draft_len=5,
                use_dynamic_tree=True,
                max_total_draft_tokens=16,
                with_ngram=True,
            ),
        ),
        ("ngram-tree", SpeculationConfig(use_dynamic_tree=True, max_total_draft_tokens=16)),
    ],
)
def test_a_name_says_method_shape_and_company(text, expected):
    name = ArmName.parse(text)

    assert text == str(name)
    assert expected == name.speculation(None)


@pytest.mark.parametrize("text", ["eagle2", "ngram+ngram", "eagle3+ngram-tree", "off-tree", ""])
def test_an_unknown_name_is_refused_with_those_there_are(text):
    with pytest.raises(ParameterError) as refused:
        parse_methods(f"ngram,{text}")

    assert str(refused.value).startswith(f"--methods: {text!r} is not one of ngram, ngram-tree, ")
    assert "eagle3-tree+ngram" in str(refused.value)


def test_off_is_measured_anyway_and_spaces_do_not_matter():
    assert ["eagle3", "ngram"] == names(parse_methods("off, eagle3, ngram"))
    assert [] == parse_methods(None)
    with pytest.raises(ParameterError, match="leaves nothing to compare"):
        parse_methods("off")
    with pytest.raises(ParameterError, match="ngram is there twice"):
        parse_methods("ngram,off,ngram")


def test_heads_are_named_by_their_method():
    given = parse_heads(["eagle3=a/b", "draft=c=d"])

    assert {Method.EAGLE3: "a/b", Method.DRAFT: "c=d"} == given
    for wrong in ("a/b", "eagle3", "eagle3=", "ngram=a", "eagle3-tree=a"):
        with pytest.raises(ParameterError, match="is not METHOD=DIR with one of draft, medusa"):
            parse_heads([wrong])
    with pytest.raises(ParameterError, match="mtp has two heads"):
        parse_heads(["mtp=a", "mtp=b"])


def test_without_heads_there_is_ngram_alone(assets):
    assert [] == list(assets.iterdir())
    assert {} == available_heads(FakeLLM().files, {})
    assert ["ngram"] == names(choose_arms([], {}, "m"))


def test_every_head_that_ships_for_the_model_gets_its_best_shape(assets):
    for method in METHODS_WITH_HEAD:
        ship(assets, method, "fake weights")
    arms = open_arms(FakeLLM(), [], {})

    assert ["ngram", "draft", "medusa-tree", "mtp-tree", "eagle3-tree+ngram"] == [
        arm.name for arm in arms
    ]
    assert all(arm.llm.speculation.head is None for arm in arms)


def test_a_head_of_another_model_is_no_arm(assets):
    ship(assets, Method.EAGLE3, "other weights")

    assert ["ngram"] == [arm.name for arm in open_arms(FakeLLM(), [], {})]


def test_a_given_head_is_taken_before_the_shipped_one(assets):
    ship(assets, Method.EAGLE3, "fake weights")
    asked = parse_methods("eagle3,eagle3-tree")
    arms = open_arms(FakeLLM(), asked, {Method.EAGLE3: "given"})

    assert ["eagle3", "eagle3-tree"] == [arm.name for arm in arms]
    assert ["given", "given"] == [arm.llm.speculation.head for arm in arms]


def test_a_module_inside_the_model_counts_as_a_head(assets, monkeypatch):
    monkeypatch.setattr("outrider.commands.demo_arms.has_mtp", lambda _: True)

    assert {Method.MTP: None} == available_heads(FakeLLM().files, {})
    assert {Method.MTP: "given"} == available_heads(FakeLLM().files, {Method.MTP: "given"})


def test_a_method_without_a_head_is_refused_with_those_that_have_one():
    with pytest.raises(ParameterError) as refused:
        choose_arms(parse_methods("ngram,mtp-tree"), {Method.MEDUSA: None}, "some-model")
    message = str(refused.value)

    assert message.startswith("--methods: mtp-tree has no head for some-model; there are: ngram, ")
    assert "medusa, medusa-tree, medusa+ngram, medusa-tree+ngram; or give" in message
    assert "--head mtp=DIR" in message
    assert "eagle3" not in message


def test_a_head_that_nothing_uses_is_refused():
    with pytest.raises(ParameterError, match="mtp=a is used by none of --methods ngram,draft"):
        choose_arms(parse_methods("ngram,draft"), {Method.MTP: "a", Method.DRAFT: None}, "m")


def test_arms_that_fit_alone_but_not_together_are_refused(assets):
    """Weights of the target are shared: only what an arm has of its own counts."""
    items = (MemoryItem("layers", "", 1000), MemoryItem("KV cache", "", 40))
    two = parse_methods("ngram,ngram-tree")
    enough, too_little = (FakeLLM(memory_plan=MemoryPlan(items, size)) for size in (80, 79))

    assert 2 == len(open_arms(enough, two, {}))
    with pytest.raises(CapacityError, match="KV cache"):
        open_arms(too_little, two, {})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--methods", "magic"], "'magic' is not one of ngram, ngram-tree"),
        (["--head", "magic=a"], "is not METHOD=DIR"),
        (["--methods", "ngram,mtp"], "mtp has no head for"),
    ],
)
def test_on_the_command_line_that_is_a_usage_error(
    assets, monkeypatch, capsys, arguments, expected
):
    monkeypatch.setattr(cli, "open_llm", lambda *_, **__: FakeLLM())

    assert 2 == cli.main(["demo", *arguments])
    assert expected in capsys.readouterr().err
