"""L1 and L2 on tiny random targets: token ids do not depend on speculation, batch or drafter.

Contract (docs/exactness.md): strict equality of ids, text and finish reason, greedy and sampled,
zero exceptions. Every test asserts that tokens were drafted, accepted and rejected, so none can
pass by not speculating.
"""

from __future__ import annotations

import pytest
import torch

from outrider.config import SpeculationConfig
from outrider.drafters import create_drafter
from outrider.models.decoder import Decoder
from tests.drafters import ScriptedDrafter
from tests.engines import Outcome, new_engine, run, submit
from tests.exactness.runs import (
    SAMPLING,
    assert_speculated,
    params_of,
    plain,
    prompts_of,
)
from tests.models import random_decoder

DRAFTERS = {
    "chain, always right": {},
    "chain, often wrong": {"honesty": 0.6},
    "chain, always wrong": {"honesty": 0.0},
    "tree, true child first": {"siblings": 2, "honesty": 0.9},
    "tree, true child last": {"siblings": 3, "honesty": 0.8, "order": "last", "depth": 6},
}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def target(request: pytest.FixtureRequest) -> Decoder:
    return random_decoder(request.param)


def foresight(prompts, outcomes: list[Outcome]):
    """The oracle: what the plain run emitted behind the tokens so far."""
    futures = [list(p) + list(o.token_ids) for p, o in zip(prompts, outcomes, strict=True)]

    def foresee(tokens, count):
        for future in futures:
            if future[: len(tokens)] == list(tokens):
                return future[len(tokens) : len(tokens) + count]
        raise AssertionError("the run left the plain run's path")

    return foresee


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_decoding(
    target: Decoder, drafter: str, sampling: str, batch: int
) -> None:
    prompts, params = prompts_of(target), params_of(sampling)
    expected = plain(target, prompts, params)
    scripted = ScriptedDrafter(
        foresight(prompts, expected), target.config.vocab_size, **DRAFTERS[drafter]
    )
    engine = new_engine(target, scripted, max_batch_size=batch)
    outcomes, stats = run(engine, prompts, params)

    assert expected == outcomes
    assert not scripted.live_requests
    assert_speculated(
        stats, accepted="always wrong" not in drafter, rejected="always right" not in drafter
    )


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", ["greedy", "warm", "top-p", "penalties"])
def test_tokens_are_the_same_with_ngram_speculation(
    target: Decoder, sampling: str, use_tree: bool, batch: int
) -> None:
    """Biased towards few tokens, so that the text repeats itself and the drafter has a chance."""
    bias = dict.fromkeys(range(12), 6.0)
    prompts, params = prompts_of(target), params_of(sampling, logit_bias=bias, max_tokens=60)
    expected = plain(target, prompts, params)
    config = SpeculationConfig(use_dynamic_tree=use_tree, adaptive=False)
    engine = new_engine(
        target,
        create_drafter(config),
        max_batch_size=batch,
        max_draft_tokens=config.num_draft_tokens,
    )
    outcomes, stats = run(engine, prompts, params)

    assert expected == outcomes
    assert_speculated(stats, accepted=True, rejected=True)


