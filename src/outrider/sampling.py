"""The target's sampler: one pick per tree node, each given the node's own prefix.

Owns penalties, filters and the argmax. Below ``verify`` in the flow; takes logits and token ids,
knows neither models nor caches. A pick is

    argmax( warp(logits of the node, prefix of the node) + noise(seed, choice, position) )

where ``warp`` applies, in this order: repetition, presence and frequency penalties, logit bias,
forbidden ids (``min_tokens``), temperature, top-k, top-p, min-p. At temperature 0 the filters and
the noise fall away. Ties go to the lowest id. Plain decoding, the first token after prefill and
every node of a draft tree come through here, so they cannot differ.

Rows are worked on one at a time, as numpy vectors of one length: what is picked for a row cannot
depend on the rows beside it or on torch's thread count, and numpy's argmax, sort and comparisons
on one row are several times faster than torch's.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import SamplingParams
from outrider.errors import ParameterError
from outrider.noise import GumbelNoise
from outrider.tree import DraftTree

NOT_FINITE = -1

Row: TypeAlias = NDArray[np.float32]
"""One node's logits ``[V]``."""

_LARGEST = np.finfo(np.float32).max
# Smaller settings would round to zero in float32 and turn infinities into NaN.
_SMALLEST = float(np.finfo(np.float32).tiny)


