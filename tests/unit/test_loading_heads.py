"""EAGLE-3 heads in all published layouts: what is translated, what is refused, and the traps."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider.config import Method
from outrider.errors import (
    CheckpointError,
    UnknownModelError,
    UnsafeFileError,
    UnsupportedModelError,
)
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import Eagle3Config
from outrider.models.loading.heads import load_head
from tests.models import tiny_config
from tests.tiny import complaint
from tests.tiny_heads import (
    LAYOUTS,
    draft_ids,
    write_eagle3_head,
    write_medusa_head,
    write_mtp_target,
)

TARGET = tiny_config(num_layers=8)
IDS = "eagle_aux_hidden_state_layer_ids"


def edit(folder: Path, **fields: Any) -> None:
    """Put fields over config.json's; ``...`` removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def eagle3(folder: Path, target: DecoderConfig = TARGET) -> Eagle3Config:
    config = load_head(folder, target).config
    assert isinstance(config, Eagle3Config)
    return config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_loads_to_the_same_head(tmp_path, layout):
    plain = load_head(write_eagle3_head(tmp_path / "plain", TARGET), TARGET)
    head = load_head(
        write_eagle3_head(tmp_path / layout, TARGET, layout, norm_before_residual=False), TARGET
    )

    assert Method.EAGLE3 == head.method
    assert plain.config == head.config
    assert set(head.config.weight_shapes()) == set(head.weights)
    for name, shape in head.config.weight_shapes().items():
        assert shape == tuple(head.weights[name].shape), name
        assert torch.equal(plain.weights[name], head.weights[name]), name
    assert layout.lower() == head.layout.lower()
    assert layout == head.name
    assert 40 / 331 == pytest.approx(head.vocabulary_coverage)
    assert head.recorded_acceptance is None


def test_the_map_is_offsets_to_the_target_ids(tmp_path):
    head = load_head(write_eagle3_head(tmp_path, TARGET), TARGET)
    d2t_W = head.weights["d2t"]

    assert torch.int64 == d2t_W.dtype
    assert draft_ids(331, 40).tolist() == (torch.arange(40) + d2t_W).tolist()


def test_captured_layers_are_inputs_at_the_top_level_and_outputs_in_eagle_config(tmp_path):
    """The off-by-one: [1, 3, 4] there and [2, 4, 5] here are the same three states."""
    folder = write_eagle3_head(tmp_path, TARGET)
    edit(folder, eagle_config={IDS: [1, 3, 4]})
    nested = load_head(folder, TARGET)
    edit(folder, eagle_config=..., **{IDS: [2, 4, 5]})
    top = load_head(folder, TARGET)
    edit(folder, **{IDS: ...})
    default = load_head(folder, TARGET)

    for head in (nested, top, default):
        assert isinstance(head.config, Eagle3Config)
        assert (2, 4, 5) == head.config.capture_layers
    assert (
        "captured layers [1, 3, 4] are layer outputs (eagle_config): the inputs of [2, 4, 5] are "
        "captured"
    ) in nested.conventions
    assert f"captured layers [2, 4, 5] are layer inputs ({IDS})" in top.conventions
    assert ("no captured layers named: the default, the inputs of [2, 4, 5]") in default.conventions


def test_ids_are_put_in_ascending_order(tmp_path):
    folder = write_eagle3_head(tmp_path, TARGET, capture_layers=(1, 3, 8))
    edit(folder, eagle_config={IDS: [7, 0, 2]})

    assert (1, 3, 8) == eagle3(folder).capture_layers


def test_two_fields_that_name_other_layers_contradict(tmp_path):
    folder = write_eagle3_head(tmp_path, TARGET, "specforge")
    edit(folder, **{IDS: [1, 3, 4]})

    with pytest.raises(CheckpointError, match=r"inputs of layers \[2, 4, 5\].*says \[1, 3, 4\]"):
        load_head(folder, TARGET)


@pytest.mark.parametrize("ids", [[2, 4, 9], [2, 4, 4], [-1, 2, 3], ["2", 4, 5], [1.5, 2, 3], "245"])
def test_impossible_layers_are_refused(tmp_path, ids):
    folder = write_eagle3_head(tmp_path, TARGET)
    edit(folder, **{IDS: ids})

    with pytest.raises(CheckpointError, match="layer") as error:
        load_head(folder, TARGET)

    assert "config.json" in str(error.value)


