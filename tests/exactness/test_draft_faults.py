"""L1 and L2 with a drafter that fails: its faults cost guesses and change no text.

Contract: for every drafter, whether it raises for one request, is fed states that are not finite,
or has a pass of several requests fail once, all ids are those of plain decoding; the request that
it failed on drafts no more, and the others go on drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.config import Method, SpeculationConfig
from outrider.drafters import Drafter, create_drafter
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.models.decoder import Decoder
from outrider.request import Request
from outrider.types import SpeculationStats
from tests.draft_modules import random_drafter
from tests.engines import new_engine, outcome, submit
from tests.exactness.runs import LENGTHS, assert_speculated, params_of, plain, prompts_of
from tests.models import random_decoder

pytestmark = pytest.mark.draft_faults
FEW_TOKENS = dict.fromkeys(range(10), 6.0)
VICTIM = 2
WITH_STATES = (Method.EAGLE3, Method.MTP, Method.MEDUSA)
Plant = Callable[[Any, list[Request], int], None]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(torch.float32)


def drafter_of(method: Method, target: Decoder) -> Drafter:
    config = SpeculationConfig(
        method=method,
        head=None if method is Method.NGRAM else "-",
        max_draft_len=3,
        use_dynamic_tree=True,
        max_total_draft_tokens=10,
        adaptive=False,
    )
    if method is not Method.NGRAM:
        return random_drafter(method, target, config, max_batch_size=len(LENGTHS))
    drafter = create_drafter(config)
    assert drafter is not None
    return drafter


def fails_to_propose(drafter: Any, requests: list[Request], at: int) -> None:
    propose = drafter.propose

    def wrong(members, max_depth, min_score=0.0):
        if requests[VICTIM] in members and requests[VICTIM].stats.verify_steps >= at:
            raise RuntimeError("planted")
        return propose(members, max_depth, min_score)

    drafter.propose = wrong


def fails_to_observe(drafter: Any, requests: list[Request], at: int) -> None:
    observe = drafter.observe

    def wrong(members, *rest):
        if requests[VICTIM] in members and requests[VICTIM].stats.verify_steps >= at:
            raise RuntimeError("planted")
        return observe(members, *rest)

    drafter.observe = wrong


def spoils_states(drafter: Any, requests: list[Request], at: int) -> None:
    observe = drafter.observe

    def wrong(members, trees, verdicts, hidden):
        spoilt = [
            states * torch.nan
            if request is requests[VICTIM] and request.stats.verify_steps == at
            else states
            for request, states in zip(members, hidden, strict=True)
        ]
        return observe(members, trees, verdicts, spoilt)

    drafter.observe = wrong


def decoded(
    target: Decoder, method: Method, plant: Plant | None, at: int
) -> tuple[list[Request], Any]:
    """All requests, in one batch from beginning to end, and what the engine counted."""
    drafter = drafter_of(method, target)
    engine = new_engine(target, drafter, max_batch_size=len(LENGTHS))
    params = params_of("warm", logit_bias=FEW_TOKENS)
    requests = [submit(engine, *pair) for pair in zip(prompts_of(target), params, strict=True)]
    if plant is not None:
        plant(drafter, requests, at)
    while engine.has_work:
        engine.step()
    expected = plain(target, prompts_of(target), params)
    assert expected == [outcome(request) for request in requests]
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)
    assert_speculated(stats, accepted=True, rejected=True)
    return requests, engine.stats()


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize(
    ("method", "plant"),
    [
        *((Method(name), fails_to_propose) for name in ("ngram", "draft", "eagle3", "medusa")),
        *((Method(name), fails_to_observe) for name in ("ngram", "mtp")),
        *((method, spoils_states) for method in WITH_STATES),
    ],
)
def test_a_fault_for_one_request_ends_its_drafting_alone(
    target: Decoder, method: Method, plant: Plant, at: int
) -> None:
    sound, _ = decoded(target, method, None, at)
    requests, stats = decoded(target, method, plant, at)

    assert stats.draft_faults in (1, 2)
    assert 0 == stats.faults == stats.failed
    for place, (request, other) in enumerate(zip(requests, sound, strict=True)):
        if place == VICTIM:
            assert request.stats.drafted < 0.5 * other.stats.drafted
        else:
            assert request.stats.drafted > 0.5 * other.stats.drafted


@pytest.mark.parametrize("is_first", [True, False], ids=["first pass", "later pass"])
@pytest.mark.parametrize("method", [Method.DRAFT, Method.EAGLE3, Method.MTP], ids=str)
def test_a_pass_of_several_that_fails_once_costs_all_a_step(
    target: Decoder, method: Method, is_first: bool
) -> None:
    def plant(drafter: Any, requests: list[Request], at: int) -> None:
        assert isinstance(drafter, AutoregressiveDrafter)
        forward = drafter.module.forward
        seen = []

        def wrong(segments, feature_RX, cache, *, from_target):
            if from_target == is_first and len(segments) > 1 and requests[0].num_output > at:
                seen.append(None)
                if len(seen) == 1:
                    raise MemoryError
            return forward(segments, feature_RX, cache, from_target=from_target)

        drafter.module.forward = wrong  # type: ignore[method-assign]

    sound, _ = decoded(target, method, None, 2)
    requests, stats = decoded(target, method, plant, 2)

    assert 1 == stats.draft_faults
    for request, other in zip(requests, sound, strict=True):
        assert request.stats.drafted > 0.5 * other.stats.drafted
