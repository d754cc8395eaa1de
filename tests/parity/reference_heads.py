"""Draft heads written from their published definitions, for the parity tests to hold ours against.

Plain PyTorch in float64: no cache, no packing, no batches. One request's rows are computed together
under a dense mask, and again from the start for each depth of its tree. Shares nothing with the
package but the configs and the names of the weights.

* EAGLE-3: Li et al. 2025 and ``eagle/model/cnets.py``; options as in vLLM's ``llama_eagle3.py`` and
  ``speculators``
* MTP: DeepSeek-V3, section 2.2; ``qwen3_next_mtp.py`` of vLLM; MiMo's own ``modeling_mimo.py``
* MEDUSA: Cai et al. 2024 and ``medusa/model/medusa_model.py``

Small methods are one decision each, so that a test can get one of them wrong on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.architecture import DecoderConfig, RopeConfig
from outrider.models.heads.config import Eagle3Config, MedusaConfig, MtpConfig


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafted rows behind the true ones, parents first; parent -1 is the last true row."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """What a head computed for each row, true ones first."""

    logits_RW: Tensor
    feature_RD: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate_half(x: Tensor) -> Tensor:
    """``(-second half, first half)``: transformers' layout of rotary pairs."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotary(rope: RopeConfig, head_dim: int, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[R, 1, K]`` of each position, both halves alike."""
    exponent = torch.arange(0, head_dim, 2).double() / head_dim
    frequency = rope.theta**-exponent
    scale = 1.0
    if rope.kind == "llama3":
        frequency = _llama3(rope, frequency)
    if rope.kind == "yarn":
        frequency = _yarn(rope, frequency, head_dim)
        scale = 0.1 * math.log(rope.factor) + 1
    angle = torch.outer(position_R.double(), frequency)
    angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
    return scale * angle.cos(), scale * angle.sin()


def _llama3(rope: RopeConfig, frequency: Tensor) -> Tensor:
    """Llama 3.1: long waves stretched by ``factor``, short ones kept, a ramp between."""
    turns = rope.original_max_position * frequency / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / rope.factor


def _yarn(rope: RopeConfig, frequency: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023): a ramp over dimensions from kept to stretched frequencies."""

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    stretched = ((torch.arange(head_dim // 2).double() - low) / (high - low)).clamp(0, 1)
    return (1 - stretched) * frequency + stretched * frequency / rope.factor


class ReferenceLayers:
    """Pre-norm decoder layers of the Llama family."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in weights.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.norm_eps)

    def linear(self, x: Tensor, name: str, *, has_bias: bool = False) -> Tensor:
        product = x @ self.weights[f"{name}.weight"].T
        return product + self.weights[f"{name}.bias"] if has_bias else product

    def layer(self, index: int, x_RD: Tensor, position_R: Tensor, visible_RR: Tensor) -> Tensor:
        normed_RD = self.norm(x_RD, f"layers.{index}.attn_norm")
        x_RD = x_RD + self.attention(index, normed_RD, position_R, visible_RR)
        return x_RD + self.mlp(index, self.norm(x_RD, f"layers.{index}.mlp_norm"))

    def attention(self, index: int, x_RX: Tensor, position_R: Tensor, visible_RR: Tensor) -> Tensor:
        config, at = self.config, f"layers.{index}"
        heads = {
            name: self.linear(x_RX, f"{at}.{name}", has_bias=config.attention_bias).unflatten(
                -1, (-1, config.head_dim)
            )
            for name in "qkv"
        }
        cos, sin = rotary(config.rope, config.head_dim, position_R)
        for name in "qk":
            if config.qk_norm:
                heads[name] = self.norm(heads[name], f"{at}.{name}_norm")
            heads[name] = heads[name] * cos + self.rotated(heads[name]) * sin
        group = config.num_heads // config.num_kv_heads
        keys, values = (heads[name].repeat_interleave(group, dim=1) for name in "kv")
        scores_HRR = torch.einsum("ihk,jhk->hij", heads["q"], keys) / math.sqrt(config.head_dim)
        if index in config.sliding_layers and config.sliding_window is not None:
            distance_RR = position_R.unsqueeze(1) - position_R
            visible_RR = visible_RR & (distance_RR < config.sliding_window)
        weight_HRR = scores_HRR.masked_fill(~visible_RR, -math.inf).softmax(dim=-1)
        out_RX = torch.einsum("hij,jhk->ihk", weight_HRR, values).flatten(1)
        return self.linear(out_RX, f"{at}.o", has_bias=config.attention_out_bias)

    def rotated(self, x: Tensor) -> Tensor:
        return rotate_half(x)

    def mlp(self, index: int, x_RD: Tensor) -> Tensor:
        at, has_bias = f"layers.{index}", self.config.mlp_bias
        gate, up = (self.linear(x_RD, f"{at}.{name}", has_bias=has_bias) for name in ("gate", "up"))
        return self.linear(torch.sigmoid(gate) * gate * up, f"{at}.down", has_bias=has_bias)


