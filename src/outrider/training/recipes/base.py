"""What the four recipes have in common: the target's ends, the objective, one batch's results.

Owns the way from a recipe's outputs to losses and counts. A recipe is a module whose parameters are
what is trained; what belongs to the target (embedding, output head) is held as buffers that are
neither trained nor saved. :mod:`outrider.training.loop` calls ``losses`` per batch, and
:mod:`outrider.training.export` writes ``weights`` and ``head_config``.

Row t at step k predicts token t + ``ahead`` + k and is taught by the target's state at the position
before it. ``ahead`` is 1 for a draft model, 2 for heads, which join the state at t with token t + 1
or, as MEDUSA's, leave the next token to the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import HeadConfig, SharedEndsConfig
from outrider.training.losses import CHUNK_ROWS, LossConfig, Teacher, projected_loss
from outrider.training.packing import Batch
from outrider.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What every recipe reads of the target: its sizes, embedding and output head.

    ``head_VD`` is ``embedding_VD`` itself where the two are tied.
    """

    config: DecoderConfig
    embedding_VD: Tensor
    head_VD: Tensor

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> TargetEnds:
        """From a loaded checkpoint's weights, in the type that products are to run in."""

        def own(name: str) -> Tensor:
            return weights[name].to(device, dtype, copy=True)

        embedding_VD = own("embed.weight")
        head_VD = embedding_VD if config.tied_embeddings else own("lm_head.weight")
        return cls(config, embedding_VD, head_VD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is minimised.

    Attributes:
        step_weights: of each training-time step, head or, for a draft model, the only one.
        loss: kinds and their weights.
        loss_on: places that count: what the target wrote, or prompts as well.
        vocabulary: tokens that count, None for all. For EAGLE-3 the head's own vocabulary; the
            other methods serve the target's, and training on its most frequent part costs less.
        chunk_rows: rows whose logits exist at once.

    Raises:
        ParameterError: no step, a weight that is not a positive number, an unknown ``loss_on``.
    """

    step_weights: tuple[float, ...]
    loss: LossConfig = field(default_factory=LossConfig)
    loss_on: Literal["response", "all"] = "response"
    vocabulary: DraftVocabulary | None = None
    chunk_rows: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        weights = self.step_weights
        if not weights or not all(0 < weight < float("inf") for weight in weights):
            raise ParameterError(
                f"step_weights: {list(weights)}; give at least one, each a number above 0"
            )
        if self.loss_on not in ("response", "all"):
            raise ParameterError(f"loss_on: {self.loss_on!r} is not one of response, all")
        vocabulary = self.vocabulary
        if vocabulary is not None and vocabulary.size == vocabulary.target_size:
            raise ParameterError(
                f"draft vocabulary: all {vocabulary.size} tokens of the target; choose fewer, or "
                "leave it out"
            )

    @property
    def num_steps(self) -> int:
        """How many tokens ahead training looks."""
        return len(self.step_weights)


def decaying_weights(
    num_steps: int, decay: float, *, normalised: bool = False
) -> tuple[float, ...]:
    """Step weights ``decay ** k``; ``normalised`` to a sum of 1.

    Raises:
        ParameterError: no steps, or a decay outside (0, 1].
    """
    if num_steps < 1:
        raise ParameterError(f"num_steps: {num_steps} is below 1; 3 to 7 are usual")
    if not 0 < decay <= 1:
        raise ParameterError(f"step_decay: {decay} is outside (0, 1]; 0.6 to 1 are usual")
    weights = [decay**k for k in range(num_steps)]
    total = sum(weights) if normalised else 1.0
    return tuple(weight / total for weight in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults:
    """What a batch gave; S training-time steps, and as many depths or more.

    Attributes:
        total: sum over rows of step weight times loss, to be differentiated; divide it by the rows
            of step 0 (of all batches of an optimiser step together).
        loss_S: unweighted sums.
        rows_S: how many rows each is over, int64.
        hits_S: of those, where drafter and target agree on the most likely token, int64.
        tested_S: rows, by depth, whose token and all before it count, whether the drafter knows the
            target's choice or not, int64.
        joint_S: of those, where drafter and target agree at this depth and all before, int64.

    All are on the batch's device; only ``total`` has a graph behind it.
    """

    total: Tensor
    loss_S: Tensor
    rows_S: Tensor
    hits_S: Tensor
    tested_S: Tensor
    joint_S: Tensor


def predicted_acceptance(tested: Sequence[int], joint: Sequence[int]) -> float:
    """Acceptance length of a greedy chain, bonus included, from sums of ``StepResults``' counts.

    Teacher-forced: a chain goes on along the recorded text, so on text that was sampled it is a
    little too low or high. 1.0 where nothing was tested.
    """
    pairs = zip(tested, joint, strict=True)
    return 1.0 + sum(hits / rows for rows, hits in pairs if rows)


class Recipe(nn.Module, ABC):
    """One way to train one kind of drafter.

    Args:
        target: what is drafted for.
        objective: what is minimised.
        ahead: how many rows behind its own the token is that a row predicts at step 0.
        captures: the target's states that ``Batch.states_PC`` must hold, in this order; the one
            behind the final norm is there for every recipe.
    """

    embedding_VD: Tensor
    head_VD: Tensor
    ids_W: Tensor | None
    head_WD: Tensor

    def __init__(
        self,
        target: TargetEnds,
        objective: Objective,
        *,
        ahead: int,
        captures: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.target_config = target.config
        self.objective = objective
        self.captures = captures
        self._ahead = ahead
        ids_W, head_WD = None, target.head_VD
        if objective.vocabulary is not None:
            assert objective.vocabulary.target_size == target.config.vocab_size
            ids_W = torch.tensor(objective.vocabulary.ids_W, device=target.head_VD.device)
            head_WD = target.head_VD[ids_W]
        for name, tensor in (
            ("embedding_VD", target.embedding_VD),
            ("head_VD", target.head_VD),
            ("ids_W", ids_W),
            ("head_WD", head_WD),
        ):
            self.register_buffer(name, tensor, persistent=False)

    @property
    def num_steps(self) -> int:
        """Training-time steps, which is what ``StepResults`` counts by."""
        return self.objective.num_steps

    @abstractmethod
    def losses(self, batch: Batch) -> StepResults:
        """Loss and counts of one batch."""

    @abstractmethod
    def head_config(self) -> HeadConfig | SharedEndsConfig:
        """What is trained, as the loader would describe it."""

    def weights(self) -> dict[str, Tensor]:
        """Float32 copies of what is trained, under the names that serving reads."""
        return {
            name: parameter.detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self.named_parameters()
        }

    def embed(self, token_R: Tensor) -> Tensor:
        """The target's embeddings ``[R, D]``, in float32 at least."""
        embedded_RD = F.embedding(token_R, self.embedding_VD)
        return embedded_RD.to(torch.promote_types(embedded_RD.dtype, torch.float32))

    def is_scored(self, batch: Batch, step: int) -> Tensor:
        """Bool ``[P]``: the rows that have something to predict at a step."""
        only_response = self.objective.loss_on == "response"
        return batch.has_ahead(self._ahead + step, only_response=only_response)

    def score(
        self,
        batch: Batch,
        students: Sequence[Tensor],
        rows: Sequence[Tensor],
        *,
        output_head_WD: Tensor | None = None,
    ) -> StepResults:
        """Losses and counts of each step's outputs.

        Args:
            batch: what they were computed from.
            students: by step, what the output head reads, ``[R, D]``.
            rows: by step, which packed rows those are.
            output_head_WD: the drafter's own output head; the target's where it has none.
        """
        device, objective = batch.token_P.device, self.objective
        row_M = torch.cat(list(rows))
        counts = torch.tensor([len(row_R) for row_R in rows], device=device)
        step_M = torch.arange(len(rows), device=device).repeat_interleave(counts)
        weight_S = torch.tensor(objective.step_weights, device=device)
        teacher_row_M = row_M + self._ahead + step_M - 1
        scored = projected_loss(
            torch.cat(list(students)),
            self.head_WD if output_head_WD is None else output_head_WD,
            Teacher(batch.final_PD, self.head_VD, self.ids_W, teacher_row_M),
            weight_S[step_M],
            objective.loss,
            chunk_rows=objective.chunk_rows,
        )
        num_steps = len(rows)
        zeros_S = torch.zeros(num_steps, dtype=torch.float64, device=device)
        is_tested_SP, is_hit_SP = torch.zeros(
            2, num_steps, len(batch.token_P), dtype=torch.bool, device=device
        )
        is_tested_SP[step_M, row_M] = True
        is_hit_SP[step_M, row_M] = scored.is_hit_R
        tested_S, joint_S = self.count_chains(batch, is_tested_SP, is_hit_SP)
        return StepResults(
            total=scored.total,
            loss_S=zeros_S.index_add(0, step_M, scored.loss_R.double()),
            rows_S=step_M[scored.is_counted_R].bincount(minlength=num_steps),
            hits_S=step_M[scored.is_hit_R].bincount(minlength=num_steps),
            tested_S=tested_S,
            joint_S=joint_S,
        )

    def count_chains(
        self,
        batch: Batch,  # noqa: ARG002 - a draft model looks along its sequences
        is_tested_SP: Tensor,
        is_hit_SP: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """By depth, how many chains were tested up to it, and how many were right up to it."""
        return count_unbroken(is_tested_SP), count_unbroken(is_hit_SP)


def count_unbroken(is_true_SP: Tensor) -> Tensor:
    """By step, rows that are true there and at all steps before; int64 ``[S]``."""
    return is_true_SP.cumprod(0).sum(1)
