"""Stop events inside accepted runs: the same text, ids, usage and reason with speculation on.

Contract (docs/exactness.md): the earliest stop event wins, and text, ids, usage and finish reason
are trimmed together, wherever the event falls in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig, SamplingParams
from outrider.engine import Engine
from outrider.errors import PromptError
from outrider.models.decoder import Decoder
from outrider.models.exactness import random_tokens
from tests.drafters import ScriptedDrafter
from tests.engines import Outcome, outcome, submit
from tests.models import random_decoder

PIECES = [bytes([byte]) for byte in range(256)]  # halves of characters, mostly
PIECES += ["é".encode(), "漢"[:1].encode(), "🙂".encode(), b"ab", b"b", b"ba", b"\n\n"] * 8
CONTEXT = 64


class ByteDecoder:
    """Token ids as byte strings, many of them parts of a character."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(PIECES[i % len(PIECES)] for i in ids).decode(errors="replace")


@cache
def target() -> Decoder:
    return random_decoder()


def run_one(
    prompt: list[int], params: SamplingParams, drafter, eos_ids: frozenset[int]
) -> tuple[Outcome, list[str], int]:
    """One request to its end: outcome, streamed pieces, steps."""
    engine = Engine(
        target(),
        decoder=ByteDecoder(),
        eos_ids=eos_ids,
        config=EngineConfig(),
        max_model_len=CONTEXT,
        drafter=drafter,
        max_draft_tokens=40,
        costs=None,
    )
    request = submit(engine, prompt, params)
    pieces = []
    while engine.has_work:
        engine.step()
        pieces.append(request.output.take_text())
    return outcome(request), pieces, request.stats.verify_steps


def foresee_from(prompt: list[int], future: Sequence[int]):
    """The unstopped continuation, so that drafts run past the stop event."""

    def foresee(tokens: Sequence[int], count: int) -> list[int]:
        done = len(tokens) - len(prompt)
        return list(future[done : done + count])

    return foresee


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stop_events_inside_accepted_runs(data: st.DataObject) -> None:
    prompt = random_tokens(331, data.draw(st.integers(1, 20)), seed=data.draw(st.integers(0, 3)))
    sampling = data.draw(st.sampled_from([{}, {"temperature": 1.0, "seed": 3}]))
    free = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
    future = run_one(prompt, free, None, frozenset())[0].token_ids
    text = ByteDecoder().decode(future)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 4))]
    eos_ids = frozenset(data.draw(st.sets(st.sampled_from(future), max_size=1)))
    params = SamplingParams(
        max_tokens=data.draw(st.integers(4, 40)),
        min_tokens=data.draw(st.integers(0, 4)),
        stop=data.draw(st.sampled_from([(), (stop,), (stop, "ab")])),
        stop_token_ids=tuple(data.draw(st.sets(st.sampled_from(future), max_size=1))),
        ignore_eos=data.draw(st.booleans()),
        **sampling,
    )
    expected, plain_pieces, plain_steps = run_one(prompt, params, None, eos_ids)
    drafter = ScriptedDrafter(
        foresee_from(prompt, future),
        331,
        depth=data.draw(st.integers(1, 8)),
        siblings=1,
        honesty=data.draw(st.sampled_from([1.0, 0.7])),
    )
    outcome, pieces, steps = run_one(prompt, params, drafter, eos_ids)

    assert expected == outcome
    assert outcome.text == "".join(pieces) == "".join(plain_pieces)
    assert steps <= plain_steps
    for text_of_stop in params.stop:
        if params.min_tokens == 0:
            assert text_of_stop not in outcome.text


def test_stops_really_fall_inside_accepted_runs() -> None:
    """The property above is not vacuous: a stop in mid-run is met, and the rest is dropped."""
    prompt = random_tokens(331, 9, seed=0)
    free = SamplingParams(max_tokens=40)
    future = run_one(prompt, free, None, frozenset())[0].token_ids
    eos = next(token for place, token in enumerate(future) if place % 8 == 4)
    cut = future.index(eos) + 1
    drafter = ScriptedDrafter(foresee_from(prompt, future), 331, depth=7, siblings=1)
    result, _, steps = run_one(prompt, free, drafter, frozenset([eos]))

    assert future[:cut] == result.token_ids
    assert "stop" == result.finish_reason
    assert -(-cut // 8) == steps
    assert cut % 8 != 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_the_first_tokens_count_exactly(max_tokens: int, depth: int) -> None:
    prompt = random_tokens(331, 9, seed=0)
    future = run_one(prompt, SamplingParams(max_tokens=40), None, frozenset())[0].token_ids
    drafter = ScriptedDrafter(foresee_from(prompt, future), 331, depth=depth, siblings=1)
    params = SamplingParams(max_tokens=max_tokens)
    result, _, _ = run_one(prompt, params, drafter, frozenset())

    assert future[:max_tokens] == result.token_ids
    assert "length" == result.finish_reason


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_tree_is_clipped_to_the_room_left_in_the_context(room: int) -> None:
    prompt = random_tokens(331, CONTEXT - room, seed=0)
    params = SamplingParams(max_tokens=40)
    expected = run_one(prompt, params, None, frozenset())[0]
    drafter = ScriptedDrafter(foresee_from(prompt, expected.token_ids), 331, depth=8, siblings=3)
    result = run_one(prompt, params, drafter, frozenset())[0]

    assert expected == result
    assert room == len(result.token_ids)
    assert "length" == result.finish_reason


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(length: int) -> None:
    prompt = random_tokens(331, length, seed=0)

    with pytest.raises(PromptError, match=f"{length} tokens.*at most {CONTEXT - 1} "):
        run_one(prompt, SamplingParams(), None, frozenset())
