"""Warping: one row of logits to the law it stands for, given the tokens before it.

Owns penalties, logit bias, what a grammar allows, forbidden ids, temperature and filters, in this
order. Stands below ``sampling``, which adds noise and picks; knows neither noise, trees nor models,
and of a grammar only its masks. One
:class:`Warp` serves the target's rows, another the same request's rows of draft logits, whose
vocabulary may be smaller: ids that it lacks are passed over.

Rows are numpy vectors, worked on one at a time: what is done to a row cannot depend on the rows
beside it or on torch's thread count, and numpy's argmax, sort and comparisons on one row are
several times faster than torch's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.config import SamplingParams
from outrider.vocabulary import DraftVocabulary

Row: TypeAlias = NDArray[np.float32]
"""One node's logits or probabilities ``[V]``, or ``[W]`` in a draft vocabulary."""

_LARGEST = np.finfo(np.float32).max
# Smaller settings would round to zero in float32 and turn infinities into NaN.
_SMALLEST = float(np.finfo(np.float32).tiny)


def keep_top_k(row: Row, top_k: int) -> Row:
    """Mask all but the ``top_k`` largest logits; what ties with the k-th stays."""
    if top_k <= 0 or top_k >= row.size:
        return row
    kth = np.partition(row, row.size - top_k)[row.size - top_k]
    return np.where(row < kth, np.float32(-np.inf), row)


def keep_top_p(row: Row, top_p: float) -> Row:
    """Mask all but the nucleus: the fewest likeliest tokens whose probability reaches ``top_p``.

    The order is by falling logit, then by id; the first token always stays (Holtzman et al. 2019,
    "The curious case of neural text degeneration"). The largest logit must be 0.
    """
    if top_p >= 1.0:
        return row
    weight = np.exp(row.astype(np.float64))
    total = weight.sum()
    # Sorting the vocabulary is avoided: if a token is in the nucleus and not its first, the mass
    # before it is below top_p, so it and the at most V - 1 tokens after it, none likelier, hold
    # more than 1 - top_p: it alone has more than (1 - top_p) / V. The first has at least 1 / V.
    # The factor leaves room for rounding.
    floor = (1.0 - 1e-9) * (1.0 - top_p) / row.size * total
    falling = np.sort(row[weight >= floor])[::-1]
    mass = np.cumsum(np.exp(falling.astype(np.float64)))
    num_kept = int(np.searchsorted(mass, top_p * total)) + 1
    last = falling[min(num_kept, falling.size) - 1]
    is_kept = row >= last
    num_extra = np.count_nonzero(is_kept) - num_kept
    if num_extra > 0:  # of the tokens that tie with the last one, the highest ids go
        is_kept[np.flatnonzero(row == last)[-num_extra:]] = False
    return np.where(is_kept, row, np.float32(-np.inf))


def keep_min_p(row: Row, min_p: float) -> Row:
    """Mask tokens less than ``min_p`` times as likely as the likeliest; largest logit must be 0."""
    if min_p <= 0.0:
        return row
    return np.where(row.astype(np.float64) < math.log(min_p), np.float32(-np.inf), row)


def softmax(row: Row) -> Row:
    """Probabilities of a warped row; float32, worked out in float64."""
    weight = np.exp(row.astype(np.float64) - row.max())
    return (weight / weight.sum()).astype(np.float32)


class Masks(Protocol):
    """Says which tokens of the vocabulary may come."""

    def mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens may come after this output; none where it is wrong itself. ``[V]``."""
        ...


class Constraint(Masks, Protocol):
    """What the output must be, as :mod:`outrider.grammar` compiles it.

    Every answer is about the output given, whatever was asked before; only what is said of drafts
    may be less than the whole.
    """

    def for_drafts(self) -> Masks:
        """The masks for a drafter: none where finding out would be dear."""
        ...

    def num_valid(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of ``path`` may follow this output, one after the other."""
        ...

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """Whether this output is all that was asked for, and nothing can follow it."""
        ...

    def failure(self, output_ids: Sequence[int]) -> str | None:
        """Why no token at all may come after this output; None where one may."""
        ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """A request's tokens up to the root, counted once for all rows of a step.

    ``count`` has the occurrences in the output; ``penalised`` are the places in a row that
    penalties touch, and ``subtract`` what presence and frequency take from each. ``output_ids`` are
    there for a constraint alone.
    """

    num_tokens: int
    num_output: int
    count: Counter[int]
    penalised: NDArray[np.int64]
    subtract: Row
    output_ids: tuple[int, ...] = ()


