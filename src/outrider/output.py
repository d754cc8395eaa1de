"""From emitted tokens to text: detokenise, apply the stop rules, hand out printable pieces.

Owns what a request's answer looks like and when it ends. Stands at the end of the flow, below
``engine`` and above nothing but settings and types; knows no tensors, no scheduler, and of the
tokeniser only :class:`TextDecoder`.

Tokens come in one at a time, however many a verify step emitted, so an answer cannot depend on
how its tokens were grouped. Each token's text passes three gates::

    ids ── _WindowDecoder ──> settled text ── stop strings ──> printable ── take_text() ──> caller
           holds back an                      hold back what                holds nothing
           unfinished character               may begin a stop

What one gate lets through is never taken back, hence the pieces always add up to ``text``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.config import SamplingParams
from outrider.types import FinishReason, TokenLogprobs

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so at most three wait for the rest. A byte-level decoder
# shows them as one replacement character, a byte-fallback decoder as one each.
_MAX_UNFINISHED = 3
# Tokens that a trimmed window keeps. Sixteen tokens are at least sixteen bytes, more than the bytes
# that can be withheld (three runs of three) and those that a cut inside a character spoils (three).
_WINDOW_KEEP = 16
_WINDOW_LIMIT = 2 * _WINDOW_KEEP


class TextDecoder(Protocol):
    """The part of a tokeniser that turns ids into text.

    The text of a longer sequence may differ from that of its beginning only in unfinished
    characters at the end (shown as U+FFFD).
    """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these ids, special tokens left out unless asked for."""
        ...


class Completing(Protocol):
    """The part of a grammar that ends an answer."""

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether this output is all that was asked for, and nothing can follow it."""
        ...


class OutputStream:
    """One request's answer: takes tokens, says when it ends, gives its text in pieces.

    The earliest event ends the answer. At one and the same token an end-of-sequence or stop id
    comes first, then a stop string, then the end of a grammar, then the length. Of several stop
    strings that one token completes, the one that starts first cuts the text. A stop string that is
    complete before ``min_tokens`` tokens are out is text like any other.

    Args:
        decoder: turns ids into text.
        params: the stop rules.
        eos_ids: the model's end-of-sequence ids; without effect under ``ignore_eos``.
        max_output: most tokens to take; the smaller of ``max_tokens`` and the room in the context.
        grammar: what ends the answer when it is complete, if anything.

    Attributes:
        token_ids: every token taken, the one that ended the answer included.
        logprobs: an entry for each of them; stays empty where none are asked for.
        finish_reason: None while the answer goes on.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        params: SamplingParams,
        eos_ids: frozenset[int],
        max_output: int,
        grammar: Completing | None = None,
    ) -> None:
        assert max_output >= 1
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._decoder = decoder
        self._window = _WindowDecoder(decoder)
        self._stop_strings = [_StopString(text) for text in params.stop]
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= eos_ids
        self._min_tokens = params.min_tokens
        self._max_output = max_output
        self._grammar = grammar
        self._printable: list[str] = []
        self._num_taken = 0
        self._held = ""

    @property
    def text(self) -> str:
        """The answer, cut before a stop string; while it goes on, as far as it is printable."""
        return "".join(self._printable)

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> FinishReason | None:
        """Take one emitted token; returns why the answer ends with it, or None to go on.

        After a reason was returned no further token may be pushed.
        """
        assert self.finish_reason is None, "the answer has ended"
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self._stop_ids:
            self._flush(self.token_ids[:-1])
            self.finish_reason = FinishReason.STOP
        elif self._pass_on(self._window.push(token)):
            self.finish_reason = FinishReason.STOP
        elif self._grammar is not None and self._grammar.is_complete(self.token_ids):
            self._flush(self.token_ids)
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self._max_output:
            has_stopped = self._flush(self.token_ids)
            self.finish_reason = FinishReason.STOP if has_stopped else FinishReason.LENGTH
        return self.finish_reason

    def close(self, reason: FinishReason) -> None:
        """End an unfinished answer from outside (abort, error); what was held back is flushed."""
        assert self.finish_reason is None, "the answer has ended"
        self._flush(self.token_ids)
        self.finish_reason = reason

    def take_text(self) -> str:
        """The next printable piece, "" if there is none yet; all pieces together are ``text``."""
        piece = "".join(self._printable[self._num_taken :])
        self._num_taken = len(self._printable)
        return piece

    def _pass_on(self, new_text: str) -> bool:
        """Move settled text through the stop strings; True if one of them cuts it."""
        text = self._held + new_text
        starts = [
            len(self._held) + end - len(stop.text)
            for stop in self._stop_strings
            if (end := stop.feed(new_text)) is not None
        ]
        has_stopped = bool(starts) and len(self.token_ids) >= self._min_tokens
        if has_stopped:
            self._held = ""
            self._print(text[: min(starts)])
        else:
            num_held = max((stop.num_matched for stop in self._stop_strings), default=0)
            self._held = text[len(text) - num_held :]
            self._print(text[: len(text) - num_held])
        return has_stopped

    def _flush(self, ids: Sequence[int]) -> bool:
        """Let go of all text held back, now that no token follows; True if a stop string cuts it.

        One decoding of all ids has the last word on what is still to come. It can contradict the
        pieces only if the decoder breaks its contract (byte fallback does, when an invalid byte
        spoils the whole run of byte tokens before it); then what was said stands.
        """
        settled = self.text + self._held
        whole = self._decoder.decode(ids)
        rest = whole[len(settled) :] if whole.startswith(settled) else self._window.withheld
        has_stopped = self._pass_on(rest)
        self._print(self._held)
        self._held = ""
        return has_stopped

    def _print(self, piece: str) -> None:
        if piece:
            self._printable.append(piece)


