"""config.json: each family's fields and defaults, both rope spellings, and bad values by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.architecture import RopeConfig
from outrider.models.loading.fields import Fields
from outrider.models.loading.hf_config import parse_config
from tests.tiny import TinyModel, complaint

LLAMA = TinyModel().config()


def parse(changes: dict[str, Any], base: dict[str, Any] = LLAMA):
    values = {key: value for key, value in (base | changes).items() if value is not ...}
    return parse_config(Fields(Path("config.json"), values))


def family(architecture: str, **changes: Any):
    return parse(changes, TinyModel(architecture=architecture).config())


def test_llama_biases_are_on_all_four_projections():
    config = parse({"attention_bias": True})

    assert config.attention_bias
    assert config.attention_out_bias


def test_qwen2_always_has_biases_on_q_k_v_alone():
    config = family("Qwen2ForCausalLM", attention_bias=...)

    assert config.attention_bias
    assert not config.attention_out_bias


def test_qwen3_has_head_norms_and_its_own_head_size():
    assert 128 == family("Qwen3ForCausalLM", head_dim=...).head_dim
    assert family("Qwen3ForCausalLM").qk_norm


def test_a_missing_head_dim_follows_from_the_hidden_size():
    assert 16 == parse({"head_dim": ...}).head_dim
    assert 32 == parse({"head_dim": 32}).head_dim
    with pytest.raises(CheckpointError, match="not a multiple of 5 attention heads"):
        parse({"head_dim": ..., "num_attention_heads": 5})


def test_a_missing_number_of_kv_heads_is_that_of_heads():
    assert 4 == parse({"num_key_value_heads": ...}).num_kv_heads


@pytest.mark.parametrize(
    ("changes", "window"),
    [({"sliding_window": None}, None), ({"sliding_window": 7}, 7), ({"sliding_window": ...}, 4096)],
)
def test_mistral_slides_in_every_layer_unless_told_null(changes, window):
    config = family("MistralForCausalLM", **changes)

    assert window == config.sliding_window
    assert ((0, 1) if window else ()) == config.sliding_layers


def test_qwen_slides_only_when_told_and_only_above_max_window_layers():
    changes = {"num_hidden_layers": 6, "sliding_window": 9, "max_window_layers": 4}
    off = family("Qwen2ForCausalLM", **changes, use_sliding_window=False)
    on = family("Qwen2ForCausalLM", **changes, use_sliding_window=True)

    assert (None, ()) == (off.sliding_window, off.sliding_layers)
    assert (9, (4, 5)) == (on.sliding_window, on.sliding_layers)


def test_layer_types_say_which_layers_slide():
    kinds = ["sliding_attention", "full_attention"]
    config = family(
        "Qwen3ForCausalLM", use_sliding_window=True, sliding_window=9, layer_types=kinds
    )

    assert (0,) == config.sliding_layers
    with pytest.raises(CheckpointError, match="layer_types is not one of"):
        family("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=9, layer_types=["x"] * 2)


def test_smollm3_layers_without_rope_by_list_or_interval():
    layers = {"num_hidden_layers": 8}
    interval = family("SmolLM3ForCausalLM", **layers, no_rope_layer_interval=4)
    listed = family("SmolLM3ForCausalLM", **layers, no_rope_layers=[1, 0, 1, 1, 1, 1, 0, 1])

    assert (3, 7) == interval.no_rope_layers
    assert (1, 6) == listed.no_rope_layers
    assert 2_000_000.0 == family("SmolLM3ForCausalLM", rope_theta=...).rope.theta
    assert family("SmolLM3ForCausalLM", tie_word_embeddings=...).tied_embeddings
    with pytest.raises(CheckpointError, match="no_rope_layers is not a list of 0 and 1"):
        family("SmolLM3ForCausalLM", no_rope_layers=[1, 2])


ROPES = {
    "linear": ({"rope_type": "linear", "factor": 2.0}, {"kind": "linear", "factor": 2.0}),
    "legacy key": ({"type": "linear", "factor": 2.0}, {"kind": "linear", "factor": 2.0}),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {
            "kind": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position": 128,
        },
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        {
            "kind": "yarn",
            "factor": 4.0,
            "original_max_position": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    "yarn without factor": (
        {"rope_type": "yarn", "original_max_position_embeddings": 128},
        {"kind": "yarn", "factor": 4.0, "original_max_position": 128},
    ),
}


@pytest.mark.parametrize(("stated", "expected"), ROPES.values(), ids=ROPES)
def test_both_spellings_of_the_rope_settings_agree(stated, expected):
    """``rope_scaling`` beside ``rope_theta``, and transformers 5's ``rope_parameters``."""
    old = parse({"rope_theta": 5e5, "rope_scaling": stated})
    new = parse(
        {
            "rope_theta": ...,
            "rope_scaling": ...,
            "rope_parameters": {"rope_theta": 5e5, **stated},
        }
    )

    assert RopeConfig(theta=5e5, **expected) == old.rope
    assert old.rope == new.rope


