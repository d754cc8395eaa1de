"""Completions as OpenAI's JSON: whole answers and the chunks of streams.

Owns every field that a client reads. Knows no HTTP and no engine: a reply is made from completions
and chunks alone, so a stream's pieces add up to the whole answer.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.server import tools
from outrider.server.logprobs import TokenWriter
from outrider.server.tools import Call, ToolPlan
from outrider.types import (
    Completion,
    FinishReason,
    PredictionStats,
    SpeculationStats,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class Header:
    """What all objects of one reply share."""

    kind: str
    reply_id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, kind: str, prefix: str, model: str, fingerprint: str) -> Header:
        """A fresh id and the time; the fingerprint shortened to OpenAI's form."""
        short = hashlib.sha256(fingerprint.encode()).hexdigest()[:12]
        reply_id = f"{prefix}-{secrets.token_hex(16)}"
        return cls(kind, reply_id, int(time.time()), model, f"fp_{short}")

    def reply(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One object with these choices."""
        return {
            "id": self.reply_id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": list(choices),
            **more,
        }


@dataclass(slots=True)
class Totals:
    """Sums over the completions of one HTTP request.

    ``prompt_lens`` has each prompt once, however many answers it gets: ``num_choices`` of them,
    one behind the other.
    """

    prompt_lens: Sequence[int]
    num_choices: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    prediction: PredictionStats = field(default_factory=PredictionStats)

    def add(self, index: int, completion: Completion) -> None:
        """Count answer ``index``."""
        self.completion_tokens += completion.usage.completion_tokens
        # Its answers may reuse each other's prompt: one of them computed what was not there before.
        prompt, cached = index // self.num_choices, completion.usage.cached_tokens
        self.cached_tokens[prompt] = min(cached, self.cached_tokens.get(prompt, cached))
        self.speculation.add(completion.speculation)
        if completion.prediction is not None:
            self.prediction = PredictionStats(
                self.prediction.accepted + completion.prediction.accepted,
                self.prediction.rejected + completion.prediction.rejected,
            )

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``; only tokens of the answers count, rejected predictions do not."""
        return {
            **self.running_usage(self.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.prediction.accepted,
                "rejected_prediction_tokens": self.prediction.rejected,
            },
        }

    def running_usage(self, num_tokens: int) -> dict[str, Any]:
        """The counts alone, after so many tokens of all answers."""
        num_prompt = sum(self.prompt_lens)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }

    def speculative(self) -> dict[str, Any]:
        """What drafting did for this request."""
        return {
            "drafted": self.speculation.drafted,
            "accepted": self.speculation.accepted,
            "steps": self.speculation.verify_steps,
            "acceptance_length": round(self.speculation.acceptance_length, 4),
        }


def finish_reason(completion: Completion, calls: Sequence[Call]) -> str:
    """In OpenAI's words."""
    if calls and completion.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return completion.finish_reason.value


def answer_logprobs(
    entries: Sequence[TokenLogprobs] | None, completion: Completion | None, stop_ids: frozenset[int]
) -> Sequence[TokenLogprobs] | None:
    """Without the token that only ended the answer: it is no part of its text."""
    if not entries or completion is None or completion.finish_reason is not FinishReason.STOP:
        return entries
    return entries[:-1] if entries[-1].token_id in stop_ids else entries


def token_ids(completion: Completion | None, *, is_wanted: bool) -> dict[str, Any]:
    """The field with a finished answer's ids, where it was asked for."""
    if completion is None or not is_wanted:
        return {}
    return {"token_ids": list(completion.token_ids)}


def chat_choice(
    index: int,
    completion: Completion,
    plan: ToolPlan | None,
    writer: TokenWriter,
    stop_ids: frozenset[int],
) -> dict[str, Any]:
    """One choice of a whole chat answer."""
    calls = () if plan is None else plan.parse(completion.text)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls else completion.text,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    entries = answer_logprobs(completion.logprobs, completion, stop_ids)
    return {
        "index": index,
        "message": message,
        "logprobs": None if entries is None else writer.chat(entries),
        "finish_reason": finish_reason(completion, calls),
    }


def text_choice(
    index: int, completion: Completion, echoed: str, writer: TokenWriter, stop_ids: frozenset[int]
) -> dict[str, Any]:
    """One choice of a whole text completion."""
    entries = answer_logprobs(completion.logprobs, completion, stop_ids)
    return {
        "index": index,
        "text": echoed + completion.text,
        "logprobs": None if entries is None else writer.completion(entries, 0),
        "finish_reason": finish_reason(completion, ()),
    }


class ChatDeltas:
    """One choice of a streamed chat answer: text as it comes, calls when they are complete."""

    def __init__(
        self,
        index: int,
        plan: ToolPlan | None,
        writer: TokenWriter,
        stop_ids: frozenset[int],
        *,
        wants_logprobs: bool,
        wants_ids: bool = False,
    ) -> None:
        self._index = index
        self._plan = plan
        self._writer = writer
        self._stop_ids = stop_ids
        self._wants_logprobs = wants_logprobs
        self._wants_ids = wants_ids
        self._held = ""
        self._held_logprobs: list[TokenLogprobs] = []
        self._is_text = plan is None

    def role(self) -> dict[str, Any]:
        """The first delta."""
        return self._choice({"role": "assistant", "content": "", "refusal": None}, None, None)

    def feed(
        self,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        completion: Completion | None,
    ) -> dict[str, Any] | None:
        """The delta for new text; None while it may still become a call."""
        self._held += text
        self._held_logprobs += logprobs or ()
        if not self._is_text and not tools.is_call_start(self._held):
            self._is_text = True
        calls: tuple[Call, ...] = ()
        if not self._is_text:
            if completion is None:
                return None
            calls = self._plan.parse(self._held) if self._plan is not None else ()
        delta: dict[str, Any] = {} if calls else {"content": self._held}
        if calls:
            delta["tool_calls"] = [
                {"index": at, **_tool_call(call)} for at, call in enumerate(calls)
            ]
        entries = answer_logprobs(self._held_logprobs, completion, self._stop_ids)
        self._held, self._held_logprobs = "", []
        reason = None if completion is None else finish_reason(completion, calls)
        written = self._writer.chat(entries or ()) if self._wants_logprobs else None
        return self._choice(delta, written, reason) | token_ids(
            completion, is_wanted=self._wants_ids
        )

    def _choice(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }


class TextDeltas:
    """One choice of a streamed text completion."""

    def __init__(
        self,
        index: int,
        echoed: str,
        writer: TokenWriter,
        stop_ids: frozenset[int],
        *,
        wants_logprobs: bool,
        wants_ids: bool = False,
    ) -> None:
        self._index = index
        self._echoed = echoed
        self._writer = writer
        self._stop_ids = stop_ids
        self._wants_logprobs = wants_logprobs
        self._wants_ids = wants_ids
        self._num_chars = 0

    def feed(
        self,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        completion: Completion | None,
    ) -> dict[str, Any]:
        """The choice for new text, the echoed prompt in front of the first."""
        written, self._echoed = self._echoed + text, ""
        entries = answer_logprobs(logprobs, completion, self._stop_ids)
        return {
            "index": self._index,
            "text": written,
            "logprobs": self._logprobs(entries),
            "finish_reason": None if completion is None else finish_reason(completion, ()),
            **token_ids(completion, is_wanted=self._wants_ids),
        }

    def _logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        entries = entries or ()
        written = self._writer.completion(entries, self._num_chars)
        self._num_chars += sum(map(self._writer.num_chars, entries))
        return written


def _tool_call(call: Call) -> dict[str, Any]:
    return {
        "id": tools.new_call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
