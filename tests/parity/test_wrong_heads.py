"""References with one decision wrong at a time: the comparison with our heads must see each.

Without this, the agreement in :mod:`tests.parity.test_heads` could mean that the weights are too
tame to tell a right head from a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.models.architecture import RopeConfig
from outrider.models.heads.config import Eagle3Config, MtpConfig
from outrider.models.heads.medusa import MedusaHeads
from tests.parity.head_cases import (
    EAGLE3,
    EAGLE3_CONFIGS,
    LLAMA3,
    MEDUSA,
    MTP,
    MTP_CONFIGS,
    WIDE,
    YARN,
    Driver,
    Reference,
    assert_same,
    head_weights,
    join,
    layers,
    make_head,
    make_medusa,
    make_reference,
    make_request,
    medusa_states,
    target,
)
from tests.parity.reference_heads import (
    Drafted,
    ReferenceEagle3,
    ReferenceMedusa,
    ReferenceMtp,
    Rows,
)

VISIBLE = 1e-3  # a mistake moves some logit by more than this


def test_a_common_shift_of_all_positions_changes_nothing() -> None:
    """Heads trained with the row of token t + 1 at position t + 1 are the same heads."""
    for config, kind in ((EAGLE3, ReferenceEagle3), (MTP, ReferenceMtp)):
        rows = make_request(config, length=20).rows(0, 19)
        expected = make_reference(config).run(*rows, WIDE)
        shifted = make_reference(config, shifted_by_one(kind)).run(*rows, WIDE)

        torch.testing.assert_close(shifted.logits_RW, expected.logits_RW, rtol=0, atol=1e-9)


def shifted_by_one(kind: type) -> type:
    class Shifted(kind):
        def positions(self, parents: Sequence[int], num_true: int) -> Tensor:
            return super().positions(parents, num_true) + 1

    return Shifted


# References with one decision wrong, mixed in front of the right ones.


class NodesAtOnePosition:
    """All drafted rows right behind the prefix, whatever their depth."""

    def positions(self, parents: Sequence[int], num_true: int) -> Tensor:
        return torch.arange(len(parents)).clamp(max=num_true)


class NodesOnePlaceTooFar:
    """A gap between the prefix and the tree."""

    def positions(self, parents: Sequence[int], num_true: int) -> Tensor:
        position_R = super().positions(parents, num_true)  # type: ignore[misc]
        return position_R + (torch.arange(len(parents)) >= num_true)


class NodesAtTheirSlots:
    """Drafted rows at the positions of the cache slots they lie in."""

    def positions(self, parents: Sequence[int], num_true: int) -> Tensor:
        return torch.arange(len(parents))


class SiblingsSeeEachOther:
    """A causal mask over the tree's rows."""

    def visible(self, parents: Sequence[int], num_true: int) -> Tensor:
        return torch.ones(len(parents), len(parents), dtype=torch.bool).tril()


class NodesDoNotSeeAncestors:
    """Drafted rows see the prefix and themselves alone."""

    def visible(self, parents: Sequence[int], num_true: int) -> Tensor:
        visible_RR = super().visible(parents, num_true)  # type: ignore[misc]
        visible_RR[num_true:, num_true:] = torch.eye(len(parents) - num_true, dtype=torch.bool)
        return visible_RR


class PrefixWithoutItsFirstRow:
    def visible(self, parents: Sequence[int], num_true: int) -> Tensor:
        visible_RR = super().visible(parents, num_true)  # type: ignore[misc]
        visible_RR[1:, 0] = False
        return visible_RR


class AllNodesReadTheLastTrueRow:
    def source(self, row: int, parents: Sequence[int], num_true: int) -> int:
        return num_true - 1


class InterleavedRotation:
    """Neighbours rotate together, not the two halves of a head."""

    def rotated(self, x: Tensor) -> Tensor:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


class StatesInReverse:
    def entry(self, states: Sequence[Tensor]) -> Tensor:
        return super().entry(states[::-1])  # type: ignore[misc]


class HiddenFirst:
    def join(self, embedded_RD: Tensor, hidden_RD: Tensor) -> Tensor:
        return torch.cat([hidden_RD, embedded_RD], dim=-1)


class FeedsBackBeforeTheNorm:
    def feed_back(self, x_RD: Tensor, normed_RD: Tensor) -> Tensor:
        return x_RD


class TokensOfTheRowsBefore:
    """Row t reads token t, not token t + 1."""

    def run(self, tokens: Sequence[int], states: Sequence[Tensor], drafted: Drafted) -> Rows:
        return super().run([0, *tokens[:-1]], states, drafted)  # type: ignore[misc]


SHARED_MISTAKES = (
    NodesAtOnePosition,
    NodesOnePlaceTooFar,
    NodesAtTheirSlots,
    SiblingsSeeEachOther,
    NodesDoNotSeeAncestors,
    PrefixWithoutItsFirstRow,
    AllNodesReadTheLastTrueRow,
    InterleavedRotation,
    TokensOfTheRowsBefore,
)
EAGLE3_MISTAKES = (*SHARED_MISTAKES, StatesInReverse, HiddenFirst)
MTP_MISTAKES = (*SHARED_MISTAKES, FeedsBackBeforeTheNorm)