def test_a_shallow_target_needs_its_layers_named(tmp_path):
    target = tiny_config(num_layers=2)
    folder = write_eagle3_head(tmp_path, target, capture_layers=(1, 2))

    assert (1, 2) == eagle3(folder, target).capture_layers

    edit(folder, eagle_config=...)
    with pytest.raises(CheckpointError, match=r"default \[2, 1, -1\] does not exist in a target"):
        load_head(folder, target)


def test_speculators_without_norm_before_residual_means_true(tmp_path):
    speculators = load_head(write_eagle3_head(tmp_path / "a", TARGET, "speculators"), TARGET)
    plain = load_head(write_eagle3_head(tmp_path / "b", TARGET), TARGET)

    assert isinstance(speculators.config, Eagle3Config)
    assert isinstance(plain.config, Eagle3Config)
    assert speculators.config.norm_before_residual
    assert any("norm_before_residual is not stated" in line for line in speculators.conventions)
    assert not plain.config.norm_before_residual


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True},
        {"own_embedding": True},
        {"draft_vocab_size": None},
        {"draft_vocab_size": None, "own_head": False},
        {"num_layers": 3},
        {"head_norms": True},
        {"hidden_size": 48, "own_embedding": True},
        {"capture_layers": (1, 2, 6, 8)},
    ],
    ids="-".join,
)
def test_options_are_found(tmp_path, layout, options):
    head = load_head(write_eagle3_head(tmp_path, TARGET, layout, **options), TARGET)
    config = head.config

    assert isinstance(config, Eagle3Config)
    assert options.get("fc_norm", False) == config.fc_norm
    assert options.get("norm_output", False) == config.norm_output
    assert options.get("norm_before_fc", False) == config.norm_before_fc
    assert options.get("own_embedding", False) == config.has_own_embedding
    assert options.get("own_head", True) == config.has_own_head
    assert options.get("num_layers", 1) == config.layers.num_layers
    assert options.get("head_norms", False) == config.layers.qk_norm
    assert options.get("hidden_size", 72) == config.layers.hidden_size
    assert options.get("capture_layers", (2, 4, 5)) == config.capture_layers
    assert ("d2t" in head.weights) == ("draft_vocab_size" not in options)
    for name in head.weights:
        head.weights[name]


def test_old_names_of_the_norms_are_known(tmp_path):
    new = load_head(write_eagle3_head(tmp_path / "new", TARGET, fc_norm=True), TARGET)
    old = load_head(
        write_eagle3_head(tmp_path / "old", TARGET, fc_norm=True, old_norm_names=True), TARGET
    )

    for i in range(3):
        name = f"fc_norm.{i}.weight"
        assert torch.equal(new.weights[name], old.weights[name])


def test_nvidias_switches_inside_eagle_config_count(tmp_path):
    folder = write_eagle3_head(tmp_path, TARGET, norm_before_fc=True)
    edit(folder, norm_before_fc=..., eagle_config={"norm_before_fc": True})

    assert eagle3(folder).norm_before_fc

    edit(folder, norm_before_fc=False)
    with pytest.raises(CheckpointError, match="norm_before_fc is False and eagle_config"):
        load_head(folder, TARGET)


def test_a_switch_without_its_tensors_and_tensors_without_their_switch(tmp_path):
    folder = write_eagle3_head(tmp_path, TARGET, fc_norm=True)
    edit(folder, fc_norm=False, norm_before_fc=True)

    with pytest.raises(CheckpointError) as error:
        load_head(folder, TARGET)

    assert "missing: input_norm.weight" in str(error.value)
    assert "unexpected: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight" in str(error.value)


def test_copies_of_the_target_are_skipped_by_name(tmp_path):
    copies = {
        "verifier_lm_head.weight": torch.ones(331, 72),
        "verifier_norm.weight": torch.ones(72),
    }
    head = load_head(write_eagle3_head(tmp_path, TARGET, "speculators", changes=copies), TARGET)

    assert (
        "skipped copies of the target's weights: verifier_lm_head.weight, verifier_norm.weight"
    ) in head.conventions


def test_positions_go_on_to_the_targets_end(tmp_path):
    head = load_head(write_eagle3_head(tmp_path, TARGET), TARGET)

    assert isinstance(head.config, Eagle3Config)
    assert TARGET.max_position == head.config.layers.max_position
    assert any("max_position_embeddings 128 is below" in line for line in head.conventions)