def argmax_rows(logits_RV: Tensor) -> list[int]:
    """The lowest id of each row's largest logit; -1 where the row is not finite.

    Not finite: any NaN, any plus infinity, or nothing but minus infinities. Single minus
    infinities are masks and fine.
    """
    logits = logits_RV.cpu().numpy()
    ids = logits.argmax(axis=1)  # a NaN counts as the largest
    is_finite = np.isfinite(logits[np.arange(len(logits)), ids])
    return np.where(is_finite, ids, NOT_FINITE).tolist()


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


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A request's tokens up to the root, counted once for all rows of a step.

    ``count`` has the occurrences in the output; ``penalised`` are the ids that penalties touch,
    and ``subtract`` what presence and frequency take from each.
    """

    num_tokens: int
    num_output: int
    count: Counter[int]
    penalised: NDArray[np.int64]
    subtract: Row


class RequestSampler:
    """Picks one request's tokens; holds what a pick depends on besides logits and prefix.

    Attributes:
        params: the request's parameters.
        seed: ``params.seed``, or a fresh private one where none was given.
        noise: the vectors that the target's picks use; a drafter may look at them.
        is_raw_argmax: True when every pick is the plain argmax of the logits, so that
            :func:`argmax_rows` over a whole batch gives the same.

    Raises:
        ParameterError: an id in ``logit_bias`` or ``stop_token_ids`` is outside the vocabulary, or
            ``min_tokens`` would forbid every token.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt_ids: Sequence[int],
        eos_ids: frozenset[int],
    ) -> None:
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.noise = GumbelNoise(self.seed, params.choice, vocab_size)
        self._vocab_size = vocab_size
        self._prompt_len = len(prompt_ids)
        self._prompt_set = frozenset(prompt_ids if params.repetition_penalty != 1.0 else ())
        self._repetition = max(params.repetition_penalty, _SMALLEST)
        self._temperature = max(params.temperature, _SMALLEST)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._forbidden = _forbidden_ids(params, vocab_size, eos_ids)
        self.is_raw_argmax = (
            params.is_greedy
            and not params.has_penalties
            and not params.logit_bias
            and not self._forbidden.size
        )

    def picks(self, logits_NV: Tensor, token_ids: Sequence[int], tree: DraftTree) -> Sequence[int]:
        """What :meth:`choose` returns, each node computed when it is first looked up.

        A walk looks up the nodes of its path only, so a wide tree costs no more than a chain. Use
        it before the logits are overwritten.
        """
        assert logits_NV.shape == (len(tree), self._vocab_size)
        return _Picks(self, logits_NV, self._prefix(token_ids), tree)

    def choose(self, logits_NV: Tensor, token_ids: Sequence[int], tree: DraftTree) -> list[int]:
        """The target's pick after each node of the tree; -1 where its logits are not finite.

        ``token_ids`` is the prompt and all emitted tokens, the tree's root last. Node n's prefix
        is ``token_ids`` and the tokens on its path; the picked token will stand at position
        ``len(token_ids) + depth(n)``, which keys its noise. ``logits_NV`` is only read.
        """
        return list(self.picks(logits_NV, token_ids, tree))

    def warp(self, logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Logits after penalties and filters, before noise; a new float32 ``[V]``.

        ``token_ids`` is the whole prefix of the token to pick. At a temperature above 0 the
        largest is 0 and masked tokens are minus infinity: the softmax is the law of the pick.
        The logits must be finite in the sense of :func:`argmax_rows`.
        """
        return torch.from_numpy(self._warp(_row(logits_V), self._prefix(token_ids), ()))

    def release(self, position: int) -> None:
        """Forget the noise of positions before this one: their tokens are committed."""
        self.noise.release_before(position)

    def _pick(self, logits_V: Tensor, prefix: _Prefix, path: Sequence[int]) -> int:
        """The pick of one row whose prefix goes on with ``path``."""
        row = _row(logits_V)
        if not np.isfinite(row.max()):  # a NaN counts as the largest
            return NOT_FINITE
        if self.is_raw_argmax:
            return int(row.argmax())
        row = self._warp(row, prefix, path)
        if not self.params.is_greedy:
            row += self.noise.at(prefix.num_tokens + len(path)).numpy()
        return int(row.argmax())

    def _warp(self, logits: Row, prefix: _Prefix, path: Sequence[int]) -> Row:
        """One row through the whole chain; always a fresh array."""
        row = logits.copy()
        if self.params.has_penalties:
            self._penalise(row, prefix, path)
        row[self._bias_ids] += self._bias
        if prefix.num_output + len(path) < self.params.min_tokens:
            row = self._forbid(row)
        if self.params.is_greedy:
            return row
        # The softmax does not see a shift; with the largest at 0 a low temperature neither
        # overflows nor costs the likely tokens their precision when noise is added.
        with np.errstate(over="ignore"):  # towards minus infinity, as it should
            row -= row.max()
            row /= self._temperature
        row = keep_top_k(row, self.params.top_k)
        return keep_min_p(keep_top_p(row, self.params.top_p), self.params.min_p)

    def _prefix(self, token_ids: Sequence[int]) -> _Prefix:
        """Count the tokens up to the root."""
        count = Counter(token_ids[self._prompt_len :] if self.params.has_penalties else ())
        penalised = list(self._prompt_set | count.keys())
        return _Prefix(
            num_tokens=len(token_ids),
            num_output=len(token_ids) - self._prompt_len,
            count=count,
            penalised=np.array(penalised, dtype=np.int64),
            subtract=self._subtractions(count[token] for token in penalised),
        )

    def _subtractions(self, counts: Iterable[int]) -> Row:
        """What presence and frequency penalties take away after so many occurrences."""
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        return np.array(
            [presence * (count > 0) + frequency * count for count in counts], dtype=np.float32
        )

    def _penalise(self, row: Row, prefix: _Prefix, path: Sequence[int]) -> None:
        """Penalise, in place, what the prefix holds and what the path adds to it."""
        # The path's ids are redone from the untouched logits, so that a step's shared counts
        # need no copy per node.
        added = Counter(path)
        path_ids = list(added)
        subtract = self._subtractions(prefix.count[token] + added[token] for token in path_ids)
        path_values = self._penalised(row[path_ids], subtract) if path_ids else None
        row[prefix.penalised] = self._penalised(row[prefix.penalised], prefix.subtract)
        if path_values is not None:
            row[path_ids] = path_values

    def _penalised(self, values: Row, subtract: Row) -> Row:
        """Repetition, then presence and frequency penalties, on the logits of seen tokens."""
        with np.errstate(over="ignore"):
            scaled = np.where(values > 0, values / self._repetition, values * self._repetition)
        finite = np.clip(scaled - subtract, -_LARGEST, _LARGEST)
        return np.where(np.isneginf(values), values, finite)

    def _forbid(self, row: Row) -> Row:
        """Mask, in place, the ids that would end the text, unless nothing else is possible."""
        held_back = row[self._forbidden]
        row[self._forbidden] = -np.inf
        if np.isneginf(row.max()):
            row[self._forbidden] = held_back
        return row


class _Picks(Sequence[int]):
    """The target's picks after the nodes of one tree: computed on demand, then kept."""

    def __init__(
        self, sampler: RequestSampler, logits_NV: Tensor, prefix: _Prefix, tree: DraftTree
    ) -> None:
        self._sampler = sampler
        self._logits_NV = logits_NV
        self._prefix = prefix
        self._tree = tree
        self._known: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tree)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[node] for node in range(len(self))[index]]
        node = range(len(self))[index]
        if node not in self._known:
            path = self._tree.path_tokens(node)
            self._known[node] = self._sampler._pick(self._logits_NV[node], self._prefix, path)
        return self._known[node]


def _row(logits_V: Tensor) -> Row:
    """The logits as a numpy row, without a copy where they are float32 on the CPU."""
    return logits_V.to(device="cpu", dtype=torch.float32).numpy()


def _forbidden_ids(
    params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]
) -> NDArray[np.int64]:
    """The ids that ``min_tokens`` holds back: what would end the text; none without it."""
    ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        ids |= {token for token in eos_ids if token < vocab_size}
    if not params.min_tokens:
        ids = set()
    if len(ids) == vocab_size:
        raise ParameterError(
            f"min_tokens: {params.min_tokens} forbids all {vocab_size} tokens of the vocabulary, "
            "since each ends the text; use min_tokens 0 or fewer stop_token_ids"
        )
    return np.array(sorted(ids), dtype=np.int64)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the model's vocabulary does not have."""
    for token in ids:
        if token >= vocab_size:
            raise ParameterError(
                f"{name}: token id {token} is outside the vocabulary; allowed: "
                f"0 .. {vocab_size - 1}"
            )
