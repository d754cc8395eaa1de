from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import decoders

from outrider.config import SamplingParams
from outrider.output import OutputStream, TextDecoder
from outrider.types import FinishReason, TokenLogprobs

EOS = 0  # in every vocabulary below; EOS and PAD are special tokens
PAD = 1
NO_LIMIT = 10_000
BYTE_TOKENS = {char: [f"<0x{byte:02X}>" for byte in char.encode()] for char in "\né你😀"}


class ByteDecoder:
    """A byte-level tokeniser: every token is a piece of a UTF-8 (or broken) byte string."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = [b"", b"", *pieces]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = b"".join(
            (b"" if skip_special_tokens else b"<special>")
            if id_ in (EOS, PAD)
            else self.pieces[id_]
            for id_ in ids
        )
        return shown.decode("utf-8", errors="replace")


class SentencePieceDecoder:
    """Llama 2's decoder: metaspace for space, byte fallback, the text's first space stripped."""

    def __init__(self, pieces: Iterable[str], num_stripped: int = 1) -> None:
        self.pieces = ["<s>", "</s>", *pieces]
        self.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=num_stripped, right=0),
            ]
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [id_ for id_ in ids if not (skip_special_tokens and id_ in (EOS, PAD))]
        return self.decoder.decode([self.pieces[id_] for id_ in kept])


class CountingDecoder:
    """Counts how many ids its inner decoder was given."""

    def __init__(self, inner: TextDecoder) -> None:
        self.inner = inner
        self.longest = 0
        self.total = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        self.total += len(ids)
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


def stream_of(
    text: str | bytes, params: SamplingParams | None = None, size: int = 1
) -> tuple[OutputStream, list[int]]:
    """An output stream and the tokens of this text, cut every ``size`` bytes."""
    data = text.encode() if isinstance(text, str) else text
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    stream = OutputStream(
        ByteDecoder(pieces), params or SamplingParams(), frozenset({EOS}), NO_LIMIT
    )
    return stream, list(range(2, 2 + len(pieces)))


def run(stream: OutputStream, ids: Sequence[int]) -> FinishReason | None:
    """Push until the answer ends or the tokens do."""
    for id_ in ids:
        if reason := stream.push(id_):
            return reason
    return None


def expected_answer(
    decoder: ByteDecoder, ids: Sequence[int], params: SamplingParams, max_output: int
) -> tuple[str, int, FinishReason | None]:
    """Plain twin: decode every beginning anew and look for events; (text, tokens, reason)."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    seen = ""  # settled text of the tokens before
    for count in range(1, len(ids) + 1):
        is_stop_id = ids[count - 1] in stop_ids
        is_last = is_stop_id or count == max_output
        text = decoder.decode(ids[: count - 1] if is_stop_id else ids[:count])
        if not is_last:
            tail = len(text) - len(text.rstrip("\ufffd"))
            text = text[: len(text) - min(3, tail)]
        matches = [
            start
            for stop in params.stop
            for start in range(len(text) - len(stop) + 1)
            if text.startswith(stop, start) and start + len(stop) > len(seen)
        ]
        if matches and count >= params.min_tokens:
            return text[: min(matches)], count, FinishReason.STOP
        if is_last:
            return text, count, FinishReason.STOP if is_stop_id else FinishReason.LENGTH
        seen = text
    return decoder.decode(ids), len(ids), None


# --- what ends an answer ---------------------------------------------------------------------


def test_end_of_sequence_ends_the_text_and_adds_none():
    stream, ids = stream_of("done")

    assert FinishReason.STOP == run(stream, [*ids, EOS])
    assert "done" == stream.text
    assert [*ids, EOS] == stream.token_ids


def test_ignore_eos_goes_on_but_stop_token_ids_still_end():
    params = SamplingParams(ignore_eos=True, stop_token_ids=(4,))
    stream, _ = stream_of("abc", params)

    assert FinishReason.STOP == run(stream, [2, EOS, 3, EOS, 4, 2])
    assert "ab" == stream.text
    assert [2, EOS, 3, EOS, 4] == stream.token_ids


