"""Drafting token by token: the module's passes, its cache, and the states it is handed.

The contract: whatever was drafted, accepted and rejected before, a step's first draft logits are
those of a drafter that is handed the target's true states of the whole text at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.config import Method, SamplingParams, SpeculationConfig
from outrider.counters import EngineStats
from outrider.drafters import autoregressive, create_drafter
from outrider.drafters.autoregressive import AutoregressiveDrafter, drafted_slots
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.growth import Growth
from outrider.models.decoder import Decoder
from outrider.models.heads.base import DraftOutput
from outrider.models.layers import Segment
from outrider.tree import DraftTree
from outrider.types import SpeculationStats, Verdict
from tests.draft_modules import random_drafter, random_source
from tests.draft_requests import BareRequest, bare_request
from tests.engines import new_engine, submit
from tests.exactness.runs import assert_speculated
from tests.models import random_decoder, random_weights, tiny_config

METHODS = (Method.DRAFT, Method.EAGLE3, Method.MTP)
DEPTH = 3
MAX_LEN = 96
FEW_TOKENS = dict.fromkeys(range(10), 6.0)
"""A bias towards few tokens: then even random heads are right now and then."""


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(torch.float32)


def shape(method: Method, use_tree: bool) -> SpeculationConfig:
    config = SpeculationConfig(method=method, head="-", max_draft_len=DEPTH)
    if not use_tree:
        return config
    return replace(
        config, use_dynamic_tree=True, dynamic_tree_max_topK=4, max_total_draft_tokens=10
    )


def drafter_of(
    method: Method, target: Decoder, use_tree: bool, batch: int = 3
) -> AutoregressiveDrafter:
    drafter = random_drafter(
        method, target, shape(method, use_tree), max_batch_size=batch, max_model_len=MAX_LEN
    )
    assert isinstance(drafter, AutoregressiveDrafter)
    return drafter


class Listener:
    """A module that notes each pass: its segments, and the logits behind the true rows."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.captures, self.token_shift = module.captures, module.token_shift
        self.new_cache = module.new_cache
        self.passes: list[list[Segment]] = []
        self.logits_of: dict[int, Tensor] = {}

    def forward(self, segments, feature_RX, cache, *, from_target: bool) -> DraftOutput:
        output = self._module.forward(segments, feature_RX, cache, from_target=from_target)
        self.passes.append(list(segments))
        loud = [s for s in segments if s.num_silent < len(s.tokens)]
        if from_target and loud:
            pairs = zip(loud, output.logits_RW, strict=True)
            self.logits_of |= {segment.cache_row: row for segment, row in pairs}
        return output


def states_of(target: Decoder, tokens: Sequence[int], captures: Sequence[int]) -> Tensor | None:
    """The target's states of a whole text, in one pass over it; None where none are asked for."""
    if not captures:
        return None
    cache = target.new_cache(max_batch_size=1, num_slots=len(tokens))
    segment = Segment(cache.allocate(), tokens, range(len(tokens)), num_silent=len(tokens))
    return target.forward([segment], cache, capture=captures).hidden_RC


def fresh_logits(drafter: AutoregressiveDrafter, target: Decoder, request: Any) -> Tensor:
    """The root's draft logits of a drafter that is handed the whole text and its true states."""
    module = Listener(drafter.module)
    config = shape(Method.DRAFT, use_tree=False)
    fresh = AutoregressiveDrafter(
        module,  # type: ignore[arg-type]
        replace(config, max_draft_len=1, max_total_draft_tokens=None),
        max_batch_size=1,
        max_model_len=MAX_LEN,
        vocabulary=drafter.vocabulary,
    )
    fresh.admit(request)
    hidden_TC = states_of(target, request.token_ids[:-1], drafter.captures)
    fresh.observe([request], [DraftTree.root(0)], [Verdict((), (), 0)], [hidden_TC])
    fresh.propose([request], [1])
    (logits_W,) = module.logits_of.values()
    return logits_W


