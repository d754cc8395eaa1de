"""Which methods a model has: those given, shipped or inside it; the rest is refused early."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from outrider.commands import available
from outrider.commands.available import chosen_methods
from outrider.config import METHODS_WITH_HEAD, Method
from outrider.errors import ParameterError
from outrider.models.loading.heads.shipped import MANIFEST


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """A model without heads, and a way to put manifests of heads into the package."""
    tokenizer = SimpleNamespace(fingerprint="fake tokenizer")
    checkpoint = SimpleNamespace(weights_hash="fake weights", tokenizer=tokenizer)
    monkeypatch.setattr("outrider.models.loading.heads.shipped.assets_root", lambda: tmp_path)
    monkeypatch.setattr(available, "resolve", lambda model, **_: tmp_path / model)
    monkeypatch.setattr(available, "load", lambda _: checkpoint)
    monkeypatch.setattr(available, "has_mtp", lambda _: False)

    def put(method: Method, weights_hash: str = "fake weights") -> None:
        folder = tmp_path / "model" / method
        folder.mkdir(parents=True)
        target = {"weights_hash": weights_hash, "tokenizer": "fake tokenizer"}
        (folder / MANIFEST).write_text(json.dumps({"meta": {"method": method, "target": target}}))

    return put


def chosen(*asked: str, heads=None) -> list[str]:
    return chosen_methods(asked, "m", heads or {}, lambda *_: None)


def test_without_heads_there_is_ngram_alone(ship):
    assert ["off", "ngram"] == chosen()


def test_every_head_that_ships_for_the_model_gets_its_best_shape(ship):
    for method in METHODS_WITH_HEAD:
        ship(method)

    best = ["off", "ngram", "draft", "medusa-tree", "mtp-tree", "eagle3-tree+ngram"]
    assert best == chosen()


def test_a_head_of_another_model_is_none(ship):
    ship(Method.EAGLE3, "other weights")

    assert ["off", "ngram"] == chosen()


def test_a_module_inside_the_model_and_a_given_head_count(ship, monkeypatch):
    monkeypatch.setattr(available, "has_mtp", lambda _: True)

    assert ["off", "ngram", "mtp-tree"] == chosen()
    assert ["off", "ngram", "medusa-tree", "mtp-tree"] == chosen(heads={"medusa": "dir"})


def test_what_was_asked_for_is_taken_if_it_has_a_head(ship):
    ship(Method.EAGLE3)

    assert ["ngram", "off", "eagle3"] == chosen("ngram", "off", "eagle3")


def test_a_method_without_a_head_is_refused_with_those_that_have_one(ship):
    ship(Method.MEDUSA)
    with pytest.raises(ParameterError) as refused:
        chosen("ngram", "mtp-tree")
    message = str(refused.value)

    assert message.startswith("--methods: mtp-tree has no head for m; there are: ngram, ngram-tree")
    assert "medusa, medusa-tree, medusa+ngram, medusa-tree+ngram; or give" in message
    assert "--head mtp=DIR" in message
    assert "eagle3" not in message


@pytest.mark.parametrize("words", [["off", "ngram"], ["ngram-tree"], ["mtp", "ngram"]])
def test_what_needs_no_look_at_the_model_takes_none(monkeypatch, words):
    def fail(*_, **__):
        raise AssertionError("the model was looked for")

    monkeypatch.setattr(available, "resolve", fail)

    assert words == chosen(*words, heads={"mtp": "dir"})