def test_the_original_length_of_the_outer_level_counts():
    stated = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    outer = {"original_max_position_embeddings": 64}

    assert 64 == parse({"rope_scaling": stated, **outer}).rope.original_max_position
    del stated["original_max_position_embeddings"]
    assert 512 == parse({"rope_scaling": stated}).rope.original_max_position


def test_empty_rope_settings_are_none():
    assert RopeConfig(theta=7.0) == parse({"rope_scaling": {}, "rope_theta": 7.0}).rope
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    assert "linear" == parse({"rope_scaling": {}, "rope_parameters": new}).rope.kind


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_other_rope_kinds_are_refused_by_name(kind):
    with pytest.raises(UnsupportedModelError, match=f"config.json: rope_scaling type '{kind}'"):
        parse({"rope_scaling": {"rope_type": kind, "factor": 2.0}})


def test_partial_rotation_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5"):
        parse({"partial_rotary_factor": 0.5})


BAD_FIELDS = {
    "negative": ("hidden_size", -64),
    "zero": ("num_hidden_layers", 0),
    "huge": ("vocab_size", 2**40),
    "text": ("intermediate_size", "96"),
    "bool": ("num_attention_heads", True),
    "fraction": ("num_key_value_heads", 1.5),
    "infinite": ("rms_norm_eps", float("inf")),
    "nan": ("rope_theta", float("nan")),
    "list": ("max_position_embeddings", [1]),
    "not a flag": ("tie_word_embeddings", "yes"),
    "not an object": ("rope_scaling", "linear"),
    "missing hidden_size": ("hidden_size", ...),
    "missing vocab_size": ("vocab_size", ...),
    "null": ("num_hidden_layers", None),
}


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_bad_field_is_named_with_its_file(name, value):
    with pytest.raises(CheckpointError, match=f"config.json: {name} is") as error:
        parse({name: value})

    assert "\n" not in str(error.value)


def test_unknown_architectures_are_refused_with_the_list():
    with pytest.raises(UnsupportedModelError, match="'GPT2LMHeadModel' is not supported; supp"):
        parse({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnsupportedModelError, match="'gemma3_text' is not supported"):
        parse({"architectures": ..., "model_type": "gemma3_text"})


def test_the_model_type_stands_in_for_missing_architectures():
    assert "LlamaForCausalLM" == parse({"architectures": ...}).architecture


def test_quantised_safetensors_are_refused():
    with pytest.raises(UnsupportedModelError, match="quantised weights \\('gptq'\\)"):
        parse({"quantization_config": {"quant_method": "gptq", "bits": 4}})


def test_another_activation_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"config\.json: hidden_act 'gelu'"):
        parse({"hidden_act": "gelu"})


@given(
    name=st.sampled_from([*LLAMA, "rope_parameters", "quantization_config", "layer_types"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field_parses_or_is_explained(name, value):
    message = complaint(lambda: parse({name: value}))

    assert message is None or "config.json: " in message
    assert message is None or "\n" not in message
