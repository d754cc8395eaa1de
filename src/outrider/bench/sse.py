"""Server-sent events, and what an OpenAI-compatible stream says in them. Pure.

Owns the parsing of bytes into events, and the counting of tokens by chunk. Fed by
:mod:`outrider.bench.client`, which owns sockets and clocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from outrider.bench.records import ChunkRecord, SpeculativeCounts, TokenSource

MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"


class StreamError(Exception):
    """The stream says something that no answer can be read from; the message is a sentence."""


class EventParser:
    """Cuts a byte stream into the data of its events (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # of a line whose end has not come yet
        self._data: list[bytes] = []
        self._num_rest = 0  # bytes of it; joined only at its end, however many pieces it came in

    def feed(self, data: bytes) -> list[bytes]:
        """The events that these bytes complete.

        Raises:
            StreamError: an event is larger than any answer's piece can be.
        """
        first, *others = data.split(b"\n")
        self._rest.append(first)
        self._num_rest += len(first)
        events = []
        for after in others:
            text = b"".join(self._rest).removesuffix(b"\r")
            self._rest, self._num_rest = [after], len(after)
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        if self._num_rest + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise StreamError(f"an event of the stream is larger than {MAX_EVENT_BYTES >> 20} MiB")
        return events


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one event added, with every count that came along with it."""

    at_s: float
    num_chars: int
    total_tokens: int | None  # usage so far, where the event carried it
    num_ids: int | None
    num_logprobs: int | None


class AnswerReader:
    """Collects one streamed answer, event by event."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.speculative: SpeculativeCounts | None = None
        self.served_model: str | None = None
        self.is_done = False

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)

    @property
    def token_hash(self) -> str | None:
        """Twelve hex digits of the answer's token ids; None where the server told none."""
        if not self._ids:
            return None
        return hashlib.sha256(orjson.dumps(self._ids)).hexdigest()[:12]

    def feed(self, event: bytes, at_s: float) -> None:
        """Take in one event that arrived at ``at_s``.

        Raises:
            StreamError: the event is no JSON object, reports a failure, or has another shape.
        """
        if event == DONE:
            self.is_done = True
            return
        try:
            row = orjson.loads(event)
        except orjson.JSONDecodeError:
            raise StreamError(f"an event is not JSON: {_excerpt(event)}") from None
        if not isinstance(row, dict):
            raise StreamError(f"an event is not a JSON object: {_excerpt(event)}")
        if row.get("error"):
            raise StreamError(f"the server reports: {_error_text(row['error'])}")
        if isinstance(row.get("model"), str):
            self.served_model = printable(row["model"])
        usage = self._usage(row.get("usage"))
        self._speculation(row)
        choices = row.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        if not isinstance(choice, dict):
            raise StreamError(f"an event has a choice that is no object: {_excerpt(event)}")
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])
        text = _text(choice)
        self._texts.append(text)
        ids, logprobs = choice.get("token_ids"), _logprobs(choice.get("logprobs"))
        num_ids = len(ids) if isinstance(ids, list) else None
        self._ids += ids if isinstance(ids, list) else ()
        self._pieces.append(_Piece(at_s, len(text), usage, num_ids, logprobs))

    def chunks(self) -> tuple[tuple[ChunkRecord, ...], TokenSource]:
        """The chunks with the best token counts that the whole stream gives, and their source.

        One kind of count for the whole answer: mixing kinds would count some tokens twice.
        """
        with_text = [piece for piece in self._pieces if piece.num_chars]
        if with_text and all(piece.total_tokens is not None for piece in with_text):
            return self._by_usage()
        for source, name in (
            (TokenSource.TOKEN_IDS, "num_ids"),
            (TokenSource.LOGPROBS, "num_logprobs"),
        ):
            if with_text and all(getattr(piece, name) is not None for piece in with_text):
                counted = [(piece, getattr(piece, name) or 0) for piece in self._pieces]
                return _kept(counted), source
        source = TokenSource.UNKNOWN if self.completion_tokens is None else TokenSource.USAGE
        return _kept([(piece, None) for piece in self._pieces]), source

    def _by_usage(self) -> tuple[tuple[ChunkRecord, ...], TokenSource]:
        """Differences of the running totals; totals that fall are no counts."""
        counted: list[tuple[_Piece, int | None]] = []
        before = 0
        for piece in self._pieces:
            total = before if piece.total_tokens is None else piece.total_tokens
            if total < before:
                return _kept([(piece, None) for piece in self._pieces]), TokenSource.USAGE
            counted.append((piece, total - before))
            before = total
        return _kept(counted), TokenSource.CONTINUOUS_USAGE

    def _usage(self, usage: object) -> int | None:
        if not isinstance(usage, Mapping):
            return None
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if _is_count(prompt):
            self.prompt_tokens = prompt
        if not _is_count(completion):
            return None
        self.completion_tokens = completion
        return completion

    def _speculation(self, row: Mapping[str, Any]) -> None:
        """Our server's counts, or those of vLLM's per-request metrics."""
        found = row.get("speculative")
        metrics = row.get("metrics")
        if found is None and isinstance(metrics, Mapping):
            found = metrics.get("speculative_decoding")
        if not isinstance(found, Mapping):
            return
        length = found.get("acceptance_length")
        by_position = found.get("accepted_per_position")
        if not isinstance(by_position, list) or not all(map(_is_count, by_position)):
            by_position = None
        self.speculative = SpeculativeCounts(
            drafted=_count(found, "drafted", "num_draft_tokens"),
            accepted=_count(found, "accepted", "num_accepted_tokens"),
            steps=_count(found, "steps", "num_drafts"),
            acceptance_length=float(length) if isinstance(length, int | float) else None,
            accepted_per_position=None if by_position is None else tuple(by_position),
        )


def _kept(counted: list[tuple[_Piece, int | None]]) -> tuple[ChunkRecord, ...]:
    """Pieces that brought text or tokens."""
    return tuple(
        ChunkRecord(piece.at_s, num_tokens, piece.num_chars)
        for piece, num_tokens in counted
        if piece.num_chars or num_tokens
    )


def _text(choice: Mapping[str, Any]) -> str:
    """Everything a choice adds that the model wrote: content, reasoning, tool arguments."""
    text = choice.get("text")
    if isinstance(text, str):
        return text
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return ""
    parts = [delta.get(key) for key in ("reasoning_content", "reasoning", "content")]
    # One of two names for the same reasoning, where a server sends both.
    if parts[0]:
        parts[1] = None
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        parts.append(function.get("arguments") if isinstance(function, Mapping) else None)
    return "".join(part for part in parts if isinstance(part, str))


def _logprobs(value: object) -> int | None:
    """How many tokens the log probabilities are of (chat: ``content``, completions: ``tokens``)."""
    if not isinstance(value, Mapping):
        return None
    for key in ("content", "tokens"):
        if isinstance(value.get(key), list):
            return len(value[key])
    return None


def _count(found: Mapping[str, Any], *names: str) -> int | None:
    return next((found[name] for name in names if _is_count(found.get(name))), None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, Mapping) else error
    return printable(str(message)[:300])


def printable(text: str) -> str:
    """A server's words on one line, without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))


def _excerpt(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))
