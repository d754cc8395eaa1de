"""How far a drafter's distribution is from the target's, without ever holding all logits.

Owns the losses and their gradients. A batch of rows times a vocabulary of tens of thousands of
logits would be the largest thing in memory by far, so :func:`projected_loss` goes through the rows
in chunks, from hidden states to the loss and back to the states' gradient in one go (as in
Hsu et al. 2024, "Liger Kernel"). :func:`reference_loss` is its plain twin for the tests.

The target's distribution is restricted to the tokens that the drafter knows and renormalised. Rows
whose most likely token the drafter does not know are left out (Li et al. 2025, EAGLE-3): what is
left of the distribution there says little about what to draft.

The kinds, p the target's and q the drafter's probabilities::

    ce   - sum p log q           soft cross-entropy
    kl     sum p log(p / q)      the same gradient; zero where the two agree
    tv     0.5 sum |p - q|       total variation: 1 - tv is the chance that rejection sampling
                                 accepts (Leviathan et al. 2023, lemma 3.3)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outrider.errors import ParameterError

KINDS = ("ce", "kl", "tv")
CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class LossConfig:
    """A weighted sum of the kinds of loss.

    Raises:
        ParameterError: no kind, an unknown one, or a weight that is not a positive number.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"ce": 1.0})

    def __post_init__(self) -> None:
        for kind, weight in self.weights.items():
            if kind not in KINDS:
                raise ParameterError(f"loss: {kind!r} is not one of {', '.join(KINDS)}")
            if not 0 < weight < float("inf"):
                raise ParameterError(f"loss: the weight of {kind} is {weight}; it must be above 0")
        if not self.weights:
            raise ParameterError(f"loss: name at least one of {', '.join(KINDS)}")

    @classmethod
    def parse(cls, text: str) -> LossConfig:
        """From ``ce``, ``tv`` or a mixture like ``ce:0.1+tv:0.9``.

        Raises:
            ParameterError: it is not of that form.
        """
        weights: dict[str, float] = {}
        for part in text.split("+"):
            kind, colon, number = (piece.strip() for piece in part.partition(":"))
            try:
                weight = float(number) if colon else 1.0
            except ValueError:
                raise ParameterError(
                    f"loss: {number!r} in {text!r} is not a number; write for example ce:0.1+tv:0.9"
                ) from None
            if kind in weights:
                raise ParameterError(f"loss: {kind} is there twice in {text!r}")
            weights[kind] = weight
        return cls(weights)

    def __str__(self) -> str:
        return "+".join(f"{kind}:{weight:g}" for kind, weight in self.weights.items())


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distributions, as the states that its output head turns into logits.

    ``state_PD`` are final, normed states; ``head_VD`` the output head. ``ids_W`` are the target's
    ids of the drafter's tokens, None where it knows all. Row ``row_R[r]`` of the states teaches the
    student's row r.
    """

    state_PD: Tensor
    head_VD: Tensor
    ids_W: Tensor | None
    row_R: Tensor


@dataclass(frozen=True, slots=True)
class RowLosses:
    """What :func:`projected_loss` returns.

    ``total`` is the weighted sum, to be differentiated. Per row: ``loss_R`` (float32, unweighted, 0
    where not counted); ``is_counted_R``, the drafter knows the teacher's most likely token;
    ``is_hit_R``, it is the drafter's most likely one too, ties included.
    """

    total: Tensor
    loss_R: Tensor
    is_counted_R: Tensor
    is_hit_R: Tensor


def projected_loss(
    student_RD: Tensor,
    head_WD: Tensor,
    teacher: Teacher,
    weight_R: Tensor,
    loss: LossConfig,
    *,
    chunk_rows: int = CHUNK_ROWS,
) -> RowLosses:
    """The loss of ``student @ head.T`` against the teacher, with gradients to student and head.

    Row r counts ``weight_R[r]``. Rows with the same teacher row are computed together, so that its
    logits are computed about once. Products run in autocast's type where it is on, else in the
    student's; softmax and sums in float32 at least.
    """
    device = student_RD.device.type
    dtype = student_RD.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    teacher = replace(teacher, head_VD=teacher.head_VD.to(dtype))
    order_R = teacher.row_R.argsort(stable=True)
    work = _Work(teacher, weight_R, loss, order_R.split(chunk_rows), dtype)
    with torch.autocast(device, enabled=False):
        total, loss_R, is_counted_R, is_hit_R = _ProjectedLoss.apply(student_RD, head_WD, work)  # type: ignore[misc]
    return RowLosses(total, loss_R, is_counted_R, is_hit_R)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a call needs beside the two tensors that are differentiated."""

    teacher: Teacher
    weight_R: Tensor
    loss: LossConfig
    chunks: tuple[Tensor, ...]
    dtype: torch.dtype


