"""Hugging Face folders: safetensors in one file and in shards, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider.errors import (
    CheckpointError,
    UnknownModelError,
    UnsafeFileError,
    UnsupportedModelError,
)
from outrider.models.loading import load
from tests.tiny import SMALLEST, complaint, write_gguf_checkpoint, write_hf_checkpoint


def test_shards_load_like_one_file(tmp_path):
    one = load(write_hf_checkpoint(tmp_path / "one"))
    three = load(write_hf_checkpoint(tmp_path / "three", shards=3))

    assert one.config == three.config
    assert set(one.weights) == set(three.weights) == set(one.config.weight_shapes())
    for name in one.weights:
        assert torch.equal(one.weights[name], three.weights[name]), name
    assert one.weights_hash != three.weights_hash
    assert three.source_bytes > sum(one.weights[name].nbytes for name in one.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_their_stored_type(tmp_path, dtype):
    checkpoint = load(write_hf_checkpoint(tmp_path, dtype=dtype))

    assert {dtype} == {checkpoint.weights[name].dtype for name in checkpoint.weights}


def test_a_safetensors_file_stands_for_its_folder(tmp_path):
    folder = load(write_hf_checkpoint(tmp_path / "model"))
    file = load(tmp_path / "model" / "model.safetensors")

    assert folder.config == file.config
    assert "model" == folder.name == file.name


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path):
    write_gguf_checkpoint(tmp_path / "a.gguf")

    assert "a" == load(tmp_path).name

    write_gguf_checkpoint(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files; name one of them: a\.gguf, b"):
        load(tmp_path)


def test_the_hash_follows_weights_and_config(tmp_path):
    first = load(write_hf_checkpoint(tmp_path / "a")).weights_hash
    again = load(write_hf_checkpoint(tmp_path / "b")).weights_hash
    other = load(write_hf_checkpoint(tmp_path / "c", seed=1)).weights_hash
    theta = load(write_hf_checkpoint(tmp_path / "d", rope={"rope_theta": 5.0})).weights_hash

    assert first == again
    assert 3 == len({first, other, theta})


def test_closed_weights_cannot_be_read(tmp_path):
    weights = load(write_hf_checkpoint(tmp_path)).weights
    kept = weights["norm.weight"]
    weights.close()

    with pytest.raises(KeyError):
        weights["norm.weight"]
    assert torch.isfinite(kept).all()


def test_harmless_extras_are_skipped(tmp_path):
    folder = write_hf_checkpoint(tmp_path, tied=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors")

    assert "lm_head.weight" not in load(folder).weights


def test_missing_unexpected_and_misshapen_tensors_are_named_together(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.adapter.weight"] = torch.ones(2)
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(CheckpointError) as error:
        load(folder)

    assert "missing: layers.1.up.weight" in str(error.value)
    assert "unexpected: model.layers.0.adapter.weight" in str(error.value)
    assert "wrong shape: norm.weight is [3], config says [64]" in str(error.value)


def test_at_most_eight_tensors_are_named(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"layers\.0\.o\.weight and 12 more$"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_that_is_no_number_is_named(tmp_path, dtype, value):
    folder = write_hf_checkpoint(tmp_path, dtype=dtype)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors")
    checkpoint = load(folder)

    with pytest.raises(CheckpointError, match=r"weight layers\.1\.down\.weight holds a NaN"):
        checkpoint.weights["layers.1.down.weight"]


def test_large_finite_weights_are_not_mistaken_for_infinities(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full((64,), 3e38)
    save_file(weights, folder / "model.safetensors")

    assert 3e38 == pytest.approx(load(folder).weights["norm.weight"][0].item())


def test_other_tensor_types_are_refused(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].double()
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is stored as F64"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.PTH", "last.ckpt"])
def test_a_folder_of_pickles_is_refused_unopened(tmp_path, name):
    folder = write_hf_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")

    with pytest.raises(UnsafeFileError, match="convert them to safetensors"):
        load(folder)
    with pytest.raises(UnsafeFileError, match="convert it to safetensors"):
        load(folder / name)


def test_code_beside_the_weights_is_never_run(tmp_path):
    folder = write_hf_checkpoint(tmp_path, extra={"auto_map": {"AutoConfig": "canary.Config"}})
    marker = tmp_path / "ran"
    (folder / "canary.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    settings_path = folder / "tokenizer_config.json"
    settings_ = json.loads(settings_path.read_text())
    settings_["auto_map"] = {"AutoTokenizer": ["canary.Config", None]}
    settings_path.write_text(json.dumps(settings_))

    load(folder)

    assert not marker.exists()


def test_an_empty_folder_has_no_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights; allowed: model\.safetensors"):
        load(tmp_path)


def test_a_missing_path_is_unknown(tmp_path):
    with pytest.raises(UnknownModelError, match="no such folder or file"):
        load(tmp_path / "nowhere")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not weights")

    with pytest.raises(CheckpointError, match=r"not a model file; allowed: \.gguf"):
        load(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b"\xff\xfe{}", b"null", b"[" * 100_000, b"{" + b'"a":{' * 9999],
)
def test_json_that_is_not_an_object_is_one_clear_line(tmp_path, name, content):
    folder = write_hf_checkpoint(tmp_path)
    (folder / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=name) as error:
        load(folder)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = write_hf_checkpoint(tmp_path)
    (folder / name).unlink()

    with pytest.raises(CheckpointError, match=f"{name}: cannot be read"):
        load(folder)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "..", "a\\b"]
)
def test_an_index_cannot_point_outside_its_folder(tmp_path, shard):
    folder = write_hf_checkpoint(tmp_path / "model", shards=2)
    save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    index_path.write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match="not the name of a safetensors file in the folder"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = write_hf_checkpoint(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"shard model-00002-of-00002\.safetensors is mis"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    folder = write_hf_checkpoint(tmp_path, shards=2)
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match="weight_map is missing or empty"):
        load(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_safetensors_are_refused(tmp_path, share):
    path = write_hf_checkpoint(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])

    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a sound safetensors"):
        load(tmp_path)


@pytest.fixture(scope="module")
def damaged_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    write_hf_checkpoint(folder, **SMALLEST)
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_clear_error_or_no_error(damaged_folder, data):
    """Flip bits in header and weights, cut the end: load, or say what is wrong."""
    folder, sound = damaged_folder
    damaged = bytearray(sound)
    header = 8 + struct.unpack("<Q", sound[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        last = data.draw(st.sampled_from([8, header, len(sound)])) - 1
        damaged[data.draw(st.integers(0, last))] ^= data.draw(st.integers(1, 255))
    length = data.draw(st.one_of(st.just(len(sound)), st.integers(0, len(sound))))
    (folder / "model.safetensors").write_bytes(damaged[:length])

    message = complaint(lambda: _load_everything(folder))

    assert message is None or str(folder) in message
    assert message is None or "\n" not in message


def _load_everything(folder: Path) -> None:
    checkpoint = load(folder)
    for name in checkpoint.weights:
        checkpoint.weights[name]
