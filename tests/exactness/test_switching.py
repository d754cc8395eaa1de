"""Drafting on and off at random, step by step: the text stays, and the drafter misses nothing.

A step that leaves the drafter out is plain decoding, and one may look up without a pass; what it
decides must reach the drafter all the same, since the next step may ask again. The text cannot show
a drafter that lost touch, its guesses can: an oracle is always right, and a head guesses at each
position what it guesses when it is asked at every one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from outrider.budget import NO_PASSES, Budget
from outrider.config import Method, SpeculationConfig
from outrider.drafters import Drafter, autoregressive
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine import Engine
from outrider.models.decoder import Decoder
from outrider.tree import DraftTree
from tests.draft_modules import oracle_drafter, random_drafter
from tests.engines import new_engine, run
from tests.exactness.runs import assert_speculated, params_of, plain, prompts_of
from tests.models import random_decoder

HEADS = (Method.DRAFT, Method.EAGLE3, Method.MTP, Method.MEDUSA)
WITH_CACHE = (Method.DRAFT, Method.EAGLE3, Method.MTP)
DEPTH = 3
FEW_TOKENS = dict.fromkeys(range(12), 6.0)
CHAIN = SpeculationConfig(method=Method.DRAFT, max_draft_len=DEPTH)
TREE = SpeculationConfig(
    method=Method.DRAFT,
    max_draft_len=DEPTH,
    use_dynamic_tree=True,
    dynamic_tree_max_topK=3,
    max_total_draft_tokens=7,
)


class Whim(Budget):
    """Leaves the drafter out for random stretches, and verifies a random part of what it drafts.

    ``verifies=False`` asks as the dice fall and verifies nothing, so that every position is met.
    """

    def __init__(self, seed: int = 0, *, ask: float = 0.7, verifies: bool = True) -> None:
        super().__init__(None, max_rows=1024)
        self._dice, self._ask, self._verifies = random.Random(seed), ask, verifies
        self._plain_left = 0
        self.num_plain = self.num_asked = 0

    def min_score(self, contexts: Sequence[int]) -> float | None:
        if self._plain_left == 0 and self._dice.random() >= self._ask:
            self._plain_left = self._dice.choice([1, 2, 3, 9])
        if self._plain_left:
            self._plain_left -= 1
            self.num_plain += 1
            return None
        self.num_asked += 1
        return self._dice.choice([0.0, 0.0, 0.02, NO_PASSES])

    def prune(self, trees, contexts, num_silent=0) -> list[DraftTree]:
        pruned = []
        for tree in super().prune(trees, contexts, num_silent):
            most = tree.num_drafted if self._verifies else 0
            if self._dice.random() < 0.5:
                most = self._dice.randint(0, most)
            pruned.append(tree.best(most))
        return pruned


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def target(request: pytest.FixtureRequest) -> Decoder:
    return random_decoder(request.param)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' texts are short: let a few waiting rows be many."""
    monkeypatch.setattr(autoregressive, "MAX_WAITING", 4)
    monkeypatch.setattr(autoregressive, "MAX_LATE", 2)
    monkeypatch.setattr(autoregressive, "MAX_ROWS", 6)


def drafter_of(name: str, target: Decoder, config: SpeculationConfig) -> Drafter:
    if name == "ngram":
        return NgramDrafter(config)
    head = random_drafter(Method(name.removesuffix(" + ngram")), target, config, max_batch_size=5)
    if name.endswith("ngram"):
        return CombinedDrafter(head, NgramDrafter(config), config.num_draft_tokens)
    return head


