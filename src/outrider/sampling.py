"""The target's sampler: one pick per tree node, each given the node's own prefix.

Owns what a request's picks depend on: its parameters, its seed and its noise. Below ``verify`` in
the flow; takes logits and token ids, knows neither models nor caches. A pick is

    argmax( warp(logits of the node, prefix of the node) + noise(seed, choice, position) )

where ``warp`` applies, in this order: repetition, presence and frequency penalties, logit bias,
grammar, forbidden ids (``min_tokens``), temperature, top-k, top-p, min-p. At temperature 0 the
filters and the noise fall away. Ties go to the lowest id. Plain decoding, the first token after
prefill and every node of a draft tree come through here, so they cannot differ. The ``rejection``
rule takes the law itself, softmax(warp), and a drafter warps its own logits in the same way.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from outrider.config import SamplingParams
from outrider.errors import ParameterError
from outrider.noise import GumbelNoise
from outrider.tree import DraftTree
from outrider.types import TokenLogprobs
from outrider.vocabulary import DraftVocabulary
from outrider.warping import Constraint, Prefix, Row, Warp, softmax

NOT_FINITE = -1

Value = TypeVar("Value")


def argmax_rows(logits_RV: Tensor) -> list[int]:
    """The lowest id of each row's largest logit; -1 where the row is not finite.

    Not finite: any NaN, any plus infinity, or nothing but minus infinities. Single minus
    infinities are masks and fine.
    """
    logits = logits_RV.cpu().numpy()
    ids = logits.argmax(axis=1)  # a NaN counts as the largest
    is_finite = np.isfinite(logits[np.arange(len(logits)), ids])
    return np.where(is_finite, ids, NOT_FINITE).tolist()


def token_logprobs(logits_V: Tensor | Row, token: int, num_top: int) -> TokenLogprobs:
    """The log-probabilities of a token and of the ``num_top`` likeliest, from a raw row of logits.

    Worked out in float64 from float32 logits, which must be finite in the sense of
    :func:`argmax_rows`; they are only read.
    """
    raw = _row(logits_V)
    row = raw.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    top: list[int] = []
    if num_top:  # ranked by the logits themselves: what is left of tiny ones above may be equal
        kth = np.partition(raw, raw.size - num_top)[raw.size - num_top] if num_top < raw.size else 0
        places = np.flatnonzero(raw >= kth) if num_top < raw.size else np.arange(raw.size)
        order = places[np.argsort(-raw[places], kind="stable")]
        top = [int(place) for place in order[:num_top] if raw[place] > -np.inf]
    return TokenLogprobs(token, float(row[token]), tuple((one, float(row[one])) for one in top))


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
        constraint: Constraint | None = None,
    ) -> None:
        check_ids("logit_bias", params.logit_bias, vocab_size)
        check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.noise = GumbelNoise(self.seed, params.choice, vocab_size)
        self._vocab_size = vocab_size
        self._prompt_ids = tuple(prompt_ids)
        self._forbidden_ids = _forbidden_ids(params, vocab_size, eos_ids)
        self._constraint = constraint
        self._warp = Warp(params, self._prompt_ids, self._forbidden_ids, constraint=constraint)
        self.is_raw_argmax = (
            params.is_greedy
            and not params.has_penalties
            and not params.logit_bias
            and not self._forbidden_ids
            and constraint is None
        )

    def picks(self, logits_NV: Tensor, token_ids: Sequence[int], tree: DraftTree) -> Sequence[int]:
        """What :meth:`choose` returns, each node computed when it is first looked up.

        A walk looks up the nodes of its path only, so a wide tree costs no more than a chain. Use
        it before the logits are overwritten.
        """
        assert logits_NV.shape == (len(tree), self._vocab_size)
        return _PerNode(self._pick, logits_NV, self._warp.prefix(token_ids), tree)

    def choose(self, logits_NV: Tensor, token_ids: Sequence[int], tree: DraftTree) -> list[int]:
        """The target's pick after each node of the tree.

        -1 where its logits are not finite, or the grammar allows none of what they do.

        ``token_ids`` is the prompt and all emitted tokens, the tree's root last. Node n's prefix
        is ``token_ids`` and the tokens on its path; the picked token will stand at position
        ``len(token_ids) + depth(n)``, which keys its noise. ``logits_NV`` is only read.
        """
        return list(self.picks(logits_NV, token_ids, tree))

    def warp(self, logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Logits after penalties and filters, before noise; a new float32 ``[V]``.

        ``token_ids`` is the whole prefix of the token to pick. At a temperature above 0 the
        largest is 0 and masked tokens are minus infinity: the softmax is the law of the pick.
        The logits must be finite in the sense of :func:`argmax_rows`. All of the result is minus
        infinity where the grammar allows nothing.
        """
        return torch.from_numpy(self._warp(_row(logits_V), self._warp.prefix(token_ids), ()))

    def laws(
        self, logits_NV: Tensor, token_ids: Sequence[int], tree: DraftTree
    ) -> Sequence[Row | None]:
        """The probabilities from which the token after each node is drawn; float32 ``[V]`` each.

        Arguments and laziness as for :meth:`picks`; None where the logits are not finite or the
        grammar allows none of what they do. Only for a temperature above 0.
        """
        assert logits_NV.shape == (len(tree), self._vocab_size)
        assert not self.params.is_greedy
        return _PerNode(self._law, logits_NV, self._warp.prefix(token_ids), tree)

    def draft_view(self, token_ids: Sequence[int], vocabulary: DraftVocabulary | None) -> DraftView:
        """This request's parameters and noise, for the logits of a drafter.

        ``token_ids`` is the prompt and all emitted tokens, the tree's root last; ``vocabulary`` is
        the drafter's, None where it is the target's own.
        """
        assert vocabulary is None or vocabulary.target_size == self._vocab_size
        masks = None if self._constraint is None else self._constraint.for_drafts()
        warp = Warp(self.params, self._prompt_ids, self._forbidden_ids, vocabulary, masks)
        noise = None if self.params.is_greedy else self.noise
        return DraftView(warp, warp.prefix(token_ids), noise, vocabulary)

    def release(self, position: int) -> None:
        """Forget the noise of positions before this one: their tokens are committed."""
        self.noise.release_before(position)

    def _pick(self, logits_V: Tensor, prefix: Prefix, path: Sequence[int]) -> int:
        """The pick of one row whose prefix goes on with ``path``."""
        row = _row(logits_V)
        if not _is_finite(row):
            return NOT_FINITE
        if self.is_raw_argmax:
            return int(row.argmax())
        row = self._warp(row, prefix, path)
        if not self.params.is_greedy:
            row += self.noise.at(prefix.num_tokens + len(path)).numpy()
        pick = int(row.argmax())
        return pick if self._constraint is None or np.isfinite(row[pick]) else NOT_FINITE

    def _law(self, logits_V: Tensor, prefix: Prefix, path: Sequence[int]) -> Row | None:
        """The law of the pick of one row whose prefix goes on with ``path``."""
        row = _row(logits_V)
        if not _is_finite(row):
            return None
        row = self._warp(row, prefix, path)
        return softmax(row) if self._constraint is None or _is_finite(row) else None


