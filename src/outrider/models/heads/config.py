"""One description of each kind of draft head that every published layout is translated into.

Owns the options in which the published heads differ and the names and shapes of their weights;
knows no file format (that is :mod:`outrider.models.loading.heads`) and no computation (that is the
module beside this one). ``layers`` describes the head's own decoder layers with the names of
:mod:`outrider.models.architecture`.

Sizes: D is the head's hidden size, E the target's, V the target's vocabulary, W the draft
vocabulary, n the number of captured states.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from outrider.errors import CheckpointError
from outrider.models.architecture import DecoderConfig

Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head (Li et al. 2025) with the options of EAGLE-3.1 and of ``speculators``.

    Attributes:
        layers: the head's decoder layers; ``vocab_size`` is the target's.
        target_hidden_size: width of one captured state.
        capture_layers: target layers whose *input* is captured, ascending; i is Hugging Face's
            ``hidden_states[i]``, the number of layers is the state that leaves the last one.
        draft_vocab_size: rows of the head's output; the target's vocabulary where not reduced.
        norm_before_fc: one norm over all captured states before ``fc``.
        fc_norm: one norm per captured state before ``fc`` (EAGLE-3.1).
        norm_before_residual: the residual is the normed state, not the raw one.
        norm_output: the state that is fed back is the normed one (EAGLE-3.1).
        has_own_embedding: else the target's embedding is used.
        has_own_head: else the target's output head is used: of a reduced vocabulary, the rows of
            the tokens that ``d2t`` names.

    Weights: those of ``layers`` (``embed`` and ``lm_head`` only where own), layer 0's q, k and v
    taking ``2 D`` inputs and having a ``hidden_norm``; ``fc.weight [D, n E]``; ``d2t [W]`` where
    the vocabulary is reduced; ``fc_norm.{i}.weight [E]``, ``input_norm.weight [n E]`` as declared.
    """

    layers: DecoderConfig
    target_hidden_size: int
    capture_layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    has_own_embedding: bool = False
    has_own_head: bool = True

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise CheckpointError("norm_before_fc and fc_norm exclude each other")
        if list(self.capture_layers) != sorted(set(self.capture_layers)):
            raise CheckpointError(
                f"captured layers {list(self.capture_layers)} are not distinct and ascending"
            )
        if not self.capture_layers or self.capture_layers[0] < 0:
            raise CheckpointError(f"captured layers {list(self.capture_layers)}: give at least one")
        if self.draft_vocab_size > self.layers.vocab_size:
            raise CheckpointError(
                f"draft_vocab_size {self.draft_vocab_size} is above the target's vocabulary of "
                f"{self.layers.vocab_size}"
            )
        is_same_width = self.layers.hidden_size == self.target_hidden_size
        if not is_same_width and not (self.has_own_embedding and self.has_own_head):
            raise CheckpointError(
                f"hidden size {self.layers.hidden_size} is not the target's "
                f"{self.target_hidden_size}: the head needs an embedding and an output head of its "
                "own"
            )

    @property
    def is_reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.layers.vocab_size

    def weight_shapes(self) -> Shapes:
        """Every weight that must be present, with its shape."""
        hidden, width = self.layers.hidden_size, self.target_hidden_size
        captured = len(self.capture_layers) * width
        shapes = _without_ends(self.layers)
        for name in "qkv":
            rows, _ = shapes[f"layers.0.{name}.weight"]
            shapes[f"layers.0.{name}.weight"] = (rows, 2 * hidden)
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
        shapes["fc.weight"] = (hidden, captured)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (captured,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(len(self.capture_layers))}
        if self.has_own_embedding:
            shapes["embed.weight"] = (self.layers.vocab_size, hidden)
        if self.has_own_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, hidden)
        if self.is_reduced:
            shapes["d2t"] = (self.draft_vocab_size,)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """A multi-token-prediction module (DeepSeek-V3 and its relatives).

    Attributes:
        layers: the module's decoder layers, usually one; sizes are the target's.
        order: what comes first in the concatenation that ``fc`` reads.
        reads_raw_state: the target's state is taken before its final norm (MiMo), not behind it.
        has_own_embedding: else the target's embedding is used.
        has_own_head: else the target's output head is used.

    Weights: those of ``layers`` (``embed`` and ``lm_head`` only where own);
    ``embed_norm.weight [D]``, ``hidden_norm.weight [D]``, ``fc.weight [D, 2 D]``.
    """

    layers: DecoderConfig
    order: Literal["embedding_first", "hidden_first"] = "embedding_first"
    reads_raw_state: bool = False
    has_own_embedding: bool = False
    has_own_head: bool = False

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the module's output: the target's vocabulary."""
        return self.layers.vocab_size

    def weight_shapes(self) -> Shapes:
        """Every weight that must be present, with its shape."""
        hidden = self.layers.hidden_size
        shapes = _without_ends(self.layers)
        shapes["embed_norm.weight"] = shapes["hidden_norm.weight"] = (hidden,)
        shapes["fc.weight"] = (hidden, 2 * hidden)
        if self.has_own_embedding:
            shapes["embed.weight"] = (self.layers.vocab_size, hidden)
        if self.has_own_head:
            shapes["lm_head.weight"] = (self.layers.vocab_size, hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """MEDUSA heads (Cai et al. 2024): each reads the target's final, normed state.

    Head i predicts the token i + 2 places after the one whose state it reads (the target itself
    predicts the next): residual blocks ``x + silu(linear(x))``, then an output head, its own or the
    target's.

    Weights: ``heads.{i}.blocks.{j}.weight [D, D]`` and ``.bias [D]``,
    ``heads.{i}.lm_head.weight [V, D]`` where own.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_own_head: bool = True

    @property
    def draft_vocab_size(self) -> int:
        """Rows of each head's output: the target's vocabulary."""
        return self.vocab_size

    def weight_shapes(self) -> Shapes:
        """Every weight that must be present, with its shape."""
        hidden = self.hidden_size
        shapes: Shapes = {}
        for head in range(self.num_heads):
            for block in range(self.num_layers):
                shapes[f"heads.{head}.blocks.{block}.weight"] = (hidden, hidden)
                shapes[f"heads.{head}.blocks.{block}.bias"] = (hidden,)
            if self.has_own_head:
                shapes[f"heads.{head}.lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


HeadConfig: TypeAlias = Eagle3Config | MtpConfig | MedusaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEndsConfig(DecoderConfig):
    """A draft model whose layers stand between the target's own embedding and output head.

    Hidden size, vocabulary and whether the ends are tied are the target's; the layers' sizes are
    free.
    """

    @classmethod
    def of(cls, decoder: DecoderConfig) -> SharedEndsConfig:
        """The same decoder without ends of its own."""
        return cls(**{field.name: getattr(decoder, field.name) for field in fields(decoder)})

    def weight_shapes(self) -> Shapes:
        """Every weight that must be present, with its shape: all but the ends'."""
        return _without_ends(self)


def _without_ends(layers: DecoderConfig) -> Shapes:
    """The layers' and the final norm's weights, without embedding and output head."""
    shapes = DecoderConfig.weight_shapes(layers)  # not a subclass's, which asks here
    return {n: shape for n, shape in shapes.items() if n not in ("embed.weight", "lm_head.weight")}