@dataclass
class Checked:
    """A drafter in an engine, compared with a fresh one whenever it drafts.

    In ``idle`` of ``period`` steps it is told that no depth is of use.
    """

    drafter: AutoregressiveDrafter
    target: Decoder
    period: int = 1
    idle: int = 0
    num_steps: int = 0
    num_checks: int = 0
    worst: float = 0.0

    def __post_init__(self) -> None:
        self.listener = Listener(self.drafter.module)
        self.drafter.module = self.listener  # type: ignore[assignment]
        self.admit, self.prefill = self.drafter.admit, self.drafter.prefill
        self.adopt = self.drafter.adopt
        self.observe, self.release = self.drafter.observe, self.drafter.release
        self.captures = self.drafter.captures

    @property
    def num_passes(self) -> int:
        return self.drafter.num_passes

    def propose(self, requests, max_depth, min_score: float = 0.0) -> list[DraftTree]:
        self.num_steps += 1
        if self.num_steps % self.period < self.idle:
            max_depth = [0] * len(requests)
        self.listener.logits_of.clear()
        trees = self.drafter.propose(requests, max_depth, min_score)
        for request in requests:
            state = self.drafter._states[request.request_id]
            logits_W = self.listener.logits_of.get(state.row)
            if logits_W is None:
                continue
            gap = (logits_W - fresh_logits(self.drafter, self.target, request)).abs().max()
            self.worst = max(self.worst, float(gap))
            self.num_checks += 1
            num_rows = len(request.token_ids) - self.drafter.module.token_shift
            assert num_rows == self.drafter._cache.committed(state.row)
        return trees


def run_checked(checked: Checked, batch: int) -> SpeculationStats:
    """Five requests of unequal lengths: some join late, on rows that others have left."""
    engine = new_engine(
        checked.target, checked, max_batch_size=batch, max_model_len=MAX_LEN, prefill_chunk=7
    )
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, logit_bias=FEW_TOKENS)
    requests = [
        submit(engine, [(7 * place + length) % 331 for place in range(length)], params)
        for length in (1, 40, 9, 26, 31)
    ]
    while engine.has_work:
        engine.step()
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)
    return stats


# --- the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_the_cache_holds_the_targets_true_rows(
    target: Decoder, method: Method, use_tree: bool
) -> None:
    checked = Checked(drafter_of(method, target, use_tree), target)
    stats = run_checked(checked, batch=3)

    assert_speculated(stats, accepted=True, rejected=True)
    assert checked.num_checks > 60
    assert checked.worst < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_pauses_drafting_misses_nothing(target: Decoder, method: Method) -> None:
    """Two of three steps without: the states wait, and the next draft sees all of them."""
    checked = Checked(drafter_of(method, target, use_tree=True), target, period=3, idle=2)
    stats = run_checked(checked, batch=2)

    assert_speculated(stats, accepted=True, rejected=True)
    assert checked.num_checks > 20
    assert checked.worst < 1e-5


