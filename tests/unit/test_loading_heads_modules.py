"""MEDUSA heads, and multi-token-prediction modules inside a target's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import Method
from outrider.errors import CheckpointError, UnsafeFileError, UnsupportedModelError
from outrider.models.heads.config import MedusaConfig, MtpConfig
from outrider.models.loading import load
from outrider.models.loading.heads import has_mtp, load_head, load_mtp
from tests.models import tiny_config
from tests.tiny import write_gguf_checkpoint, write_hf_checkpoint
from tests.tiny_heads import ORDERS, write_medusa_head, write_mtp_target

TARGET = tiny_config()


def medusa(folder: Path) -> MedusaConfig:
    config = load_head(folder, TARGET).config
    assert isinstance(config, MedusaConfig)
    return config


# MEDUSA.


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_counts_come_from_the_tensors(tmp_path, prefix, num_layers):
    folder = write_medusa_head(tmp_path, TARGET, num_heads=5, num_layers=num_layers, prefix=prefix)
    head = load_head(folder, TARGET)
    stored = load_file(folder / "medusa_lm_head.safetensors")

    assert (
        MedusaConfig(hidden_size=72, vocab_size=331, num_heads=5, num_layers=num_layers)
        == head.config
    )
    assert Method.MEDUSA == head.method
    assert "MEDUSA" == head.layout
    assert ("the published config says 2 heads, the tensors hold 5",) == head.conventions
    assert set(head.config.weight_shapes()) == set(head.weights)
    for i in range(5):
        ours, theirs = f"heads.{i}.", f"{prefix}{i}."
        for kind in ("weight", "bias"):
            last = num_layers - 1
            assert torch.equal(
                stored[f"{theirs}{last}.linear.{kind}"], head.weights[f"{ours}blocks.{last}.{kind}"]
            )
        assert torch.equal(
            stored[f"{theirs}{num_layers}.weight"], head.weights[f"{ours}lm_head.weight"]
        )
    assert 1.0 == head.vocabulary_coverage


def test_heads_without_output_layers_use_the_targets(tmp_path):
    folder = write_medusa_head(tmp_path, TARGET, own_head=False)

    assert not medusa(folder).has_own_head
    assert (
        "no output layers: the target's output head is used"
        in load_head(folder, TARGET).conventions
    )


def test_medusa_needs_no_config(tmp_path):
    folder = write_medusa_head(tmp_path, TARGET, num_heads=2)
    (folder / "config.json").unlink()

    assert 2 == medusa(folder).num_heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1.0.linear.bias": None}, r"missing: heads\.1\.blocks\.0\.bias"),
        ({"2.1.weight": None}, r"missing: heads\.2\.lm_head\.weight"),
        ({"1.0.linear.weight": torch.ones(3, 72)}, r"heads\.1\.blocks\.0\.weight is \[3, 72\]"),
        ({"7.0.linear.weight": torch.ones(72, 72)}, r"unexpected: heads\.7\.blocks\.0\.weight"),
        ({"0.4.weight": torch.ones(331, 72)}, r"unexpected: 0\.4\.weight"),
        ({"mixer.weight": torch.ones(2)}, r"unexpected: mixer\.weight"),
    ],
)
def test_medusa_tensors_that_do_not_fit_are_named(tmp_path, changes, message):
    folder = write_medusa_head(tmp_path, TARGET, changes=changes)

    with pytest.raises(CheckpointError, match=message):
        load_head(folder, TARGET)


def test_medusa_for_another_target_names_both_sizes(tmp_path):
    folder = write_medusa_head(tmp_path, TARGET)

    with pytest.raises(CheckpointError, match="heads are 72 wide, the target's hidden size is 96"):
        load_head(folder, tiny_config(hidden_size=96))
    with pytest.raises(CheckpointError, match="vocabulary is 331, the target's is 320"):
        load_head(folder, tiny_config(vocab_size=320))


def test_medusas_published_pickle_is_refused(tmp_path):
    folder = write_medusa_head(tmp_path, TARGET)
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")

    with pytest.raises(UnsafeFileError, match=r"medusa_lm_head\.pt: a pickle"):
        load_head(folder, TARGET)


def test_several_weight_files_need_a_name(tmp_path):
    folder = write_medusa_head(tmp_path, TARGET)
    write_medusa_head(tmp_path, TARGET, file_name="other.safetensors", num_heads=1)

    with pytest.raises(CheckpointError, match="several weight files; name one of them: medusa_lm"):
        load_head(folder, TARGET)
    assert 1 == medusa(folder / "other.safetensors").num_heads


# Multi-token prediction.

FAMILY = {"deepseek": "LlamaForCausalLM", "qwen": "Qwen3ForCausalLM", "mimo": "MiMoForCausalLM"}
NAMES = {
    "deepseek": {
        "model.layers.2.enorm": "embed_norm",
        "model.layers.2.hnorm": "hidden_norm",
        "model.layers.2.eh_proj": "fc",
        "model.layers.2.shared_head.norm": "norm",
        "model.layers.2.self_attn.q_proj": "layers.0.q",
        "model.layers.2.input_layernorm": "layers.0.attn_norm",
    },
    "qwen": {
        "mtp.pre_fc_norm_embedding": "embed_norm",
        "mtp.pre_fc_norm_hidden": "hidden_norm",
        "mtp.fc": "fc",
        "mtp.norm": "norm",
        "mtp.layers.0.self_attn.q_norm": "layers.0.q_norm",
        "mtp.layers.0.mlp.down_proj": "layers.0.down",
    },
    "mimo": {
        "model.mtp_layers.0.token_layernorm": "embed_norm",
        "model.mtp_layers.0.hidden_layernorm": "hidden_norm",
        "model.mtp_layers.0.input_proj": "fc",
        "model.mtp_layers.0.final_layernorm": "norm",
        "model.mtp_layers.0.self_attn.k_proj": "layers.0.k",
        "model.mtp_layers.0.post_attention_layernorm": "layers.0.mlp_norm",
    },
}


def mtp(folder: Path):
    return load_mtp(folder, load(folder).config)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_each_family_loads_beside_its_target(tmp_path, order, shards):
    folder = write_mtp_target(tmp_path, order, architecture=FAMILY[order], shards=shards)
    target = load(folder)
    head = mtp(folder)
    plain = load(write_hf_checkpoint(tmp_path / "plain", architecture=FAMILY[order]))

    assert plain.config == target.config
    assert set(plain.weights) == set(target.weights)
    assert isinstance(head.config, MtpConfig)
    assert Method.MTP == head.method
    assert f"MTP ({order})".lower() == head.layout.lower()
    assert ("hidden_first" if order == "mimo" else "embedding_first") == head.config.order
    assert (order == "mimo") == head.config.reads_raw_state
    assert not head.config.has_own_embedding
    assert not head.config.has_own_head
    assert (order == "qwen") == head.config.layers.qk_norm
    assert (order == "mimo") == head.config.layers.attention_bias
    assert set(head.config.weight_shapes()) == set(head.weights)
    file = "model.safetensors" if shards == 1 else "model-mtp.safetensors"
    stored = load_file(folder / file)
    for theirs, ours in NAMES[order].items():
        assert torch.equal(stored[f"{theirs}.weight"], head.weights[f"{ours}.weight"]), theirs
    assert sum(head.weights[name].nbytes for name in head.weights) == head.source_bytes


@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_embedding_and_head_are_the_modules_own(tmp_path, order):
    folder = write_mtp_target(
        tmp_path, order, architecture=FAMILY[order], own_embedding=True, own_head=True
    )
    head = mtp(folder)

    assert isinstance(head.config, MtpConfig)
    assert head.config.has_own_embedding
    assert head.config.has_own_head
    assert {"embed.weight", "lm_head.weight"} <= set(head.weights)
    assert "brings its own embedding and output head" in head.conventions


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_of_several_modules_is_used(tmp_path, order):
    one = mtp(write_mtp_target(tmp_path / "1", order, architecture=FAMILY[order]))
    two = mtp(write_mtp_target(tmp_path / "2", order, architecture=FAMILY[order], num_modules=2))

    assert "2 modules stored; the first is used for every step" in two.conventions
    assert one.config == two.config
    for name in one.weights:
        assert torch.equal(one.weights[name], two.weights[name])


@pytest.mark.parametrize("order", ORDERS)
def test_a_target_says_whether_it_holds_a_module(tmp_path, order):
    assert has_mtp(write_mtp_target(tmp_path / "with", order, architecture=FAMILY[order]))
    without = write_hf_checkpoint(tmp_path / "without", architecture=FAMILY[order])
    assert not has_mtp(without)
    assert not has_mtp(write_gguf_checkpoint(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match="holds no multi-token-prediction module"):
        mtp(without)


def test_norms_that_add_one_are_plain_once_loaded(tmp_path):
    """Qwen3-Next's RMSNorm multiplies by 1 + weight; config.json's model_type tells."""
    folder = write_mtp_target(tmp_path, "qwen", architecture="Qwen3ForCausalLM")
    plain = mtp(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen3_next"}))
    added = mtp(folder)

    assert any(
        "norms multiply by 1 + weight (model_type qwen3_next)" in c for c in added.conventions
    )
    for name in plain.weights:
        shift = 1 if name.endswith("norm.weight") else 0
        assert torch.equal(plain.weights[name] + shift, added.weights[name]), name


def test_a_module_may_come_in_a_folder_of_its_own(tmp_path):
    folder = write_mtp_target(tmp_path, "qwen", architecture="Qwen3ForCausalLM")
    target = load(folder).config
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k.startswith("mtp.")}, path)

    assert load_mtp(folder, target).config == load_head(folder, target).config


def test_a_layer_too_many_is_no_module(tmp_path):
    """A config.json with too few layers is an error still, not a skipped module."""
    folder = write_hf_checkpoint(tmp_path, num_layers=3)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))

    with pytest.raises(CheckpointError, match=r"unexpected: .*layers\.2\.q\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("order", "name", "shape", "message"),
    [
        ("deepseek", "model.layers.2.mlp.experts.0.gate_proj.weight", (4, 64), "experts"),
        ("deepseek", "model.layers.2.mlp.gate.weight", (4, 64), "experts"),
        ("deepseek", "model.layers.2.self_attn.kv_a_proj_with_mqa.weight", (4, 64), "MLA"),
        ("qwen", "mtp.layers.0.mlp.shared_expert.up_proj.weight", (4, 64), "experts"),
        ("qwen", "mtp.layers.0.self_attn.q_proj.weight", (128, 64), "gated attention"),
    ],
)
def test_layers_that_we_do_not_have_are_refused_by_name(tmp_path, order, name, shape, message):
    folder = write_mtp_target(
        tmp_path, order, architecture=FAMILY[order], changes={name: torch.ones(shape)}
    )

    with pytest.raises(UnsupportedModelError, match=message) as error:
        mtp(folder)

    assert name in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp.norm.weight": None}, r"missing: norm\.weight"),
        ({"mtp.gain.weight": torch.ones(2)}, r"unexpected: mtp\.gain\.weight"),
        ({"mtp.fc.weight": torch.ones(64, 64)}, r"fc\.weight is \[64, 64\].*\[64, 128\]"),
    ],
)
def test_module_tensors_that_do_not_fit_are_named(tmp_path, changes, message):
    folder = write_mtp_target(tmp_path, "qwen", architecture="Qwen3ForCausalLM", changes=changes)

    with pytest.raises(CheckpointError, match=message):
        mtp(folder)


def test_mimo_is_qwen2_to_the_decoder(tmp_path):
    mimo = load(write_hf_checkpoint(tmp_path / "m", architecture="MiMoForCausalLM"))
    qwen2 = load(write_hf_checkpoint(tmp_path / "q", architecture="Qwen2ForCausalLM"))

    assert "MiMoForCausalLM" == mimo.config.architecture
    assert mimo.config.attention_bias
    assert not mimo.config.attention_out_bias
    assert qwen2.config.weight_shapes() == mimo.config.weight_shapes()