class DraftView:
    """A request as its drafter sees it, for one step: its parameters and noise on draft logits.

    Rows are over the drafter's own vocabulary; ``path`` holds the tokens below the root, in the
    target's ids, after which the row's token would come.

    Attributes:
        num_tokens: the request's tokens, root included; where a child of the root would stand.
        is_finite: whether all logits so far were.
    """

    def __init__(
        self,
        warp: Warp,
        prefix: Prefix,
        noise: GumbelNoise | None,
        vocabulary: DraftVocabulary | None,
    ) -> None:
        self.num_tokens = prefix.num_tokens
        self.is_finite = True
        self._warp = warp
        self._prefix = prefix
        self._noise = noise
        self._vocabulary = vocabulary
        self._noise_at: dict[int, Row] = {}

    def warp(self, logits_W: Tensor | Row, path: Sequence[int]) -> Row:
        """Draft logits after the request's penalties, grammar and filters; a new float32 ``[W]``.

        All minus infinity where the logits are not finite, or where the grammar allows none of the
        draft's tokens: such a row proposes nothing.
        """
        row = _row(logits_W)
        if not _is_finite(row):
            self.is_finite = False
            return np.full_like(row, -np.inf)
        return self._warp(row, self._prefix, path)

    def noise(self, depth: int) -> Row | None:
        """The target's own noise for the children of a node at ``depth``; None if there is none.

        Float32 ``[W]``; not to be written to.
        """
        if self._noise is None:
            return None
        if depth not in self._noise_at:
            noise_V = self._noise.at(self.num_tokens + depth).numpy()
            self._noise_at[depth] = (
                noise_V if self._vocabulary is None else noise_V[self._vocabulary.ids_W]
            )
        return self._noise_at[depth]

    def probs(self, logits_W: Tensor | Row, path: Sequence[int]) -> Row:
        """The softmax of :meth:`warp`; all 0 where the logits are not finite."""
        row = self.warp(logits_W, path)
        return softmax(row) if _is_finite(row) else np.zeros_like(row)


class _PerNode(Sequence[Value]):
    """A value for each node of one tree, from its row and path: made on demand, then kept."""

    def __init__(
        self,
        make: Callable[[Tensor, Prefix, Sequence[int]], Value],
        logits_NV: Tensor,
        prefix: Prefix,
        tree: DraftTree,
    ) -> None:
        self._make = make
        self._logits_NV = logits_NV
        self._prefix = prefix
        self._tree = tree
        self._known: dict[int, Value] = {}

    def __len__(self) -> int:
        return len(self._tree)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> list[Value]: ...
    def __getitem__(self, index: int | slice) -> Value | list[Value]:
        if isinstance(index, slice):
            return [self[node] for node in range(len(self))[index]]
        node = range(len(self))[index]
        if node not in self._known:
            path = self._tree.path_tokens(node)
            self._known[node] = self._make(self._logits_NV[node], self._prefix, path)
        return self._known[node]


def _is_finite(row: Row) -> bool:
    """Whether a row has a largest entry; a NaN counts as the largest."""
    return bool(np.isfinite(row.max()))


def _row(logits_V: Tensor | Row) -> Row:
    """The logits as a numpy row, without a copy where they are float32 on the CPU."""
    if isinstance(logits_V, np.ndarray):
        return logits_V.astype(np.float32, copy=False)
    return logits_V.to(device="cpu", dtype=torch.float32).numpy()


def _forbidden_ids(
    params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]
) -> tuple[int, ...]:
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
    return tuple(sorted(ids))


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the model's vocabulary does not have."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ParameterError(
                f"{name}: token id {token} is outside the vocabulary; allowed: "
                f"0 .. {vocab_size - 1}"
            )
