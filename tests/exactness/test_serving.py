"""L1 and L2 under a server's conditions: a text does not depend on what else the engine did.

Contract: the same seed gives the same ids alone, in a batch, after preemption, on the keys and
values of an earlier request, and with or without speculation, for every drafter: strict equality,
zero exceptions. Each test asserts that the thing it is about happened, and that tokens were
drafted, accepted and rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.config import (
    EngineConfig,
    GrammarKind,
    GrammarSpec,
    Method,
    SamplingParams,
    SpeculationConfig,
)
from outrider.drafters import Drafter, create_drafter
from outrider.engine import Engine
from outrider.kv_cache import KVCache
from outrider.models.decoder import Decoder
from outrider.models.exactness import random_tokens
from outrider.models.layers import Segment
from outrider.request import Request
from outrider.types import SpeculationStats
from tests.draft_modules import random_drafter
from tests.engines import new_engine, submit
from tests.exactness.runs import SAMPLING, assert_speculated
from tests.models import random_decoder
from tests.serving import fill_row
from tests.tiny import write_hf_checkpoint

MAX_LEN = 128
FEW_TOKENS = dict.fromkeys(range(10), 6.0)
METHODS = [method for method in Method if method is not Method.OFF]
# Every drafter; those that keep no state or that of all kinds also with every way of sampling.
CASES = [
    *((method, "warm") for method in (Method.DRAFT, Method.MEDUSA, Method.MTP)),
    *(
        (method, sampling)
        for method in (None, Method.NGRAM, Method.EAGLE3)
        for sampling in ("greedy", "warm", "penalties")
    ),
]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def target(request: pytest.FixtureRequest) -> Decoder:
    return random_decoder(request.param)


def drafter_of(method: Method | None, target: Decoder, batch: int) -> Drafter | None:
    if method is None:
        return None
    head = None if method is Method.NGRAM else "-"
    config = SpeculationConfig(
        method=method,
        head=head,
        max_draft_len=3,
        use_dynamic_tree=True,
        max_total_draft_tokens=10,
        adaptive=False,
    )
    if method is Method.NGRAM:
        return create_drafter(config)
    return random_drafter(method, target, config, max_batch_size=batch, max_model_len=MAX_LEN)


def params_of(sampling: str, **changes) -> SamplingParams:
    settings = {"max_tokens": 40, "logit_bias": FEW_TOKENS, **SAMPLING[sampling], **changes}
    return SamplingParams(**settings)


# The target is kept beside its texts: an id may be given anew once its object is gone.
_ALONE: dict[tuple[object, ...], tuple[Decoder, list[int]]] = {}


def alone(target: Decoder, request: Request) -> list[int]:
    """The request's tokens from an engine that decodes plainly and has never seen another one."""
    prompt = request.token_ids[: request.prompt_len]
    key = (id(target), tuple(prompt), repr(request.params))
    if key not in _ALONE:
        assert request.params.seed is not None or request.params.is_greedy
        engine = new_engine(target, None, max_model_len=MAX_LEN)
        fresh = submit(engine, prompt, request.params)
        while engine.has_work:
            engine.step()
        _ALONE[key] = target, fresh.token_ids
    return _ALONE[key][1]


def busy_day(engine: Engine, params: SamplingParams) -> list[Request]:
    """Conversations that go on, branch and crowd each other out, and one that is cancelled."""
    vocab_size = 331
    openings = [random_tokens(vocab_size, length, seed=length) for length in (38, 30, 44, 5)]
    requests = [
        submit(engine, prompt, replace(params, seed=100 + place))
        for place, prompt in enumerate(openings)
    ]
    while engine.has_work:
        engine.step()
    for place, request in enumerate(requests[:3]):
        more = random_tokens(vocab_size, 6, seed=place)
        follow_up = [*request.token_ids, *more]
        requests.append(submit(engine, follow_up, replace(params, seed=200 + place)))
        for _ in range(4):
            engine.step()
    cancelled = submit(engine, openings[2], params)
    requests.append(submit(engine, [*openings[2][:25], 7, 7], replace(params, seed=300)))
    requests += [  # two answers to one prompt
        submit(engine, openings[0], replace(params, seed=400, choice=choice)) for choice in (0, 1)
    ]
    for _ in range(3):
        engine.step()
    engine.abort(cancelled)
    while engine.has_work:
        engine.step()
    return requests


