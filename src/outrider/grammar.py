"""Grammars: which tokens may come next, given those that are out.

Owns compiling (llguidance, and only here), its limits and its cache, and one matcher per request.
Below ``warping``, which masks a row of logits with what is said here; knows neither logits nor
trees. For the sampler a grammar is a pure function of the output so far: a matcher remembers where
it stands only to get to the next place quickly, forwards by the new tokens and backwards over those
of a draft that was not accepted::

    asked about   a b | c d      path of a draft
    next          a b | x        goes back two tokens, forward one

so a mask cannot depend on what was drafted, and there is nothing to roll back.

llguidance would also force the tokeniser's own spelling of text that has only one way to go on.
That is switched off: every token that the grammar allows is allowed, and the target chooses.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.config import GrammarSpec
from outrider.errors import ParameterError
from outrider.grammar_notation import as_lark

if TYPE_CHECKING:
    import llguidance

# How much the parser may do for one mask, and remember. Those who exceed it end with an error.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,  # an ambiguous grammar takes their square in time, for each token
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,  # one or two kilobytes each
    "max_grammar_size": 50_000,
    "verbose_errors": False,  # would print the grammar and what was parsed
}

_NO_FORCING = '%llguidance {"no_forcing": true}\n'


class TokenBytes(Protocol):
    """What a grammar needs of a tokeniser."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to one below this."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: their spelling is not text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in the middle of a text."""
        ...


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


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What a mask is about: its width, which ids end a text, and the matchers' own table."""

    num_rows: int
    eos_ids: tuple[int, ...]
    table: llguidance.LLTokenizer

    @classmethod
    def of(cls, tokenizer: TokenBytes, num_rows: int) -> _Vocabulary:
        """Read all tokens once; about a second for 50,000 of them."""
        import llguidance

        spellings = _Spellings(tokenizer, num_rows)
        return cls(
            num_rows,
            spellings.eos_ids,
            llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(spellings),
                n_vocab=len(spellings.tokens),
                eos_token=list(spellings.eos_ids) or spellings.eos_token_id,
            ),
        )