def run_conversations(checked: Checked, **config: Any) -> tuple[SpeculationStats, EngineStats]:
    """Three texts, then requests that go on from them, branch off, or begin like one that runs."""
    engine = new_engine(
        checked.target,
        checked,
        max_batch_size=5,
        max_model_len=MAX_LEN,
        prefill_chunk=7,
        prefix_cache=True,
        **config,
    )
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30, logit_bias=FEW_TOKENS)
    prompts = [[(7 * place + length) % 331 for place in range(length)] for length in (30, 20, 41)]
    requests = [submit(engine, prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    first, second, third = requests
    requests.append(submit(engine, [*first.token_ids, 3, 1, 4], params))
    engine.step()
    engine.step()
    engine.step()
    requests += [
        submit(engine, first.token_ids[:40], params),
        submit(engine, [*second.token_ids[:24], 9], params),
        submit(engine, [*third.token_ids, *range(20)], params),
        submit(engine, third.token_ids[:41], params),
    ]
    while engine.has_work:
        engine.step()
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)
    return stats, engine.stats()


@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_adopted_from_other_requests_are_true_rows_too(
    target: Decoder, method: Method, use_tree: bool
) -> None:
    checked = Checked(drafter_of(method, target, use_tree, batch=5), target)
    stats, totals = run_conversations(checked, max_slots=100)

    assert_speculated(stats, accepted=True, rejected=True)
    assert totals.prefix_hits >= 4
    assert totals.preemptions > 0
    assert checked.num_checks > 60
    assert checked.worst < 1e-5


class AdoptsARowTooMany(AutoregressiveDrafter):
    """Wrong: takes the last shared position's row too, which is made of the source's next token."""

    def adopt(self, request, source_id, num_tokens, *, takes_over) -> int:
        shift = self.module.token_shift
        known = super().adopt(request, source_id, num_tokens + shift, takes_over=takes_over)
        return min(known, num_tokens)


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.MTP])
def test_a_row_of_another_requests_token_is_noticed(target: Decoder, method: Method) -> None:
    drafter = drafter_of(method, target, use_tree=False, batch=5)
    drafter.__class__ = AdoptsARowTooMany
    checked = Checked(drafter, target)
    try:
        run_conversations(checked)
    except AssertionError:
        return  # states and rows do not add up
    assert checked.worst > 1e-3


class KeepsDraftedRows(AutoregressiveDrafter):
    """Wrong: takes the drafted rows of accepted nodes for true ones, as they lie in the cache."""

    def observe(self, requests, trees, verdicts, hidden) -> None:
        super().observe(requests, trees, verdicts, hidden)
        for request, tree, verdict in zip(requests, trees, verdicts, strict=True):
            state = self._states[request.request_id]
            if not tree.num_drafted:
                continue
            num_kept = min(len(verdict.path), max(tree.depth) - 1)
            self._cache.extend(state.row, num_kept)
            if state.waiting:
                state.waiting[-1] = state.waiting[-1][num_kept:]
                state.num_waiting -= num_kept


@pytest.mark.parametrize(
    ("method", "use_tree"),
    [(Method.EAGLE3, False), (Method.MTP, False), *((method, True) for method in METHODS)],
)
def test_drafted_rows_taken_for_true_ones_are_noticed(
    target: Decoder, method: Method, use_tree: bool
) -> None:
    """A draft model's chain is left out: its drafted rows are what the true ones will be."""
    drafter = drafter_of(method, target, use_tree)
    drafter.__class__ = KeepsDraftedRows
    checked = Checked(drafter, target)
    stats = run_checked(checked, batch=3)

    assert_speculated(stats, accepted=True, rejected=True)
    assert checked.worst > 1e-3


def test_the_draft_models_own_kept_chain_would_be_right(target: Decoder) -> None:
    """So the wrong variant is wrong because of what the rows hold, not of how many there are."""
    drafter = drafter_of(Method.DRAFT, target, use_tree=False)
    drafter.__class__ = KeepsDraftedRows
    checked = Checked(drafter, target)
    stats = run_checked(checked, batch=3)

    assert_speculated(stats, accepted=True, rejected=True)
    assert checked.worst < 1e-5


# --- drafted rows -------------------------------------------------------------------------------


