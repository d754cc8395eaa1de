"""Writing EAGLE-3 heads: what is written is what was read, in both layouts, or nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.commands.convert import convert
from outrider.errors import CheckpointError, ParameterError
from outrider.models.architecture import RopeConfig
from outrider.models.heads.config import Eagle3Config
from outrider.models.loading.heads import LAYOUTS, LoadedHead, load_head, write_eagle3
from outrider.models.loading.heads import folder as folder_module
from tests.models import tiny_config
from tests.tiny import TinyModel, write_hf_checkpoint
from tests.tiny_heads import write_eagle3_head, write_medusa_head

TARGET = tiny_config(num_layers=8)
IDS = "eagle_aux_hidden_state_layer_ids"


def rewrite(head: LoadedHead, folder: Path, layout: str, acceptance: float | None = None) -> Path:
    assert isinstance(head.config, Eagle3Config)
    write_eagle3(
        head.config,
        head.weights,
        folder,
        layout=layout,
        target_name="tiny",
        target=TARGET,
        recorded_acceptance=acceptance,
    )
    return folder


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def assert_same(first: LoadedHead, second: LoadedHead) -> None:
    assert first.config == second.config
    assert set(first.weights) == set(second.weights)
    for name in first.weights:
        assert first.weights[name].dtype == second.weights[name].dtype, name
        assert torch.equal(first.weights[name], second.weights[name]), name


PLAIN_OPTIONS = [
    {},
    {"draft_vocab_size": None},
    {"own_embedding": True},
    {"hidden_size": 48, "own_embedding": True},
    {"capture_layers": (1, 3, 8)},
    {"dtype": torch.bfloat16},
    {"extra": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
]


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("options", PLAIN_OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_head_survives_both_layouts_in_any_order(tmp_path, options, first, second):
    published = load_head(write_eagle3_head(tmp_path / "published", TARGET, **options), TARGET)
    once = load_head(rewrite(published, tmp_path / "once", first), TARGET)
    twice = load_head(rewrite(once, tmp_path / "twice", second), TARGET)

    assert_same(published, once)
    assert_same(once, twice)
    assert second == twice.layout.lower().replace("specforge", "safeailab")


@pytest.mark.parametrize(
    "options",
    [
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"num_layers": 3},
        {"head_norms": True},
        {"draft_vocab_size": None, "own_head": False},
        {"capture_layers": (0, 8)},
    ],
    ids="-".join,
)
def test_every_option_survives_speculators(tmp_path, options):
    published = write_eagle3_head(tmp_path / "published", TARGET, "speculators", **options)
    head = load_head(published, TARGET)
    again = load_head(rewrite(head, tmp_path / "again", "speculators"), TARGET)

    assert_same(head, again)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=64),
        RopeConfig(kind="yarn", factor=4.0, original_max_position=32, mscale=0.7, truncate=False),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_scaling_survives(tmp_path, layout, rope):
    head = load_head(write_eagle3_head(tmp_path / "head", TARGET), TARGET)
    assert isinstance(head.config, Eagle3Config)
    scaled = replace(head.config, layers=replace(head.config.layers, rope=rope))
    rewrite(replace(head, config=scaled), tmp_path / "new", layout)

    assert scaled == load_head(tmp_path / "new", TARGET).config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_measured_acceptance_is_read_back(tmp_path, layout):
    head = load_head(write_eagle3_head(tmp_path / "head", TARGET), TARGET)

    assert (
        2.37
        == load_head(rewrite(head, tmp_path / "with", layout, 2.37), TARGET).recorded_acceptance
    )
    assert (
        load_head(rewrite(head, tmp_path / "without", layout), TARGET).recorded_acceptance is None
    )


def test_captured_layers_are_written_in_the_layouts_convention(tmp_path):
    published = write_eagle3_head(tmp_path / "head", TARGET, capture_layers=(1, 3, 8))
    head = load_head(published, TARGET)
    safeailab = config_of(rewrite(head, tmp_path / "a", "safeailab"))
    speculators = config_of(rewrite(head, tmp_path / "b", "speculators"))

    assert [0, 2, 7] == safeailab["eagle_config"][IDS]
    assert [1, 3, 8] == speculators[IDS]
    assert [1, 3, 8] == safeailab["outrider"]["capture_layers"]
    assert [1, 3, 8] == speculators["outrider"]["capture_layers"]


def test_the_default_layers_need_no_field_that_engines_read_differently(tmp_path):
    head = load_head(write_eagle3_head(tmp_path / "head", TARGET), TARGET)
    config = config_of(rewrite(head, tmp_path / "new", "safeailab"))

    assert "eagle_config" not in config
    assert [2, 4, 5] == config["outrider"]["capture_layers"]


def test_our_layers_and_the_layouts_must_agree(tmp_path):
    published = write_eagle3_head(tmp_path / "head", TARGET, capture_layers=(1, 3, 8))
    folder = rewrite(load_head(published, TARGET), tmp_path / "new", "safeailab")
    config = config_of(folder)
    config["eagle_config"][IDS] = [1, 3, 8]  # as someone would who takes them for inputs
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=r"means the inputs of layers \[2, 4, 9\], outrider"):
        load_head(folder, TARGET)


def test_keys_and_fields_are_the_published_ones(tmp_path):
    published = write_eagle3_head(tmp_path / "head", TARGET)
    head = load_head(published, TARGET)
    safeailab = rewrite(head, tmp_path / "a", "safeailab")
    speculators = rewrite(head, tmp_path / "b", "speculators")
    other = write_eagle3_head(tmp_path / "other", TARGET, "speculators", norm_before_residual=False)

    for ours, theirs in ((safeailab, published), (speculators, other)):
        stored = load_file(theirs / "model.safetensors")
        written = load_file(ours / "model.safetensors")
        assert set(stored) == set(written)
        for name in stored:
            assert torch.equal(stored[name], written[name]), name
    fields = config_of(speculators)
    assert "eagle3" == fields["speculators_model_type"] == fields["speculators_config"]["algorithm"]
    assert {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]} == (
        fields["speculators_config"]["verifier"]
    )
    assert ["LlamaForCausalLMEagle3"] == config_of(safeailab)["architectures"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"norm_output": True, "fc_norm": True}, "fc_norm, norm_output"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"num_layers": 2}, "2 layers"),
        ({"head_norms": True}, "q and k norms"),
        ({"draft_vocab_size": None, "own_head": False}, "the target's output head"),
    ],
)
def test_what_safeailab_cannot_express_is_named(tmp_path, options, named):
    head = load_head(write_eagle3_head(tmp_path / "head", TARGET, **options), TARGET)

    with pytest.raises(ParameterError, match=f"cannot express {named}; use layout speculators"):
        rewrite(head, tmp_path / "new", "safeailab")

    assert not (tmp_path / "new").exists()


def test_the_embedding_is_the_output_of_no_layer(tmp_path):
    published = write_eagle3_head(
        tmp_path / "head", TARGET, "speculators", capture_layers=(0, 4, 8)
    )
    head = load_head(published, TARGET)
    assert isinstance(head.config, Eagle3Config)
    head = replace(head, config=replace(head.config, norm_before_residual=False))

    with pytest.raises(ParameterError, match="the embedding captured as a layer's output"):
        rewrite(head, tmp_path / "new", "safeailab")


def test_a_folder_in_use_is_left_alone(tmp_path):
    head = load_head(write_eagle3_head(tmp_path / "head", TARGET), TARGET)
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    rewrite(head, tmp_path / "empty", "safeailab")

    with pytest.raises(ParameterError, match="exists and is not an empty folder"):
        rewrite(head, used, "safeailab")
    with pytest.raises(ParameterError, match="exists and is not an empty folder"):
        rewrite(head, used / "notes.txt", "safeailab")
    assert ["notes.txt"] == [path.name for path in used.iterdir()]
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    head = load_head(write_eagle3_head(tmp_path / "head", TARGET), TARGET)

    def full(*_arguments, **_settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_tensors", full)
    with pytest.raises(CheckpointError, match="new: cannot be written: No space left on device"):
        rewrite(head, tmp_path / "new", "safeailab")

    assert ["head"] == [path.name for path in tmp_path.iterdir()]


def test_weights_that_do_not_fit_are_not_written(tmp_path):
    head = load_head(write_eagle3_head(tmp_path / "head", TARGET), TARGET)
    config = head.config
    assert isinstance(config, Eagle3Config)

    def write(**changes):
        write_eagle3(
            config,
            {**head.weights, **changes},
            tmp_path / "new",
            layout="safeailab",
            target_name="tiny",
            target=TARGET,
        )

    with pytest.raises(CheckpointError, match=r"fc\.weight is \[3\], head's config says"):
        write(**{"fc.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match="both stand for target id"):
        write(d2t=-torch.arange(40))
    assert not (tmp_path / "new").exists()


# The verb.


@pytest.fixture
def model(tmp_path):
    return write_hf_checkpoint(tmp_path / "model", num_layers=7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convert_writes_the_head_in_the_other_layout(tmp_path, model, layout):
    head = write_eagle3_head(tmp_path / "head", TinyModel(num_layers=7), "specforge")
    report = convert(head, str(model), layout, tmp_path / "out")

    assert layout == report.layout == report.to_json()["layout"]
    assert "SpecForge" == report.source_layout
    assert ("head", "model") == (report.head, report.target)
    assert report.num_bytes > 10_000
    assert any("layer outputs" in sentence for sentence in report.conventions)
    assert 5 + len(report.conventions) == report.table().row_count
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draft_size", [40, None], ids=["reduced", "whole"])
def test_convert_puts_in_output_rows_that_are_the_targets(tmp_path, model, layout, draft_size):
    """Those that the head named in our own words, which other engines do not know."""
    sizes = TinyModel(num_layers=7)
    ours = {"outrider": {"lm_head": "target"}}
    head = write_eagle3_head(
        tmp_path / "head", sizes, own_head=False, draft_vocab_size=draft_size, extra=ours
    )
    report = convert(head, str(model), layout, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    output = load_file(model / "model.safetensors")["lm_head.weight"]
    if draft_size is not None:
        output = output[stored["d2t"] + torch.arange(draft_size)]
    is_whole = draft_size is None and layout == "speculators"

    assert is_whole == ("lm_head.weight" not in stored)
    assert is_whole == ("lm_head" in config_of(tmp_path / "out")["outrider"])
    assert is_whole or torch.equal(output, stored["lm_head.weight"])
    assert any("outrider.lm_head: the target's" in sentence for sentence in report.conventions)


def test_convert_refuses_what_has_one_layout(tmp_path, model):
    head = write_medusa_head(tmp_path / "head", TinyModel(num_layers=7))

    with pytest.raises(ParameterError, match="a MEDUSA head; only EAGLE-3 heads have several"):
        convert(head, str(model), "speculators", tmp_path / "out")


def test_convert_names_the_layouts(tmp_path, model):
    head = write_eagle3_head(tmp_path / "head", TinyModel(num_layers=7))

    with pytest.raises(ParameterError, match="'gguf' is not one of safeailab, speculators"):
        convert(head, str(model), "gguf", tmp_path / "out")
