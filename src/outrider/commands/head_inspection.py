"""What a draft head or draft model is, and whether it fits a target, without building either.

Owns the facts that ``outrider inspect MODEL --head HEAD`` adds: what kind of drafter it is, how its
layout was understood, and the gates between the two. A pair that cannot run at all is an error; a
gate says ``warning`` where it runs, but may guess badly. Stands on :mod:`outrider.pairing`; used by
:mod:`outrider.commands.inspection`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from rich.table import Table

from outrider.commands.architecture_text import (
    attention_line,
    extras_line,
    rope_line,
    size_line,
)
from outrider.commands.console import format_bytes, table
from outrider.config import Method, SpeculationConfig
from outrider.drafters import DraftSource
from outrider.errors import UnknownModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import (
    Eagle3Config,
    MedusaConfig,
    MtpConfig,
    SharedEndsConfig,
)
from outrider.models.loading.heads import is_draft_model
from outrider.models.loading.hub import resolve
from outrider.pairing import OpenedDrafter, TargetFiles, open_drafter, open_head
from outrider.types import ProgressCallback

_KINDS = {
    Method.EAGLE3: "EAGLE-3 head",
    Method.MTP: "multi-token-prediction module",
    Method.MEDUSA: "MEDUSA heads",
    Method.DRAFT: "draft model",
}


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition for a good match; ``warning``: it runs, but may draft badly."""

    name: str
    state: Literal["ok", "warning"]
    detail: str


