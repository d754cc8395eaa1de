"""Every drafter leaves the text as it is: same ids with speculation on and off (L1, L2).

Random heads are hardly ever right, oracles always; each runs as a chain and as a tree, under every
kind of sampling, alone and in a batch of unequal lengths.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from outrider.config import Method, SpeculationConfig
from outrider.costs import CostTable
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.decoder import Decoder
from tests.draft_modules import oracle_drafter, random_drafter
from tests.engines import new_engine, run, submit
from tests.exactness.rejection_toy import Untaught
from tests.exactness.runs import assert_speculated, params_of, plain, prompts_of
from tests.models import random_decoder

METHODS = (Method.DRAFT, Method.EAGLE3, Method.MTP, Method.MEDUSA)
SAMPLING = ("greedy", "warm", "top-k", "top-p", "penalties")
DEPTH = 3  # as many as the tests' MEDUSA has heads
FEW_TOKENS = dict.fromkeys(range(12), 6.0)
"""A bias towards few tokens: then even random heads are right now and then."""


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def target(request: pytest.FixtureRequest) -> Decoder:
    return random_decoder(request.param)


def shape(method: Method, use_tree: bool) -> SpeculationConfig:
    """A chain, or a tree of fewer nodes than layers of four would have."""
    head = None if method is Method.NGRAM else "-"
    if not use_tree:
        return SpeculationConfig(method=method, head=head, max_draft_len=DEPTH)
    return SpeculationConfig(
        method=method,
        head=head,
        max_draft_len=DEPTH,
        use_dynamic_tree=True,
        dynamic_tree_max_topK=4,
        max_total_draft_tokens=9,
    )


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_a_random_head_changes_nothing(
    target: Decoder, method: Method, use_tree: bool, sampling: str, batch: int
) -> None:
    prompts, params = prompts_of(target), params_of(sampling, logit_bias=FEW_TOKENS)
    expected = plain(target, prompts, params)
    drafter = random_drafter(method, target, shape(method, use_tree), max_batch_size=batch)
    outcomes, stats = run(new_engine(target, drafter, max_batch_size=batch), prompts, params)

    assert expected == outcomes
    assert_speculated(stats, accepted=True, rejected=True)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_an_oracle_head_changes_nothing_and_is_always_accepted(
    target: Decoder, method: Method, use_tree: bool, sampling: str, batch: int
) -> None:
    prompts, params = prompts_of(target), params_of(sampling)
    expected = plain(target, prompts, params)
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, expected, strict=True)]
    drafter = oracle_drafter(method, target, shape(method, use_tree), texts, max_batch_size=batch)
    outcomes, stats = run(new_engine(target, drafter, max_batch_size=batch), prompts, params)
    # Heads wait for the target's states in a request's first step; the last steps are cut short.
    waiting = 0 if method is Method.DRAFT else 1
    num_steps = sum(waiting + -(-(len(o.token_ids) - waiting) // (DEPTH + 1)) for o in expected)

    assert expected == outcomes
    assert num_steps == stats.verify_steps
    assert all(later <= earlier for earlier, later in pairwise(stats.accepted_at))
    if not use_tree:
        assert stats.drafted == stats.accepted


@pytest.mark.parametrize("sampling", ["greedy", "warm", "penalties"])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_and_ngram_in_one_tree_change_nothing(
    target: Decoder, method: Method, sampling: str
) -> None:
    prompts, params = prompts_of(target), params_of(sampling, logit_bias=FEW_TOKENS, max_tokens=60)
    expected = plain(target, prompts, params)
    config = shape(method, use_tree=True)
    head = random_drafter(method, target, config, max_batch_size=3)
    drafter = CombinedDrafter(head, NgramDrafter(config), config.num_draft_tokens)
    outcomes, stats = run(new_engine(target, drafter, max_batch_size=3), prompts, params)
    alone = random_drafter(method, target, config, max_batch_size=3)
    without, few = run(new_engine(target, alone, max_batch_size=3), prompts, params)

    assert expected == outcomes == without
    assert_speculated(stats, accepted=True, rejected=True)
    if sampling == "greedy":  # its text repeats itself, which n-gram sees and the head does not
        assert stats.acceptance_length > few.acceptance_length


@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", [*METHODS, Method.NGRAM])
def test_the_rejection_rule_runs_with_every_drafter(
    target: Decoder, method: Method, use_tree: bool
) -> None:
    """Its law is tested by enumeration; here: pinned and in the same batch, a seed repeats it."""
    prompts = prompts_of(target)
    params = params_of("warm", logit_bias=FEW_TOKENS, accept="rejection")

    def answers(batch: int):
        config = shape(method, use_tree)
        if method is Method.NGRAM:
            drafter = NgramDrafter(config)
        else:
            drafter = random_drafter(method, target, config, max_batch_size=batch)
        engine = new_engine(target, drafter, max_batch_size=batch)
        return run(engine, prompts, params)

    outcomes, stats = answers(batch=1)
    again, _ = answers(batch=1)

    assert outcomes == again
    assert_speculated(stats, accepted=True, rejected=True)
    assert all(outcome.error is None for outcome in answers(batch=5)[0])


@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_pruning_by_cost_changes_nothing(target: Decoder, method: Method, use_tree: bool) -> None:
    """Rows that cost so much that some drafts pay and some do not."""
    costs = CostTable(rows=(1, 64), contexts=(1,), seconds=((1.0, 16.0),))
    prompts, params = prompts_of(target), params_of("warm", logit_bias=FEW_TOKENS)
    expected = plain(target, prompts, params)
    drafter = random_drafter(method, target, shape(method, use_tree), max_batch_size=5)
    engine = new_engine(target, drafter, max_batch_size=5)
    engine._budget = Untaught(costs, max_rows=64)
    outcomes, stats = run(engine, prompts, params)
    most = shape(method, use_tree).num_draft_tokens * stats.verify_steps

    assert expected == outcomes
    assert_speculated(stats, accepted=True, rejected=True)
    assert stats.drafted < most


@pytest.mark.parametrize("method", METHODS)
def test_a_prefill_that_is_interrupted_ends_its_requests_and_the_engine_goes_on(
    target: Decoder, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = prompts_of(target), params_of("warm", logit_bias=FEW_TOKENS)
    expected = plain(target, prompts, params)
    drafter = random_drafter(method, target, shape(method, use_tree=False), max_batch_size=5)
    engine = new_engine(target, drafter, max_batch_size=5)
    requests = [submit(engine, *pair) for pair in zip(prompts, params, strict=True)]
    forward = target.forward

    def interrupted(segments, cache, **more):
        if segments[0].cache_row == 3:  # the one long prompt: the others need no prefill
            raise KeyboardInterrupt
        return forward(segments, cache, **more)

    monkeypatch.setattr(target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    while engine.has_work:
        engine.step()
    outcomes, stats = run(engine, prompts, params)

    ends = ["length", "length", "length", "abort", "length"]
    assert ends == [request.finish_reason for request in requests]
    for outcome, request in zip(expected, requests, strict=True):
        if request.finish_reason == "length":
            assert outcome.token_ids == tuple(request.token_ids[request.prompt_len :])
    assert expected == outcomes
    assert_speculated(stats, accepted=True, rejected=True)
