"""Each recipe's losses and counts on a tiny target; that they can be learned from, and exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.config import Method
from outrider.errors import ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.training.losses import LossConfig
from outrider.training.packing import Batch, TrainingSequence, pack
from outrider.training.recipes import (
    DraftOptions,
    Eagle3Options,
    MedusaOptions,
    MtpOptions,
    Objective,
    Options,
    Recipe,
    StepResults,
    create_recipe,
    default_layers,
    predicted_acceptance,
    step_weights,
)
from outrider.training.recipes.draft import CHAIN_DEPTH
from outrider.training.recipes.recursion import plan_steps
from outrider.vocabulary import DraftVocabulary
from tests.models import random_weights
from tests.training.tiny_training import (
    CAPTURES,
    objective,
    tiny_batch,
    tiny_ends,
    tiny_sequences,
    tiny_target,
    tiny_vocabulary,
)

EAGLE3 = Eagle3Options(capture_layers=CAPTURES)
OPTIONS: dict[str, Options] = {
    "EAGLE-3": EAGLE3,
    "EAGLE-3.1, own head": replace(EAGLE3, fc_norm=True, norm_output=True, train_head=True),
    "EAGLE-3, random": replace(EAGLE3, init="random"),
    "MTP": MtpOptions(),
    "MTP, random, hidden first": MtpOptions(order="hidden_first", init="random"),
    "MEDUSA": MedusaOptions(),
    "draft model": DraftOptions(layers=(0, 3), mlp_size=64),
}
every_recipe = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def make(options: Options, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any):
    num_steps = 1 if isinstance(options, DraftOptions) else 3
    return create_recipe(
        options,
        tiny_ends(dtype),
        random_weights(tiny_target().config),
        objective(num_steps, **changes),
        seed=seed,
    )


def ahead_of(recipe: Recipe) -> int:
    return 1 if isinstance(recipe.head_config(), DecoderConfig) else 2


def losses_of(recipe: Recipe, sequences: list[TrainingSequence]) -> StepResults:
    with torch.no_grad():
        return recipe.losses(pack(sequences))


@every_recipe
@pytest.mark.parametrize("loss_on", ["response", "all"])
def test_rows_end_with_their_sequence_and_with_the_response(options: Options, loss_on: str) -> None:
    """Row t at step k has a loss exactly where token t + ahead + k exists and counts."""
    recipe = make(options, loss_on=loss_on)
    sequences = tiny_sequences(tiny_target())
    results = losses_of(recipe, sequences)
    expected = []
    for k in range(recipe.num_steps):
        predicted = [range(ahead_of(recipe) + k, len(sequence.token_ids)) for sequence in sequences]
        first = [sequence.prompt_len if loss_on == "response" else 0 for sequence in sequences]
        pairs = zip(predicted, first, strict=True)
        expected.append(sum(sum(token >= start for token in tokens) for tokens, start in pairs))

    assert expected == results.rows_S.tolist()


@every_recipe
def test_a_sequence_does_not_see_its_neighbours(options: Options) -> None:
    recipe = make(options)
    sequences = tiny_sequences(tiny_target())
    alone = [losses_of(recipe, [sequence]) for sequence in sequences]
    together = losses_of(recipe, sequences)

    total_S = torch.stack([results.loss_S for results in alone]).sum(0)
    torch.testing.assert_close(together.loss_S, total_S, rtol=1e-6, atol=1e-6)
    for name in ("rows_S", "hits_S", "tested_S", "joint_S"):
        counts_S = torch.stack([getattr(results, name) for results in alone]).sum(0)
        assert torch.equal(counts_S, getattr(together, name))


@every_recipe
def test_another_neighbour_changes_nothing_in_a_sequences_gradients(options: Options) -> None:
    """Its gradients are what its own loss gives; another text beside it only adds its own."""
    recipe = make(options)
    first, second, _, third, _ = tiny_sequences(tiny_target())

    def gradient(sequences: list[TrainingSequence]) -> Tensor:
        total = recipe.losses(pack(sequences)).total
        grads = torch.autograd.grad(total, list(recipe.parameters()))
        return torch.cat([grad.flatten() for grad in grads])

    expected = gradient([first]) + gradient([third])
    scale = expected.abs().max().item()

    assert scale > 0.01
    for sequences in ([first, third], [third, first]):
        torch.testing.assert_close(gradient(sequences), expected, rtol=0, atol=1e-5 * scale)
    assert not torch.allclose(gradient([first, second]), expected, rtol=0, atol=1e-3 * scale)


@every_recipe
def test_the_total_weighs_the_steps(options: Options) -> None:
    results = make(options, loss=LossConfig.parse("ce:0.5+tv:2")).losses(tiny_batch(tiny_target()))
    weights = [0.8**k for k in range(len(results.loss_S))]
    expected = sum(w * loss for w, loss in zip(weights, results.loss_S.tolist(), strict=True))

    assert expected == pytest.approx(results.total.item(), rel=1e-5)


@pytest.mark.parametrize("options", [EAGLE3, MtpOptions()], ids=["EAGLE-3", "MTP"])
def test_leaving_rows_out_of_later_steps_changes_no_loss_of_the_response(
    options: Options,
) -> None:
    """Long prompts are computed once; what the response's rows see and give is the same."""
    batch = tiny_batch(tiny_target())
    kept = [len(step.row_R) for step in plan_steps(batch, 3, only_response=True)]
    whole = [len(step.row_R) for step in plan_steps(batch, 3, only_response=False)]
    recipe = make(options)
    only_response = recipe.losses(batch)
    everything = make(options, loss_on="all")  # no row is left out of any step
    counted = _loss_of_response(everything, batch, recipe.is_scored)

    assert kept[0] <= whole[0]
    assert kept[1] < whole[1]
    torch.testing.assert_close(only_response.loss_S, counted, rtol=1e-5, atol=1e-5)