class GrammarCompiler:
    """Compiles grammars for one vocabulary and remembers the last ones; safe to share.

    Args:
        tokenizer: the vocabulary; read when the first grammar comes.
        num_rows: the model's vocabulary, at least the tokeniser's. What is beyond the tokeniser's
            is never allowed.
        max_entries: compiled grammars to keep.
        max_chars: length of their texts together.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        num_rows: int,
        *,
        max_entries: int = 32,
        max_chars: int = 2**20,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_rows = num_rows
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._known: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()

    def constraint(self, spec: GrammarSpec, *, ignores_eos: bool = False) -> GrammarConstraint:
        """A fresh matcher for one request; ``ignores_eos`` never allows an end-of-sequence id.

        Takes up to about a second for a new grammar, a few more for the first one of all.

        Raises:
            ParameterError: the grammar is malformed, too large, uses what is not supported, or
                has no text but the empty one; or llguidance is not installed.
        """
        with self._lock:
            compiled = self._known.get(spec)
            if compiled is not None:
                self._known.move_to_end(spec)
        if compiled is None:
            compiled = self._checked(spec)
            self._remember(spec, compiled)
        return self._constraint(spec, compiled, ignores_eos=ignores_eos)

    @property
    def num_known(self) -> int:
        """Compiled grammars that are remembered."""
        return len(self._known)

    def _remember(self, spec: GrammarSpec, compiled: llguidance.LLMatcher) -> None:
        with self._lock:
            self._known[spec] = compiled
            num_chars = sum(len(known.text) for known in self._known)
            while len(self._known) > self._max_entries or num_chars > self._max_chars:
                dropped, _ = self._known.popitem(last=False)
                num_chars -= len(dropped.text)

    def _constraint(
        self, spec: GrammarSpec, compiled: llguidance.LLMatcher, *, ignores_eos: bool = False
    ) -> GrammarConstraint:
        return GrammarConstraint(
            compiled,
            self._vocabulary,
            renew=partial(self._renew, spec),
            ignores_eos=ignores_eos,
        )

    def _renew(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        """A compiled grammar with an empty memory, from now on for everybody."""
        compiled = self._compile(spec)
        self._remember(spec, compiled)
        return compiled

    def _checked(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        """A matcher before its first token, known to allow one."""
        matcher = self._compile(spec)
        start = self._constraint(spec, matcher).state(())
        if not start.may_go_on:
            raise ParameterError(
                f"grammar: no text but at most the empty one is of this {spec.kind}"
                f"{_in_brackets(start.problem)}; give one that allows something"
            )
        return matcher

    def _compile(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        try:
            import llguidance
        except ImportError:
            raise ParameterError(
                "grammar: this needs llguidance, which is not installed; "
                "pip install 'outrider[grammar]'"
            ) from None
        lark = _NO_FORCING + as_lark(spec)
        limits = llguidance.LLParserLimits(**_LIMITS)
        with self._vocabulary_lock:
            table = self._vocabulary.table
        matcher = llguidance.LLMatcher(table, lark, log_level=0, limits=limits)
        if problem := _problem(matcher):
            raise ParameterError(f"grammar: the {spec.kind} does not compile: {problem}")
        return matcher

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary.of(self._tokenizer, self._num_rows)


class GrammarConstraint:
    """One request's grammar; each answer depends on the output it is asked about alone.

    Not safe to share between threads that ask at once. The copies of one compiled grammar share a
    memory of what they have seen, which can fill up; ``renew`` compiles the grammar again.
    """

    def __init__(
        self,
        compiled: llguidance.LLMatcher,
        vocabulary: _Vocabulary,
        *,
        renew: Callable[[], llguidance.LLMatcher],
        ignores_eos: bool = False,
    ) -> None:
        self._compiled = compiled
        self._renew = renew
        self._num_rows = vocabulary.num_rows
        self._eos_ids = list(vocabulary.eos_ids)
        self._ignores_eos = ignores_eos
        self._eos_set = frozenset(vocabulary.eos_ids)
        self._matcher = compiled.deep_copy()
        self._consumed: list[int] = []
        self._states: OrderedDict[tuple[int, ...], State] = OrderedDict()

    def mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens may come after this output; none where it is not of the grammar. ``[V]``."""
        state = self.state(output_ids)
        bits = np.unpackbits(state.allowed, count=self._num_rows, bitorder="little")
        mask_V = bits.view(np.bool_)
        if state.may_end and not self._ignores_eos:
            mask_V[self._eos_ids] = True
        return mask_V

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether this output is a whole text of the grammar that nothing can follow."""
        state = self.state(output_ids)
        return state.may_end and not state.may_go_on

    def num_valid(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of ``path`` may follow this output, one after the other."""
        num_text = next((n for n, token in enumerate(path) if token in self._eos_set), len(path))
        if not self._move_to(output_ids):
            return 0
        num_valid = self._matcher.validate_tokens(list(path[:num_text])) if num_text else 0
        if num_text == len(path) or num_valid < num_text or self._ignores_eos:
            return num_valid
        return num_valid + self.state([*output_ids, *path[:num_text]]).may_end

    def failure(self, output_ids: Sequence[int]) -> str | None:
        """Why no token at all may come after this output; None where one may."""
        state = self.state(output_ids)
        if state.may_go_on or (state.may_end and not self._ignores_eos):
            return None
        return (
            f"the grammar allows no token after {len(output_ids)} of output"
            f"{_in_brackets(state.problem)}"
        )

    def state(self, output_ids: Sequence[int]) -> State:
        """What may come after this output; the answers of a step are kept for a while."""
        key = tuple(output_ids)
        state = self._states.get(key)
        if state is None:
            state = self._ask(key)
            if state.problem:
                # Perhaps only because of what else was asked, here or by others: ask afresh.
                self._compiled = self._renew()
                self._restart()
                state = self._ask(key)
            self._states[key] = state
            if len(self._states) > _NUM_STATES:
                self._states.popitem(last=False)
        return state

    def _ask(self, output_ids: tuple[int, ...]) -> State:
        nothing = np.zeros(-(-self._num_rows // 8), dtype=np.uint8)
        if not self._move_to(output_ids):
            return State(nothing, may_end=False, problem=_problem(self._matcher))
        may_end = self._matcher.is_accepting()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if problem := _problem(self._matcher):
            is_end = may_end and problem in ("NoExtension", "NoExtensionBias")
            return State(nothing, may_end=is_end, problem="" if is_end else problem)
        allowed = nothing
        num_bytes = min(bits.size, allowed.size)
        allowed[:num_bytes] = bits[:num_bytes]
        for token in self._eos_ids:
            allowed[token // 8] &= 0xFF ^ (1 << token % 8)
        if self._num_rows % 8:  # what the tokeniser has beyond the model's rows
            allowed[-1] &= (1 << self._num_rows % 8) - 1
        return State(allowed, may_end)

    def _move_to(self, output_ids: Sequence[int]) -> bool:
        """Stand behind this output; False if the grammar does not get there."""
        if self._matcher.is_error():  # it never leaves an error, which may be of another path
            self._restart()
        output = list(output_ids)
        num_shared = _shared_len(self._consumed, output)
        num_back = len(self._consumed) - num_shared
        if num_back and not self._matcher.rollback(num_back):
            self._restart()
            num_shared = 0
        del self._consumed[num_shared:]
        rest = output[num_shared:]
        if not rest:
            return True
        if not self._eos_set.isdisjoint(rest):
            return False  # nothing follows the end
        num_consumed = self._matcher.try_consume_tokens(rest)
        self._consumed += rest[:num_consumed]
        return num_consumed == len(rest)

    def _restart(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._consumed = []


# Nodes of a tree and the tokens of a step, with room: a drafter, the sampler and the stop rules ask
# about the same ones.
_NUM_STATES = 64


class _Spellings:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, tokenizer: TokenBytes, num_rows: int) -> None:
        num_ids = min(tokenizer.vocab_size, num_rows)
        self.tokens = [tokenizer.token_bytes(token) for token in range(num_ids)]
        self.eos_ids = tuple(sorted(token for token in tokenizer.eos_ids if token < num_ids))
        if not self.eos_ids:  # it wants one: what no model has a row for
            self.tokens += [b""] * (num_rows - num_ids) + [b"<end>"]
        self.eos_token_id = self.eos_ids[0] if self.eos_ids else num_rows
        self.bos_token_id = None
        special_ids = {token for token in tokenizer.special_ids if token < num_ids}
        self.special_token_ids = sorted(special_ids | {self.eos_token_id, *self.eos_ids})

    def __call__(self, text: bytes | str) -> list[int]:  # noqa: ARG002 - nothing is forced
        """The tokens of a text; only asked for where text is forced, which is switched off."""
        return []


def _shared_len(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _problem(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a matcher, in one line; "" if nothing is."""
    if not matcher.is_error():
        return ""
    reason = matcher.stop_reason()
    if reason not in ("NotStopped", "InternalError"):
        return reason
    first = next(iter(matcher.get_error().splitlines()), reason)
    return first if len(first) <= 200 else f"{first[:200]} ..."


def _in_brackets(problem: str) -> str:
    return f" ({problem})" if problem else ""