class _ProjectedLoss(torch.autograd.Function):
    """Computes the gradients on the way forward, while a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,  # torch's contexts take any attribute
        student_RD: Tensor,
        head_WD: Tensor,
        work: _Work,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants_student, wants_head = ctx.needs_input_grad[:2]
        num_rows, sums = len(student_RD), torch.promote_types(student_RD.dtype, torch.float32)
        loss_R = student_RD.new_zeros(num_rows, dtype=sums)
        is_counted_R, is_hit_R = student_RD.new_zeros(2, num_rows, dtype=torch.bool)
        grad_RD = torch.zeros_like(student_RD, dtype=sums) if wants_student else None
        grad_WD = torch.zeros_like(head_WD, dtype=sums) if wants_head else None
        weight_R = work.weight_R.to(sums)
        compute_head_WD = head_WD.to(work.dtype)
        for rows in work.chunks:
            x_RD = student_RD[rows].to(work.dtype)
            probs_RW, entropy_R, best_R, is_counted_R[rows] = _teach(work, rows, sums)
            logits_RW = (x_RD @ compute_head_WD.T).to(sums)
            largest_R = logits_RW.amax(1)
            is_best_R = logits_RW.gather(1, best_R.unsqueeze(1)).squeeze(1) == largest_R
            is_hit_R[rows] = is_best_R & is_counted_R[rows]
            chunk_loss_R, slope_RW = _compare(probs_RW, entropy_R, logits_RW, largest_R, work.loss)
            loss_R[rows] = chunk_loss_R * is_counted_R[rows]
            slope_RW *= (weight_R[rows] * is_counted_R[rows]).unsqueeze(1)
            slope_RW = slope_RW.to(work.dtype)
            if grad_RD is not None:
                grad_RD[rows] = (slope_RW @ compute_head_WD).to(sums)
            if grad_WD is not None:
                grad_WD += slope_RW.T @ x_RD
        ctx.save_for_backward(grad_RD, grad_WD)
        ctx.types = student_RD.dtype, head_WD.dtype
        ctx.mark_non_differentiable(loss_R, is_counted_R, is_hit_R)
        return (loss_R * weight_R).sum(), loss_R, is_counted_R, is_hit_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides names
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        grad_RD, grad_WD = ctx.saved_tensors
        student_type, head_type = ctx.types
        return (
            None if grad_RD is None else (grad_RD * grads[0]).to(student_type),
            None if grad_WD is None else (grad_WD * grads[0]).to(head_type),
            None,
        )


def _teach(work: _Work, rows: Tensor, sums: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The teacher of some rows.

    Its probabilities ``[R, W]``, their entropy ``[R]``, the most likely of the drafter's tokens
    ``[R]``, and whether that is the most likely of all.
    """
    teacher = work.teacher
    # Rows come sorted by teacher row, and several steps share one: each is computed once.
    taught_U, place_R = torch.unique_consecutive(teacher.row_R[rows], return_inverse=True)
    state_UD = teacher.state_PD[taught_U].to(work.dtype)
    logits_UV = state_UD @ teacher.head_VD.T
    if teacher.ids_W is None:
        logits_UW = logits_UV.to(sums)
    else:
        logits_UW = logits_UV.index_select(1, teacher.ids_W).to(sums)
    largest_U, best_U = logits_UW.max(1)
    is_known_U = largest_U == logits_UV.amax(1)
    probs_UW = logits_UW.softmax(1)
    entropy_U = torch.special.entr(probs_UW).sum(1) if "kl" in work.loss.weights else largest_U
    return (
        probs_UW.index_select(0, place_R),
        entropy_U[place_R],
        best_U[place_R],
        is_known_U[place_R],
    )


def _compare(
    probs_RW: Tensor, entropy_R: Tensor, logits_RW: Tensor, largest_R: Tensor, loss: LossConfig
) -> tuple[Tensor, Tensor]:
    """Each row's loss, and its derivative by the drafter's logits.

    These are most of what a step costs beside the products, so each pass over ``[R, W]`` counts.
    """
    ce, kl, tv = (loss.weights.get(kind, 0.0) for kind in KINDS)
    draft_RW = logits_RW.softmax(1)
    normaliser_R = largest_R - draft_RW.amax(1).log()  # the largest is exp(largest - normaliser)
    cross_R = normaliser_R - (probs_RW * logits_RW).sum(1)
    loss_R = (ce + kl) * cross_R - kl * entropy_R if ce or kl else torch.zeros_like(cross_R)
    if not tv:
        return loss_R, draft_RW.sub_(probs_RW).mul_(ce + kl)
    excess_RW = draft_RW - probs_RW
    loss_R = loss_R + tv * 0.5 * excess_RW.abs().sum(1)
    pull_RW = excess_RW.sign().mul_(0.5 * tv)
    pull_RW -= (pull_RW * draft_RW).sum(1, keepdim=True)
    return loss_R, pull_RW.mul_(draft_RW).add_(excess_RW, alpha=ce + kl)


def reference_loss(
    student_RD: Tensor,
    head_WD: Tensor,
    teacher: Teacher,
    weight_R: Tensor,
    loss: LossConfig,
) -> RowLosses:
    """The same by its definition: whole rows of logits, gradients by autograd."""
    all_RV = teacher.state_PD[teacher.row_R] @ teacher.head_VD.T
    best_R = all_RV.argmax(1)
    size = all_RV.shape[1]
    ids_W = torch.arange(size) if teacher.ids_W is None else teacher.ids_W
    teacher_RW = all_RV[:, ids_W].log_softmax(1)
    student_RW = (student_RD @ head_WD.T).log_softmax(1)
    losses = {
        "ce": -(teacher_RW.exp() * student_RW).sum(1),
        "kl": (teacher_RW.exp() * (teacher_RW - student_RW)).sum(1),
        "tv": 0.5 * (teacher_RW.exp() - student_RW.exp()).abs().sum(1),
    }
    is_counted_R = (best_R.unsqueeze(1) == ids_W).any(1)
    loss_R = torch.stack([weight * losses[kind] for kind, weight in loss.weights.items()]).sum(0)
    loss_R = torch.where(is_counted_R, loss_R, 0.0)
    is_hit_R = ids_W[student_RW.argmax(1)] == best_R
    return RowLosses((weight_R * loss_R).sum(), loss_R.detach(), is_counted_R, is_hit_R)
