"""The simulator counts what the engine counts, step by step, for every drafter, shape and rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from outrider.bench.prompts import load_prompts
from outrider.config import Accept, EngineConfig, Method, SamplingParams, SpeculationConfig
from outrider.drafters import Drafter
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine import Engine
from outrider.errors import ParameterError
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.exactness import row_policies
from outrider.models.loading import LoadedCheckpoint, load
from outrider.models.loading.cache import cache_root
from outrider.models.loading.hub import DEFAULT_MODEL, resolve
from outrider.models.machine import ResultCache, preferred_dtype
from outrider.request import Request
from outrider.training.simulate import Recording, captured_states, simulate
from outrider.training.states import states_of
from outrider.types import FinishReason, SpeculationStats
from tests.draft_modules import oracle_drafter, random_drafter
from tests.engines import new_engine, submit
from tests.exactness.runs import LENGTHS, assert_speculated, params_of, prompts_of
from tests.models import random_decoder

HEADS = (Method.DRAFT, Method.EAGLE3, Method.MTP, Method.MEDUSA)
MAX_LEN, BATCH, CHUNK, DEPTH = 256, 3, 16, 3
FEW_TOKENS = dict.fromkeys(range(12), 6.0)  # a bias with which random heads are sometimes right
LONG_TEXT = {"max_tokens": 60, "logit_bias": FEW_TOKENS}
CHAIN = {"max_draft_len": DEPTH}
TREE = {
    "max_draft_len": DEPTH,
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 4,
    "max_total_draft_tokens": 9,
}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder()


def speculation(method: Method, shape: dict[str, int | bool]) -> SpeculationConfig:
    head = None if method is Method.NGRAM else "-"
    return SpeculationConfig(method=method, head=head, **shape)  # type: ignore[arg-type]


def head_drafter(target: Decoder, method: Method, shape) -> Drafter:
    config = speculation(method, shape)
    return random_drafter(method, target, config, max_batch_size=BATCH, max_model_len=MAX_LEN)


def merged_drafter(target: Decoder) -> Drafter:
    config = speculation(Method.EAGLE3, TREE)
    head = head_drafter(target, Method.EAGLE3, TREE)
    return CombinedDrafter(head, NgramDrafter(config), config.num_draft_tokens)


def decode(
    target: Decoder,
    drafter: Drafter | None,
    params: Sequence[SamplingParams],
    eos_ids: frozenset[int] = frozenset(),
) -> list[Request]:
    """The tests' prompts through the engine, to the end."""
    engine = new_engine(
        target,
        drafter,
        max_batch_size=BATCH,
        max_model_len=MAX_LEN,
        prefill_chunk=CHUNK,
        eos_ids=eos_ids,
    )
    requests = [submit(engine, *pair) for pair in zip(prompts_of(target), params, strict=True)]
    while engine.has_work:
        engine.step()
    return requests


def recorded(target: Decoder, requests: Sequence[Request], captures) -> list[Recording]:
    """What the engine wrote, with the states of one pass over each finished text."""
    return [
        Recording(
            request.token_ids[: request.prompt_len],
            request.token_ids[request.prompt_len :],
            request.params,
            states_of(target, request.token_ids, captures) if captures else None,
        )
        for request in requests
    ]


def texts_of(request: Request, num_kept: int) -> tuple[list[int], list[int]]:
    """A request's prompt and the beginning of its answer."""
    start = request.prompt_len
    return request.token_ids[:start], request.token_ids[start : start + num_kept]


def replay(
    target: Decoder,
    drafter: Drafter,
    recordings: Sequence[Recording],
    eos_ids: frozenset[int] = frozenset(),
) -> list[SpeculationStats]:
    return simulate(
        drafter,
        recordings,
        vocab_size=target.config.vocab_size,
        max_model_len=MAX_LEN,
        max_batch_size=BATCH,
        prefill_chunk=CHUNK,
        eos_ids=eos_ids,
    )


def total(all_stats: Sequence[SpeculationStats]) -> SpeculationStats:
    pooled = SpeculationStats()
    for stats in all_stats:
        pooled.add(stats)
    return pooled