def engine_of(target: Decoder, drafter: Drafter, budget: Budget, batch: int) -> Engine:
    engine = new_engine(target, drafter, max_batch_size=batch)
    engine._budget = budget
    return engine


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("sampling", ["greedy", "warm"])
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["ngram", *HEADS, "eagle3 + ngram", "mtp + ngram"])
def test_switching_at_random_changes_nothing(
    target: Decoder, name: str, config: SpeculationConfig, sampling: str, batch: int
) -> None:
    prompts, params = prompts_of(target), params_of(sampling, logit_bias=FEW_TOKENS, max_tokens=60)
    expected = plain(target, prompts, params)
    whim = Whim()
    outcomes, stats = run(
        engine_of(target, drafter_of(name, target, config), whim, batch), prompts, params
    )

    assert expected == outcomes
    assert_speculated(stats, accepted=True, rejected=True)
    assert min(whim.num_plain, whim.num_asked) > 5


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("method", HEADS)
def test_an_oracle_that_is_asked_now_and_then_is_always_right(
    target: Decoder, method: Method, batch: int
) -> None:
    stats, whim = oracle_stats(target, method, batch)

    assert stats.drafted == stats.accepted > 0
    assert min(whim.num_plain, whim.num_asked) > 5


@pytest.mark.parametrize("fault", ["forgets", "one behind"])
@pytest.mark.parametrize("method", WITH_CACHE)
def test_an_oracle_that_lost_touch_is_found_out(
    target: Decoder, method: Method, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would say of a drafter that does not catch up, or not at its place."""
    sound, _ = oracle_stats(target, method, batch=1)
    take_in = AutoregressiveDrafter._take_in

    def faulty(self, pairs, *, is_silent):
        if not is_silent:
            return take_in(self, pairs, is_silent=is_silent)
        if fault == "one behind":
            pairs = [(state, [*tokens[:1], *tokens[:-1]]) for state, tokens in pairs]
            return take_in(self, pairs, is_silent=is_silent)
        for state, tokens in pairs:  # as if they had been taken in
            if state.waiting:
                state.take(len(tokens))
            self._cache.extend(state.row, len(tokens))
        return None

    monkeypatch.setattr(AutoregressiveDrafter, "_take_in", faulty)
    stats, whim = oracle_stats(target, method, batch=1)

    assert min(whim.num_plain, whim.num_asked) > 5
    assert stats.accepted < 0.7 * sound.accepted


def oracle_stats(target: Decoder, method: Method, batch: int):
    """Statistics of a chain that knows the text, asked at random; the text is checked here."""
    prompts, params = prompts_of(target), params_of("warm", max_tokens=60)
    expected = plain(target, prompts, params)
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, expected, strict=True)]
    drafter = oracle_drafter(method, target, CHAIN, texts, max_batch_size=batch)
    whim = Whim(3)
    outcomes, stats = run(engine_of(target, drafter, whim, batch), prompts, params)
    assert expected == outcomes
    return stats, whim


@pytest.mark.parametrize("method", HEADS)
def test_a_head_guesses_what_it_guesses_when_it_is_always_asked(
    target: Decoder, method: Method
) -> None:
    always = guesses(target, method, Whim(ask=1.0, verifies=False))
    now_and_then = guesses(target, method, Whim(5, ask=0.5, verifies=False))

    assert 40 < len(now_and_then) < len(always)
    same = [always[place] == guess for place, guess in now_and_then.items()]
    assert all(same) if target.dtype == torch.float32 else sum(same) > 0.9 * len(same)


def guesses(target: Decoder, method: Method, budget: Budget) -> dict[tuple[int, int], list[int]]:
    """The chain that is proposed at each place of each text."""
    drafter = random_drafter(method, target, CHAIN, max_batch_size=5)
    propose, found = drafter.propose, {}

    def listen(requests, max_depth, min_score=0.0):
        trees = propose(requests, max_depth, 0.0)
        for request, tree in zip(requests, trees, strict=True):
            if tree.num_drafted:
                found[request.request_id, len(request.token_ids)] = tree.token[1:]
        return trees

    drafter.propose = listen  # type: ignore[method-assign]
    run(
        engine_of(target, drafter, budget, batch=5),
        prompts_of(target),
        params_of("greedy", max_tokens=60),
    )
    return found