def test_a_stop_string_across_tokens_cuts_the_text_but_not_the_tokens():
    stream, ids = stream_of("one END two", SamplingParams(stop=("END",)), size=2)

    assert FinishReason.STOP == run(stream, ids)
    assert "one " == stream.text
    assert ids[:4] == stream.token_ids  # "on" "e " "EN" "D "


def test_of_several_stop_strings_in_one_token_the_earliest_start_wins():
    stream, ids = stream_of("a<long stop>b", SamplingParams(stop=("stop", "<long stop>")), size=99)

    assert FinishReason.STOP == run(stream, ids)
    assert "a" == stream.text


def test_of_several_occurrences_in_one_token_the_first_cuts_the_text():
    stream, ids = stream_of("a<>b<>c", SamplingParams(stop=("<>",)), size=99)

    assert FinishReason.STOP == run(stream, ids)
    assert "a" == stream.text


def test_a_stop_string_that_is_complete_first_wins_over_a_longer_one():
    stream, ids = stream_of("xabc", SamplingParams(stop=("abc", "ab")))

    assert FinishReason.STOP == run(stream, ids)
    assert "x" == stream.text
    assert 3 == len(stream.token_ids)


def test_a_stop_string_wins_over_the_length_at_the_same_token():
    decoder = ByteDecoder([b"a", b"b", b"c"])
    stream = OutputStream(decoder, SamplingParams(stop=("c",)), frozenset({EOS}), 3)

    assert FinishReason.STOP == run(stream, [2, 3, 4])
    assert "ab" == stream.text


def test_a_stop_id_wins_over_the_length_at_the_same_token():
    decoder = ByteDecoder([b"a"])
    stream = OutputStream(decoder, SamplingParams(), frozenset({EOS}), 2)

    assert FinishReason.STOP == run(stream, [2, EOS])


@pytest.mark.parametrize("max_output", [1, 2, 3])
def test_the_length_ends_the_text_with_exactly_so_many_tokens(max_output: int):
    decoder = ByteDecoder([b"a", b"b", b"c", b"d"])
    stream = OutputStream(decoder, SamplingParams(), frozenset({EOS}), max_output)

    assert FinishReason.LENGTH == run(stream, [2, 3, 4, 5])
    assert "abcd"[:max_output] == stream.text
    assert max_output == len(stream.token_ids)


def test_a_stop_string_within_min_tokens_is_text_like_any_other():
    stream, ids = stream_of("..a..b..", SamplingParams(stop=("..",), min_tokens=3))

    assert FinishReason.STOP == run(stream, ids)
    assert "..a" == stream.text
    assert 5 == len(stream.token_ids)


def test_a_stop_string_that_begins_within_min_tokens_ends_the_text_where_it_begins():
    stream, ids = stream_of("aab", SamplingParams(stop=("aab",), min_tokens=3))

    assert FinishReason.STOP == run(stream, ids)
    assert "" == stream.text


def test_a_stop_string_may_overlap_one_that_came_too_early():
    stream, ids = stream_of("aaa", SamplingParams(stop=("aa",), min_tokens=3))

    assert FinishReason.STOP == run(stream, ids)
    assert "a" == stream.text