def test_a_request_that_opts_out_decodes_plainly_beside_others(target: Decoder) -> None:
    prompts, params = prompts_of(target), params_of("warm")
    expected = plain(target, prompts, params)
    scripted = ScriptedDrafter(
        foresight(prompts, expected), target.config.vocab_size, honesty=0.7, siblings=1
    )
    engine = new_engine(target, scripted, max_batch_size=4)
    requests = [
        submit(engine, prompt, param, speculates=i % 2 == 0)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
    ]
    while engine.has_work:
        engine.step()

    assert [o.token_ids for o in expected] == [tuple(r.token_ids[r.prompt_len :]) for r in requests]
    assert [0, 0] == [requests[1].stats.drafted, requests[3].stats.drafted]
    assert_speculated(requests[0].stats, accepted=True, rejected=True)


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_an_oracle_takes_the_fewest_possible_steps(target: Decoder, depth: int) -> None:
    prompts, params = prompts_of(target)[1:2], params_of("hot")[1:2]
    expected = plain(target, prompts, params)
    oracle = ScriptedDrafter(
        foresight(prompts, expected), target.config.vocab_size, depth=depth, siblings=1
    )
    outcomes, stats = run(new_engine(target, oracle), prompts, params)
    num_tokens = len(expected[0].token_ids)

    assert expected == outcomes
    assert -(-num_tokens // (depth + 1)) == stats.verify_steps


def test_abort_frees_the_row_and_leaves_the_others_text(target: Decoder) -> None:
    prompts, params = prompts_of(target), params_of("warm")
    expected = plain(target, prompts, params)
    scripted = ScriptedDrafter(
        foresight(prompts, expected), target.config.vocab_size, honesty=0.7, siblings=1
    )
    engine = new_engine(target, scripted, max_batch_size=2)
    requests = [submit(engine, *pair) for pair in zip(prompts, params, strict=True)]
    engine.step()
    engine.abort(requests[0])  # running
    engine.abort(requests[4])  # waiting
    engine.abort(requests[4])  # ended already: nothing happens
    while engine.has_work:
        engine.step()

    assert ["abort", "length", "length", "length", "abort"] == [r.finish_reason for r in requests]
    for i in (1, 2, 3):
        assert expected[i].token_ids == tuple(requests[i].token_ids[requests[i].prompt_len :])
    assert not scripted.live_requests
    assert_speculated(requests[1].stats, accepted=True, rejected=True)


def test_a_nan_ends_its_request_and_leaves_neighbours_bitwise_untouched(target: Decoder) -> None:
    """One token's embedding is made NaN: whoever meets it ends; its cache row is clean again."""
    prompts, params = prompts_of(target), params_of("hot")
    expected = plain(target, prompts, params)
    poison = 330
    assert all(poison not in p for p in prompts)
    assert all(poison not in o.token_ids for o in expected)
    clean = target._embedding[poison].clone()
    target._embedding[poison] = float("nan")
    try:
        drafter = ScriptedDrafter(
            foresight(prompts, expected), target.config.vocab_size, honesty=0.7, siblings=2
        )
        engine = new_engine(target, drafter, max_batch_size=3)
        poisoned = submit(engine, [1, 2, poison, 3], params[0], speculates=False)
        outcomes, stats = run(engine, prompts, params)
        again = run(engine, prompts, params)[0]
    finally:
        target._embedding[poison] = clean

    assert "error" == poisoned.finish_reason
    assert poisoned.error is not None
    assert expected == outcomes == again
    assert_speculated(stats, accepted=True, rejected=True)


def test_a_drafted_nan_is_rejected_without_a_trace(target: Decoder) -> None:
    """A draft token that overflows is rejected; its stale slots must not poison later steps."""
    prompts, params = prompts_of(target), params_of("warm")
    expected = plain(target, prompts, params)
    poison = 330
    clean = target._embedding[poison].clone()
    target._embedding[poison] = float("nan")

    class PoisonedDrafter(ScriptedDrafter):
        def propose(self, requests, max_depth, min_score=0.0):
            trees = super().propose(requests, max_depth, min_score)
            for tree in trees:
                if self._rng.random() < 0.3 and poison not in tree.children()[0]:
                    tree.add(0, poison, 0.01)
            return trees

    try:
        drafter = PoisonedDrafter(
            foresight(prompts, expected), target.config.vocab_size, honesty=0.8
        )
        outcomes, stats = run(new_engine(target, drafter, max_batch_size=2), prompts, params)
    finally:
        target._embedding[poison] = clean

    assert expected == outcomes
    assert_speculated(stats, accepted=True, rejected=True)


def test_an_interrupted_step_ends_its_requests_and_the_engine_goes_on(target: Decoder) -> None:
    prompts, params = prompts_of(target), params_of("warm")
    expected = plain(target, prompts, params)

    class InterruptedDrafter(ScriptedDrafter):
        def observe(self, requests, trees, verdicts, hidden):
            super().observe(requests, trees, verdicts, hidden)
            has_ended = any(request.finish_reason for request in requests)
            if has_ended or self._rng.random() < 0.2:
                raise KeyboardInterrupt

    drafter = InterruptedDrafter(
        foresight(prompts, expected), target.config.vocab_size, honesty=0.7, siblings=1
    )
    engine = new_engine(target, drafter, max_batch_size=2)
    requests = [submit(engine, *pair) for pair in zip(prompts, params, strict=True)]
    num_interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    interrupted = [request for request in requests if request.finish_reason == "abort"]
    for outcome, request in zip(expected, requests, strict=True):
        emitted = tuple(request.token_ids[request.prompt_len :])
        assert outcome.token_ids[: len(emitted)] == emitted

    assert num_interrupts > 0
    assert len(interrupted) >= num_interrupts
    assert not drafter.live_requests
    engine_after = new_engine(target, None)
    assert expected == run(engine_after, prompts, params)[0]