def path_logits(
    drafter: AutoregressiveDrafter, target: Decoder, tokens: Sequence[int], path: Sequence[int]
) -> Tensor:
    """The draft logits after one path: the true rows in one pass, then the path row by row."""
    module = drafter.module
    cache = module.new_cache(max_batch_size=1, num_slots=MAX_LEN)
    row = cache.allocate()
    known = tokens[module.token_shift :]
    feature_RX = states_of(target, tokens[:-1], drafter.captures)
    if feature_RX is None:
        feature_RX = torch.empty(0, 0)
    segment = Segment(row, known, range(len(known)), num_silent=len(known) - 1)
    output = module.forward([segment], feature_RX, cache, from_target=True)
    for token in path:
        cache.extend(row, len(segment.tokens))
        segment = Segment(row, [token], [0])
        feature_RX = torch.empty(0, 0) if output.feature_RD is None else output.feature_RD
        output = module.forward([segment], feature_RX, cache, from_target=False)
    return output.logits_RW[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_node_is_drafted_from_its_own_path_alone(
    target: Decoder, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither siblings, nor the order of the layers' rows, nor the rest of the batch matter."""
    drafter = drafter_of(method, target, use_tree=True)
    requests = requests_of(9, 2, 30)
    seen: list[tuple[list[int], list[int], Tensor]] = []
    extend = Growth.extend

    def noting(growth: Growth, nodes: Sequence[int], logits: Any) -> None:
        for node, logits_W in zip(nodes, logits, strict=True):
            (text,) = (r.token_ids for r in requests if r.token_ids[-1] == growth.tree.token[0])
            seen.append((text, growth.tree.path_tokens(node), torch.from_numpy(logits_W).clone()))
        extend(growth, nodes, logits)

    monkeypatch.setattr(Growth, "extend", noting)
    ready(drafter, target, requests)
    drafter.propose(requests, [9, 9, 9])

    assert 3 * (1 + 4 + 4) == len(seen)
    for text, path, logits_W in seen:
        expected_W = path_logits(drafter, target, text, path)
        assert torch.allclose(expected_W, logits_W, atol=1e-5, rtol=0)


# --- passes -------------------------------------------------------------------------------------


def requests_of(*lengths: int, params: SamplingParams | None = None) -> list[BareRequest]:
    return [
        bare_request([(5 * t + n) % 331 for t in range(n)], params, vocab_size=331, request_id=i)
        for i, n in enumerate(lengths)
    ]


def ready(drafter: AutoregressiveDrafter, target: Decoder, requests: Sequence[BareRequest]) -> None:
    """As after a first step that drafted nothing: the states of all but the last token wait."""
    for request in requests:
        drafter.admit(request)
        hidden_TC = states_of(target, request.token_ids[:-1], drafter.captures)
        drafter.observe(
            [request], [DraftTree.root(0)], [Verdict((), (request.token_ids[-1],), 0)], [hidden_TC]
        )


@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_takes_one_pass_per_layer_for_the_whole_batch(
    target: Decoder, method: Method, use_tree: bool
) -> None:
    drafter = drafter_of(method, target, use_tree)
    listener = drafter.module = Listener(drafter.module)  # type: ignore[assignment]
    requests = requests_of(9, 2, 30)
    ready(drafter, target, requests)
    trees = drafter.propose(requests, [9, 2, 1])
    width = 4 if use_tree else 1

    assert DEPTH == drafter.num_passes == len(listener.passes)
    assert [[0, 1, 2], [0, 1], [0]] == [[s.cache_row for s in p] for p in listener.passes]
    assert [[width] * 2, [width]] == [[len(s.tokens) for s in p] for p in listener.passes[1:]]
    assert ([10, 10, 4] if use_tree else [DEPTH, 2, 1]) == [tree.num_drafted for tree in trees]
    assert all(max(tree.depth) <= depth for tree, depth in zip(trees, [9, 2, 1], strict=True))


def test_a_batch_drafts_what_each_request_alone_would(target: Decoder) -> None:
    together, alone = [drafter_of(Method.EAGLE3, target, use_tree=True) for _ in range(2)]
    requests = requests_of(9, 2, 30)
    ready(together, target, requests)
    ready(alone, target, requests)
    trees = together.propose(requests, [9, 2, 3])

    assert [tree.token for tree in trees] == [
        alone.propose([request], [depth])[0].token
        for request, depth in zip(requests, [9, 2, 3], strict=True)
    ]


def test_nothing_runs_where_no_depth_is_of_use(target: Decoder) -> None:
    drafter = drafter_of(Method.EAGLE3, target, use_tree=True)
    requests = requests_of(9, 2)
    ready(drafter, target, requests)
    trees = drafter.propose(requests, [0, 0])

    assert [[r.token_ids[-1]] for r in requests] == [tree.token for tree in trees]
    assert 0 == drafter.num_passes


def test_no_pass_is_spent_on_nodes_that_would_not_pay(target: Decoder) -> None:
    drafter = drafter_of(Method.EAGLE3, target, use_tree=True)
    requests = requests_of(9)
    ready(drafter, target, requests)
    (tree,) = drafter.propose(requests, [9], min_score=1.0)

    assert 1 == max(tree.depth)
    assert 1 == drafter.num_passes


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.MTP])
def test_a_head_waits_for_the_states_of_the_first_step(target: Decoder, method: Method) -> None:
    drafter = drafter_of(method, target, use_tree=False)
    requests = requests_of(9)
    drafter.admit(requests[0])
    drafter.prefill(requests[0], 5, states_of(target, requests[0].token_ids[:5], drafter.captures))
    passes_before = drafter.num_passes
    (tree,) = drafter.propose(requests, [9])

    assert 0 == tree.num_drafted
    assert 0 == passes_before == drafter.num_passes


