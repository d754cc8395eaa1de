"""The table of drafters: each method builds what it names, and pads do not get in its way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.config import Method, SamplingParams, SpeculationConfig
from outrider.drafters import DraftSource, create_drafter
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.mtp import MtpHead
from tests.draft_modules import random_drafter
from tests.engines import new_engine, run
from tests.models import random_decoder, random_weights, tiny_config

VOCAB = 331  # of the target


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(torch.float32)


def test_plain_decoding_has_no_drafter() -> None:
    assert create_drafter(SpeculationConfig(method=Method.OFF)) is None


def test_ngram_needs_no_checkpoint() -> None:
    assert isinstance(create_drafter(SpeculationConfig(method=Method.NGRAM)), NgramDrafter)


@pytest.mark.parametrize(
    ("method", "module", "captures", "vocab_size"),
    [
        (Method.EAGLE3, Eagle3Head, (0, 1, 2), VOCAB // 2),
        (Method.MTP, MtpHead, (FINAL_STATE,), None),
        (Method.DRAFT, DraftModel, (), None),
    ],
)
@pytest.mark.parametrize("with_ngram", [False, True])
def test_a_module_that_drafts_token_by_token(
    target: Decoder,
    method: Method,
    module: type,
    captures: Sequence[int],
    vocab_size: int | None,
    with_ngram: bool,
) -> None:
    config = SpeculationConfig(method=method, head="-", with_ngram=with_ngram)
    drafter = random_drafter(method, target, config, max_batch_size=1)
    head = drafter.head if isinstance(drafter, CombinedDrafter) else drafter

    assert with_ngram == isinstance(drafter, CombinedDrafter)
    assert isinstance(head, AutoregressiveDrafter)
    assert isinstance(head.module, module)
    assert tuple(captures) == head.captures == drafter.captures
    assert vocab_size == (None if head.vocabulary is None else head.vocabulary.size)


@pytest.mark.parametrize("with_ngram", [False, True])
def test_medusa(target: Decoder, with_ngram: bool) -> None:
    config = SpeculationConfig(method=Method.MEDUSA, head="-", with_ngram=with_ngram)
    drafter = random_drafter(Method.MEDUSA, target, config, max_batch_size=1)
    head = drafter.head if isinstance(drafter, CombinedDrafter) else drafter

    assert with_ngram == isinstance(drafter, CombinedDrafter)
    assert isinstance(head, MedusaDrafter)
    assert (FINAL_STATE,) == drafter.captures


@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("draft_size", [300, 384])
def test_a_draft_model_of_another_padding_runs_and_changes_nothing(
    target: Decoder, draft_size: int, accept: str, use_tree: bool
) -> None:
    """The target's last ids, which the smaller draft model lacks, are in prompt and output."""
    config = tiny_config(num_layers=1, hidden_size=48, vocab_size=draft_size)
    bias = dict.fromkeys([3, 9, 299, 300, 330], 9.0)
    params = [
        SamplingParams(temperature=0.9, seed=2, max_tokens=30, logit_bias=bias, accept=accept)  # type: ignore[arg-type]
    ]
    drafter = create_drafter(
        SpeculationConfig(
            method=Method.DRAFT, head="-", max_draft_len=3, use_dynamic_tree=use_tree
        ),
        source=DraftSource(config, random_weights(config)),
        target=target,
        max_batch_size=1,
        max_model_len=256,
    )
    prompts = [[1, 330, 2]]
    (expected,), _ = run(new_engine(target, None), prompts, params)
    (outcome,), stats = run(new_engine(target, drafter), prompts, params)

    assert outcome.error is None
    assert {300, 330} & set(outcome.token_ids)
    assert 0 < stats.accepted < stats.drafted
    if accept == "coupled":
        assert expected == outcome
