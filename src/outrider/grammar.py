"""Grammars: which tokens may come next, given those that are out.

Owns compiling (with llguidance), its limits and its cache, and one request's answers.
Below ``warping``, which masks a row of logits with what is said here; knows neither logits nor
trees. Above :mod:`outrider.grammar_matcher`, which moves the parser from one output to the next.

For the sampler a grammar is a pure function of the output so far, so that a text depends neither on
drafts nor on neighbours. What could break this is the memory of the lexer that requests with the
same grammar share: it fills up with whatever is asked, drafts included. The sampler never hears of
that, since it is then given the answer of a new, empty memory, which is bounded by the output
alone. Whoever only guesses gets no new memory, and no answer until the sampler has asked again
(:meth:`GrammarConstraint.for_drafts`): a draft may cost no compiling.

llguidance would also force the tokeniser's own spelling of text that has only one way to go on.
That is switched off: every token that the grammar allows is allowed, and the target chooses.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.config import GrammarSpec
from outrider.errors import ParameterError
from outrider.grammar_matcher import Matcher, State, Vocabulary, problem_of
from outrider.grammar_notation import as_lark, wording

if TYPE_CHECKING:
    import llguidance

# How much the parser may do for one mask, and remember. Those who exceed it end with an error.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,  # an ambiguous grammar takes their square in time, for each token
    "initial_lexer_fuel": 500_000,
    # A fifth of a second at worst. A new memory has to find out at once what the old one had learnt
    # step by step, so this must not be what ends a text that had got so far.
    "step_lexer_fuel": 2_000_000,
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


class _Key(NamedTuple):
    """Who may share a compiled grammar."""

    salt: str
    spec: GrammarSpec


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
        self._known: OrderedDict[_Key, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()

    def constraint(
        self, spec: GrammarSpec, *, ignores_eos: bool = False, salt: str = ""
    ) -> GrammarConstraint:
        """A fresh matcher for one request; ``ignores_eos`` never allows an end-of-sequence id.

        What is compiled is shared with requests of the same ``salt`` alone, so that the time that
        it takes tells nobody what others have asked. Takes up to about a second for a new grammar,
        a few more for the first one of all.

        Raises:
            ParameterError: the grammar is malformed, too large, uses what is not supported, or
                has no text but the empty one; or llguidance is not installed.
        """
        key = _Key(salt, spec)
        with self._lock:
            compiled = self._known.get(key)
            if compiled is not None:
                self._known.move_to_end(key)
        if compiled is None:
            compiled = self._checked(key)
            self._remember(key, compiled)
        return self._constraint(key, compiled, ignores_eos=ignores_eos)

    @property
    def num_known(self) -> int:
        """Compiled grammars that are remembered."""
        return len(self._known)

    def _remember(self, key: _Key, compiled: llguidance.LLMatcher) -> None:
        with self._lock:
            self._known[key] = compiled
            num_chars = sum(len(known.spec.text) for known in self._known)
            while len(self._known) > self._max_entries or num_chars > self._max_chars:
                dropped, _ = self._known.popitem(last=False)
                num_chars -= len(dropped.spec.text)

    def _constraint(
        self, key: _Key, compiled: llguidance.LLMatcher, *, ignores_eos: bool = False
    ) -> GrammarConstraint:
        return GrammarConstraint(
            compiled,
            self._vocabulary,
            renew=partial(self._renew, key),
            ignores_eos=ignores_eos,
        )

    def _renew(self, key: _Key, full: llguidance.LLMatcher) -> tuple[llguidance.LLMatcher, bool]:
        """The grammar with another memory than this one, and whether that is empty.

        The one that a neighbour has renewed already, or else a new one, from now on for everybody.
        """
        with self._lock:
            known = self._known.get(key)
        if known is not None and known is not full:
            return known, False
        compiled = self._compile(key.spec)
        self._remember(key, compiled)
        return compiled, True

    def _checked(self, key: _Key) -> llguidance.LLMatcher:
        """A matcher before its first token, known to allow one."""
        matcher = self._compile(key.spec)
        start = Matcher(matcher, self._vocabulary).state(())
        if not start.may_go_on:
            raise ParameterError(
                f"grammar: no text but at most the empty one is of this {wording(key.spec.kind)}"
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
        if problem := problem_of(matcher):
            raise ParameterError(f"grammar: the {wording(spec.kind)} does not compile: {problem}")
        return matcher

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        """All tokens, read once; about a second for 50,000 of them."""
        import llguidance

        spellings = _Spellings(self._tokenizer, self._num_rows)
        return Vocabulary(
            self._num_rows,
            spellings.eos_ids,
            llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(spellings),
                n_vocab=len(spellings.tokens),
                eos_token=list(spellings.eos_ids) or spellings.eos_token_id,
            ),
        )


class GrammarConstraint:
    """One request's grammar; each answer depends on the output it is asked about alone.

    Not safe to share between threads that ask at once.

    Args:
        compiled: the grammar, with the memory that its copies share.
        vocabulary: the tokens that it was compiled for.
        renew: the grammar with another memory than a full one, and whether that is empty.
        ignores_eos: never allow an end-of-sequence id.
    """

    def __init__(
        self,
        compiled: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        *,
        renew: Callable[[llguidance.LLMatcher], tuple[llguidance.LLMatcher, bool]],
        ignores_eos: bool = False,
    ) -> None:
        self._matcher = Matcher(compiled, vocabulary)
        self._renew = renew
        self._num_rows = vocabulary.num_rows
        self._eos_ids = list(vocabulary.eos_ids)
        self._eos_set = frozenset(vocabulary.eos_ids)
        self._ignores_eos = ignores_eos
        self._states: OrderedDict[tuple[int, ...], State] = OrderedDict()
        self._may_guess = True  # until a guess fails; again when the sampler has asked

    def mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens may come after this output; none where it is not of the grammar. ``[V]``."""
        return self._as_mask(self.state(output_ids))

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether this output is a whole text of the grammar that nothing can follow."""
        state = self.state(output_ids)
        return state.may_end and not state.may_go_on

    def num_valid(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of ``path`` may follow this output, one after the other.

        Fewer where saying so would need a new memory: it is asked about drafts.
        """
        num_text = next((n for n, token in enumerate(path) if token in self._eos_set), len(path))
        num_valid = self._matcher.num_valid(output_ids, path[:num_text])
        if num_text == len(path) or num_valid < num_text or self._ignores_eos:
            return num_valid
        state = self._guess((*output_ids, *path[:num_text]))
        return num_valid + (state is not None and state.may_end)

    def failure(self, output_ids: Sequence[int]) -> str | None:
        """Why no token at all may come after this output; None where one may."""
        state = self.state(output_ids)
        if state.may_go_on or (state.may_end and not self._ignores_eos):
            return None
        return (
            f"the grammar allows no token after {len(output_ids)} of output"
            f"{_in_brackets(state.problem)}"
        )

    def for_drafts(self) -> DraftMasks:
        """The masks for whoever only guesses: never dear, and none where they would be."""
        return DraftMasks(self)

    def guessed_mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        """The mask, or none at all where the parser gives up; nothing is compiled for it."""
        state = self._guess(tuple(output_ids))
        return np.zeros(self._num_rows, np.bool_) if state is None else self._as_mask(state)

    def state(self, output_ids: Sequence[int]) -> State:
        """What may come after this output; the answers of a step are kept for a while."""
        key = tuple(output_ids)
        self._may_guess = True
        state = self._known(key)
        if state is None:
            state, is_empty = self._matcher.state(key), False
            while state.is_memory_full and not is_empty:
                compiled, is_empty = self._renew(self._matcher.compiled)
                self._matcher.use(compiled)
                state = self._matcher.state(key)
            self._keep(key, state)
        return state

    def _guess(self, key: tuple[int, ...]) -> State | None:
        """The same for a guess; None where the parser gives up, and then until the next state."""
        state = self._known(key)
        if state is None and self._may_guess:
            state = self._matcher.state(key)
            if state.problem:  # finding out took long, or the memory is full
                self._may_guess = False
                return None
            self._keep(key, state)
        return state

    def _as_mask(self, state: State) -> NDArray[np.bool_]:
        bits = np.unpackbits(state.allowed, count=self._num_rows, bitorder="little")
        mask_V = bits.view(np.bool_)
        if state.may_end and not self._ignores_eos:
            mask_V[self._eos_ids] = True
        return mask_V

    def _known(self, key: tuple[int, ...]) -> State | None:
        """What is known already, be it from the output without its last token."""
        state = self._states.get(key)
        before = self._states.get(key[:-1]) if state is None and key else None
        if before is not None and not before.allows(key[-1]):
            return State(np.zeros_like(before.allowed), may_end=False, problem=before.problem)
        return state

    def _keep(self, key: tuple[int, ...], state: State) -> None:
        self._states[key] = state
        if len(self._states) > _NUM_STATES:
            self._states.popitem(last=False)


class DraftMasks:
    """What a grammar says to a drafter: masks that may lack what is allowed."""

    def __init__(self, constraint: GrammarConstraint) -> None:
        self._constraint = constraint

    def mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens may come after this output, as far as that is cheap to say. ``[V]``."""
        return self._constraint.guessed_mask(output_ids)


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


def _in_brackets(problem: str) -> str:
    return f" ({problem})" if problem else ""
