"""The drafter contract: what every drafting method offers, and what it may see.

A drafter only guesses: whatever it proposes, the emitted tokens are the target's own. It sees the
request's tokens and, through ``sampler``, the same noise and filters as the target, and hands
over one :class:`~outrider.tree.DraftTree` per request.

Sits below ``step``, which calls ``prefill`` once per request, then ``propose`` and ``observe`` once
per verify step, then ``release``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.sampling import RequestSampler
from outrider.tree import DraftTree
from outrider.types import Verdict


class DraftRequest(Protocol):
    """What a drafter sees of a request; ``token_ids`` is prompt plus emitted tokens, growing."""

    @property
    def request_id(self) -> int:
        """Unique among the engine's requests."""
        ...

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

    def prefill(self, request: DraftRequest, hidden_TD: Tensor | None) -> None:
        """Take in a new request's prompt; ``hidden_TD`` are captured states where asked for."""
        ...

    def propose(
        self, requests: Sequence[DraftRequest], max_depth: Sequence[int]
    ) -> list[DraftTree]:
        """One tree per request, no deeper than its ``max_depth`` (0: the root alone).

        The root is the request's last token. ``score`` is the drafter's confidence in (0, 1].
        """
        ...

    def observe(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden_RD: Tensor | None,
    ) -> None:
        """Learn what the target decided; ``request.token_ids`` already holds the new tokens."""
        ...

    def release(self, request: DraftRequest) -> None:
        """Forget a request that ended, at whatever stage."""
        ...