@pytest.mark.parametrize("sampling", ["greedy", "hot", "top-p", "penalties"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("method", HEADS)
def test_a_head_is_counted_as_in_the_engine(
    target: Decoder, method: Method, shape, sampling: str
) -> None:
    """More requests than rows, so that the order in which rows are filled anew counts too."""
    requests = decode(target, head_drafter(target, method, shape), params_of(sampling, **LONG_TEXT))
    drafter = head_drafter(target, method, shape)
    simulated = replay(target, drafter, recorded(target, requests, drafter.captures))

    assert [request.stats for request in requests] == simulated
    assert_speculated(total(simulated), accepted=True, rejected=True)


@pytest.mark.parametrize("sampling", ["greedy", "hot"])
def test_a_head_merged_with_ngram_is_counted_as_in_the_engine(
    target: Decoder, sampling: str
) -> None:
    requests = decode(target, merged_drafter(target), params_of(sampling, **LONG_TEXT))
    drafter = merged_drafter(target)
    recordings = recorded(target, requests, drafter.captures)
    simulated = replay(target, drafter, recordings)
    alone = replay(target, head_drafter(target, Method.EAGLE3, TREE), recordings)

    assert [request.stats for request in requests] == simulated
    assert_speculated(total(simulated), accepted=True, rejected=True)
    assert alone != simulated


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", ["greedy", "hot"])
def test_ngram_is_counted_as_in_the_engine_without_any_states(
    target: Decoder, sampling: str, shape
) -> None:
    config = speculation(Method.NGRAM, shape)
    requests = decode(target, NgramDrafter(config), params_of(sampling, **LONG_TEXT))
    simulated = replay(target, NgramDrafter(config), recorded(target, requests, ()))

    assert [request.stats for request in requests] == simulated
    assert_speculated(total(simulated), accepted=True, rejected=True)


@pytest.mark.parametrize("sampling", ["greedy", "hot"])
@pytest.mark.parametrize("method", HEADS)
def test_an_oracle_is_always_accepted_up_to_the_end(
    target: Decoder, method: Method, sampling: str
) -> None:
    plain = decode(target, None, params_of(sampling))
    texts = [request.token_ids for request in plain]
    config = speculation(method, CHAIN)
    drafter = oracle_drafter(
        method, target, config, texts, max_batch_size=BATCH, max_model_len=MAX_LEN
    )
    simulated = replay(target, drafter, recorded(target, plain, drafter.captures))
    # Heads wait for the target's states in a request's first step; the last steps are cut short.
    waiting = 0 if method is Method.DRAFT else 1
    num_steps = sum(waiting + -(-(r.num_output - waiting) // (DEPTH + 1)) for r in plain)

    assert num_steps == total(simulated).verify_steps
    assert_speculated(total(simulated), accepted=True, rejected=False)


@pytest.mark.parametrize("sampling", ["greedy", "hot"])
@pytest.mark.parametrize("method", HEADS)
def test_a_text_that_stops_early_is_counted_as_in_the_engine(
    target: Decoder, method: Method, sampling: str
) -> None:
    """Nothing behind the stop counts, though the engine's tree may have reached beyond it."""
    eos_ids = frozenset({3, 7})
    params = params_of(sampling, **LONG_TEXT)
    requests = decode(target, head_drafter(target, method, CHAIN), params, eos_ids)
    drafter = head_drafter(target, method, CHAIN)
    simulated = replay(target, drafter, recorded(target, requests, drafter.captures), eos_ids)

    assert FinishReason.STOP in {request.finish_reason for request in requests}
    assert [request.stats for request in requests] == simulated


def test_a_plain_text_serves_every_drafter(target: Decoder) -> None:
    """Text and states do not depend on what was drafted while they were recorded."""
    params = params_of("hot", **LONG_TEXT)
    drafted = decode(target, head_drafter(target, Method.MTP, TREE), params)
    drafter = head_drafter(target, Method.MTP, TREE)
    plain = recorded(target, decode(target, None, params), drafter.captures)

    assert [request.stats for request in drafted] == replay(target, drafter, plain)


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.MTP, Method.MEDUSA])
def test_states_of_the_position_before_are_noticed(target: Decoder, method: Method) -> None:
    requests = decode(target, head_drafter(target, method, TREE), params_of("greedy", **LONG_TEXT))
    drafter = head_drafter(target, method, TREE)
    recordings = recorded(target, requests, drafter.captures)
    shifted = []
    for recording in recordings:
        assert recording.hidden_TC is not None
        shifted.append(replace(recording, hidden_TC=recording.hidden_TC.roll(1, dims=0)))

    assert [request.stats for request in requests] != replay(target, drafter, shifted)


def test_another_seed_than_the_texts_is_noticed(target: Decoder) -> None:
    """A drafter looks at the noise that the target's picks used."""
    params = params_of("hot", **LONG_TEXT)
    requests = decode(target, head_drafter(target, Method.EAGLE3, TREE), params)
    drafter = head_drafter(target, Method.EAGLE3, TREE)
    wrong = [
        replace(recording, params=replace(recording.params, seed=99))
        for recording in recorded(target, requests, drafter.captures)
    ]

    assert [request.stats for request in requests] != replay(target, drafter, wrong)


def test_the_end_of_a_recording_cut_short_is_not_drafted_past(target: Decoder) -> None:
    """A text that was cut, at a loop for one, ends like one that stopped there."""
    plain = decode(target, None, params_of("greedy"))
    texts = [request.token_ids for request in plain]
    drafter = oracle_drafter(
        Method.EAGLE3,
        target,
        speculation(Method.EAGLE3, CHAIN),
        texts,
        max_batch_size=BATCH,
        max_model_len=MAX_LEN,
    )
    cut = []
    for request in plain:
        prompt, kept = texts_of(request, num_kept=11)
        hidden_TC = states_of(target, [*prompt, *kept], drafter.captures)
        cut.append(Recording(prompt, kept, request.params, hidden_TC))
    # One token without drafts, then 4, 4, and of the last chain the 2 that are still known.
    expected = SpeculationStats(verify_steps=4, drafted=9, accepted=8, accepted_at=[3, 3, 2])

    assert [expected] * len(LENGTHS) == replay(target, drafter, cut)


def test_stored_states_are_picked_in_the_drafters_order() -> None:
    pieces = [torch.full((4, 3), float(i)) for i in range(3)]
    final_TD = torch.full((4, 3), 9.0)
    stored = {"layers": (2, 15, 27), "states_TC": torch.cat(pieces, dim=1), "final_TD": final_TD}
    picked = captured_states((27, 2), **stored)
    final = captured_states((FINAL_STATE,), **stored)

    assert picked is not None
    assert torch.equal(torch.cat([pieces[2], pieces[0]], dim=1), picked)
    assert final is not None
    assert torch.equal(final_TD, final)
    assert captured_states((), **stored) is None


def test_states_that_were_not_stored_are_named() -> None:
    with pytest.raises(ParameterError, match=r"states \[5\] were not stored, only \[2, -1\]"):
        captured_states((2, 5), layers=(2,), states_TC=torch.ones(4, 3), final_TD=torch.ones(4, 3))


SAMPLED = SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt_ids": []}, "0 prompt and 2 response tokens"),
        ({"response_ids": []}, "3 prompt and 0 response tokens"),
        ({"params": replace(SAMPLED, seed=1, accept=Accept.REJECTION)}, "cannot be replayed"),
        ({"params": SAMPLED}, "seed: None"),
        ({"hidden_TC": torch.ones(4, 8)}, "states of 4 positions for 5 tokens"),
    ],
)
def test_a_text_that_cannot_be_replayed_is_refused(fields, complaint: str) -> None:
    sound = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "params": SamplingParams(),
        "hidden_TC": None,
    }
    with pytest.raises(ParameterError, match=complaint):
        Recording(**{**sound, **fields})