def test_biases_follow_the_tensors_where_config_json_was_copied_from_the_target(tmp_path):
    head = load_head(write_eagle3_head(tmp_path, TARGET, extra={"attention_bias": True}), TARGET)

    assert isinstance(head.config, Eagle3Config)
    assert not head.config.layers.attention_bias
    assert any("no biases; config.json says otherwise" in line for line in head.conventions)


# What does not fit: each its own error.

WRONG = {
    "missing fc": ({"changes": {"fc.weight": None}}, r"missing: fc\.weight"),
    "wrong shape": (
        {"changes": {"fc.weight": torch.ones(72, 144)}},
        r"wrong shape: fc\.weight is \[72, 144\], config\.json and the target says \[72, 216\]",
    ),
    "renamed tensor": (
        {
            "changes": {
                "midlayer.mlp.up_proj.weight": None,
                "midlayer.mlp.upward_proj.weight": torch.ones(100, 72),
            }
        },
        r"missing: layers\.0\.up\.weight; unexpected: midlayer\.mlp\.upward_proj\.weight",
    ),
    "a tensor under two names": (
        {
            "changes": {
                "model.norm.weight": torch.ones(72),
                "layers.0.hidden_norm.weight": torch.ones(72),
            }
        },
        r"unexpected: (model\.)?norm\.weight|unexpected: .*hidden_norm\.weight, (model\.)?norm\.w",
    ),
    "missing d2t": ({"changes": {"d2t": None}}, r"d2t is missing, so which 40 of the target's 331"),
    "no map at all": ({"changes": {"d2t": None, "t2d": None}}, r"d2t is missing"),
    "stale d2t": (
        {"changes": {"d2t": draft_ids(331, 40, 7) - torch.arange(40)}},
        r"d2t and t2d disagree about the draft vocabulary: only d2t has .*; only t2d has ",
    ),
    "zero d2t": (
        {"changes": {"d2t": torch.zeros(40, dtype=torch.int64)}},
        r"d2t and t2d disagree",
    ),
    "d2t of ids": (
        {"changes": {"d2t": draft_ids(331, 40), "t2d": None}},
        r"d2t: .*(outside the target's vocabulary|both stand for)",
    ),
    "d2t beyond the vocabulary": (
        {"changes": {"d2t": torch.full((40,), 300)}},
        r"9 of 40 draft tokens are outside the target's vocabulary",
    ),
    "d2t with a token twice": (
        {"changes": {"d2t": torch.tensor([1, 0, *[5] * 38])}},
        r"draft ids 0 and 1 both stand for target id 1",
    ),
    "d2t of another size": (
        {"changes": {"d2t": torch.zeros(39, dtype=torch.int64)}},
        r"d2t is \[39\], the draft vocabulary is \[40\]",
    ),
    "d2t of floats": ({"changes": {"d2t": torch.zeros(40)}}, r"d2t is stored as F32"),
    "t2d of another target": (
        {"changes": {"t2d": torch.zeros(330, dtype=torch.bool)}},
        r"t2d is \[330\], the target's vocabulary is \[331\]",
    ),
    "a whole vocabulary in another order": (
        {"draft_vocab_size": None, "changes": {"d2t": torch.tensor([1, -1, *[0] * 329])}},
        r"d2t reorders the whole vocabulary",
    ),
    "no head for a reduced vocabulary": ({"own_head": False}, r"missing: lm_head\.weight"),
    "wrong hidden size": (
        {"extra": {"target_hidden_size": 96}},
        r"target_hidden_size is 96, the target's hidden size is 72",
    ),
    "a narrow head without an embedding": ({"hidden_size": 48}, r"hidden size 48 is not the"),
    "wrong vocabulary": (
        {"extra": {"vocab_size": 320}},
        r"vocab_size is 320, the target's vocabulary is 331",
    ),
    "too large a draft vocabulary": (
        {"extra": {"draft_vocab_size": 400}},
        r"draft_vocab_size 400 is above the target's vocabulary of 331",
    ),
    "heads that do not divide": (
        {"extra": {"num_key_value_heads": 4}},
        r"num_attention_heads 6 is not a multiple",
    ),
    "both norms": (
        {"extra": {"fc_norm": True, "norm_before_fc": True}},
        r"norm_before_fc and fc_norm exclude each other",
    ),
    "weights in another type": (
        {"changes": {"norm.weight": torch.ones(72, dtype=torch.float64)}},
        r"norm\.weight is stored as F64",
    ),
    "a bad figure": ({"extra": {"outrider": {"recorded_acceptance": -1}}}, r"recorded_acceptance"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_has_an_error_of_its_own(tmp_path, options, message):
    folder = write_eagle3_head(tmp_path / "head", TARGET, **options)

    with pytest.raises(CheckpointError, match=message) as error:
        load_head(folder, TARGET)

    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_head_for_another_target_names_both_sizes(tmp_path):
    folder = write_eagle3_head(tmp_path, tiny_config(num_layers=8, hidden_size=96))

    with pytest.raises(CheckpointError, match="hidden_size is 96, the target's hidden size is 72"):
        load_head(folder, TARGET)


def test_a_head_for_a_deeper_target_is_refused(tmp_path):
    folder = write_eagle3_head(tmp_path, TARGET, "speculators", capture_layers=(2, 4, 8))

    with pytest.raises(CheckpointError, match="input of layer 8, the target has 6 layers"):
        load_head(folder, tiny_config(num_layers=6))


def test_a_draft_vocabulary_of_the_first_tokens_may_have_zero_offsets(tmp_path):
    changes = {
        "d2t": torch.zeros(40, dtype=torch.int64),
        "t2d": torch.arange(331) < 40,
    }
    head = load_head(write_eagle3_head(tmp_path, TARGET, changes=changes), TARGET)

    assert any("d2t is all zeros: the draft vocabulary is the first" in c for c in head.conventions)


def test_a_map_in_32_bits_is_read_in_64(tmp_path):
    d2t = (draft_ids(331, 40) - torch.arange(40)).to(torch.int32)
    head = load_head(write_eagle3_head(tmp_path, TARGET, changes={"d2t": d2t}), TARGET)

    assert torch.int64 == head.weights["d2t"].dtype
    assert d2t.tolist() == head.weights["d2t"].tolist()


def test_a_nan_is_named(tmp_path):
    folder = write_eagle3_head(
        tmp_path, TARGET, changes={"norm.weight": torch.full((72,), torch.nan)}
    )
    head = load_head(folder, TARGET)

    with pytest.raises(CheckpointError, match=r"weight norm\.weight holds a NaN"):
        head.weights["norm.weight"]


# Relatives that are other networks, by name.


@pytest.mark.parametrize(
    ("name", "fields", "changes"),
    [
        ("use_aux_hidden_state is false", {"eagle_config": {"use_aux_hidden_state": False}}, {}),
        ("P-EAGLE", {}, {"mask_hidden": torch.ones(1, 216)}),
        ("P-EAGLE", {"architectures": ["PEagleDraftModel"]}, {}),
        ("DFlash", {"dflash_config": {"mask_token_id": 1}}, {}),
        ("DSpark", {"speculators_model_type": "dspark"}, {}),
        ("speculators_model_type 'mtp'", {"speculators_model_type": "mtp"}, {}),
        ("model_type 'deepseek_v3'", {"model_type": "deepseek_v3"}, {}),
        ("sliding attention", {"layer_types": ["sliding_attention"]}, {}),
        ("quantised weights", {"quantization_config": {"quant_method": "fp8"}}, {}),
    ],
)
def test_other_networks_are_refused_by_name(tmp_path, name, fields, changes):
    folder = write_eagle3_head(tmp_path, TARGET, changes=changes, extra=fields)

    with pytest.raises(UnsupportedModelError, match=name):
        load_head(folder, TARGET)


def test_eagle_1_and_2_are_refused_by_name(tmp_path):
    weights = {
        "fc.weight": torch.ones(72, 144),
        "fc.bias": torch.ones(72),
        "layers.0.self_attn.q_proj.weight": torch.ones(72, 72),
    }
    save_file(weights, tmp_path / "model.safetensors")

    with pytest.raises(UnsupportedModelError, match="EAGLE-1 or EAGLE-2"):
        load_head(tmp_path, TARGET)


def test_what_is_no_head_is_listed(tmp_path):
    save_file({"encoder.weight": torch.ones(2)}, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"tensors: encoder\.weight; supported: EAGLE-3"):
        load_head(tmp_path, TARGET)


# Files.


def test_a_file_and_shards_load_like_the_folder(tmp_path):
    folder = write_eagle3_head(tmp_path / "head", TARGET)
    whole = load_head(folder, TARGET)
    file = load_head(folder / "model.safetensors", TARGET)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    sharded = write_eagle3_head(tmp_path / "sharded", TARGET)
    (sharded / "model.safetensors").unlink()
    files = {}
    for part in range(2):
        shard = {name: weights[name] for name in names[part::2]}
        save_file(shard, sharded / f"model-{part}.safetensors")
        files |= dict.fromkeys(shard, f"model-{part}.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    parts = load_head(sharded, TARGET)

    assert whole.config == file.config == parts.config
    assert whole.weights_hash == file.weights_hash != parts.weights_hash
    assert whole.source_bytes == (folder / "model.safetensors").stat().st_size
    for name in whole.weights:
        assert torch.equal(whole.weights[name], parts.weights[name])


def test_pickles_are_refused_unopened_with_the_way_out(tmp_path):
    folder = write_eagle3_head(tmp_path, TARGET)
    (folder / "model.safetensors").unlink()
    pickle = folder / "pytorch_model.bin"
    pickle.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")

    for path in (folder, pickle):
        with pytest.raises(UnsafeFileError, match=r"pytorch_model\.bin: a pickle.*save_file"):
            load_head(path, TARGET)


def test_gguf_heads_are_refused(tmp_path):
    path = tmp_path / "head.gguf"
    path.write_bytes(b"GGUF")

    with pytest.raises(UnsupportedModelError, match="read from safetensors only"):
        load_head(path, TARGET)
    with pytest.raises(UnsupportedModelError, match="read from safetensors only"):
        load_head(tmp_path, TARGET)


def test_missing_things_are_named(tmp_path):
    with pytest.raises(UnknownModelError, match="no such folder or file"):
        load_head(tmp_path / "nowhere", TARGET)
    with pytest.raises(CheckpointError, match="no weights; allowed"):
        load_head(tmp_path, TARGET)
    folder = write_eagle3_head(tmp_path / "head", TARGET)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing; the head's layout needs it"):
        load_head(folder, TARGET)


def test_closed_weights_cannot_be_read(tmp_path):
    weights = load_head(write_eagle3_head(tmp_path, TARGET), TARGET).weights
    weights.close()

    with pytest.raises(KeyError):
        weights["fc.weight"]


SMALL = tiny_config(
    vocab_size=24, hidden_size=8, num_layers=7, num_heads=2, num_kv_heads=1, head_dim=4, mlp_size=8
)


def small_heads(folder: Path) -> list[Path]:
    """One small head of each kind."""
    options: dict[str, Any] = {"draft_vocab_size": 12, "fc_norm": True}
    mtp = write_mtp_target(
        folder / "mtp", vocab_size=24, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4,
        mlp_size=8, num_layers=7,
    )  # fmt: skip
    return [
        write_eagle3_head(folder / "safeailab", SMALL, **options),
        write_eagle3_head(folder / "speculators", SMALL, "speculators", **options),
        write_medusa_head(folder / "medusa", SMALL, file_name="model.safetensors"),
        _only_module(mtp),
    ]


def _only_module(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k.startswith("mtp.")}, path)
    return folder


@pytest.fixture(scope="module")
def sound_heads(tmp_path_factory):
    folders = small_heads(tmp_path_factory.mktemp("small"))
    files = [folder / name for folder in folders for name in ("model.safetensors", "config.json")]
    return {file: file.read_bytes() for file in files}


def test_the_small_heads_are_sound(sound_heads):
    folders = {file.parent for file in sound_heads}

    assert {"EAGLE3", "MEDUSA", "MTP"} == {load_head(f, SMALL).method.name for f in folders}
    for folder in folders:
        _load_everything(folder)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_clear_error_or_no_error(sound_heads, data):
    """Flip bits in header, weights and config.json, cut the end: load, or say what is wrong."""
    file = data.draw(st.sampled_from(sorted(sound_heads)))
    damaged = bytearray(sound_heads[file])
    ends = [len(damaged)]
    if file.suffix == ".safetensors":
        ends = [8, 8 + struct.unpack("<Q", damaged[:8])[0], len(damaged)]
    for _ in range(data.draw(st.integers(1, 4))):
        last = data.draw(st.sampled_from(ends)) - 1
        damaged[data.draw(st.integers(0, last))] ^= data.draw(st.integers(1, 255))
    length = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    file.write_bytes(damaged[:length])
    try:
        message = complaint(lambda: _load_everything(file.parent))
    finally:
        file.write_bytes(sound_heads[file])

    assert message is None or str(file.parent) in message
    assert message is None or "\n" not in message


def _load_everything(folder: Path) -> None:
    head = load_head(folder, SMALL)
    for name in head.weights:
        head.weights[name]
    head.weights.close()