@pytest.mark.parametrize(("max_waiting", "num_passes"), [(256, 0), (4, 2)])
def test_a_prompts_rows_wait_and_many_are_taken_in(
    target: Decoder, max_waiting: int, num_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoregressive, "MAX_WAITING", max_waiting)
    chunked, whole = [drafter_of(Method.MTP, target, use_tree=True) for _ in range(2)]
    requests = requests_of(20)
    text = requests[0].token_ids
    hidden_TC = states_of(target, text[:-1], chunked.captures)
    assert hidden_TC is not None
    chunked.admit(requests[0])
    for start, end in ((0, 6), (6, 7), (7, 15)):
        chunked.prefill(requests[0], end, hidden_TC[start:end])
    chunked.observe(requests, [DraftTree.root(0)], [Verdict((), (text[-1],), 0)], [hidden_TC[15:]])
    ready(whole, target, requests)

    assert whole.propose(requests, [9])[0].token == chunked.propose(requests, [9])[0].token
    assert num_passes + DEPTH == chunked.num_passes


# --- rows of the cache --------------------------------------------------------------------------


def test_rows_are_given_back_and_taken_again(target: Decoder) -> None:
    drafter = drafter_of(Method.DRAFT, target, use_tree=True, batch=1)
    for request in requests_of(9, 30, 4):
        drafter.admit(request)
        tree = drafter.propose([request], [9])[0]
        fresh = drafter_of(Method.DRAFT, target, use_tree=True, batch=1)
        fresh.admit(request)

        assert fresh.propose([request], [9])[0].token == tree.token
        drafter.release(request)
        drafter.release(request)  # as after an abort


def test_a_request_that_failed_leaves_nothing_that_spoils_its_row(target: Decoder) -> None:
    """States that are not finite go into the cache with the prompt, before the target fails."""
    drafter = drafter_of(Method.EAGLE3, target, use_tree=True, batch=2)
    failed, short, long = requests_of(40, 3, 40)
    drafter.admit(failed)
    hidden_TC = states_of(target, failed.token_ids[:15], drafter.captures)
    assert hidden_TC is not None
    drafter.prefill(failed, 15, torch.full_like(hidden_TC, torch.nan))
    drafter.release(failed)
    ready(drafter, target, [short, long])

    assert all(tree.num_drafted == 10 for tree in drafter.propose([short, long], [9, 9]))


def test_logits_that_are_not_finite_draft_nothing(target: Decoder) -> None:
    drafter = drafter_of(Method.EAGLE3, target, use_tree=True)
    requests = requests_of(9)
    drafter.admit(requests[0])
    hidden_TC = states_of(target, requests[0].token_ids[:-1], drafter.captures)
    assert hidden_TC is not None
    hidden_TC = torch.full_like(hidden_TC, torch.inf)
    drafter.observe(requests, [DraftTree.root(0)], [Verdict((), (1,), 0)], [hidden_TC])

    assert 0 == drafter.propose(requests, [9])[0].num_drafted