class CompleteAfter:
    """A grammar whose texts are so many tokens long."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        return len(output_ids) == self.num_tokens


@pytest.mark.parametrize(
    ("params", "max_output", "text", "reason"),
    [
        ({}, 9, "abc", FinishReason.STOP),
        ({}, 3, "abc", FinishReason.STOP),  # at the same token as the length
        ({}, 2, "ab", FinishReason.LENGTH),
        ({"stop": ("bc",)}, 9, "a", FinishReason.STOP),  # at the same token as a stop string
        ({"stop": ("b",)}, 9, "a", FinishReason.STOP),
        ({"stop": ("cd",)}, 9, "abc", FinishReason.STOP),  # what was held back for it is flushed
        ({"stop_token_ids": (4,)}, 9, "ab", FinishReason.STOP),
        ({"min_tokens": 5, "max_tokens": 9}, 9, "abc", FinishReason.STOP),
    ],
)
def test_a_complete_grammar_ends_the_text_behind_ids_and_strings_and_before_the_length(
    params: dict[str, Any], max_output: int, text: str, reason: FinishReason
):
    stream = OutputStream(
        ByteDecoder([b"a", b"b", b"c", b"d"]),
        SamplingParams(**params),
        frozenset({EOS}),
        max_output,
        CompleteAfter(3),
    )

    assert reason == run(stream, [2, 3, 4, 5])
    assert text == stream.text
    assert text == stream.take_text()


def test_logprobs_go_with_their_tokens():
    stream, ids = stream_of("one END two", SamplingParams(stop=("END",)), size=2)
    logprobs = [TokenLogprobs(token, -0.5 * token) for token in ids]
    for token, entry in zip(ids, logprobs, strict=True):
        if stream.push(token, entry):
            break

    assert len(ids) > len(stream.token_ids)
    assert logprobs[: len(stream.token_ids)] == stream.logprobs


def test_no_token_may_follow_the_end():
    stream, _ = stream_of("a")
    stream.push(EOS)

    with pytest.raises(AssertionError):
        stream.push(2)


def test_close_flushes_what_was_held_back():
    stream, ids = stream_of("abEN", SamplingParams(stop=("END",)))
    run(stream, ids)

    assert "ab" == stream.take_text()
    stream.close(FinishReason.ABORT)
    assert "EN" == stream.take_text()
    assert "abEN" == stream.text
    assert FinishReason.ABORT == stream.finish_reason


# --- what is printable when ------------------------------------------------------------------


def test_a_character_is_held_back_until_its_last_byte():
    stream, ids = stream_of("a😀b")
    pieces = []
    for id_ in ids:
        stream.push(id_)
        pieces.append(stream.take_text())

    assert ["a", "", "", "", "😀", "b"] == pieces


def test_text_before_an_unfinished_character_is_not_held_back():
    decoder = ByteDecoder(["hello 你".encode()[:-1]])
    stream = OutputStream(decoder, SamplingParams(stop=("hello",)), frozenset(), NO_LIMIT)

    assert FinishReason.STOP == stream.push(2)


def test_ending_inside_a_character_flushes_a_replacement_character():
    stream, ids = stream_of("a😀".encode()[:3])
    run(stream, ids)
    stream.push(EOS)

    assert "a\ufffd" == stream.text


def test_the_beginning_of_a_stop_string_is_held_back_and_released_when_it_is_none():
    stream, ids = stream_of("a<<b", SamplingParams(stop=("<<<",)))
    pieces = []
    for id_ in ids:
        stream.push(id_)
        pieces.append(stream.take_text())

    assert ["a", "", "", "<<b"] == pieces


def test_endless_special_tokens_do_not_lengthen_the_window():
    decoder = CountingDecoder(ByteDecoder([b"a"]))
    stream = OutputStream(decoder, SamplingParams(ignore_eos=True), frozenset({EOS}), 501)
    run(stream, [2, *[EOS] * 500])

    assert "a" == stream.text
    assert 4 * 501 >= decoder.total - 501


@pytest.mark.parametrize("pieces", [[b"word "], [b"\xff"], [b"\xf0\x9f\x98"], [b"\xf0", b"\x9f"]])
def test_the_cost_of_a_token_does_not_grow_with_the_text(pieces: list[bytes]):
    """Broken bytes included: only the one decoding at the end sees the whole answer."""
    decoder = CountingDecoder(ByteDecoder(pieces))
    stream = OutputStream(decoder, SamplingParams(), frozenset({EOS}), NO_LIMIT)
    for index in range(2_000):
        stream.push(2 + index % len(pieces))

    assert 64 >= decoder.longest


def test_the_window_is_trimmed_only_at_the_edges_of_byte_fallback_characters():
    decoder = CountingDecoder(SentencePieceDecoder(BYTE_TOKENS["你"]))
    stream = OutputStream(decoder, SamplingParams(), frozenset({EOS}), NO_LIMIT)
    for _ in range(100):
        run(stream, [2, 3, 4])

    assert "你" * 100 == stream.take_text()
    assert 64 >= decoder.longest


def test_a_decoder_that_strips_all_leading_spaces_keeps_those_within():
    stream = OutputStream(
        SentencePieceDecoder(["a", "▁"], num_stripped=99), SamplingParams(), frozenset(), NO_LIMIT
    )
    run(stream, [3, 2, *[3] * 60, 2])

    assert "a" + " " * 60 + "a" == stream.take_text()


class RevisingDecoder(ByteDecoder):
    """Breaks the contract: the text of a whole answer is not that of its beginning plus more."""

    def __init__(self, before: str, after: str) -> None:
        super().__init__([b"a"])
        self.before, self.after = before, after

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = super().decode(ids, skip_special_tokens)
        return self.before + text + self.after if len(ids) == 100 else text


@pytest.mark.parametrize(("before", "after"), [("", "!"), ("!", ""), ("!", "!")])
def test_decoding_all_ids_has_the_last_word_unless_it_contradicts_what_was_said(before, after):
    stream = OutputStream(RevisingDecoder(before, after), SamplingParams(), frozenset(), 100)
    run(stream, [2] * 100)

    assert "a" * 100 + (after if not before else "") == stream.text
    assert stream.text == stream.take_text()


# --- properties ------------------------------------------------------------------------------

CHARACTERS = st.sampled_from(["a", "b", "ab", " ", "\n", "é", "你", "😀", "\ufffd"])
BROKEN = st.sampled_from([b"\xff", b"\x80", b"\xe4", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xc3"])
PIECES = st.lists(
    st.one_of(
        st.lists(CHARACTERS, min_size=1, max_size=4).map(lambda chars: "".join(chars).encode()),
        BROKEN,
        st.binary(min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=8,
)
STOPS = st.lists(st.text("ab 你\ufffd", min_size=1, max_size=4), max_size=3)


@st.composite
def answers(draw: st.DrawFn):
    """A byte-level vocabulary, ids in it, stop rules and a length."""
    data = b"".join(draw(PIECES))
    cuts = draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=12))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    decoder = ByteDecoder(data[a:b] for a, b in pairwise(bounds))
    last = len(decoder.pieces) - 1
    in_order = st.just(list(range(2, last + 1)))
    ids = draw(in_order) + draw(st.lists(st.integers(0, last), max_size=60))
    max_output = draw(st.integers(1, len(ids)))
    params = SamplingParams(
        stop=tuple(draw(STOPS)),
        stop_token_ids=tuple(draw(st.lists(st.integers(2, last), max_size=1))),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 6)),
    )
    return decoder, ids, params, max_output


@given(answers(), st.data())
def test_pieces_add_up_and_events_are_those_of_plain_decoding(answer, data: st.DataObject):
    """For every pattern of push and take: the answer of the quadratic twin, piece by piece."""
    decoder, ids, params, max_output = answer
    stream = OutputStream(decoder, params, frozenset({EOS}), max_output)
    pieces = []
    for id_ in ids:
        reason = stream.push(id_)
        if data.draw(st.booleans()):
            pieces.append(stream.take_text())
            assert "".join(pieces) == stream.text
        if reason is not None:
            break
    pieces.append(stream.take_text())
    text, count, reason = expected_answer(decoder, ids, params, max_output)

    assert (text, ids[:count], reason) == (stream.text, stream.token_ids, stream.finish_reason)
    assert text == "".join(pieces)


@given(PIECES, st.lists(st.integers(0, 9), min_size=40, max_size=150))
@example([b"\xf0", b"\x9f", b"\x98", b"\x80"], [2, 3, 4, 5] * 30)
@example([b"\xff", b"a"], [2] * 70 + [3] + [2] * 40)
@example([b"\xe4", b"\xbd", b"\xa0"], [PAD, 2, PAD, 3, PAD, 4] * 20)
def test_long_byte_level_text_equals_one_decoding_of_all_ids(pieces, choices):
    """The window is trimmed many times; nothing is lost, doubled or spoiled at its edges."""
    decoder = ByteDecoder(pieces)
    ids = [choice % len(decoder.pieces) for choice in choices]
    stream = OutputStream(decoder, SamplingParams(ignore_eos=True), frozenset(), len(ids))
    streamed = ""
    for id_ in ids[:-1]:
        stream.push(id_)
        streamed += stream.take_text()
        unfinished = decoder.decode(stream.token_ids)[len(streamed) :]

        assert decoder.decode(stream.token_ids).startswith(streamed)
        assert "\ufffd" * len(unfinished) == unfinished
        assert 3 >= len(unfinished)
    stream.push(ids[-1])

    assert decoder.decode(ids) == stream.text


@given(
    st.lists(
        st.sampled_from(
            [["▁"], ["▁▁"], ["▁a"], ["a"], ["▁", "▁b"], ["</s>"], *BYTE_TOKENS.values()]
        ),
        min_size=1,
        max_size=80,
    )
)
@example([["</s>"]] * 3 + [["▁a"]])
@example([["▁"]] * 70 + [["a"]])
@example([BYTE_TOKENS["你"]] * 40)
@example([["a"], *[BYTE_TOKENS["😀"], ["</s>"]] * 30])
def test_sentencepiece_text_equals_one_decoding_of_all_ids(groups: list[list[str]]):
    """The first space is stripped once, no later one; byte-fallback characters arrive whole."""
    tokens = [token for group in groups for token in group]
    names = sorted({*tokens} - {"</s>"})
    decoder = SentencePieceDecoder(names)
    ids = [PAD if token == "</s>" else 2 + names.index(token) for token in tokens]
    stream = OutputStream(decoder, SamplingParams(), frozenset({EOS}), NO_LIMIT)
    pieces = []
    for id_ in ids:
        stream.push(id_)
        pieces.append(stream.take_text())

    assert not any("\ufffd" in piece for piece in pieces)
    stream.push(EOS)
    assert decoder.decode(ids) == stream.text


@given(st.lists(st.sampled_from(["▁a", "▁", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>"]), max_size=80))
def test_broken_byte_fallback_never_takes_back_what_it_said(tokens: list[str]):
    """There a bad byte spoils the characters before it, which may be printed already."""
    names = sorted(set(tokens))
    decoder = SentencePieceDecoder(names)
    stream = OutputStream(decoder, SamplingParams(), frozenset({EOS}), NO_LIMIT)
    pieces = []
    for token in tokens:
        stream.push(2 + names.index(token))
        pieces.append(stream.take_text())
    stream.push(EOS)
    pieces.append(stream.take_text())

    assert "".join(pieces) == stream.text
    if "�" not in decoder.decode(stream.token_ids):
        assert decoder.decode(stream.token_ids) == stream.text


@given(answers())
def test_text_never_contains_a_stop_string_that_was_free_to_act(answer):
    decoder, ids, params, max_output = answer
    assume(params.min_tokens <= 1)
    stream = OutputStream(decoder, params, frozenset({EOS}), max_output)
    run(stream, ids)
    if stream.finish_reason is None:
        stream.close(FinishReason.ABORT)

    assert not any(stop in stream.text for stop in params.stop)