@dataclass(frozen=True, slots=True)
class HeadInspection:
    """The facts about one drafter beside its target; its files are closed.

    ``speculation`` is what the memory is planned for: the method's default chain.
    """

    opened: OpenedDrafter
    speculation: SpeculationConfig
    gates: tuple[Gate, ...]
    target: DecoderConfig

    @property
    def num_parameters(self) -> int:
        """Weights of its own; what it shares with the target is not counted."""
        shapes = self.opened.source.config.weight_shapes()
        return sum(prod(shape) for name, shape in shapes.items() if name != "d2t")

    @property
    def draft_vocab_size(self) -> int:
        """How many of the target's tokens it can propose."""
        config = self.opened.source.config
        if isinstance(config, DecoderConfig):
            return min(config.vocab_size, self.target.vocab_size)
        return config.draft_vocab_size

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Target layers whose input it reads; () where it reads the last state, or none."""
        config = self.opened.source.config
        return config.capture_layers if isinstance(config, Eagle3Config) else ()

    def to_json(self) -> dict[str, Any]:
        """All facts as plain values."""
        opened, head = self.opened, self.opened.head
        return {
            "name": opened.name,
            "method": self.speculation.method.value,
            "layout": None if head is None else head.layout,
            "weights_hash": opened.weights_hash,
            "source_bytes": None if head is None else head.source_bytes,
            "num_parameters": self.num_parameters,
            "architecture": asdict(opened.source.config),
            "captured_layers": list(self.captured_layers),
            "reads": _reads(opened.source.config, self.target),
            "conventions": [] if head is None else list(head.conventions),
            "vocabulary": {
                "draft_size": self.draft_vocab_size,
                "target_size": self.target.vocab_size,
                "coverage": self.draft_vocab_size / self.target.vocab_size,
            },
            "recorded_acceptance": opened.recorded_acceptance,
            "gates": [asdict(gate) for gate in self.gates],
        }

    def tables(self) -> list[Table]:
        """The same facts for people."""
        return [self._facts_table(), self._gates_table()]

    def _facts_table(self) -> Table:
        opened, head, config = self.opened, self.opened.head, self.opened.source.config
        draft, target = self.draft_vocab_size, self.target.vocab_size
        recorded = opened.recorded_acceptance
        rows = [
            ("kind", _KINDS[self.speculation.method]),
            ("parameters", f"{self.num_parameters:,}"),
            ("weights", opened.weights_hash),
            *_architecture_rows(config),
            ("reads", _reads(config, self.target)),
            ("vocabulary", f"{draft:,} of the target's {target:,} tokens ({draft / target:.1%})"),
        ]
        if head is not None:
            rows[1:1] = [("layout", head.layout), ("file", format_bytes(head.source_bytes))]
            rows += [("found", sentence) for sentence in head.conventions]
        rows.append(("recorded acceptance length", "-" if recorded is None else f"{recorded:.2f}"))
        return table(("", ""), rows, title=f"Drafter: {opened.name}", numbers_from=2)

    def _gates_table(self) -> Table:
        rows = [(gate.name, gate.state, gate.detail) for gate in self.gates]
        return table(("gate", "state", ""), rows, title="Fits the target", numbers_from=3)


def inspect_head(
    head: str,
    target: TargetFiles,
    *,
    max_model_len: int,
    on_progress: ProgressCallback | None = None,
) -> HeadInspection:
    """Read a drafter's facts; what kind it is, its files tell.

    Args:
        head: folder or file of a head, or what names a model. Nothing is fetched.
        target: what it would draft for.
        max_model_len: how many tokens a request may have.
        on_progress: called with what is being done.

    Raises:
        UnknownModelError: there is no such folder, file or model.
        CheckpointError: damaged files, or a head made for another target.
        UnsupportedModelError: a kind of head that is not ours, or another tokeniser.
    """
    speculation, opened = _open(head, target, on_progress)
    try:
        return HeadInspection(
            opened=opened,
            speculation=speculation,
            gates=tuple(_gates(opened, target, max_model_len)),
            target=target.config,
        )
    finally:
        opened.close()


def _open(
    name: str, target: TargetFiles, on_progress: ProgressCallback | None
) -> tuple[SpeculationConfig, OpenedDrafter]:
    """Open a head of any kind, or a model as a draft model."""
    try:
        path = resolve(name)
    except UnknownModelError:
        raise UnknownModelError(
            f"--head: no such folder, file or model: {name}; give a draft head's folder or "
            ".safetensors file, or a draft model"
        ) from None
    if is_draft_model(path, target.config):
        speculation = SpeculationConfig(method=Method.DRAFT, head=str(path))
        opened = open_drafter(speculation, target, on_progress)
        assert opened is not None, "a draft model has files"
        return speculation, opened
    head = open_head(str(path), target, on_progress)
    return SpeculationConfig(method=head.method, head=str(path)), OpenedDrafter.of(head)


def _gates(opened: OpenedDrafter, target: TargetFiles, max_model_len: int) -> Iterator[Gate]:
    """What can be said about the match; whatever makes it impossible was an error at opening."""
    config = opened.source.config
    yield _hidden_size(config, target.config)
    yield _vocabulary(opened.source, target.config)
    if isinstance(config, Eagle3Config):
        yield Gate("captured layers", "ok", _reads(config, target.config))
    yield _positions(opened, target.config, max_model_len)
    if isinstance(config, DecoderConfig):
        fingerprint = target.tokenizer.fingerprint[:16]
        yield Gate("tokeniser", "ok", f"the target's: vocabulary {fingerprint}")
    depth = "as deep as asked for"
    if isinstance(config, MedusaConfig):
        depth = f"at most {config.num_heads} deep, a head for each depth"
    yield Gate("chain and tree", "ok", f"both, {depth}")


def _hidden_size(config: object, target: DecoderConfig) -> Gate:
    if isinstance(config, DecoderConfig) and not isinstance(config, SharedEndsConfig):
        detail = f"{config.hidden_size:,}, of no concern: a draft model reads tokens only"
    elif isinstance(config, Eagle3Config) and config.layers.hidden_size != target.hidden_size:
        detail = (
            f"reads the target's {target.hidden_size:,}, is {config.layers.hidden_size:,} wide "
            "itself, with an embedding and an output head of its own"
        )
    else:
        detail = f"{target.hidden_size:,}, the target's"
    return Gate("hidden size", "ok", detail)


def _vocabulary(source: DraftSource, target: DecoderConfig) -> Gate:
    config = source.config
    if isinstance(config, Eagle3Config) and config.is_reduced:
        if not source.weights["d2t"].any():
            detail = (
                f"d2t is all zeros: the first {config.draft_vocab_size:,} ids are drafted, which "
                "is rarely what a head was trained on; was the map lost?"
            )
            return Gate("vocabulary", "warning", detail)
        detail = f"{config.draft_vocab_size:,} tokens, each with a target token of its own"
        return Gate("vocabulary", "ok", detail)
    if isinstance(config, DecoderConfig) and config.vocab_size != target.vocab_size:
        detail = (
            f"{config.vocab_size:,} rows beside the target's {target.vocab_size:,}; the "
            f"{min(config.vocab_size, target.vocab_size):,} in common are drafted"
        )
        return Gate("vocabulary", "ok", detail)
    return Gate("vocabulary", "ok", f"all {target.vocab_size:,} of the target's")


def _positions(opened: OpenedDrafter, target: DecoderConfig, max_model_len: int) -> Gate:
    """Whether the drafter was made for as long a context as requests may have."""
    config = opened.source.config
    if isinstance(config, MedusaConfig):
        return Gate("positions", "ok", "of no concern: the heads read one state")
    reach = target.max_position
    if isinstance(config, DecoderConfig):
        reach = config.max_position
    elif opened.head is not None and opened.head.trained_positions is not None:
        reach = opened.head.trained_positions
    if reach < max_model_len:
        detail = (
            f"its config.json ends at {reach:,}, requests may have {max_model_len:,}: it drafts "
            "on, but beyond what it was made for"
        )
        return Gate("positions", "warning", detail)
    return Gate("positions", "ok", f"up to {reach:,}; requests may have {max_model_len:,}")


def _reads(config: object, target: DecoderConfig) -> str:
    """What of the target the drafter sees, besides the tokens."""
    if isinstance(config, Eagle3Config):
        layers = ", ".join(str(layer) for layer in config.capture_layers)
        return (
            f"the states that enter layers {layers} (hidden_states[i]; the target has "
            f"{target.num_layers} layers)"
        )
    if isinstance(config, DecoderConfig):
        return "tokens only"
    is_raw = isinstance(config, MtpConfig) and config.reads_raw_state
    return f"the last state, {'before' if is_raw else 'behind'} the target's final norm"


def _architecture_rows(
    config: Eagle3Config | MtpConfig | MedusaConfig | DecoderConfig,
) -> list[tuple[str, str]]:
    """Sizes and options of the drafter's own layers."""
    if isinstance(config, MedusaConfig):
        output = "an output head each" if config.has_own_head else "the target's output head"
        return [
            ("heads", f"{config.num_heads}, of {config.num_layers} block(s) each, {output}"),
            ("hidden size", f"{config.hidden_size:,}"),
        ]
    layers = config if isinstance(config, DecoderConfig) else config.layers
    rows = [
        ("layers", str(layers.num_layers)),
        ("hidden / MLP size", size_line(layers)),
        ("attention", attention_line(layers)),
        ("rotary embedding", rope_line(layers.rope)),
        ("further", extras_line(layers)),
    ]
    if isinstance(config, SharedEndsConfig):
        ends = {"embedding": "the target's", "output head": "the target's"}
        return [("architecture", config.architecture), *rows, *ends.items()]
    if isinstance(config, DecoderConfig):
        return [("architecture", config.architecture), *rows]
    is_reduced = isinstance(config, Eagle3Config) and config.is_reduced
    rows_of = "the target's rows of the draft vocabulary" if is_reduced else "the target's"
    ends = {
        "embedding": "its own" if config.has_own_embedding else "the target's",
        "output head": "its own" if config.has_own_head else rows_of,
    }
    options = (
        ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
        if isinstance(config, Eagle3Config)
        else ()
    )
    used = ", ".join(name for name in options if getattr(config, name))
    return [*rows, *ends.items(), *([("options", used)] if used else [])]
