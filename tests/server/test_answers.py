"""The pieces between engine and client: the buffer, the cadence, replies made piece by piece."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.answers import Answers
from outrider.server.errors import ApiError, failed
from outrider.server.logprobs import TokenWriter
from outrider.server.replies import ChatDeltas, TextDeltas, Totals, chat_choice, text_choice
from outrider.server.routes_openai import merged
from outrider.server.schemas import Tool
from outrider.server.streaming import DONE, EventStream, batches
from outrider.server.tools import OPEN, ToolPlan, call_text, is_call_start
from outrider.types import (
    Completion,
    FinishReason,
    SpeculationStats,
    TextChunk,
    Timing,
    TokenLogprobs,
    Usage,
)

EOS = 0xFF  # no byte of a text
STOP_IDS = frozenset({EOS})
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("a", "b-2")
]


class Letters:
    """A tokeniser with one token per byte; token 0 ends an answer."""

    special_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == EOS else bytes([token_id])


WRITER = TokenWriter(Letters())  # type: ignore[arg-type]


def completion(
    text: str = "",
    reason: FinishReason = FinishReason.STOP,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    error: str | None = None,
) -> Completion:
    return Completion(
        text=text,
        token_ids=tuple(text.encode()),
        finish_reason=reason,
        usage=Usage(3, len(text)),
        method="off",
        speculation=SpeculationStats(),
        timing=Timing(0, 0, 0, 0, 0, 0),
        fingerprint="fake",
        logprobs=logprobs,
        error=error,
    )


def answers(count: int = 1, *, streams: bool = True, limit: int = 10_000) -> Answers:
    requests = [SimpleNamespace() for _ in range(count)]
    return Answers(
        requests,  # type: ignore[arg-type]
        streams=streams,
        max_buffered_bytes=limit,
        on_abort=lambda _: None,
    )


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)] or [""]


def entries_of(text: str) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(byte, -0.5, ((byte, -0.5),)) for byte in text.encode())


def test_completions_come_in_the_order_of_the_requests() -> None:
    async def main() -> list[str]:
        made = answers(2, streams=False)
        made.put(1, TextChunk("", (), completion("second")))
        made.put(0, TextChunk("", (), completion("first")))
        return [each.text for each in await made.completions()]

    assert ["first", "second"] == asyncio.run(main())


def test_a_buffer_that_overflows_aborts_once_and_ends_with_an_error() -> None:
    aborted = []

    async def main() -> None:
        made = answers(limit=1000)
        made._on_abort = aborted.append
        for _ in range(20):
            made.put(0, TextChunk("x" * 50, (1,)))
        with pytest.raises(ApiError, match="more slowly"):
            await made.take()

    asyncio.run(main())
    assert 1 == len(aborted)


def test_a_buffer_that_is_taken_in_time_never_overflows() -> None:
    async def main() -> str:
        made = answers(limit=1000)
        text = ""
        for _ in range(100):
            made.put(0, TextChunk("x" * 50, (1,)))
            text += "".join(chunk.text for _, chunk in await made.take())
        return text

    assert "x" * 5000 == asyncio.run(main())


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_answer_that_did_not_end_well_is_an_error(reason: FinishReason) -> None:
    async def main() -> None:
        made = answers()
        made.put(0, TextChunk("", (), completion(reason=reason, error="not finite")))
        await made.completions()

    with pytest.raises(ApiError) as caught:
        asyncio.run(main())
    assert 500 == caught.value.status


def test_an_error_reaches_who_already_waits() -> None:
    async def main() -> None:
        made = answers()
        waiting = asyncio.create_task(made.take())
        await asyncio.sleep(0)
        made.fail(failed("the engine has failed"))
        await asyncio.wait_for(waiting, 5)

    with pytest.raises(ApiError, match="the engine has failed"):
        asyncio.run(main())


@pytest.mark.parametrize("steps", [[30], [1] * 30, [8, 1, 1, 12, 8], [15, 15]], ids=str)
def test_at_a_fixed_cadence_the_number_of_batches_tells_nothing_about_steps(
    steps: list[int],
) -> None:
    """The same text over the same time, in other portions."""
    duration_s, interval_s = 0.4, 0.1

    async def main() -> list[int]:
        made = answers()

        async def write() -> None:
            for index, count in enumerate(steps):
                chunk = TextChunk("x" * count, tuple([1] * count))
                made.put(0, chunk)
                await asyncio.sleep(duration_s * count / sum(steps))
                if index == len(steps) - 1:
                    made.put(0, TextChunk("", (), completion("x" * sum(steps))))

        task = asyncio.create_task(write())
        sizes = [
            sum(len(chunk.text) for _, chunk in batch) async for batch in batches(made, interval_s)
        ]
        await task
        return sizes

    sizes = asyncio.run(main())

    assert 30 == sum(sizes)
    # The first token at once, then every 0.1 s until 0.4 s have passed.
    assert 5 <= len(sizes) <= 7


def test_without_a_cadence_a_batch_goes_out_as_it_comes() -> None:
    async def main() -> list[int]:
        made = answers()
        made.put(0, TextChunk("a", (1,)))
        sizes = []
        async for batch in batches(made, 0.0):
            sizes.append(len(batch))
            if len(sizes) == 1:
                made.put(0, TextChunk("b", (1,)))
                made.put(0, TextChunk("", (), completion("ab")))
        return sizes

    assert [1, 2] == asyncio.run(main())


@pytest.mark.parametrize("interval_s", [0.0, 0.02], ids=["as it comes", "at a cadence"])
@pytest.mark.parametrize("is_sending", [True, False], ids=["sending", "waiting"])
def test_a_stream_that_fails_never_ends_as_if_it_were_done(
    interval_s: float, is_sending: bool
) -> None:
    """Whether the engine dies while a chunk is awaited or while a slow client takes one."""

    async def main() -> list[bytes]:
        made = answers()
        made.put(0, TextChunk("hello", (1,)))
        sent: list[bytes] = []

        def die() -> None:
            made.fail(failed("the engine has failed", code="engine_dead"))
            made.num_open = 0

        async def events():
            async for batch in batches(made, interval_s):
                yield {"text": "".join(chunk.text for _, chunk in batch)}

        async def send(message) -> None:
            if message["type"] == "http.response.body":
                sent.append(message["body"])
            if len(sent) == 1 and is_sending:
                die()

        async def receive():
            await asyncio.Event().wait()

        if not is_sending:
            asyncio.get_running_loop().call_later(0.05, die)
        stream = EventStream(events(), made, write_timeout_s=5.0)
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 5)
        return sent

    first, *_, last, end = asyncio.run(main())

    assert b'data: {"text":"hello"}\n\n' == first
    assert b'"code":"engine_dead"' in last
    assert b"" == end
    assert DONE != last


def chat_pieces(
    text: str, cuts: Sequence[int], plan: ToolPlan | None, *, logprobs: bool
) -> tuple[dict, dict]:
    """A whole chat choice, and the same put together from its stream's deltas."""
    entries = (*entries_of(text), TokenLogprobs(EOS, -0.1)) if logprobs else None
    done = completion(text, logprobs=entries)
    whole = chat_choice(0, done, plan, WRITER, STOP_IDS)
    deltas = ChatDeltas(0, plan, WRITER, STOP_IDS, wants_logprobs=logprobs)
    parts = pieces(text, cuts)
    content: str | None = None
    streamed: dict = {"logprobs": [], "tool_calls": []}
    at = 0
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        size = len(part.encode())
        new = None if entries is None else entries[at : None if is_last else at + size]
        at += size
        choice = deltas.feed(part, new, done if is_last else None)
        if choice is None:
            continue
        if "content" in choice["delta"]:
            content = (content or "") + choice["delta"]["content"]
        streamed["tool_calls"] += choice["delta"].get("tool_calls", [])
        streamed["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        streamed["finish_reason"] = choice["finish_reason"]
    return whole, {**streamed, "content": content}


@given(st.text(), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_the_pieces_of_a_chat_stream_add_up_to_the_whole(
    text: str, cuts: list[int], logprobs: bool
) -> None:
    whole, streamed = chat_pieces(text, cuts, None, logprobs=logprobs)

    assert whole["message"]["content"] == streamed["content"] == text
    assert whole["finish_reason"] == streamed["finish_reason"] == "stop"
    expected = whole["logprobs"]["content"] if logprobs else []
    assert expected == streamed["logprobs"]
    if logprobs:
        assert text.encode() == bytes(byte for entry in expected for byte in entry["bytes"])


CALLS = call_text("a", '{"x": [1, "</tool>"]}') + call_text("b-2", "{}")


@given(
    st.sampled_from([CALLS, call_text("a", '"é"'), "<tool", "<tool_call>{", " <tool_call>", "no"]),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_calls_are_the_same_streamed_and_whole(text: str, cuts: list[int], logprobs: bool) -> None:
    plan = ToolPlan.of(TOOLS, "auto", None)
    whole, streamed = chat_pieces(text, cuts, plan, logprobs=logprobs)
    message = whole["message"]

    assert whole["finish_reason"] == streamed["finish_reason"]
    assert message["content"] == streamed["content"]
    assert [call["function"] for call in message.get("tool_calls", [])] == [
        call["function"] for call in streamed["tool_calls"]
    ]
    assert ("tool_calls" == whole["finish_reason"]) == text.endswith("</tool_call>")


@given(
    st.text(), st.text(), st.lists(st.integers(0, 200), max_size=8), st.sampled_from([True, False])
)
def test_the_pieces_of_a_text_stream_add_up_to_the_whole(
    prompt: str, text: str, cuts: list[int], logprobs: bool
) -> None:
    entries = entries_of(text) if logprobs else None
    done = completion(text, reason=FinishReason.LENGTH, logprobs=entries)
    whole = text_choice(0, done, prompt, WRITER, STOP_IDS)
    deltas = TextDeltas(0, prompt, WRITER, STOP_IDS, wants_logprobs=logprobs)
    parts, at, got = pieces(text, cuts), 0, []
    for number, part in enumerate(parts):
        size = len(part.encode())
        new = None if entries is None else entries[at : at + size]
        at += size
        got.append(deltas.feed(part, new, done if number == len(parts) - 1 else None))

    assert prompt + text == whole["text"] == "".join(choice["text"] for choice in got)
    assert "length" == whole["finish_reason"] == got[-1]["finish_reason"]
    if logprobs:
        for key, values in whole["logprobs"].items():
            assert values == [value for choice in got for value in choice["logprobs"][key]]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_ids_of_an_answer_come_once_and_only_if_they_were_asked_for(is_wanted: bool) -> None:
    done = completion("ab")
    chat = ChatDeltas(0, None, WRITER, STOP_IDS, wants_logprobs=False, wants_ids=is_wanted)
    text = TextDeltas(0, "", WRITER, STOP_IDS, wants_logprobs=False, wants_ids=is_wanted)
    for deltas in (chat, text):
        first, last = deltas.feed("a", None, None), deltas.feed("b", None, done)
        assert first is not None
        assert last is not None
        assert "token_ids" not in first
        assert (list(done.token_ids) if is_wanted else None) == last.get("token_ids")
    assert done.token_ids


def test_offsets_count_characters_and_begin_behind_those_before() -> None:
    written = WRITER.completion(entries_of("aé€b"), 10)

    assert [10, 11, 12, 12, 13, 13, 13] == written["text_offset"]


def test_chunks_of_one_answer_merge_into_one_piece() -> None:
    one, two = TokenLogprobs(1, -1.0), TokenLogprobs(2, -2.0)
    done = completion("ab")
    news = merged(
        [
            (0, TextChunk("a", (1,), logprobs=(one,))),
            (1, TextChunk("z", (9,))),
            (0, TextChunk("b", (2,), done, logprobs=(two,))),
        ]
    )

    assert {0: TextChunk("ab", (1, 2), done, (one, two)), 1: TextChunk("z", (9,))} == news


def test_a_prompt_counts_once_and_was_cached_as_far_as_none_of_its_answers_computed_it() -> None:
    totals = Totals([10, 20], num_choices=2)
    for index, cached in enumerate([9, 4, 0, 19]):
        totals.add(index, replace(completion("ab"), usage=Usage(1, 2, cached)))
    usage = totals.usage()

    assert {"cached_tokens": 4} == usage["prompt_tokens_details"]
    assert (30, 8, 38) == tuple(
        usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("text", ()),
        (call_text("a", "{}"), (("a", "{}"),)),
        (call_text("a", '{"t": "\\"}"}') * 2, (("a", '{"t": "\\"}"}'),) * 2),
        (call_text("a", "{}") + "and text", ()),
        (call_text("a", "{")[:-3], ()),
        (call_text("a", "not json"), ()),
        (OPEN + "{}</tool_call>", ()),
    ],
)
def test_calls_are_read_back_or_left_as_text(text: str, expected: tuple) -> None:
    plan = ToolPlan.of(TOOLS, None, None)
    assert plan is not None

    assert expected == tuple((call.name, call.arguments) for call in plan.parse(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", True), ("<too", True), (OPEN, True), (OPEN + "{", True), ("<b", False), ("a<", False)],
)
def test_what_may_become_a_call_is_held_back(text: str, expected: bool) -> None:
    assert expected == is_call_start(text)


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        ("auto", None, (True, True)),
        (None, False, (False, True)),
        ("required", True, (True, False)),
        ("required", False, (False, False)),
    ],
)
def test_the_choice_decides_what_the_answer_may_be(choice, parallel, expected) -> None:
    plan = ToolPlan.of(TOOLS, choice, parallel)
    assert plan is not None
    wanted = json.loads(plan.grammar().text)

    assert expected == (wanted["repeats"], wanted["or_text"])
    assert ToolPlan.of(TOOLS, "none", None) is None
    assert ToolPlan.of([], "auto", None) is None


def test_what_the_grammar_lets_through_is_read_back_as_a_call() -> None:
    """Both know the notation: tags around JSON are a call with that JSON as arguments."""
    plan = ToolPlan.of(TOOLS, "required", None)
    assert plan is not None
    tags = json.loads(plan.grammar().text)["tags"]
    text = "".join(f"{tag['begin']}{{}}{tag['end']}" for tag in tags)

    assert [("a", "{}"), ("b-2", "{}")] == [(c.name, c.arguments) for c in plan.parse(text)]
