"""GGUF: the container, its translation into config and weights, and every way it can be broken."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.loading import load
from outrider.models.loading.gguf_file import GGUFFile
from outrider.models.loading.gguf_model import llama3_divisors, read_config
from tests.tiny import (
    SMALLEST,
    TinyModel,
    complaint,
    write_gguf_checkpoint,
    write_hf_checkpoint,
)

Kind = gguf.GGMLQuantizationType

SHAPES = {
    "llama": {},
    "llama-tied-biased": {"tied": True, "attention_bias": True, "mlp_bias": True},
    "llama-multi-head": {"num_kv_heads": 4, "head_dim": 8},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf_checkpoint(path, **SMALLEST)
    return path.read_bytes()


@pytest.fixture
def write(tmp_path):
    """Write a GGUF file from explicit metadata and tensors."""

    def write_file(metadata=(), tensors=(), arch="llama"):
        path = tmp_path / "made.gguf"
        writer = gguf.GGUFWriter(path, arch)
        for key, value, kind in metadata:
            writer.add_key_value(key, value, kind)
        for name, data in tensors:
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write_file


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gguf_and_safetensors_of_one_model_load_alike(tmp_path, shape):
    """Names, orientation and row order come out the same from both formats."""
    folder = load(write_hf_checkpoint(tmp_path / "hf", **shape))
    file = load(write_gguf_checkpoint(tmp_path / "tiny.gguf", **shape))

    assert set(folder.weights) == set(file.weights)
    for name in folder.weights:
        assert torch.equal(folder.weights[name], file.weights[name]), name
    same = dataclasses.replace(file.config, norm_eps=folder.config.norm_eps)
    assert folder.config == same
    assert folder.config.norm_eps == pytest.approx(file.config.norm_eps)
    assert folder.tokenizer.fingerprint == file.tokenizer.fingerprint


def test_smollm3_rows_are_put_back_and_every_fourth_layer_has_no_rope(tmp_path):
    shape = {"architecture": "SmolLM3ForCausalLM", "num_layers": 8, "tied": True}
    folder = load(write_hf_checkpoint(tmp_path / "hf", **shape))
    file = load(write_gguf_checkpoint(tmp_path / "tiny.gguf", **shape))

    assert (3, 7) == file.config.no_rope_layers
    for name in folder.weights:
        assert torch.equal(folder.weights[name], file.weights[name]), name


def test_q_and_k_rows_differ_in_the_file(tmp_path):
    """Control for the tests above: without putting rows back they could not pass."""
    path = write_gguf_checkpoint(tmp_path / "tiny.gguf")
    stored = GGUFFile.open(path).read("blk.0.attn_q.weight")
    loaded = load(path).weights["layers.0.q.weight"]

    assert stored.shape == loaded.shape
    assert not torch.equal(stored, loaded)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rope_scaling_means_the_same_as_in_config_json(tmp_path, rope):
    shape = {"rope": rope, "head_dim": 32, "max_position": 512}
    expected = load(write_hf_checkpoint(tmp_path / "hf", **shape)).config.rope
    rope_config = load(write_gguf_checkpoint(tmp_path / "tiny.gguf", **shape)).config.rope

    assert expected.kind == rope_config.kind
    assert expected.theta == rope_config.theta
    assert expected.factor == pytest.approx(rope_config.factor)
    if rope["rope_type"] != "linear":
        assert expected.original_max_position == rope_config.original_max_position


@pytest.mark.parametrize(("low", "high", "original"), [(1.0, 4.0, 8192), (2.0, 8.0, 4096)])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, low, high, original):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    path = write_gguf_checkpoint(tmp_path / "tiny.gguf", rope=rope, head_dim=64)
    stored = GGUFFile.open(path).read("rope_freqs.weight").numpy()

    recovered = load(path).config.rope

    assert recovered.kind == "llama3"
    np.testing.assert_allclose(llama3_divisors(recovered, 64), stored, rtol=1e-4)


def test_rope_divisors_of_another_kind_are_refused(write):
    divisors = np.linspace(1.0, 7.0, 8, dtype=np.float32)
    path = write(_sizes(), [("token_embd.weight", _zeros(32, 16)), ("rope_freqs.weight", divisors)])

    with pytest.raises(UnsupportedModelError, match="not Llama 3's rope scaling"):
        read_config(GGUFFile.open(path))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_precision_stays_as_stored(tmp_path, kind):
    path = write_gguf_checkpoint(tmp_path / "tiny.gguf", kind=kind)
    expected = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    weights = load(path).weights

    assert expected == weights["layers.0.up.weight"].dtype
    assert torch.float32 == weights["norm.weight"].dtype
    reference = TinyModel().weights()["model.layers.0.mlp.up_proj.weight"]
    torch.testing.assert_close(
        reference, weights["layers.0.up.weight"].float(), rtol=2**-7, atol=1e-6
    )


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_blocks_become_float32(tmp_path, kind):
    path = write_gguf_checkpoint(tmp_path / "tiny.gguf", kind=kind)
    stored = TinyModel().weights()["model.layers.0.mlp.down_proj.weight"].numpy()
    loaded = load(path).weights["layers.0.down.weight"]

    assert torch.float32 == loaded.dtype
    np.testing.assert_array_equal(dequantize(quantize(stored, kind), kind), loaded.numpy())
    assert 0.9 < np.corrcoef(stored.ravel(), loaded.numpy().ravel())[0, 1]


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_read(tmp_path, kind):
    """gguf-py can decode K-quants but not make them, so the blocks are random bytes."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (4, block_bytes), dtype=np.uint8)
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile.open(path)

    assert (4, 256) == file.tensors["w"].shape
    np.testing.assert_array_equal(dequantize(blocks, kind), file.read("w").numpy())


