"""transformers as a peer: the same weights, and a generate call that is timed like ours.

Runs in ``peers.py``'s own process. A Hugging Face folder is loaded by transformers itself; a GGUF
file's weights come through our loader, dequantised, so that both sides compute with the same
numbers. ``hf_folder.py`` writes them out for other engines with the names that stand here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# isort: off
# outrider comes before torch: it sets how torch is to allocate memory, for every arm alike.
import outrider  # noqa: F401 - for that effect
import torch

# isort: on
import transformers
from peer import Answer, AnswerFunction, Arm, Stopwatch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from outrider.models.architecture import DecoderConfig
from outrider.models.loading import load

NAME = "transformers"
# Hugging Face's names for the weights of a Llama checkpoint.
HF_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
HF_PARTS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


class Counting:
    """A streamer for ``generate`` that only notes when new tokens came, and how many."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._is_prompt = True

    def put(self, token_ids: Any) -> None:
        """Receive the prompt first, then new tokens as they come."""
        if not self._is_prompt:
            self._watch.saw(token_ids.numel())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left to do at the end of the text."""


def arms(path: Path, dtype_name: str, num_lookup_tokens: int, assistant: Path | None) -> list[Arm]:
    """All ways to decode in one precision; with ``assistant`` as draft model if given."""
    model = load_transformers(path, dtype_name)
    version = f"transformers {transformers.__version__}"
    ways = {"plain": generating(model), "prompt lookup": generating(model, num_lookup_tokens)}
    if assistant is not None:
        draft = load_transformers(assistant, dtype_name)
        ways["assistant"] = generating(model, assistant=draft)
    return [
        Arm(f"{NAME} {way} {dtype_name}", NAME, dtype_name, way == "plain", answer, version)
        for way, answer in ways.items()
    ]


def generating(
    model: Any, num_lookup_tokens: int | None = None, assistant: Any = None
) -> AnswerFunction:
    """Answer with ``model.generate``: plain, with prompt lookup, or with a draft model."""
    # What generate is not told it takes from here: a checkpoint's own end-of-sequence id or
    # penalties would apply in spite of the None below.
    model.generation_config = GenerationConfig()

    def answer(prompt: list[int], max_tokens: int) -> Answer:
        # No end-of-sequence id: generation runs to its length, as ours does with ignore_eos.
        settings = GenerationConfig(
            do_sample=False,
            min_new_tokens=None,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            prompt_lookup_num_tokens=num_lookup_tokens,
        )
        input_ids = torch.tensor([prompt])
        watch = Stopwatch()
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=settings,
                assistant_model=assistant,
                streamer=Counting(watch),
            )
        return watch.answer(output[0, len(prompt) :].tolist())

    return answer


def load_transformers(path: Path, dtype_name: str) -> Any:
    """The same checkpoint as a transformers model."""
    dtype = getattr(torch, dtype_name)
    if (path / "config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    checkpoint = load(path)
    config = llama_config(checkpoint.config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {
        hf_name(name): checkpoint.weights[name].to(dtype, copy=True) for name in checkpoint.weights
    }
    if checkpoint.config.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # Buffers are not in the state: build the rotary table anew, off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()


def llama_config(config: DecoderConfig) -> LlamaConfig:
    """The same architecture in transformers' words."""
    if config.architecture != "LlamaForCausalLM" or config.rope.kind != "default":
        raise SystemExit(
            f"a GGUF file of {config.architecture} with {config.rope.kind} rotary embedding cannot "
            "be handed to transformers here; give the model as a Hugging Face folder"
        )
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tied_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def hf_name(name: str) -> str:
    """Transformers' name of one of our weights."""
    if name in HF_TOP:
        return HF_TOP[name]
    layers, index, part, kind = name.split(".")
    return f"model.{layers}.{index}.{HF_PARTS[part]}.{kind}"