@pytest.mark.parametrize(("method", "sampling"), CASES)
def test_a_text_is_the_same_alone_crowded_preempted_and_on_reused_rows(
    target: Decoder, method: Method | None, sampling: str
) -> None:
    engine = new_engine(
        target,
        drafter_of(method, target, batch=4),
        max_batch_size=4,
        max_model_len=MAX_LEN,
        max_slots=160,
        prefill_chunk=9,
        prefix_cache=True,
    )
    requests = busy_day(engine, params_of(sampling))
    totals = engine.stats()
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)

    for request in requests:
        assert alone(target, request) == request.token_ids
    assert totals.preemptions > 0
    assert totals.prefix_hits >= 4
    assert totals.aborted == 1
    assert totals.failed == totals.faults == 0
    if method is not None:
        assert_speculated(stats, accepted=True, rejected=True)


def test_reused_and_recomputed_rows_hold_the_same_bits_as_fresh_ones(target: Decoder) -> None:
    engine = new_engine(
        target,
        drafter_of(Method.NGRAM, target, batch=4),
        max_batch_size=4,
        max_model_len=MAX_LEN,
        max_slots=160,
        prefill_chunk=9,
        prefix_cache=True,
    )
    busy_day(engine, params_of("warm"))
    kept = engine._prefixes.rows

    assert 4 == len(kept)
    for row in kept:
        cache = target.new_cache(max_batch_size=1, num_slots=MAX_LEN)
        count = len(row.token_ids)
        target.forward([Segment(cache.allocate(), row.token_ids, range(count))], cache)
        mine = engine._cache.read(row.row, count)
        for mine_LGSK, fresh_LGSK in zip(mine, cache.read(0, count), strict=True):
            assert torch.equal(fresh_LGSK, mine_LGSK)


def off_by_one(cached_LGSK: torch.Tensor) -> torch.Tensor:
    """Each slot but the first holds what belongs to the one before it."""
    return cached_LGSK[:, :, [0, *range(cached_LGSK.shape[2] - 1)]]