def _loss_of_response(
    recipe: Recipe, batch: Batch, is_scored: Callable[[Batch, int], Tensor]
) -> Tensor:
    """A recipe's loss by step over the rows that another one scores."""
    score = recipe.score

    def score_some(batch: Batch, students: list[Tensor], rows: list[Tensor], **more: Any):
        keeps = [is_scored(batch, k)[row_R] for k, row_R in enumerate(rows)]
        students = [x_RD[keep] for x_RD, keep in zip(students, keeps, strict=True)]
        return score(
            batch,
            students,
            [row_R[keep] for row_R, keep in zip(rows, keeps, strict=True)],
            **more,
        )

    recipe.score = score_some  # type: ignore[method-assign]
    return recipe.losses(batch).loss_S


@every_recipe
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_few_steps_of_an_optimiser_lower_the_loss(options: Options, autocast: bool) -> None:
    dtype = torch.bfloat16 if autocast else torch.float32
    recipe = make(options, dtype=dtype, loss=LossConfig.parse("kl"))
    batch = _as_stored(tiny_batch(tiny_target())) if autocast else tiny_batch(tiny_target())
    optimiser = torch.optim.AdamW(recipe.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results = recipe.losses(batch)
        losses.append(results.total.item())
        optimiser.zero_grad()
        (results.total / results.rows_S[0]).backward()
        optimiser.step()

    assert np.isfinite(losses).all()
    assert losses[-1] < 0.6 * losses[0]
    for name, parameter in recipe.named_parameters():
        assert torch.float32 == parameter.dtype
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@every_recipe
def test_bfloat16_stays_near_float32(options: Options) -> None:
    batch = tiny_batch(tiny_target())
    expected = make(options).losses(batch)
    with torch.autocast("cpu", torch.bfloat16):
        results = make(options, dtype=torch.bfloat16).losses(_as_stored(batch))

    torch.testing.assert_close(results.loss_S, expected.loss_S, rtol=0.05, atol=0)
    assert not torch.equal(results.loss_S, expected.loss_S)


def _as_stored(batch: Batch) -> Batch:
    assert batch.states_PC is not None
    return replace(batch, states_PC=batch.states_PC.bfloat16(), final_PD=batch.final_PD.bfloat16())


@every_recipe
def test_a_batch_with_nothing_to_learn_is_no_error(options: Options) -> None:
    recipe = make(options)
    results = recipe.losses(tiny_batch(tiny_target(), shapes=((2, 2), (5, 5), (1, 1))))
    results.total.backward()

    assert 0 == results.total
    assert 0 == results.rows_S.sum() == results.tested_S.sum()
    for parameter in recipe.parameters():
        assert parameter.grad is None or not parameter.grad.any()


@every_recipe
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_exported_weights_are_what_the_description_asks_for(
    options: Options, reduced: bool
) -> None:
    recipe = make(options, vocabulary=tiny_vocabulary() if reduced else None)
    config, weights = recipe.head_config(), recipe.weights()
    expected = dict(config.weight_shapes())

    assert expected == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert ("d2t" in weights) == (reduced and isinstance(options, Eagle3Options))
    for name, tensor in weights.items():
        assert (torch.int64 if name == "d2t" else torch.float32) == tensor.dtype


@every_recipe
def test_the_target_is_neither_trained_nor_saved(options: Options) -> None:
    recipe = make(options, vocabulary=tiny_vocabulary())
    before = recipe.head_VD.clone(), recipe.head_WD.clone(), recipe.embedding_VD.clone()
    optimiser = torch.optim.SGD(recipe.parameters(), lr=0.1)
    recipe.losses(tiny_batch(tiny_target())).total.backward()
    optimiser.step()

    assert not {"embedding_VD", "head_VD", "head_WD", "ids_W"} & recipe.state_dict().keys()
    for tensor, now in zip(
        before, (recipe.head_VD, recipe.head_WD, recipe.embedding_VD), strict=True
    ):
        assert torch.equal(tensor, now)


@every_recipe
def test_what_is_drawn_follows_from_the_seed(options: Options) -> None:
    torch.manual_seed(0)
    first = make(options, seed=4).weights()
    torch.manual_seed(1)
    again, other = make(options, seed=4).weights(), make(options, seed=5).weights()

    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    is_drawn = not isinstance(options, MedusaOptions | DraftOptions)
    assert is_drawn == any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_the_vocabulary_is_offsets_to_the_targets_ids() -> None:
    vocabulary = tiny_vocabulary()
    weights = make(EAGLE3, vocabulary=vocabulary).weights()
    again = DraftVocabulary.from_offsets(weights["d2t"].numpy(), 331)

    assert vocabulary.ids_W.tolist() == again.ids_W.tolist()


def test_an_own_head_begins_as_the_targets_rows_and_learns() -> None:
    recipe = make(replace(EAGLE3, train_head=True), vocabulary=tiny_vocabulary())
    rows = tiny_ends().head_VD[tiny_vocabulary().ids_W.tolist()]
    begun = recipe.weights()["lm_head.weight"]
    recipe.losses(tiny_batch(tiny_target())).total.backward()
    torch.optim.SGD(recipe.parameters(), lr=0.1).step()

    assert torch.equal(rows, begun)
    assert not torch.equal(rows, recipe.weights()["lm_head.weight"])


@every_recipe
def test_rows_whose_choice_the_vocabulary_lacks_are_tested_but_not_counted(
    options: Options,
) -> None:
    vocabulary, batch = tiny_vocabulary(), tiny_batch(tiny_target())
    recipe = make(options, vocabulary=vocabulary)
    results = recipe.losses(batch)
    best_P = (batch.final_PD @ recipe.head_VD.T).argmax(1)
    is_known_P = torch.isin(best_P, torch.tensor(vocabulary.ids_W))
    for k in range(recipe.num_steps):
        row_R = recipe.is_scored(batch, k).nonzero().squeeze(1)
        known = int(is_known_P[row_R + ahead_of(recipe) + k - 1].sum())

        assert 0 < known < len(row_R)
        assert known == results.rows_S[k]
    assert results.tested_S[0] == recipe.is_scored(batch, 0).sum()


def test_a_draft_model_of_all_layers_is_the_target() -> None:
    options = DraftOptions(layers=(0, 1, 2, 3))
    recipe = make(options, loss=LossConfig.parse("kl"), loss_on="all")
    results = losses_of(recipe, tiny_sequences(tiny_target()))

    assert results.loss_S[0] < 1e-4 * results.rows_S[0]
    assert torch.equal(results.rows_S, results.hits_S)
    assert torch.equal(results.tested_S, results.joint_S)
    assert 1.0 + CHAIN_DEPTH == predicted_acceptance(
        results.tested_S.tolist(), results.joint_S.tolist()
    )


def test_chains_of_a_draft_model_are_runs_of_hits() -> None:
    recipe = make(DraftOptions(layers=(0, 2, 3)), loss_on="all")
    sequences = tiny_sequences(tiny_target())
    results = losses_of(recipe, sequences)
    joint = [0] * CHAIN_DEPTH
    for sequence in sequences:
        batch = pack([sequence])
        with torch.no_grad():
            draft_T = (recipe.run(batch) @ recipe.head_VD.T).argmax(1)  # type: ignore[operator]
        target_T = (batch.final_PD @ recipe.head_VD.T).argmax(1)
        hits = (draft_T == target_T)[:-1].tolist()
        for depth in range(1, CHAIN_DEPTH + 1):
            starts = range(len(hits) - depth + 1)
            joint[depth - 1] += sum(all(hits[start : start + depth]) for start in starts)

    assert joint == results.joint_S.tolist()
    assert 0 < joint[0] < results.tested_S[0]


def test_chains_of_a_head_are_rows_that_hit_at_every_step() -> None:
    """Of a head that has half learned its few texts."""
    recipe, batch = make(MtpOptions()), tiny_batch(tiny_target())
    optimiser = torch.optim.AdamW(recipe.parameters(), lr=3e-3)
    for _ in range(22):
        optimiser.zero_grad()
        recipe.losses(batch).total.backward()
        optimiser.step()
    seen: list[Tensor] = []
    count_chains = recipe.count_chains

    def watch(batch: Batch, is_tested_SP: Tensor, is_hit_SP: Tensor) -> tuple[Tensor, Tensor]:
        seen.extend((is_tested_SP, is_hit_SP))
        return count_chains(batch, is_tested_SP, is_hit_SP)

    recipe.count_chains = watch  # type: ignore[method-assign]
    results = recipe.losses(batch)
    is_tested_PS, is_hit_PS = (flags_SP.T.tolist() for flags_SP in seen)
    tested = [sum(all(flags[: k + 1]) for flags in is_tested_PS) for k in range(3)]
    joint = [sum(all(flags[: k + 1]) for flags in is_hit_PS) for k in range(3)]

    assert [25, 22, 19] == tested == results.tested_S.tolist()  # a prompt's last rows start late
    assert joint == results.joint_S.tolist()
    assert results.hits_S.tolist() == torch.tensor(is_hit_PS).sum(0).tolist()
    assert results.joint_S[2] < results.hits_S[2]
    assert 0 < joint[2] < joint[0] < tested[0]


def test_medusa_heads_begin_as_the_targets_state() -> None:
    """What they then predict is the target's next token, one place too early."""
    recipe, batch = make(MedusaOptions()), tiny_batch(tiny_target())
    results = recipe.losses(batch)
    best_P = (batch.final_PD @ recipe.head_VD.T).argmax(1)
    expected = [
        int((best_P.roll(-1 - k) == best_P)[recipe.is_scored(batch, k)].sum()) for k in range(3)
    ]

    assert expected == results.hits_S.tolist()


@pytest.mark.parametrize("options", [EAGLE3, MtpOptions()], ids=["EAGLE-3", "MTP"])
def test_a_head_begins_as_the_targets_last_layer(options: Options) -> None:
    weights, target = make(options).weights(), random_weights(tiny_target().config)
    width = 72

    for name in ("o", "gate", "up", "down"):
        key = f"{name}.weight"
        assert torch.equal(target[f"layers.3.{key}"], weights[f"layers.0.{key}"])
    for name in "qkv":
        assert torch.equal(
            target[f"layers.3.{name}.weight"], weights[f"layers.0.{name}.weight"][:, -width:]
        )
    assert torch.equal(target["norm.weight"], weights["norm.weight"])
    passed = weights["fc.weight"][:, -width:] - torch.eye(width)
    assert 0 < passed.abs().max() < 0.02


def test_a_narrower_draft_model_keeps_its_largest_units() -> None:
    weights = random_weights(tiny_target().config)
    weights["layers.3.up.weight"][[5, 50, 99]] *= 100
    options = DraftOptions(layers=(3,), mlp_size=3)
    recipe = create_recipe(options, tiny_ends(), weights, objective(1), seed=0)
    ours = recipe.weights()

    assert torch.equal(weights["layers.3.up.weight"][[5, 50, 99]], ours["layers.0.up.weight"])
    assert torch.equal(weights["layers.3.gate.weight"][[5, 50, 99]], ours["layers.0.gate.weight"])
    assert torch.equal(
        weights["layers.3.down.weight"][:, [5, 50, 99]], ours["layers.0.down.weight"]
    )


def test_layers_keep_their_own_kind_of_attention() -> None:
    changes = {"sliding_window": 5, "sliding_layers": (1, 3), "no_rope_layers": (2,)}
    target = tiny_target(**changes)
    recipe = create_recipe(
        DraftOptions(layers=(0, 2, 3)),
        tiny_ends(**changes),
        random_weights(target.config),
        objective(1),
        seed=0,
    )
    config = recipe.head_config()
    assert isinstance(config, DecoderConfig)

    assert ((1,), (2,)) == (config.no_rope_layers, config.sliding_layers)


def test_default_layers_are_the_ends() -> None:
    assert (0, 29) == default_layers(30)
    assert (0,) == default_layers(1)


def test_acceptance_counts_the_bonus_and_what_was_tested() -> None:
    assert 1.75 == predicted_acceptance([8, 4, 0], [4, 1, 0])
    assert 1.0 == predicted_acceptance([0], [0])


def test_step_weights_by_method() -> None:
    assert (1.0, 0.8, 0.64, 0.512, 0.4096) == pytest.approx(step_weights(Method.EAGLE3))
    assert (0.5, 0.5) == pytest.approx(step_weights(Method.MTP, 2, 1.0))
    assert 1.0 == pytest.approx(sum(step_weights(Method.MTP, 7)))
    assert (1.0,) == step_weights(Method.DRAFT)


@pytest.mark.parametrize(
    ("make_wrong", "message"),
    [
        (lambda: step_weights(Method.NGRAM), "ngram is not trained; allowed: draft, eagle3"),
        (lambda: step_weights(Method.MTP, 0), "num_steps: 0 is below 1"),
        (lambda: step_weights(Method.MTP, 3, 1.5), "step_decay: 1.5 is outside"),
        (lambda: Objective(step_weights=()), "give at least one"),
        (lambda: Objective(step_weights=(1.0, -1.0)), "each a number above 0"),
        (lambda: objective(loss_on="prompt"), "'prompt' is not one of response, all"),
        (
            lambda: objective(vocabulary=DraftVocabulary.first(331, 331)),
            "all 331 tokens of the target; choose fewer",
        ),
        (lambda: replace(EAGLE3, init="last"), "'last' is not one of target, random"),
        (lambda: MtpOptions(order="both"), "'both' is not one of embedding_first"),  # type: ignore[arg-type]
        (lambda: MtpOptions(init="x"), "'x' is not one of target, random"),  # type: ignore[arg-type]
        (lambda: MedusaOptions(num_layers=0), "num_layers: 0 is below 1"),
        (lambda: make(DraftOptions(layers=(0, 4))), r"layers: \[0, 4\]; .* 0 .. 3"),
        (lambda: make(DraftOptions(layers=())), r"layers: \[\]; allowed"),
        (lambda: make(DraftOptions(layers=(2, 1))), "distinct, ascending"),
        (lambda: make(DraftOptions(layers=(0,), mlp_size=101)), "101; allowed: 1 .. 100"),
        (
            lambda: create_recipe(
                DraftOptions(layers=(0,)),
                tiny_ends(),
                random_weights(tiny_target().config),
                objective(2),
                seed=0,
            ),
            "a draft model is trained on one step",
        ),
    ],
)
def test_what_cannot_be_is_refused(make_wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_wrong()
