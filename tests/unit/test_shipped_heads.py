from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider import LLM, SamplingParams, cli
from outrider.commands.inspection import inspect
from outrider.config import METHODS_WITH_HEAD, EngineConfig, Method, SpeculationConfig
from outrider.errors import CheckpointError, ParameterError
from outrider.models.heads.config import Eagle3Config, MedusaConfig, MtpConfig
from outrider.models.loading import load
from outrider.models.loading.fields import read_json
from outrider.models.loading.heads.mtp import module_layers
from outrider.models.loading.heads.shipped import MANIFEST, assets_root, shipped_heads
from outrider.models.loading.hub import CATALOGUE
from outrider.pairing import OpenedDrafter, TargetFiles, open_drafter
from outrider.training.export import Config, export_head
from tests.models import random_weights
from tests.parity.head_cases import head_weights
from tests.tiny import TinyModel, write_hf_checkpoint
from tests.tiny_heads import write_eagle3_head, write_mtp_target

MODEL = "a-model"
FLOAT32 = EngineConfig(dtype="float32", self_test="off", max_model_len=128)
LENGTHS = {
    "eagle3 chain 5": {"0": {"all": 1.811, "coding": 2.0}, "1": {"all": 1.507}},
    "eagle3 tree 16": {"0": {"all": 2.304}},
}
OF_ALL = {"eagle3 chain 5": {"0": 1.811, "1": 1.507}, "eagle3 tree 16": {"0": 2.304}}