def test_a_reused_row_that_is_off_by_one_is_noticed(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse test: keys and values of the wrong tokens do change texts of this model."""

    def wrong(self, source, row, count):
        fill_row(self, row, *map(off_by_one, self.read(source, count)))
        self._committed[row] = count

    monkeypatch.setattr("outrider.kv_cache.KVCache.copy_prefix", wrong)
    engine = new_engine(
        target, None, max_batch_size=4, max_model_len=MAX_LEN, prefill_chunk=9, prefix_cache=True
    )
    requests = busy_day(engine, params_of("warm"))

    assert any(alone(target, request) != request.token_ids for request in requests)


def wait_again_half_computed(
    target: Decoder, method: Method | None
) -> tuple[Engine, list[Request]]:
    """Four prompts, three of which are made to wait twice each in the middle of their prefill."""
    engine = new_engine(
        target,
        drafter_of(method, target, batch=4),
        max_batch_size=4,
        max_model_len=MAX_LEN,
        prefill_chunk=9,
        prefix_cache=True,
    )
    params = params_of("warm", max_tokens=24)
    prompts = [random_tokens(331, length, seed=length) for length in (3, 80, 60, 70)]
    requests = [submit(engine, prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
        for request in engine._scheduler.running[1:]:
            committed = engine._cache.committed(request.row)
            if 16 <= committed < request.prompt_len - 24 and request.num_admissions < 3:
                engine._preempt(request, keeps=True)
    return engine, requests


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_prompt_that_waits_again_half_computed_goes_on_from_there(
    target: Decoder, method: Method | None
) -> None:
    engine, requests = wait_again_half_computed(target, method)
    stats = engine.stats()
    num_needed = sum(request.prompt_len - 24 for request in requests[1:])

    for request in requests:
        assert alone(target, request) == request.token_ids
    assert 6 == stats.preemptions
    # A draft head needs the last state again; all else is computed once.
    assert num_needed <= stats.prefilled_tokens <= num_needed + stats.preemptions
    if method is not None:
        assert_speculated(stats.speculation, accepted=True, rejected=True)


def test_a_half_computed_prompt_that_is_off_by_one_is_noticed(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse test."""
    free = KVCache.free

    def wrong(self, row, *, scrub=False):
        free(self, row, scrub=scrub)
        fill_row(self, row, *map(off_by_one, self.read(row, self.num_slots)))

    monkeypatch.setattr(KVCache, "free", wrong)
    _, requests = wait_again_half_computed(target, None)

    assert any(alone(target, request) != request.token_ids for request in requests)


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_the_size_of_the_prefill_chunks_changes_nothing(target: Decoder, chunk: int) -> None:
    engine = new_engine(
        target,
        drafter_of(Method.EAGLE3, target, batch=4),
        max_batch_size=4,
        max_model_len=MAX_LEN,
        prefill_chunk=chunk,
    )
    params = params_of("warm", max_tokens=24)
    prompts = [random_tokens(331, length, seed=length) for length in (80, 3, 60, 70)]
    requests = [submit(engine, prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)

    for request in requests:
        assert alone(target, request) == request.token_ids
    assert sum(len(prompt) - 24 for prompt in prompts if len(prompt) > 24) == (
        engine.stats().prefilled_tokens
    )
    assert_speculated(stats, accepted=True, rejected=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_hf_checkpoint(tmp_path_factory.mktemp("model") / "tiny", scale=0.15)


def test_options_that_carry_state_survive_waiting_again_and_reused_rows(folder: Path) -> None:
    """Grammar, prediction, log-probabilities and stop strings, all at once in too few slots."""
    settings: list[dict] = [
        {"logprobs": 3},
        {"grammar": GrammarSpec(GrammarKind.REGEX, "([a-z]{1,8} ){8,30}"), "logprobs": 0},
        {"grammar": GrammarSpec(GrammarKind.JSON_OBJECT)},
        {"stop": ("e", "qz"), "min_tokens": 20},
    ]
    all_params = [
        SamplingParams(temperature=0.9, seed=place, max_tokens=80, **more)
        for place, more in enumerate(settings)
    ]
    start = "A river does not ask the stones where to go, and the stone is rounder for it. "
    prompts = [start + tail for tail in ("It", "Go on", "The", "When")]
    plain = LLM(
        folder,
        speculation=SpeculationConfig(method=Method.OFF),
        engine=EngineConfig(max_model_len=160, dtype="float32"),
    )
    expected = [plain.generate(*pair)[0] for pair in zip(prompts, all_params, strict=True)]
    busy = LLM(
        folder,
        speculation=SpeculationConfig(adaptive=False),
        engine=EngineConfig(
            max_batch_size=4,
            max_model_len=160,
            max_slots=160,  # the prompts have 36 tokens, the answers up to 80
            prefill_chunk=8,
            prefix_cache=True,
            dtype="float32",
        ),
    )
    requests = []
    for prompt, params, known in zip(prompts, all_params, expected, strict=True):
        ids = list(known.token_ids)
        ids[5:6] = [7, 8]  # the prediction is wrong in one place
        if not requests:
            ids = []  # the first one goes on for long
        requests.append(
            busy.engine.new_request(busy.tokenizer.encode(prompt), params, prediction_ids=ids)
        )
    busy.engine.submit_all(requests)
    while busy.engine.has_work:
        busy.engine.step()
    found = [busy.take(request, 0).completion for request in requests]
    totals = busy.engine.stats()

    for known, completion in zip(expected, found, strict=True):
        assert completion is not None
        assert known.text == completion.text
        assert known.token_ids == completion.token_ids
        assert known.finish_reason == completion.finish_reason
        assert known.logprobs == completion.logprobs
    assert totals.preemptions > 0
    assert totals.prefix_hits > 0
    assert_speculated(totals.speculation, accepted=True, rejected=True)
