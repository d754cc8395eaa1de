"""A small vocabulary for grammar tests, and what a regular grammar allows, by trying all texts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Spelled:
    """A tokeniser by its tokens' bytes; ``eos_ids`` are control tokens."""

    tokens: tuple[bytes, ...]
    eos_ids: frozenset[int] = frozenset()

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def special_ids(self) -> frozenset[int]:
        return self.eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in ids).decode()


def letters(count: int, eos_ids: frozenset[int] = frozenset()) -> Spelled:
    """Token 0 is "a", token 1 is "b", and so on, the ends of text excepted."""
    spelled = ("abcdefghij"[token] for token in range(count))
    return Spelled(
        tuple(b"<end>" if i in eos_ids else char.encode() for i, char in enumerate(spelled)),
        eos_ids,
    )


@cache
def _beginnings(expression: str, alphabet: str, max_len: int) -> frozenset[str]:
    """Every beginning of a text of at most ``max_len`` characters that matches."""
    found = set()
    for length in range(max_len + 1):
        for chars in itertools.product(alphabet, repeat=length):
            text = "".join(chars)
            if re.fullmatch(expression, text):
                found.update(text[:end] for end in range(length + 1))
    return frozenset(found)


def allowed_by_trying(
    expression: str, tokenizer: Spelled, output: Sequence[int], *, alphabet: str, max_len: int
) -> set[int]:
    """Tokens that keep the output the beginning of a match, and the ends where it is one."""
    if any(token in tokenizer.eos_ids or not tokenizer.tokens[token] for token in output):
        return set()  # nothing follows an end, and a token of no text is never taken
    text = tokenizer.text(output)
    beginnings = _beginnings(expression, alphabet, max_len)
    if text not in beginnings:
        return set()
    found = {
        token
        for token in range(tokenizer.vocab_size)
        if token not in tokenizer.eos_ids
        and tokenizer.tokens[token]
        and text + tokenizer.text([token]) in beginnings
    }
    return found | (tokenizer.eos_ids if re.fullmatch(expression, text) else set())