@pytest.fixture
def assets(tmp_path, monkeypatch) -> Path:
    """An empty folder in the place of the package's own heads, and a user cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "assets"
    monkeypatch.setattr("outrider.models.loading.heads.shipped.assets_root", lambda: root)
    return root


@pytest.fixture
def model(tmp_path) -> Path:
    return write_hf_checkpoint(tmp_path / "model")


def files_of(path: Path) -> TargetFiles:
    checkpoint = load(path)
    checkpoint.weights.close()
    return TargetFiles.of(path, checkpoint)


def config_of(method: Method, target: TargetFiles) -> Config:
    layers, config = module_layers(target.config), target.config
    return {
        Method.EAGLE3: Eagle3Config(
            layers=layers,
            target_hidden_size=config.hidden_size,
            capture_layers=(1, 2),
            draft_vocab_size=config.vocab_size,
            has_own_head=False,
        ),
        Method.MTP: MtpConfig(layers=layers),
        Method.MEDUSA: MedusaConfig(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_heads=2,
            has_own_head=False,
        ),
        Method.DRAFT: replace(config, num_layers=1),
    }[method]


def ship(
    assets: Path,
    method: Method,
    target: TargetFiles,
    *,
    model: str = MODEL,
    training: Mapping[str, Any] | None = None,
    acceptance: float | None = None,
) -> Path:
    """Export a random head as training does, to where the package keeps heads."""
    config = config_of(method, target)
    folder = assets / model / method.value
    weights = random_weights(config) if method is Method.DRAFT else head_weights(config)  # type: ignore[arg-type]
    export_head(
        method,
        config,
        weights,
        folder,
        target=target,
        manifest=training or {},
        acceptance=acceptance,
        dtype=torch.float32,
    )
    return folder


def opened(target: TargetFiles, method: Method, head: Path | None = None) -> OpenedDrafter:
    named = None if head is None else str(head)
    found = open_drafter(SpeculationConfig(method=method, head=named), target, None)
    assert found is not None
    found.close()
    return found


@pytest.mark.parametrize("method", METHODS_WITH_HEAD)
def test_without_a_head_the_one_that_ships_for_the_target_drafts(assets, model, method):
    target = files_of(model)
    folder = ship(assets, method, target)

    assert opened(target, method, folder).weights_hash == opened(target, method).weights_hash


def test_texts_are_the_targets_own_with_a_shipped_head(assets, model):
    ship(assets, Method.EAGLE3, files_of(model))
    llm = LLM(model, speculation=SpeculationConfig(method=Method.EAGLE3), engine=FLOAT32)
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    (drafted,), (alone,) = llm.generate([[5, 6, 7]], params), plain.generate([[5, 6, 7]], params)

    assert alone.token_ids == drafted.token_ids
    assert drafted.speculation.drafted > 0


def test_a_head_that_is_named_is_taken_instead(assets, tmp_path, model):
    target = files_of(model)
    shipped = ship(assets, Method.EAGLE3, target)
    named = write_eagle3_head(tmp_path / "named", TinyModel())
    found = opened(target, Method.EAGLE3, named)

    assert "named" == found.name
    assert opened(target, Method.EAGLE3, shipped).weights_hash != found.weights_hash


def test_a_module_inside_the_target_comes_before_a_shipped_one(assets, tmp_path):
    target = files_of(write_mtp_target(tmp_path / "mtp", "deepseek"))
    shipped = ship(assets, Method.MTP, target)
    inside = opened(target, Method.MTP)

    assert opened(target, Method.MTP, target.path).weights_hash == inside.weights_hash
    assert opened(target, Method.MTP, shipped).weights_hash != inside.weights_hash


def test_a_target_is_known_by_its_weights_wherever_it_lies(assets, tmp_path, model):
    ship(assets, Method.MEDUSA, files_of(model), model="called-otherwise")
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)

    assert "medusa" == opened(files_of(copy), Method.MEDUSA).name


@pytest.mark.parametrize("changed", ["weights_hash", "tokenizer"])
def test_a_head_of_another_target_is_not_taken(assets, model, changed):
    target = files_of(model)
    ship(assets, Method.EAGLE3, target)
    manifest = assets / MODEL / "eagle3" / MANIFEST
    content = read_json(manifest)
    content["meta"]["target"][changed] = "0" * 64
    manifest.write_text(json.dumps(content))

    with pytest.raises(ParameterError, match="no eagle3 head ships for model"):
        opened(target, Method.EAGLE3)


@pytest.mark.parametrize("method", METHODS_WITH_HEAD)
def test_where_none_ships_the_refusal_says_what_to_do(assets, model, method):
    other = Method.MEDUSA if method is not Method.MEDUSA else Method.EAGLE3
    target = files_of(model)
    ship(assets, other, target)
    with pytest.raises(ParameterError) as refused:
        opened(target, method)
    message = str(refused.value)
    what = "draft model" if method is Method.DRAFT else f"{method} head"

    assert message.startswith(f"method: no {what} ships for model")
    assert f"outrider train {method}" in message
    assert "give one with head (--head)" in message
    assert ("holds no mtp module" in message) == (method is Method.MTP)


def test_on_the_command_line_that_is_a_usage_error(assets, model, capsys):
    del assets  # empty
    arguments = ["generate", "Hi", "--model", str(model), "--method", "eagle3"]

    assert 2 == cli.main(arguments)
    assert "no eagle3 head ships for model" in capsys.readouterr().err


def test_inspect_lists_them_with_what_was_measured(assets, model):
    target = files_of(model)
    folder = ship(
        assets,
        Method.EAGLE3,
        target,
        training={"acceptance_length": LENGTHS},
        acceptance=1.8107,
    )
    ship(assets, Method.MTP, target)
    found = inspect(str(model), FLOAT32)
    mtp, eagle3 = json.loads(json.dumps(found.to_json()))["shipped_heads"]  # Method's order
    console = Console(width=200)
    with console.capture() as capture:
        for part in found.tables():
            console.print(part)
    lines = [line.split() for line in capture.get().splitlines()]

    assert ("mtp", None, {}) == (
        mtp["method"],
        mtp["recorded_acceptance"],
        mtp["acceptance_lengths"],
    )
    assert ("eagle3", str(folder)) == (eagle3["method"], eagle3["path"])
    assert (1.8107, OF_ALL) == (eagle3["recorded_acceptance"], eagle3["acceptance_lengths"])
    assert sum(file.stat().st_size for file in folder.iterdir()) == eagle3["size_bytes"]
    assert ["chain", "5", "1.81", "1.51"] in [line[-4:] for line in lines]
    assert ["tree", "16", "2.30", "-"] in [line[-4:] for line in lines]


def test_a_model_without_shipped_heads_has_no_table_of_them(assets, model):
    del assets  # empty
    found = inspect(str(model), FLOAT32)

    assert [] == found.to_json()["shipped_heads"]
    assert not any("ship" in str(part.title) for part in found.tables())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON"),
        ('{"meta": []}', "meta is"),
        ('{"meta": {"target": {"weights_hash": "w", "tokenizer": "t"}}}', "method is missing"),
        (
            '{"meta": {"method": "ngram", "target": {"weights_hash": "w", "tokenizer": "t"}}}',
            "method is 'ngram'; allowed: draft, medusa, mtp, eagle3",
        ),
    ],
)
def test_a_damaged_manifest_is_named(assets, content, complaint):
    manifest = assets / MODEL / "eagle3" / MANIFEST
    manifest.parent.mkdir(parents=True)
    manifest.write_text(content)
    with pytest.raises(CheckpointError) as refused:
        shipped_heads("w", "t")

    assert str(refused.value).startswith(str(manifest))
    assert complaint in str(refused.value)


@pytest.mark.parametrize("manifest", sorted(assets_root().glob(f"*/*/{MANIFEST}")), ids=str)
def test_every_head_in_the_package_is_of_a_model_in_the_catalogue(manifest):
    named = read_json(manifest)["meta"]["target"]
    model, method = manifest.parts[-3:-1]

    assert CATALOGUE[model].wheel.sha256 == named["weights_hash"]
    assert read_json(manifest)["meta"]["method"] == method
