"""What is trained is what is served: the training forward against the drafting forward, in float32.

Serving runs as drafters run it, row after row through the module's own cache: the true rows up to t
are committed, then a chain is drafted behind them along the text's own tokens, each node on the
state that the node before it fed back. Training computes step k of all rows at once, over several
packed sequences; step k at row t must be node k of the chain behind row t. Serving itself is held
against independent references in :mod:`tests.parity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafters.draft_model import DraftModel
from outrider.models.architecture import RopeConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.heads.mtp import MtpHead
from outrider.models.layers import Segment
from outrider.training.packing import Batch, pack
from outrider.training.recipes import (
    DraftOptions,
    Eagle3Options,
    MedusaOptions,
    MtpOptions,
    create_recipe,
    step_weights,
)
from outrider.training.recipes import recursion as recursion_module
from outrider.training.recipes.draft import DraftRecipe
from outrider.training.recipes.eagle3 import Eagle3Recipe
from outrider.training.recipes.layers import Rotation
from outrider.training.recipes.mtp import MtpRecipe
from outrider.training.recipes.recursion import plan_steps, run_steps
from tests.models import random_weights
from tests.parity.head_cases import LIVELY, Driver
from tests.parity.reference_heads import Drafted
from tests.training.tiny_training import (
    CAPTURES,
    SHAPES,
    make_lively,
    objective,
    tiny_batch,
    tiny_ends,
    tiny_sequences,
    tiny_target,
    tiny_vocabulary,
)

TOLERANCE = 1e-5
NUM_STEPS = 4

EAGLE3 = Eagle3Options(capture_layers=CAPTURES)
EAGLE3_CASES: dict[str, tuple[Eagle3Options, dict[str, Any]]] = {
    "plain": (EAGLE3, {}),
    "fc_norm": (replace(EAGLE3, fc_norm=True), {}),
    "norm_output": (replace(EAGLE3, norm_output=True), {}),
    "norm_before_residual": (replace(EAGLE3, norm_before_residual=True), {}),
    "all norms, own head": (
        replace(EAGLE3, fc_norm=True, norm_output=True, norm_before_residual=True, train_head=True),
        {},
    ),
    "other captures": (replace(EAGLE3, capture_layers=(1, 4)), {}),
    "head norms": (EAGLE3, {"qk_norm": True}),
    "biases": (EAGLE3, {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    "equal heads": (EAGLE3, {"num_kv_heads": 6}),
    "yarn": (EAGLE3, {"rope": RopeConfig(kind="yarn", factor=4.0, original_max_position=32)}),
    "tied": (EAGLE3, {"tied_embeddings": True}),
}
MTP_CASES: dict[str, tuple[MtpOptions, dict[str, Any]]] = {
    "embedding first": (MtpOptions(), {}),
    "hidden first": (MtpOptions(order="hidden_first"), {}),
    "head norms": (MtpOptions(), {"qk_norm": True}),
    "biases": (MtpOptions(), {"attention_bias": True}),
}
CASES = {
    **{f"EAGLE-3, {name}": case for name, case in EAGLE3_CASES.items()},
    **{f"MTP, {name}": case for name, case in MTP_CASES.items()},
}

Recursive = Eagle3Recipe | MtpRecipe
# (sequence, step) -> logits of rows 0, 1, ...
Logits = dict[tuple[int, int], Tensor]


def make_recipe(options: Eagle3Options | MtpOptions, changes: dict[str, Any]) -> Recursive:
    """With a reduced vocabulary where the head has one of its own."""
    is_eagle3 = isinstance(options, Eagle3Options)
    recipe = create_recipe(
        options,
        tiny_ends(**changes),
        random_weights(tiny_target(**changes).config),
        objective(NUM_STEPS, loss_on="all", vocabulary=tiny_vocabulary() if is_eagle3 else None),
        seed=0,
    )
    assert isinstance(recipe, Recursive)
    make_lively(recipe)
    return recipe


def trained_logits(recipe: Recursive, batch: Batch) -> Logits:
    """By the training forward."""
    head_WD = recipe.head_WD
    if isinstance(recipe, Eagle3Recipe) and recipe.lm_head is not None:
        head_WD = recipe.lm_head.weight
    steps = plan_steps(batch, NUM_STEPS, only_response=False)
    with torch.no_grad():
        outputs = run_steps(recipe, batch, steps)
    logits = {}
    for k, (step, student_RD) in enumerate(zip(steps, outputs, strict=True)):
        scored_RD = student_RD[step.scored_R] @ head_WD.T
        sequence_R = batch.sequence_P[step.row_R[step.scored_R]]
        for sequence in range(len(batch.lengths)):
            logits[sequence, k] = scored_RD[sequence_R == sequence]
    return logits


def served_logits(recipe: Recursive, target: Decoder) -> Logits:
    """By the drafting forward, one row at a time."""
    config, weights = recipe.head_config(), recipe.weights()
    kind = Eagle3Head if isinstance(recipe, Eagle3Recipe) else MtpHead
    head = kind(config, weights, target)  # type: ignore[arg-type]
    rows: dict[tuple[int, int], list[Tensor]] = {}
    for b, sequence in enumerate(tiny_sequences(target, recipe.captures)):
        tokens = list(sequence.token_ids)
        state_TX = sequence.states_TC if recipe.captures else sequence.final_TD
        assert state_TX is not None
        driver = Driver(head)
        for t in range(len(tokens) - 2):
            (root,) = driver.take_in([([tokens[t + 1]], [state_TX[t : t + 1]])])
            rows.setdefault((b, 0), []).append(root.logits_RW[0])
            known = tuple(tokens[t + 2 : -1][: NUM_STEPS - 1])  # what follows them is predicted
            if known:
                chain = Drafted(known, tuple(range(-1, len(known) - 1)))
                (nodes,) = driver.grow([root], [chain])
                for k, logits_W in enumerate(nodes.logits_RW):
                    rows.setdefault((b, k + 1), []).append(logits_W)
    return {place: torch.stack(logits) for place, logits in rows.items()}


def distance(served: Tensor, trained: Tensor) -> float:
    """Largest difference; of logits that are larger than usual, in their standard deviations."""
    return ((served - trained).abs().max() / trained.std().clamp_min(1.0)).item()


def distances(
    recipe: Recursive, changes: dict[str, Any], batch: Batch | None = None
) -> list[float]:
    """By step, the largest distance between the two."""
    target = tiny_target(**changes)
    trained = trained_logits(recipe, batch or tiny_batch(target, recipe.captures))
    served = served_logits(recipe, target)
    largest = [0.0] * NUM_STEPS
    for (sequence, k), logits in trained.items():
        if not len(logits):
            assert (sequence, k) not in served
            continue
        assert logits.std() > LIVELY
        assert served[sequence, k].shape == logits.shape
        largest[k] = max(largest[k], distance(served[sequence, k], logits))
    assert served.keys() <= trained.keys()
    return largest


@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=list(CASES))
def test_every_step_of_every_row_equals_the_drafted_node(
    options: Eagle3Options | MtpOptions, changes: dict[str, Any]
) -> None:
    recipe = make_recipe(options, changes)

    assert max(distances(recipe, changes)) <= TOLERANCE


def test_rows_in_several_blocks_equal_rows_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recursion_module, "QUERY_ROWS", 5)

    assert max(distances(make_recipe(EAGLE3, {}), {})) <= TOLERANCE


@pytest.mark.parametrize("options", [EAGLE3, MtpOptions()], ids=["EAGLE-3", "MTP"])
@pytest.mark.parametrize("wrong", ["position", "entries", "prefix"])
def test_a_wrong_step_is_seen(
    options: Eagle3Options | MtpOptions, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step stays right, the later ones are not: these are the classic mistakes."""
    recipe = make_recipe(options, {})
    attend_block = recursion_module._attend_block

    def drop_entries(query, position, first, own):
        return attend_block(query, position, first, tuple(tensor[-1:] for tensor in own))

    def see_next(query, position, first, own):
        return attend_block(query, position + 1, first, own)

    def stand_still(config, position_R):
        """Rows of later steps at step 0's positions."""
        is_later = len(position_R) < num_rows
        return Rotation(config, position_R - 1 if is_later else position_R)

    batch = tiny_batch(tiny_target(), recipe.captures)
    num_rows = len(plan_steps(batch, NUM_STEPS, only_response=False)[0].row_R)
    patches: dict[str, tuple[str, Callable[..., Any]]] = {
        "position": ("Rotation", stand_still),
        "entries": ("_attend_block", drop_entries),
        "prefix": ("_attend_block", see_next),
    }
    monkeypatch.setattr(recursion_module, *patches[wrong])
    first, *later = distances(recipe, {})
    if wrong == "entries":  # a row with only one entry of its own has none to drop
        assert later.pop(0) <= TOLERANCE

    assert first <= TOLERANCE
    assert min(later) > 100 * TOLERANCE


