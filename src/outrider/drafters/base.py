"""The drafter contract: what every drafting method offers, and what it may see.

A drafter only guesses: whatever it proposes, the emitted tokens are the target's own. It sees the
request's tokens and, through ``sampler``, the same noise and filters as the target, and hands
over one :class:`~outrider.tree.DraftTree` per request.

Sits below ``step``. The engine calls ``admit``, or ``adopt`` where another request began with the
same tokens, then ``prefill`` after each pass over the prompt (a
short prompt has none: its tokens come with the first step), ``step`` calls ``propose`` and
``observe`` once per verify step, the engine ``release`` at the end::

    position     0 ... c-1 | c ......... n-1 | n            n = len(token_ids) - 1, the root's
    token        known     | known           | root
    state        handed over by earlier calls| not yet there: the step computes it
                             ^ this call's T states, positions c .. n-1

Each state comes with the call in which its position was committed, so the token behind it,
``token_ids[position + 1]``, is always known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.sampling import RequestSampler
from outrider.tree import DraftTree
from outrider.types import Verdict


class Identified(Protocol):
    """All that a drafter needs in order to forget a request."""

    @property
    def request_id(self) -> int:
        """Unique among the engine's requests."""
        ...


class DraftRequest(Identified, Protocol):
    """What a drafter sees of a request; ``token_ids`` is prompt plus emitted tokens, growing."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and emitted tokens; the last is the next tree's root."""
        ...

    @property
    def prompt_len(self) -> int:
        """How many of them are the prompt's."""
        ...

    @property
    def sampler(self) -> RequestSampler:
        """The target's filters and noise, to look at."""
        ...


class Drafter(Protocol):
    """Proposes trees; keeps whatever state it needs per ``request_id``."""

    @property
    def captures(self) -> tuple[int, ...]:
        """The target's states it wants to see, as ``Decoder.forward`` names them; often none."""
        ...

    @property
    def num_passes(self) -> int:
        """Forward passes of a draft module so far; the unit in which drafting time is told."""
        ...

    def admit(self, request: DraftRequest) -> None:
        """Make room for a request that is about to run."""
        ...

    def adopt(
        self, request: DraftRequest, source_id: int, num_tokens: int, *, takes_over: bool
    ) -> int:
        """Admit a request that begins with ``num_tokens`` tokens of another one.

        The source is running, or has ended and was not released yet; with ``takes_over`` it is
        forgotten, and what was kept for it goes to the new request. Returns for how many of those
        positions, from the first, the target's states need not be handed over again: 0 where the
        source is unknown. The engine computes the target from there on.
        """
        ...

    def prefill(self, request: DraftRequest, num_committed: int, hidden_TC: Tensor | None) -> None:
        """Take in the states of prompt positions that a pass committed.

        ``num_committed`` is the number of positions now committed; ``hidden_TC`` are the captured
        states of the last T of them, side by side; None where none are asked for.
        """
        ...

    def propose(
        self, requests: Sequence[DraftRequest], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        """One tree per request, no deeper than its ``max_depth`` (0: the root alone).

        The root is the request's last token. ``score`` is the drafter's confidence in (0, 1].
        A pass extends nodes of at least ``min_score`` only, and is made only if the best such nodes
        of the requests promise together ``min_score`` times their number. Above 1, which is the
        root's, there is none, and what is proposed is looked up.
        """
        ...

    def observe(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden: Sequence[Tensor | None],
    ) -> None:
        """Learn what the target decided; ``request.token_ids`` already holds the new tokens.

        ``hidden[b]`` are the captured states ``[T, C]`` of the positions the step committed: those
        that prefill had left, the root's and the accepted nodes'. A call that raised may be made
        again, for the same requests one by one, and must not count anything twice.
        """
        ...

    def release(self, request: Identified) -> None:
        """Forget a request that ended, at whatever stage; one that is unknown is fine."""
        ...
