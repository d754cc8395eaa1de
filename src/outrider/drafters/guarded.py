"""A drafter whose faults cost guesses, and nothing else.

Owns what happens when a drafter raises, or computes what is not finite. Sits between the engine and
whichever drafter it was given, and is one itself. The texts are the target's own whatever is
drafted, so a request can always go on without:

- What fails for one request ends that request's drafting, until it has ended.
- ``propose`` works for several at once. When it raises, all go on plainly for that step, and from
  the next one they are asked about one by one, until each has been answered once: the one that
  fails alone is to blame.
- ``observe`` too works for several at once, and is called again one by one when it raises.
- After ``MAX_DRY`` steps in a row in which it failed and nobody got an answer, it is not asked any
  more.

The ``rejection`` rule's law holds for drafts whose making does not depend on what was drawn; a
drafter that fails for some draws and not for others is no such thing, and faults are counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outrider.drafters.base import Drafter, DraftRequest, Identified
from outrider.tree import DraftTree
from outrider.types import Verdict

MAX_DRY = 3

_log = logging.getLogger(__name__)


class _BadDraftError(Exception):
    """A drafter handed over what can be no draft."""


class GuardedDrafter:
    """``drafter`` as far as it works; none of its exceptions gets through.

    Attributes:
        num_faults: calls that raised, and trees that were no good.
        is_off: whether it failed so often that it is not asked any more.

    Args:
        drafter: what drafts.
        vocab_size: the target's; a draft outside it is no good.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.num_faults = 0
        self.is_off = False
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._lost: set[int] = set()  # requests that go on plainly
        self._suspects: set[int] = set()  # one of them made ``propose`` fail
        self._num_dry = 0

    @property
    def captures(self) -> tuple[int, ...]:
        """The drafter's; none once it is off."""
        return () if self.is_off else self._drafter.captures

    @property
    def num_passes(self) -> int:
        """The drafter's."""
        return self._drafter.num_passes

    def admit(self, request: DraftRequest) -> None:
        """Let the drafter make room."""
        self._try(request, self._drafter.admit, request)

    def adopt(
        self, request: DraftRequest, source_id: int, num_tokens: int, *, takes_over: bool
    ) -> int:
        """Let the drafter start on another request; one that goes on plainly misses no states."""
        adopted = self._try(
            request, self._drafter.adopt, request, source_id, num_tokens, takes_over=takes_over
        )
        if takes_over and source_id != request.request_id:
            self.release(_Source(source_id))  # whatever of it is left
        return num_tokens if adopted is None else adopted

    def prefill(self, request: DraftRequest, num_committed: int, hidden_TC: Tensor | None) -> None:
        """Let the drafter take in a prompt's states."""
        self._try(request, self._drafter.prefill, request, num_committed, hidden_TC)

    def propose(
        self, requests: Sequence[DraftRequest], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        """The drafter's trees, and the root alone where there is none."""
        trees = [DraftTree.root(request.token_ids[-1]) for request in requests]
        asked = [b for b, request in enumerate(requests) if self._may_draft(request)]
        alone = [b for b in asked if requests[b].request_id in self._suspects]
        together = [b for b in asked if b not in alone]
        before, num_good = self.num_faults, 0
        for group in (*([together] if together else []), *([b] for b in alone)):
            members = [requests[b] for b in group]
            try:
                depths = [max_depth[b] for b in group]
                proposed = self._drafter.propose(members, depths, min_score)
                pairs = list(zip(group, proposed, strict=True))
            except Exception as error:
                self._blame(members, error)
                continue
            for b, tree in pairs:
                if (problem := self._problem(tree, requests[b], max_depth[b])) is not None:
                    self._blame([requests[b]], _BadDraftError(problem))
                    continue
                trees[b] = tree
                num_good += 1
                self._suspects.discard(requests[b].request_id)
        self._count_dry(has_failed=self.num_faults > before, has_worked=num_good > 0)
        return trees

    def observe(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden: Sequence[Tensor | None],
    ) -> None:
        """Let the drafter learn: of all at once, and after a fault of each for itself.

        All at once lets a drafter share its passes; one by one shows which request it fails on.
        """
        asked = [b for b, request in enumerate(requests) if self._may_draft(request)]
        if len(asked) > 1:
            try:
                self._drafter.observe(*_part(asked, requests, trees, verdicts, hidden))
                return
            except Exception as error:
                self._count(error)
        for b in asked:
            told = _part([b], requests, trees, verdicts, hidden)
            self._try(requests[b], self._drafter.observe, *told)

    def release(self, request: Identified) -> None:
        """Forget a request, and that it went on plainly."""
        self._lost.discard(request.request_id)
        self._suspects.discard(request.request_id)
        try:
            self._drafter.release(request)
        except Exception as error:
            self._count(error)

    def _may_draft(self, request: Identified) -> bool:
        return not self.is_off and request.request_id not in self._lost

    def _try(self, request: Identified, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """What a call about one request returns; None where it fails or is not made."""
        if not self._may_draft(request):
            return None
        try:
            return call(*args, **more)
        except Exception as error:
            self._blame([request], error)
            return None

    def _problem(self, tree: DraftTree, request: DraftRequest, max_depth: int) -> str | None:
        """Why this can be no draft, if so."""
        if not (tree.is_finite and math.isfinite(math.fsum(tree.score))):
            return "its logits are not finite"
        if tree.token[0] != request.token_ids[-1]:
            return f"its root is token {tree.token[0]}, and the last token {request.token_ids[-1]}"
        if not all(0 <= token < self._vocab_size for token in tree.token):
            return f"it drafted a token outside 0 .. {self._vocab_size - 1}: {max(tree.token)}"
        if max(tree.depth) > max_depth:
            return f"its tree is {max(tree.depth)} deep, and {max_depth} were allowed"
        return None

    def _blame(self, requests: Sequence[Identified], error: Exception) -> None:
        """One request goes on plainly; of several it has to be seen which one is to blame."""
        self._count(error)
        if len(requests) > 1:
            self._suspects.update(request.request_id for request in requests)
            return
        with suppress(Exception):  # one fault is enough to tell
            self._drafter.release(requests[0])
        self._suspects.discard(requests[0].request_id)
        self._lost.add(requests[0].request_id)

    def _count(self, error: Exception) -> None:
        self.num_faults += 1
        level = logging.WARNING if self.num_faults == 1 else logging.DEBUG
        text = "the drafter failed; texts do not change, what it failed on goes on without drafts"
        _log.log(level, "%s (further faults are only counted)", text, exc_info=error)

    def _count_dry(self, *, has_failed: bool, has_worked: bool) -> None:
        if has_worked:
            self._num_dry = 0
        elif has_failed:
            self._num_dry += 1
        if self._num_dry == MAX_DRY and not self.is_off:
            self.is_off = True
            _log.error("the drafter failed %d times in a row: drafting is off", MAX_DRY)


def _part(places: Sequence[int], *columns: Sequence[Any]) -> list[list[Any]]:
    """These places of each column."""
    return [[column[place] for place in places] for column in columns]


@dataclass(frozen=True, slots=True)
class _Source:
    """A request of which only the number is known."""

    request_id: int
