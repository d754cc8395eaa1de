"""One parser and where it stands: what may come after an output, for any output in any order.

Owns the parser's moves, forwards by the new tokens and backwards over those of a draft that was not
accepted, and reading off what it allows. Below :mod:`outrider.grammar`, which compiles what it
parses by, keeps its answers and gives it a new memory::

    asked about   a b | c d      path of a draft
    next          a b | x        goes back two tokens, forward one

Two things that llguidance remembers could carry over from one question to another:

- Its last mask, by the number of the parser's row and the lexer's state. Other rows get the same
  numbers after going back, so the mask is then replaced at once, by that of where both paths part.
- The states of its lexer, which the copies of one compiled grammar share. A full memory takes no
  token and at first does not say so; asking for a mask brings it out. Such an answer is marked as
  :attr:`State.is_memory_full`, and means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.sequences import shared_len

if TYPE_CHECKING:
    import llguidance

_LEXER = "lexer error"  # begins what the shared memory has to say


class State(NamedTuple):
    """What may come after some output.

    ``allowed`` holds a bit per token, lowest first, end-of-sequence left out; ``may_end`` says that
    the output is a whole text of the grammar; ``problem`` is why the parser gave up, "" mostly.
    """

    allowed: NDArray[np.uint8]
    may_end: bool
    problem: str = ""

    @property
    def may_go_on(self) -> bool:
        """Whether any token of text may come."""
        return bool(self.allowed.any())

    @property
    def is_memory_full(self) -> bool:
        """Whether this says what else was asked, and nothing about the output."""
        return self.problem.startswith(_LEXER)

    def allows(self, token: int) -> bool:
        """Whether this token of text may come."""
        return token < 8 * self.allowed.size and bool(self.allowed[token // 8] >> token % 8 & 1)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a mask is about: its width, which ids end a text, and the parsers' own table."""

    num_rows: int
    eos_ids: tuple[int, ...]
    table: llguidance.LLTokenizer


class Matcher:
    """A parser of one grammar; each answer depends on the output that it is about alone.

    Except that the memory may be full, but then the answer says so.

    Args:
        compiled: the grammar. It is copied and not asked, since it must stand at the beginning.
        vocabulary: the tokens that it was compiled for.
    """

    def __init__(self, compiled: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.compiled = compiled
        self._num_rows = vocabulary.num_rows
        self._eos_ids = vocabulary.eos_ids
        self._eos_set = frozenset(vocabulary.eos_ids)
        self._restart()

    def use(self, compiled: llguidance.LLMatcher) -> None:
        """Parse by the same grammar with another memory."""
        self.compiled = compiled
        self._restart()

    def state(self, output_ids: Sequence[int]) -> State:
        """What may come after this output."""
        nothing = np.zeros(-(-self._num_rows // 8), dtype=np.uint8)
        if not self._move_to(output_ids):
            if self._eos_set.isdisjoint(output_ids):
                self._mask()  # says whether it was the token or the memory
            return State(nothing, may_end=False, problem=self._trouble())
        may_end = self._parser.is_accepting()
        bits = np.frombuffer(self._mask(), dtype=np.uint8)
        if self._parser.is_error():
            problem = self._trouble()
            return State(nothing, may_end=may_end and not problem, problem=problem)
        allowed = nothing
        num_bytes = min(bits.size, allowed.size)
        allowed[:num_bytes] = bits[:num_bytes]
        for token in self._eos_ids:
            allowed[token // 8] &= 0xFF ^ (1 << token % 8)
        if self._num_rows % 8:  # what the tokeniser has beyond the model's rows
            allowed[-1] &= (1 << self._num_rows % 8) - 1
        return State(allowed, may_end)

    def num_valid(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of text may follow this output; fewer where the memory is full."""
        if not path or not self._move_to(output_ids):
            return 0
        return self._parser.validate_tokens(list(path))

    def _move_to(self, output_ids: Sequence[int]) -> bool:
        """Stand behind this output; False if the parser does not get there."""
        if self._parser.is_error():  # it never leaves an error, which may be of another path
            self._restart()
        self._go_back(shared_len(self._consumed, output_ids))
        rest = list(output_ids[len(self._consumed) :])
        if not rest:
            return True
        if not self._eos_set.isdisjoint(rest):
            return False  # nothing follows the end
        num_consumed = self._parser.try_consume_tokens(rest)
        self._consumed += rest[:num_consumed]
        return num_consumed == len(rest)

    def _go_back(self, length: int) -> None:
        """Stand behind the first tokens that were consumed, or at the very beginning."""
        num_back = len(self._consumed) - length
        if num_back and not self._parser.rollback(num_back):
            self._restart()
        del self._consumed[length:]
        if self._masked_len > length:  # behind the place where the paths part
            self._mask()
            if self._parser.is_error():
                self._restart()

    def _trouble(self) -> str:
        """Why the parser gave up; "" if only because no token follows."""
        problem = problem_of(self._parser)
        return "" if problem in ("NoExtension", "NoExtensionBias") else problem

    def _mask(self) -> bytes:
        """The parser's mask of where it stands, which it will remember."""
        self._masked_len = len(self._consumed)
        return self._parser.compute_bitmask()

    def _restart(self) -> None:
        self._parser = self.compiled.deep_copy()
        self._consumed: list[int] = []
        self._masked_len = 0  # tokens before the mask that the parser remembers


def problem_of(parser: llguidance.LLMatcher) -> str:
    """What is wrong with a parser, in one line; "" if nothing is."""
    if not parser.is_error():
        return ""
    reason = parser.stop_reason()
    if reason not in ("NotStopped", "InternalError"):
        return reason
    first = next(iter(parser.get_error().splitlines()), reason)
    return first if len(first) <= 200 else f"{first[:200]} ..."
