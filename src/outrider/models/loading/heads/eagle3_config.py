"""config.json of an EAGLE-3 head: four dialects, two conventions for the captured layers.

The trap is an off-by-one. We name a captured state by the layer it *enters* (Hugging Face's
``hidden_states[i]``). Top-level ``eagle_aux_hidden_state_layer_ids`` (speculators, vLLM) do the
same; the ids inside ``eagle_config`` (SpecForge, and SGLang, which adds the 1) name the layer a
state *leaves*. Heads we wrote say it a second time, in our own object, and both are compared.

That object may also say ``"lm_head": "target"``: the head of a reduced vocabulary has no output
rows of its own, but the target's. Without these words they count as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.errors import UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import Eagle3Config
from outrider.models.loading.fields import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    at_path,
)
from outrider.models.loading.hf_config import parse_config
from outrider.models.loading.safetensors_file import StoredTensor

OURS = "outrider"
TARGETS = "target"  # in place of a weight that is the target's own
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_OPTIONS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """A head's description, what was translated on the way, and the figure its maker recorded.

    ``trained_positions`` is None where the head's positions reach as far as the target's.
    """

    config: Eagle3Config
    conventions: tuple[str, ...]
    recorded_acceptance: float | None
    trained_positions: int | None


@dataclass(slots=True)
class _Reader:
    """One config.json being read for one target; collects the sentences."""

    fields: Fields
    tensors: Mapping[str, StoredTensor]
    target: DecoderConfig
    notes: list[str] = field(default_factory=list)
    trained_positions: int | None = None

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.fields

    @property
    def nested(self) -> Fields:
        return self.fields.sub("eagle_config")


def read_config(
    fields: Fields, tensors: Mapping[str, StoredTensor], target: DecoderConfig
) -> Eagle3Settings:
    """Translate a head's config.json, and check it against the target.

    Args:
        fields: config.json.
        tensors: the file's tensors under our names; decide what the dialects leave open.
        target: what the head is for.

    Raises:
        CheckpointError: a bad, contradictory or missing field, or another size than the target's;
            names the field and both values.
        UnsupportedModelError: a variant that is another network.
    """
    reader = _Reader(fields, tensors, target)
    with at_path(fields.path):
        if not reader.nested.flag("use_aux_hidden_state", True):
            raise UnsupportedModelError(
                "eagle_config.use_aux_hidden_state is false: a head that reads the target's last "
                "state only (EAGLE-2) is not supported; supported: EAGLE-3"
            )
        layers = _layers(reader)
        target_hidden = fields.whole("target_hidden_size", 1, MAX_WIDTH, layers.hidden_size)
        if target_hidden != target.hidden_size:
            field_name = "target_hidden_size" if "target_hidden_size" in fields else "hidden_size"
            raise fields.error(
                field_name, f"is {target_hidden}, the target's hidden size is {target.hidden_size}"
            )
        ours = fields.sub(OURS)
        config = Eagle3Config(
            layers=layers,
            target_hidden_size=target_hidden,
            capture_layers=_capture_layers(reader),
            draft_vocab_size=fields.whole("draft_vocab_size", 1, MAX_VOCAB, target.vocab_size),
            **_options(reader),
            has_own_embedding="embed.weight" in tensors,
            has_own_head=_has_own_head(reader),
        )
        recorded = ours.positive("recorded_acceptance", None)
    return Eagle3Settings(config, tuple(reader.notes), recorded, reader.trained_positions)


def _layers(reader: _Reader) -> DecoderConfig:
    """The head's own decoder layers."""
    fields, target = reader.fields, reader.target
    if reader.is_speculators:
        inner = fields.sub("transformer_layer_config")
        if not inner.values():
            raise fields.error("transformer_layer_config", "is missing")
    else:
        inner = fields
    kind = inner.text("model_type", "llama")
    if kind not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {kind!r} of the head's layers is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    kinds = inner.raw("layer_types", [])
    if kind == "llama" and isinstance(kinds, list) and "sliding_attention" in kinds:
        raise UnsupportedModelError("layer_types: heads with sliding attention are not supported")
    values = {
        **inner.values(),
        "architectures": [_ARCHITECTURES[kind]],
        "tie_word_embeddings": False,  # what is there decides, see has_own_head
    }
    values.setdefault("num_hidden_layers", 1)
    layers = parse_config(Fields(fields.path, values))
    if layers.vocab_size != target.vocab_size:
        raise inner.error(
            "vocab_size", f"is {layers.vocab_size}, the target's vocabulary is {target.vocab_size}"
        )
    if not reader.is_speculators:
        layers = _with_found_biases(reader, layers)
    if layers.max_position < target.max_position:
        reader.notes.append(
            f"max_position_embeddings {layers.max_position} is below the target's: positions go on "
            f"to {target.max_position}"
        )
        reader.trained_positions = layers.max_position
        layers = replace(layers, max_position=target.max_position)
    return layers