def largest_difference(
    config: Eagle3Config | MtpConfig,
    wrong: Reference,
    states_of: Eagle3Config | MtpConfig | None = None,
) -> float:
    """Between our head's logits and a wrong reference's, on true rows and tree."""
    length = 24
    request = make_request(config, length)
    driver = Driver(make_head(config))
    true = driver.take_in([request.rows(0, length - 1)])
    rows = join([*true, *driver.grow(true, [WIDE])])
    assert_same(make_reference(config).run(*request.rows(0, length - 1), WIDE), rows)
    read = make_request(states_of or config, length)
    expected = wrong.run(*read.rows(0, length - 1), WIDE)
    return (rows.logits_RW - expected.logits_RW).abs().max().item()


@pytest.mark.parametrize("mistake", EAGLE3_MISTAKES)
@pytest.mark.parametrize("name", ["plain", "EAGLE-3.1", "two layers"])
def test_a_wrong_eagle3_is_seen(name: str, mistake: type) -> None:
    config = EAGLE3_CONFIGS[name]
    wrong = type(mistake.__name__, (mistake, ReferenceEagle3), {})

    assert VISIBLE < largest_difference(config, make_reference(config, wrong))


@pytest.mark.parametrize("mistake", MTP_MISTAKES)
@pytest.mark.parametrize("name", MTP_CONFIGS)
def test_a_wrong_mtp_is_seen(name: str, mistake: type) -> None:
    config = MTP_CONFIGS[name]
    wrong = type(mistake.__name__, (mistake, ReferenceMtp), {})

    assert VISIBLE < largest_difference(config, make_reference(config, wrong))


EAGLE3_OPTIONS: dict[str, dict[str, object]] = {
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "own embedding": {"has_own_embedding": True},
    "two layers": {"layers": layers(2)},
    "head norms": {"layers": layers(qk_norm=True)},
    "bias on q, k, v": {"layers": layers(attention_bias=True)},
    "bias on o": {"layers": layers(attention_out_bias=True)},
    "bias in the MLP": {"layers": layers(mlp_bias=True)},
    "theta": {"layers": layers(rope=RopeConfig(theta=500000.0))},
    "llama3 rope": {"layers": layers(rope=LLAMA3)},
    "yarn rope": {"layers": layers(rope=YARN)},
    "window": {"layers": layers(sliding_window=6, sliding_layers=(0,))},
}
MTP_OPTIONS: dict[str, dict[str, object]] = {
    "order": {"order": "hidden_first"},
    "raw state": {"reads_raw_state": True},
    "own embedding": {"has_own_embedding": True},
    "own head": {"has_own_head": True},
    "two layers": {"layers": layers(2)},
}


@pytest.mark.parametrize("name", EAGLE3_OPTIONS)
def test_each_option_of_eagle3_makes_a_difference(name: str) -> None:
    """Both ways: our head has the option and the reference not, and the other way round.

    Weights that both have are equal, so the option alone is what differs.
    """
    with_option = replace(EAGLE3, **EAGLE3_OPTIONS[name])  # type: ignore[arg-type]
    for ours, theirs in ((EAGLE3, with_option), (with_option, EAGLE3)):
        assert VISIBLE < largest_difference(ours, make_reference(theirs))


@pytest.mark.parametrize("name", MTP_OPTIONS)
def test_each_option_of_mtp_makes_a_difference(name: str) -> None:
    with_option = replace(MTP, **MTP_OPTIONS[name])  # type: ignore[arg-type]
    for ours, theirs in ((MTP, with_option), (with_option, MTP)):
        assert VISIBLE < largest_difference(ours, make_reference(theirs), states_of=theirs)


class WithoutResidual(ReferenceMedusa):
    def block(self, head: int, block: int, x_RD: Tensor) -> Tensor:
        return super().block(head, block, x_RD) - x_RD


class BlocksInReverse(ReferenceMedusa):
    def block(self, head: int, block: int, x_RD: Tensor) -> Tensor:
        return super().block(head, self.config.num_layers - 1 - block, x_RD)


class FirstBlockTwice(ReferenceMedusa):
    """``[block] * n`` in the published code: one block, n times."""

    def block(self, head: int, block: int, x_RD: Tensor) -> Tensor:
        return super().block(head, 0, x_RD)


class HeadsInReverse(ReferenceMedusa):
    def block(self, head: int, block: int, x_RD: Tensor) -> Tensor:
        return super().block(self.config.num_heads - 1 - head, block, x_RD)


@pytest.mark.parametrize(
    "kind", [WithoutResidual, BlocksInReverse, FirstBlockTwice, HeadsInReverse]
)
@pytest.mark.parametrize("has_own_head", [True, False])
def test_a_wrong_medusa_is_seen(kind: type[ReferenceMedusa], has_own_head: bool) -> None:
    config = replace(MEDUSA, num_layers=2, has_own_head=has_own_head)
    state_RD = medusa_states()
    wrong = make_medusa(config, kind).run(state_RD)[0]
    (logits_RV,) = MedusaHeads(config, head_weights(config), target()).forward(state_RD, 1)

    assert VISIBLE < (logits_RV - wrong).abs().max()