def test_an_unsupported_tensor_type_is_named(write):
    path = write(tensors=[("w", np.zeros((2, 2), dtype=np.float64))])

    with pytest.raises(UnsupportedModelError, match="'w' is stored as F64; supported: F32"):
        GGUFFile.open(path)


def test_metadata_of_every_type_is_read(write):
    types = gguf.GGUFValueType
    scalars = {
        types.UINT8: 200,
        types.INT8: -3,
        types.UINT16: 60000,
        types.INT16: -300,
        types.UINT32: 4_000_000_000,
        types.INT32: -70000,
        types.FLOAT32: 0.5,
        types.BOOL: True,
        types.STRING: "naïve",
        types.UINT64: 2**63,
        types.INT64: -(2**62),
        types.FLOAT64: 0.1,
    }
    path = write([(f"k.{kind.name}", value, kind) for kind, value in scalars.items()])

    metadata = GGUFFile.open(path).metadata

    assert {f"k.{kind.name}": value for kind, value in scalars.items()} == {
        key: value for key, value in metadata.items() if key.startswith("k.")
    }


def test_every_missing_and_unexpected_tensor_is_named(write):
    tensors = [("token_embd.weight", _zeros(32, 16)), ("blk.0.attn_sinks.weight", _zeros(4))]
    path = write(_sizes(), tensors)

    with pytest.raises(CheckpointError) as error:
        load(path)

    assert "\n" not in str(error.value)
    assert "missing: norm.weight" in str(error.value)
    assert "and 2 more" in str(error.value)
    assert "unexpected: blk.0.attn_sinks.weight" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embedding_length", 0, "llama.embedding_length is 0; allowed: a whole number from 1"),
        ("embedding_length", 2**31, "llama.embedding_length is 2147483648"),
        ("block_count", 2**20, "llama.block_count is 1048576"),
        ("attention.head_count", 0, "llama.attention.head_count is 0"),
        ("attention.head_count_kv", 3, "not a multiple"),
        ("rope.dimension_count", 4, "only full heads are supported"),
        ("expert_count", 8, "mixture of experts"),
        ("context_length", None, "llama.context_length is missing"),
        ("feed_forward_length", None, "llama.feed_forward_length is missing"),
    ],
)
def test_a_bad_size_is_named(write, key, value, message):
    sizes = {entry[0]: entry for entry in _sizes()}
    full = f"llama.{key}"
    if value is None:
        del sizes[full]
    else:
        sizes[full] = (full, value, gguf.GGUFValueType.UINT32)
    path = write(sizes.values(), [("token_embd.weight", _zeros(32, 16))])

    with pytest.raises(CheckpointError, match=message) as error:
        load(path)

    assert str(path) in str(error.value)


def test_an_unknown_architecture_is_refused_with_the_list(write):
    path = write(arch="gpt2")

    with pytest.raises(UnsupportedModelError, match="'gpt2' is not supported; supported: llama,"):
        load(path)


def test_a_part_of_a_split_file_is_refused(write):
    path = write([("split.count", 3, gguf.GGUFValueType.UINT16)])

    with pytest.raises(UnsupportedModelError, match="merge the parts first"):
        load(path)


def test_an_adapter_is_no_model(write):
    path = write([("general.type", "adapter", gguf.GGUFValueType.STRING)])

    with pytest.raises(UnsupportedModelError, match="a GGUF adapter, not a model"):
        load(path)


def test_nan_weights_are_named_when_read(tmp_path, tiny_bytes):
    path = tmp_path / "nan.gguf"
    path.write_bytes(tiny_bytes)
    start = GGUFFile.open(path).tensors["output_norm.weight"].start
    damaged = bytearray(tiny_bytes)
    damaged[start : start + 4] = struct.pack("<f", float("nan"))
    path.write_bytes(damaged)
    weights = load(path).weights

    with pytest.raises(CheckpointError, match=r"weight norm\.weight holds a NaN"):
        weights["norm.weight"]
    assert torch.isfinite(weights["embed.weight"]).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "does not start with 'GGUF'"),
        (b"PK\x03\x04" + bytes(64), "does not start with 'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "declares 4611686018427387904 entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "declares 4611686018427387904 entries"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(32),
            "is 9223372036854775808 bytes",
        ),
    ],
)
def test_a_broken_header_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=message) as error:
        load(path)

    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused(tmp_path, tiny_bytes, share):
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_bytes[: int(len(tiny_bytes) * share)])

    with pytest.raises(CheckpointError, match=r"past the end|truncated"):
        load(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_clear_error_or_no_error(tmp_path, tiny_bytes, data):
    """Flip bits, overwrite integers, cut the end: load, or say what is wrong."""
    damaged = bytearray(tiny_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        # most of the damage goes into the header, where it can be told apart
        at = data.draw(st.integers(0, len(damaged) - 9))
        value = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=1),
                st.sampled_from([b"\xff" * 8, bytes(8), struct.pack("<Q", 2**63)]),
            )
        )
        damaged[at : at + len(value)] = value
    length = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged[:length])

    message = complaint(lambda: _load_everything(path))

    assert message is None or (message and "\n" not in message)


def _load_everything(path: Path) -> None:
    checkpoint = load(path)
    for name in checkpoint.weights:
        checkpoint.weights[name]
    checkpoint.tokenizer.encode("a b")


def _sizes():
    number, real = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
    return [
        ("llama.context_length", 64, number),
        ("llama.embedding_length", 16, number),
        ("llama.block_count", 1, number),
        ("llama.feed_forward_length", 32, number),
        ("llama.attention.head_count", 1, number),
        ("llama.attention.head_count_kv", 1, number),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5, real),
    ]


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)