class _WindowDecoder:
    """Decodes token by token at a cost that does not grow with the text.

    Only a window of recent ids is decoded::

        ids      ... | x x x x x x x x x x x
        forgotten    | window
        text         | given      | withheld    (unfinished characters, as U+FFFD)

    Decoding from the middle may spoil the front of the window (a cut character, a leading space
    that a SentencePiece decoder strips), which is why ids leave the window only when enough text
    that was already given follows the cut, and lengths count from the window's end.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._text = ""
        self._given = ""
        self._num_waits = 0

    @property
    def withheld(self) -> str:
        """What the window shows beyond the text given out."""
        return self._text[len(self._given) :]

    def push(self, token: int) -> str:
        """Take one id; returns the text that is settled by it."""
        text = self._decoder.decode([*self._ids, token])
        if text == self._text and self._is_special(token):
            return ""  # leaves no trace in any decoding, so it need not fill the window
        self._ids.append(token)
        self._text = text
        is_finished = not text.endswith(_REPLACEMENT)
        settled = text[: len(text) - _num_unfinished(text)]
        if not settled.startswith(self._given) and not is_finished:
            # Byte fallback shows a whole run of byte tokens as U+FFFD while its last character is
            # incomplete. Three more bytes complete it; later the run is known to be broken.
            self._num_waits += 1
            if self._num_waits <= _MAX_UNFINISHED:
                return ""
        self._num_waits = 0
        num_given = len(self._given)
        self._given = text[: max(num_given, len(settled))]
        if len(self._ids) >= _WINDOW_LIMIT:
            self._trim()
        return text[num_given : len(settled)]

    def _trim(self) -> None:
        """Forget the front of the window where that provably leaves the given text's end intact.

        A cut inside a character leaves up to three stray bytes; a cut inside a byte-fallback run
        can spoil all of it, so up to four places are tried.
        """
        num_withheld = len(self.withheld)
        for keep in range(_WINDOW_KEEP, _WINDOW_KEEP + 4):
            ids = self._ids[-keep:]
            text = self._decoder.decode(ids)
            num_stray = min(_MAX_UNFINISHED, len(text) - len(text.lstrip(_REPLACEMENT)))
            intact = text[num_stray:]
            if len(intact) > num_withheld and self._text.endswith(intact):
                self._ids, self._text = ids, text
                self._given = text[: len(text) - num_withheld]
                return

    def _is_special(self, token: int) -> bool:
        """Whether decoding leaves this id out."""
        shown = self._decoder.decode([token], skip_special_tokens=False)
        return shown != "" and self._decoder.decode([token]) == ""


class _StopString:
    """One stop string, searched while text streams by (Knuth, Morris, Pratt 1977).

    ``num_matched`` is the length of the longest proper beginning of the string in which the text
    so far ends.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * len(text)  # the same for each beginning of the string itself
        for index in range(1, len(text)):
            self._fallback[index] = self._extend(self._fallback[index - 1], text[index])

    def feed(self, new_text: str) -> int | None:
        """Read on; returns where in ``new_text`` the first occurrence ends, None without one."""
        first_end = None
        for index, char in enumerate(new_text):
            self.num_matched = self._extend(self.num_matched, char)
            if self.num_matched == len(self.text):
                self.num_matched = self._fallback[-1]
                if first_end is None:
                    first_end = index + 1
        return first_end

    def _extend(self, num_matched: int, char: str) -> int:
        """Length matched after one more character."""
        while num_matched and self.text[num_matched] != char:
            num_matched = self._fallback[num_matched - 1]
        return num_matched + (self.text[num_matched] == char)


def _num_unfinished(text: str) -> int:
    """How many replacement characters at the end further bytes might still turn into others."""
    return min(_MAX_UNFINISHED, len(text) - len(text.rstrip(_REPLACEMENT)))