def _with_found_biases(reader: _Reader, layers: DecoderConfig) -> DecoderConfig:
    """SafeAILab's and SpecForge's layers have no biases, whatever a copied config.json says."""
    has_bias = "layers.0.q.bias" in reader.tensors
    has_out_bias = "layers.0.o.bias" in reader.tensors
    if has_bias == layers.attention_bias and has_out_bias == layers.attention_out_bias:
        return layers
    found = "biases" if has_bias else "no biases"
    reader.notes.append(f"the attention of the tensors has {found}; config.json says otherwise")
    return replace(layers, attention_bias=has_bias, attention_out_bias=has_out_bias)


def _capture_layers(reader: _Reader) -> tuple[int, ...]:
    """The captured layers in our convention, from whichever fields name them; all must agree."""
    fields = reader.fields
    named = {
        f"{OURS}.capture_layers": _ids(fields.sub(OURS), "capture_layers"),
        LAYER_IDS: _ids(fields, LAYER_IDS),
        f"eagle_config.{LAYER_IDS}": _ids(reader.nested, LAYER_IDS, offset=1),
    }
    found = {name: ids for name, ids in named.items() if ids is not None}
    if not found:
        return _default_layers(reader)
    (first, layers), *others = found.items()
    for name, ids in others:
        if ids != layers:
            raise fields.error(
                name, f"means the inputs of layers {list(ids)}, {first} says {list(layers)}"
            )
    if layers[-1] > reader.target.num_layers:
        raise fields.error(
            first,
            f"captures the input of layer {layers[-1]}, the target has "
            f"{reader.target.num_layers} layers",
        )
    if f"eagle_config.{LAYER_IDS}" in found:
        outputs = [layer - 1 for layer in layers]
        reader.notes.append(
            f"captured layers {outputs} are layer outputs (eagle_config): the inputs of "
            f"{list(layers)} are captured"
        )
    else:
        reader.notes.append(f"captured layers {list(layers)} are layer inputs ({first})")
    return layers


def _ids(fields: Fields, name: str, offset: int = 0) -> tuple[int, ...] | None:
    """Layer ids in ascending order, which is how every engine concatenates them."""
    listed: Any = fields.raw(name, None)
    if listed is None or listed == []:
        return None
    is_list = isinstance(listed, list) and len(listed) <= MAX_LAYERS
    if not is_list or any(
        isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_LAYERS
        for item in listed
    ):
        raise fields.error(name, f"is not a list of layer ids from 0 to {MAX_LAYERS}")
    return tuple(sorted(item + offset for item in listed))


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """Whose inputs EAGLE-3 captures unless told otherwise (Li et al. 2025): low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def _default_layers(reader: _Reader) -> tuple[int, ...]:
    num_layers = reader.target.num_layers
    layers = default_capture_layers(num_layers)
    if list(layers) != sorted(set(layers)):
        raise reader.fields.error(
            LAYER_IDS,
            f"is missing, and its default {list(layers)} does not exist in a target of "
            f"{num_layers} layers",
        )
    reader.notes.append(f"no captured layers named: the default, the inputs of {list(layers)}")
    return layers


def _options(reader: _Reader) -> dict[str, bool]:
    """The switches; outside speculators some engines write them into ``eagle_config``."""
    options = {}
    for name in _OPTIONS:
        outer, inner = reader.fields.flag(name, None), reader.nested.flag(name, None)
        if outer is not None and inner is not None and outer != inner:
            raise reader.fields.error(
                name, f"is {outer} and eagle_config.{name} is {inner}; one of them is wrong"
            )
        options[name] = bool(outer or inner)
        if name == "norm_before_residual" and reader.is_speculators and outer is None:
            options[name] = True
            reader.notes.append("norm_before_residual is not stated: true, as vLLM reads it")
    return options


def _has_own_head(reader: _Reader) -> bool:
    has_own = "lm_head.weight" in reader.tensors
    is_tied = reader.fields.flag("tie_word_embeddings", False)
    if is_tied and not has_own and "embed.weight" in reader.tensors:
        raise UnsupportedModelError(
            "tie_word_embeddings: an output head tied to the head's own embedding is not supported"
        )
    # A reduced vocabulary mostly has rows of its own: without a word they are missing.
    is_reduced = (
        reader.fields.whole("draft_vocab_size", 1, MAX_VOCAB, reader.target.vocab_size)
        != reader.target.vocab_size
    )
    if says_target(reader.fields.sub(OURS), "lm_head"):
        if has_own:
            raise reader.fields.error(
                f"{OURS}.lm_head",
                f"is {TARGETS!r}, but the weights hold lm_head; take one of them away",
            )
        rows = "rows of the draft vocabulary are" if is_reduced else "output head is"
        reader.notes.append(f"{OURS}.lm_head: the target's {rows} used")
        return False
    if not has_own and not is_reduced:
        reader.notes.append("no lm_head: the target's output head is used")
    return has_own or is_reduced


def says_target(ours: Fields, name: str) -> bool:
    """Whether our object in config.json declares the weight ``name`` the target's own.

    Raises:
        CheckpointError: it says anything else.
    """
    said = ours.text(name, None)
    if said not in (None, TARGETS):
        raise ours.error(f"{OURS}.{name}", f"is {said!r}; allowed: {TARGETS!r}")
    return said is not None