@pytest.mark.parametrize("options", [EAGLE3, MtpOptions()], ids=["EAGLE-3", "MTP"])
def test_a_wrong_token_or_state_is_seen_at_once(options: Eagle3Options | MtpOptions) -> None:
    recipe = make_recipe(options, {})
    batch = tiny_batch(tiny_target(), recipe.captures)
    tokens = replace(batch, token_P=batch.token_P.roll(1))
    states_PC = None if batch.states_PC is None else batch.states_PC.roll(1, 0)
    states = replace(batch, states_PC=states_PC, final_PD=batch.final_PD.roll(1, 0))

    for shifted in (tokens, states):
        assert min(distances(recipe, {}, shifted)) > 100 * TOLERANCE


def test_feeding_back_the_other_state_is_seen_from_the_second_step_on() -> None:
    recipe = make_recipe(EAGLE3, {})
    assert isinstance(recipe, Eagle3Recipe)
    served_by = recipe.head_config()
    recipe.options = replace(EAGLE3, norm_output=True)
    recipe.head_config = lambda: served_by  # type: ignore[method-assign]
    first, *later = distances(recipe, {})

    assert first <= TOLERANCE
    assert min(later) > 100 * TOLERANCE


@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_heads_are_served_as_trained(num_layers: int) -> None:
    target = tiny_target()
    options = MedusaOptions(num_layers=num_layers)
    recipe = create_recipe(options, tiny_ends(), {}, objective(3), seed=0)
    config, weights = recipe.head_config(), make_lively(recipe)
    batch = tiny_batch(target, ())
    served = MedusaHeads(config, weights, target).forward(batch.final_PD, 3)  # type: ignore[arg-type]
    with torch.no_grad():
        trained = [head(batch.final_PD) @ recipe.head_WD.T for head in recipe.heads]  # type: ignore[union-attr]

    for logits, expected in zip(trained, served, strict=True):
        assert expected.std() > LIVELY
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