class Warp:
    """One request's parameters, at work on rows of one vocabulary.

    Args:
        params: the request's parameters.
        prompt_ids: its prompt.
        forbidden_ids: the target's ids that ``min_tokens`` holds back.
        vocabulary: the rows' own vocabulary, where it is not the target's.
        constraint: what the output must be, if anything.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Collection[int],
        forbidden_ids: Collection[int],
        vocabulary: DraftVocabulary | None = None,
        constraint: Masks | None = None,
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._vocabulary = vocabulary
        self._prompt_len = len(prompt_ids)
        self._prompt_set = frozenset(prompt_ids if params.repetition_penalty != 1.0 else ())
        self._repetition = max(params.repetition_penalty, _SMALLEST)
        self._temperature = max(params.temperature, _SMALLEST)
        bias_ids = self._known(params.logit_bias)
        self._bias_places = self._places(bias_ids)
        self._bias = np.array([params.logit_bias[token] for token in bias_ids], dtype=np.float32)
        self._forbidden = self._places(self._known(forbidden_ids))

    def __call__(self, logits: Row, prefix: Prefix, path: Sequence[int]) -> Row:
        """One row through the whole chain; always a fresh array.

        Its prefix goes on with ``path``, in the target's ids. The row must have a largest entry
        and that be finite; all of the result is minus infinity where the constraint leaves nothing.
        """
        row = logits.copy()
        if self._params.has_penalties:
            self._penalise(row, prefix, path)
        row[self._bias_places] += self._bias
        if self._constraint is not None:
            row = self._constrain(row, [*prefix.output_ids, *path])
        if prefix.num_output + len(path) < self._params.min_tokens:
            row = self._forbid(row)
        if self._params.is_greedy or (self._constraint is not None and np.isneginf(row.max())):
            return row
        # The softmax does not see a shift; with the largest at 0 a low temperature neither
        # overflows nor costs the likely tokens their precision when noise is added.
        with np.errstate(over="ignore"):  # towards minus infinity, as it should
            row -= row.max()
            row /= self._temperature
        row = keep_top_k(row, self._params.top_k)
        return keep_min_p(keep_top_p(row, self._params.top_p), self._params.min_p)

    def prefix(self, token_ids: Sequence[int]) -> Prefix:
        """Count the tokens up to the root."""
        count = Counter(token_ids[self._prompt_len :] if self._params.has_penalties else ())
        penalised = self._known(self._prompt_set | count.keys())
        return Prefix(
            num_tokens=len(token_ids),
            num_output=len(token_ids) - self._prompt_len,
            count=count,
            penalised=self._places(penalised),
            subtract=self._subtractions(count[token] for token in penalised),
            output_ids=() if self._constraint is None else tuple(token_ids[self._prompt_len :]),
        )

    def _known(self, ids: Iterable[int]) -> list[int]:
        """Those of the target's ids that stand in a row at all."""
        if self._vocabulary is None:
            return list(ids)
        place_V = self._vocabulary.place_V
        return [token for token in ids if place_V[token] >= 0]

    def _places(self, known_ids: Sequence[int]) -> NDArray[np.int64]:
        """Where in a row they stand."""
        ids = np.array(known_ids, dtype=np.int64)
        return ids if self._vocabulary is None else self._vocabulary.place_V[ids]

    def _subtractions(self, counts: Iterable[int]) -> Row:
        """What presence and frequency penalties take away after so many occurrences."""
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        return np.array(
            [presence * (count > 0) + frequency * count for count in counts], dtype=np.float32
        )

    def _penalise(self, row: Row, prefix: Prefix, path: Sequence[int]) -> None:
        """Penalise, in place, what the prefix holds and what the path adds to it."""
        # The path's ids are redone from the untouched logits, so that a step's shared counts
        # need no copy per node.
        added = Counter(path)
        path_ids = self._known(added)
        path_places = self._places(path_ids)
        subtract = self._subtractions(prefix.count[token] + added[token] for token in path_ids)
        path_values = self._penalised(row[path_places], subtract) if path_ids else None
        row[prefix.penalised] = self._penalised(row[prefix.penalised], prefix.subtract)
        if path_values is not None:
            row[path_places] = path_values

    def _penalised(self, values: Row, subtract: Row) -> Row:
        """Repetition, then presence and frequency penalties, on the logits of seen tokens."""
        with np.errstate(over="ignore"):
            scaled = np.where(values > 0, values / self._repetition, values * self._repetition)
        finite = np.clip(scaled - subtract, -_LARGEST, _LARGEST)
        return np.where(np.isneginf(values), values, finite)

    def _constrain(self, row: Row, output_ids: Sequence[int]) -> Row:
        """Mask what the constraint does not allow after this output."""
        assert self._constraint is not None
        mask_V = self._constraint.mask(output_ids)
        mask = mask_V if self._vocabulary is None else mask_V[self._vocabulary.ids_W]
        return np.where(mask, row, np.float32(-np.inf))

    def _forbid(self, row: Row) -> Row:
        """Mask, in place, the ids that would end the text, unless nothing else is possible."""
        held_back = row[self._forbidden]
        row[self._forbidden] = -np.inf
        if np.isneginf(row.max()):
            row[self._forbidden] = held_back
        return row
