"""The chunked loss against its definition by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.training.losses import LossConfig, Teacher, projected_loss, reference_loss

ROWS, STATES, HIDDEN, VOCAB, DRAFT = 37, 23, 16, 64, 25
KINDS = ["ce", "kl", "tv", "ce:0.1+tv:0.9", "kl:0.5+tv:2+ce:0.25"]


class Case:
    """Students, a teacher whose rows teach several of them, and unequal weights."""

    def __init__(self, *, reduced: bool = True, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.student_RD = random(ROWS, HIDDEN).requires_grad_()
        self.ids_W = torch.randperm(VOCAB, generator=generator)[:DRAFT] if reduced else None
        head_VD = random(VOCAB, HIDDEN)
        head_WD = head_VD if self.ids_W is None else head_VD[self.ids_W]
        self.head_WD = (head_WD + 0.1 * random(*head_WD.shape)).requires_grad_()
        row_R = torch.randint(STATES, (ROWS,), generator=generator)
        self.teacher = Teacher(random(STATES, HIDDEN), head_VD, self.ids_W, row_R)
        with torch.no_grad():  # some students know better than chance
            self.student_RD[::2] += 2 * self.teacher.state_PD[row_R[::2]]
        self.weight_R = torch.rand(ROWS, generator=generator).to(dtype) + 0.5

    def arguments(self, text: str) -> tuple[Tensor, Tensor, Teacher, Tensor, LossConfig]:
        loss = LossConfig.parse(text)
        return self.student_RD, self.head_WD, self.teacher, self.weight_R, loss

    def gradients(self, total: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
        return torch.autograd.grad(factor * total, (self.student_RD, self.head_WD))


@pytest.mark.parametrize("text", KINDS)
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "whole vocabulary"])
@pytest.mark.parametrize("chunk_rows", [1, 8, 256])
def test_values_and_gradients_equal_the_definition(
    text: str, reduced: bool, chunk_rows: int
) -> None:
    case = Case(reduced=reduced)
    expected = reference_loss(*case.arguments(text))
    ours = projected_loss(*case.arguments(text), chunk_rows=chunk_rows)

    torch.testing.assert_close(ours.loss_R, expected.loss_R, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.total, expected.total, rtol=1e-5, atol=1e-5)
    assert torch.equal(expected.is_counted_R, ours.is_counted_R)
    assert torch.equal(expected.is_hit_R, ours.is_hit_R)
    assert 0 < int(ours.is_hit_R.sum()) < ROWS
    assert (0 < int((~ours.is_counted_R).sum()) < ROWS) == reduced
    for got, wanted in zip(
        case.gradients(ours.total, 3.0), case.gradients(expected.total, 3.0), strict=True
    ):
        largest = float(wanted.abs().max())
        assert largest > 0.05
        # Entries are sums of terms as large as the largest: float32 rounds those, not the sum.
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * max(1.0, largest))


@pytest.mark.parametrize("text", KINDS)
def test_gradients_follow_from_the_values(text: str) -> None:
    """In float64, against finite differences."""
    case = Case(dtype=torch.float64)

    def total(student_RD: Tensor, head_WD: Tensor) -> Tensor:
        return projected_loss(student_RD, head_WD, *case.arguments(text)[2:]).total

    assert torch.autograd.gradcheck(total, (case.student_RD, case.head_WD))


def test_a_row_that_the_drafter_cannot_match_has_neither_loss_nor_gradient() -> None:
    case = Case()
    result = projected_loss(*case.arguments("ce"))
    grad_RD, _ = case.gradients(result.total)
    left_out = ~result.is_counted_R

    assert not result.loss_R[left_out].any()
    assert not grad_RD[left_out].any()
    assert not result.is_hit_R[left_out].any()
    assert grad_RD[result.is_counted_R].abs().sum(1).min() > 0


def test_a_drafter_that_equals_the_target_has_no_divergence() -> None:
    case = Case(reduced=False)
    same_RD = case.teacher.state_PD[case.teacher.row_R]
    for kind in ("kl", "tv"):
        result = projected_loss(same_RD, case.teacher.head_VD, *case.arguments(kind)[2:])

        torch.testing.assert_close(result.loss_R, torch.zeros(ROWS), rtol=0, atol=1e-5)
        assert result.is_hit_R.all()


@pytest.mark.parametrize("text", KINDS)
def test_bfloat16_products_under_autocast_stay_near(text: str) -> None:
    case = Case()
    expected = projected_loss(*case.arguments(text))
    wanted, _ = case.gradients(expected.total)
    with torch.autocast("cpu", torch.bfloat16):
        ours = projected_loss(*case.arguments(text))
    got, _ = case.gradients(ours.total)

    assert torch.float32 == got.dtype
    assert not torch.equal(wanted, got)  # else autocast was not on
    torch.testing.assert_close(ours.total, expected.total, rtol=0.02, atol=0.02)
    assert (got - wanted).norm() < 0.05 * wanted.norm()


def test_a_frozen_head_gets_no_gradient() -> None:
    case = Case()
    case.head_WD.requires_grad_(False)
    projected_loss(*case.arguments("ce")).total.backward()

    assert case.student_RD.grad is not None
    assert case.head_WD.grad is None


def test_without_gradients_only_values_are_computed() -> None:
    case = Case()
    with torch.no_grad():
        result = projected_loss(*case.arguments("tv"))

    assert not result.total.requires_grad
    assert result.total == projected_loss(*case.arguments("tv")).total


def test_no_rows_make_no_loss() -> None:
    case = Case()
    teacher = Teacher(
        case.teacher.state_PD, case.teacher.head_VD, case.ids_W, torch.tensor([]).long()
    )
    result = projected_loss(
        case.student_RD[:0], case.head_WD, teacher, torch.empty(0), LossConfig()
    )
    grad_RD, grad_WD = case.gradients(result.total)

    assert 0 == result.total
    assert not grad_RD.any()
    assert not grad_WD.any()


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("ce", {"ce": 1.0}),
        ("kl:2", {"kl": 2.0}),
        (" ce:0.1 + tv:0.9", {"ce": 0.1, "tv": 0.9}),
    ],
)
def test_a_mixture_is_read_and_written(text: str, weights: dict[str, float]) -> None:
    assert weights == LossConfig.parse(text).weights
    assert LossConfig.parse(text) == LossConfig.parse(str(LossConfig.parse(text)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not one of ce, kl, tv"),
        ("mse", "'mse' is not one of ce, kl, tv"),
        ("ce:x", "'x' in 'ce:x' is not a number; write for example ce:0.1"),
        ("ce:0", "the weight of ce is 0.0; it must be above 0"),
        ("ce:nan", "the weight of ce is nan"),
        ("ce:inf", "the weight of ce is inf"),
        ("tv+tv:2", "tv is there twice"),
    ],
)
def test_what_is_no_loss_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LossConfig.parse(text)


def test_an_empty_mixture_is_refused() -> None:
    with pytest.raises(ParameterError, match="name at least one of ce, kl, tv"):
        LossConfig({})