class _ReferenceHead(ReferenceLayers):
    """A head that is run again on its own output; subclasses define one row's arithmetic.

    ``embedding`` and ``output`` are the target's, used where the head has none of its own.
    """

    def __init__(
        self,
        config: Eagle3Config | MtpConfig,
        weights: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        output: Tensor,
    ) -> None:
        super().__init__(config.layers, weights)
        own = self.weights
        self.embedding = own["embed.weight"] if config.has_own_embedding else embedding.double()
        self.output = own["lm_head.weight"] if config.has_own_head else output.double()

    def entry(self, states: Sequence[Tensor]) -> Tensor:
        """What true rows are conditioned on, from the target's states ``[T, E]`` by layer."""
        raise NotImplementedError

    def body(
        self, embedded_RD: Tensor, entry_RD: Tensor, position_R: Tensor, visible_RR: Tensor
    ) -> Rows:
        """Everything between the two inputs and the logits."""
        raise NotImplementedError

    def run(self, tokens: Sequence[int], states: Sequence[Tensor], drafted: Drafted) -> Rows:
        """Row t joins ``states[..][t]`` with ``tokens[t]``, a drafted row its parent's output.

        The caller shifts: ``tokens[t]`` is the text's token t + 1.
        """
        num_true = len(tokens)
        ids = torch.tensor([*tokens, *drafted.tokens])
        parents = [*range(-1, num_true - 1), *(num_true + parent for parent in drafted.parents)]
        position_R, visible_RR = self.positions(parents, num_true), self.visible(parents, num_true)
        entry_RD = self.entry([state.double() for state in states])
        while True:
            known = len(entry_RD)
            rows = self.body(
                self.embedding[ids[:known]],
                entry_RD,
                position_R[:known],
                visible_RR[:known, :known],
            )
            if known == len(ids):
                return rows
            ready = [row for row in range(known, len(ids)) if parents[row] < known]
            assert ready == list(range(known, known + len(ready))), "parents come first, by depth"
            sources = [self.source(row, parents, num_true) for row in ready]
            entry_RD = torch.cat([entry_RD, rows.feature_RD[sources]])

    def source(self, row: int, parents: Sequence[int], num_true: int) -> int:
        """The row whose output a drafted row is conditioned on."""
        return parents[row]

    def positions(self, parents: Sequence[int], num_true: int) -> Tensor:
        """One place behind the parent; true row t is at t."""
        position: list[int] = []
        for parent in parents:
            position.append(0 if parent < 0 else position[parent] + 1)
        return torch.tensor(position)

    def visible(self, parents: Sequence[int], num_true: int) -> Tensor:
        """A row sees itself and what its parent sees."""
        visible_RR = torch.eye(len(parents), dtype=torch.bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                visible_RR[row] |= visible_RR[parent]
        return visible_RR


class ReferenceEagle3(_ReferenceHead):
    """EAGLE-3 with its options."""

    def __init__(
        self,
        config: Eagle3Config,
        weights: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        output: Tensor,
    ) -> None:
        super().__init__(config, weights, embedding=embedding, output=output)
        self.options = config

    def entry(self, states: Sequence[Tensor]) -> Tensor:
        if self.options.fc_norm:
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        joined = torch.cat(list(states), dim=-1)
        if self.options.norm_before_fc:
            joined = self.norm(joined, "input_norm")
        return self.linear(joined, "fc")

    def join(self, embedded_RD: Tensor, hidden_RD: Tensor) -> Tensor:
        return torch.cat([embedded_RD, hidden_RD], dim=-1)

    def body(
        self, embedded_RD: Tensor, entry_RD: Tensor, position_R: Tensor, visible_RR: Tensor
    ) -> Rows:
        hidden_RD = self.norm(entry_RD, "layers.0.hidden_norm")
        joined = self.join(self.norm(embedded_RD, "layers.0.attn_norm"), hidden_RD)
        residual = hidden_RD if self.options.norm_before_residual else entry_RD
        x_RD = residual + self.attention(0, joined, position_R, visible_RR)
        x_RD = x_RD + self.mlp(0, self.norm(x_RD, "layers.0.mlp_norm"))
        for index in range(1, self.config.num_layers):
            x_RD = self.layer(index, x_RD, position_R, visible_RR)
        normed_RD = self.norm(x_RD, "norm")
        feature_RD = normed_RD if self.options.norm_output else x_RD
        return Rows(normed_RD @ self.output.T, feature_RD)


class ReferenceMtp(_ReferenceHead):
    """A multi-token-prediction module, run again on its own normed output."""

    def __init__(
        self,
        config: MtpConfig,
        weights: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        output: Tensor,
    ) -> None:
        super().__init__(config, weights, embedding=embedding, output=output)
        self.order = config.order

    def entry(self, states: Sequence[Tensor]) -> Tensor:
        (state,) = states
        return state

    def feed_back(self, x_RD: Tensor, normed_RD: Tensor) -> Tensor:
        return normed_RD

    def body(
        self, embedded_RD: Tensor, entry_RD: Tensor, position_R: Tensor, visible_RR: Tensor
    ) -> Rows:
        embedded_RD = self.norm(embedded_RD, "embed_norm")
        hidden_RD = self.norm(entry_RD, "hidden_norm")
        is_embedding_first = self.order == "embedding_first"
        parts = [embedded_RD, hidden_RD] if is_embedding_first else [hidden_RD, embedded_RD]
        x_RD = self.linear(torch.cat(parts, dim=-1), "fc")
        for index in range(self.config.num_layers):
            x_RD = self.layer(index, x_RD, position_R, visible_RR)
        normed_RD = self.norm(x_RD, "norm")
        return Rows(normed_RD @ self.output.T, self.feed_back(x_RD, normed_RD))


class ReferenceMedusa:
    """MEDUSA heads on the target's final, normed state; ``output`` is the target's own."""

    def __init__(
        self, config: MedusaConfig, weights: Mapping[str, Tensor], *, output: Tensor
    ) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.output = output.double()

    def block(self, head: int, block: int, x_RD: Tensor) -> Tensor:
        at = f"heads.{head}.blocks.{block}"
        linear = x_RD @ self.weights[f"{at}.weight"].T + self.weights[f"{at}.bias"]
        return x_RD + linear * torch.sigmoid(linear)

    def run(self, state_RD: Tensor) -> list[Tensor]:
        """Logits ``[R, V]`` of each head."""
        logits = []
        for head in range(self.config.num_heads):
            x_RD = state_RD.double()
            for block in range(self.config.num_layers):
                x_RD = self.block(head, block, x_RD)
            own = self.weights.get(f"heads.{head}.lm_head.weight", self.output)
            logits.append(x_RD @ own.T)
        return logits