@pytest.mark.parametrize("method", METHODS)
def test_the_longest_text_and_the_widest_tree_fit_the_cache(
    target: Decoder, method: Method
) -> None:
    config = shape(method, use_tree=True)
    drafter = random_drafter(method, target, config, max_batch_size=1, max_model_len=30)
    assert isinstance(drafter, AutoregressiveDrafter)
    requests = requests_of(30)
    ready(drafter, target, requests)

    assert 10 == drafter.propose(requests, [9])[0].num_drafted
    assert DEPTH == drafter.num_passes
    assert 4 * (DEPTH - 1) == drafted_slots(config)


# --- building -----------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_size", [300, 331, 384])
def test_a_draft_models_vocabulary_may_be_padded_otherwise(
    target: Decoder, draft_size: int
) -> None:
    """Only ids that both have are drafted; a token that the draft model lacks is no obstacle."""
    config = tiny_config(num_layers=1, hidden_size=48, vocab_size=draft_size)
    weights = random_weights(config)
    decoder = Decoder(config, weights, dtype=torch.float32, policies=None)
    speculation = shape(Method.DRAFT, use_tree=True)
    drafter = create_drafter(
        speculation,
        source=replace(random_source(Method.DRAFT, target), config=config, weights=weights),
        target=target,
        max_batch_size=1,
        max_model_len=MAX_LEN,
    )
    assert isinstance(drafter, AutoregressiveDrafter)
    (request,) = requests_of(9)
    drafter.admit(request)
    (tree,) = drafter.propose([request], [9])
    cache = decoder.new_cache(max_batch_size=1, num_slots=9)
    segment = Segment(cache.allocate(), request.token_ids, range(9), num_silent=8)
    logits_V = decoder.forward([segment], cache).logits_RV[0]
    shared = min(draft_size, 331)
    best = logits_V[:shared].argsort(descending=True)[:4].tolist()
    request.token_ids.append(330)
    (later,) = drafter.propose([request], [9])

    assert best == tree.token[1:5]
    assert [1, 1, 1, 1, 2] == tree.depth[1:6]
    assert max(tree.token) < shared
    assert 10 == later.num_drafted
    assert (draft_size < 331) == (drafter.vocabulary is not None)


def test_a_draft_model_reads_a_token_that_it_lacks_as_another(target: Decoder) -> None:
    config = tiny_config(num_layers=1, hidden_size=48, vocab_size=300)
    decoder = Decoder(config, random_weights(config), dtype=torch.float32, policies=None)
    module = DraftModel(decoder, target_size=331)

    def logits_after(token: int) -> Tensor:
        cache = module.new_cache(max_batch_size=1, num_slots=2)
        segment = Segment(cache.allocate(), [5, token], range(2), num_silent=1)
        output = module.forward([segment], torch.empty(0, 0), cache, from_target=True)
        return output.logits_RW

    assert (1, 300) == logits_after(299).shape
    assert logits_after(0).equal(logits_after(300))
    assert not logits_after(299).equal(logits_after(300))


def test_requests_that_fall_far_behind_are_taken_in_together(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has too many rows that wait: those of the others that have many share its pass."""
    monkeypatch.setattr(autoregressive, "MAX_WAITING", 8)
    drafter = drafter_of(Method.EAGLE3, target, use_tree=False)
    requests = requests_of(3, 6, 10)
    hidden = [states_of(target, r.token_ids[:-1], drafter.captures) for r in requests]
    for request in requests:
        drafter.admit(request)
    verdicts = [Verdict((), (request.token_ids[-1],), 0) for request in requests]
    roots = [DraftTree.root(0) for _ in requests]
    sizes = []
    forward = drafter.module.forward

    def listen(segments, feature_RX, cache, *, from_target):
        sizes.append([len(segment.tokens) for segment in segments])
        return forward(segments, feature_RX, cache, from_target=from_target)

    drafter.module.forward = listen  # type: ignore[method-assign]
    drafter.observe(requests, roots, verdicts, hidden)
    drafter.observe(requests, roots, verdicts, hidden)  # again, as after a fault: nothing is left

    assert [[4, 8]] == sizes