DRAFT_CASES: dict[str, tuple[DraftOptions, dict[str, Any]]] = {
    "first and last": (DraftOptions(layers=(0, 3)), {}),
    "three": (DraftOptions(layers=(0, 1, 3)), {"qk_norm": True}),
    "narrower": (DraftOptions(layers=(0, 3), mlp_size=40), {"mlp_bias": False}),
    "with biases": (
        DraftOptions(layers=(2,), mlp_size=64),
        {"attention_bias": True, "mlp_bias": True},
    ),
    "windows": (
        DraftOptions(layers=(0, 1, 3)),
        {"sliding_window": 5, "sliding_layers": (1, 2), "no_rope_layers": (3,)},
    ),
    "tied": (DraftOptions(layers=(0, 3)), {"tied_embeddings": True}),
}


def draft_distance(options: DraftOptions, changes: dict[str, Any], batch: Batch) -> float:
    """Distance between a pass over the batch and token after token through the cache."""
    target = tiny_target(**changes)
    weights = random_weights(target.config)
    recipe = create_recipe(options, tiny_ends(**changes), weights, objective(1), seed=0)
    assert isinstance(recipe, DraftRecipe)
    decoder = Decoder(
        recipe.head_config(),
        recipe.weights(),
        dtype=torch.float32,
        policies=None,
        ends=target,
    )
    module = DraftModel(decoder, target.config.vocab_size)
    served = []
    for sequence in tiny_sequences(target, ()):
        cache = module.new_cache(max_batch_size=1, num_slots=len(sequence.token_ids))
        row = cache.allocate()
        for token in sequence.token_ids:
            segment = Segment(row, [token], range(1))
            output = module.forward([segment], torch.empty(0, 0), cache, from_target=True)
            served.append(output.logits_RW)
            cache.extend(row, 1)
    with torch.no_grad():
        trained_PV = recipe.run(batch) @ recipe.head_VD.T
    assert trained_PV.std() > LIVELY
    return distance(torch.cat(served), trained_PV)


@pytest.mark.parametrize(("options", "changes"), DRAFT_CASES.values(), ids=list(DRAFT_CASES))
def test_a_draft_model_is_served_as_trained(options: DraftOptions, changes: dict[str, Any]) -> None:
    batch = tiny_batch(tiny_target(**changes), ())

    assert draft_distance(options, changes, batch) <= TOLERANCE


def test_a_draft_model_that_saw_its_neighbour_would_be_seen() -> None:
    options, changes = DRAFT_CASES["first and last"]
    batch = tiny_batch(tiny_target(), ())
    merged = replace(batch, lengths=(sum(batch.lengths[:2]), *batch.lengths[2:]))

    assert draft_distance(options, changes, merged) > 100 * TOLERANCE


def test_the_published_step_weights() -> None:
    assert (1.0, 0.8, 0.64) == pytest.approx(step_weights("eagle3", 3))  # type: ignore[arg-type]
    assert (0.51, 0.31, 0.18) == pytest.approx(step_weights("mtp"), abs=0.006)  # type: ignore[arg-type]


def test_the_texts_hold_borders_of_every_kind() -> None:
    """Texts that end before the last step, without an answer, and too short for any loss."""
    batch = pack(tiny_sequences(tiny_target()))
    counts = [step.counts for step in plan_steps(batch, NUM_STEPS, only_response=False)]

    assert [length for length, _ in SHAPES] == list(batch.lengths)
    assert [(17, 2, 9, 12, 0), (16, 1, 8, 11, 0), (15, 0, 7, 10, 0), (14, 0, 6, 9, 0)] == counts