def test_missing_states_and_too_little_room_are_refused(target: Decoder) -> None:
    params = SamplingParams(max_tokens=2)
    bare = Recording([1, 2, 3], [4, 5], params, None)
    with pytest.raises(ParameterError, match="holds no states, but the drafter reads those of"):
        replay(target, head_drafter(target, Method.EAGLE3, CHAIN), [bare])
    too_long = Recording([1, 2, 3], [4, 5, 6], params, None)
    with pytest.raises(ParameterError, match=r"a text of 6 tokens, but .* allow 5"):
        replay(target, NgramDrafter(speculation(Method.NGRAM, CHAIN)), [too_long])


@dataclass(frozen=True)
class Embedded:
    checkpoint: LoadedCheckpoint
    target: Decoder


@pytest.fixture(scope="module")
def embedded() -> Iterator[Embedded]:
    checkpoint = load(resolve(DEFAULT_MODEL, pull=True))
    dtype = preferred_dtype()
    policies = row_policies(checkpoint.config, dtype, ResultCache(cache_root()))
    target = Decoder(checkpoint.config, checkpoint.weights, dtype=dtype, policies=policies)
    yield Embedded(checkpoint, target)
    checkpoint.weights.close()


@pytest.mark.embedded
def test_the_embedded_models_acceptance_is_predicted_within_5_percent(embedded: Embedded) -> None:
    """Real sizes and bfloat16; the bias lets a random head be right often enough to count."""
    tokenizer, target = embedded.checkpoint.tokenizer, embedded.target
    drafting, replaying = (head_drafter(target, Method.EAGLE3, TREE) for _ in range(2))
    assert isinstance(drafting, AutoregressiveDrafter)
    assert drafting.vocabulary is not None
    bias = dict.fromkeys(drafting.vocabulary.ids_W[100:108].tolist(), 25.0)
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        for prompt in load_prompts()
    ]
    prompts = sorted(prompts, key=len)[:4]
    config = speculation(Method.EAGLE3, TREE)
    engine = Engine(
        target,
        decoder=tokenizer,
        eos_ids=tokenizer.eos_ids,
        config=EngineConfig(max_batch_size=BATCH, prefill_chunk=CHUNK),
        max_model_len=MAX_LEN,
        drafter=drafting,
        max_draft_tokens=config.num_draft_tokens,
        costs=None,
    )
    requests = [
        submit(
            engine,
            prompt,
            SamplingParams(temperature=i % 2, seed=i, max_tokens=24, logit_bias=bias),
        )
        for i, prompt in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
    recordings = recorded(target, requests, replaying.captures)
    simulated = total(replay(target, replaying, recordings, tokenizer.eos_ids))
    measured = total([request.stats for request in requests])

    assert_speculated(measured, accepted=True, rejected=True)
    assert measured.acceptance_length > 1.3
    assert abs(simulated.acceptance_length / measured.acceptance_length - 1) < 0.05
