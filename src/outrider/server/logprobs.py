"""Log-probabilities as OpenAI's two formats write them.

Owns what a token looks like to a client: its text and its bytes. Used by :mod:`.replies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.models.loading import Tokenizer
from outrider.types import TokenLogprobs

# JSON has no minus infinity, and a token that was forced may have had no probability at all.
LOWEST = -9999.0


class TokenWriter:
    """Writes tokens of one model.

    A control token stands for no text of an answer, so its bytes are none: the bytes of an answer's
    tokens always add up to its text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """The token's text; pieces of a character show as U+FFFD."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes that the token adds to the answer."""
        if token_id in self._tokenizer.special_ids:
            return []
        return list(self._tokenizer.token_bytes(token_id))

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The ``logprobs`` of a chat choice."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._chat_token(entry.token_id, entry.logprob),
            "top_logprobs": [self._chat_token(token, logprob) for token, logprob in entry.top],
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": self.bytes_of(token_id),
        }

    def completion(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The ``logprobs`` of a text choice; ``offset`` is where its first token begins."""
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += self.num_chars(entry)
        return {
            "tokens": [self.text(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def num_chars(self, entry: TokenLogprobs) -> int:
        """Characters that begin in this token; a character may take several tokens."""
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(entry.token_id))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text, as that format has it: of tokens that look alike the likelier one stays."""
        top: dict[str, float] = {}
        for token, logprob in entry.top:
            top.setdefault(self.text(token), max(logprob, LOWEST))
        return top
