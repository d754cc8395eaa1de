"""Which requests run: the queue, the running ones, and what starts on what.

Owns every request's place from its submission to its end. The engine asks it whom to admit, whose
prompt to compute, who decodes and who must wait again, and hands it the ones that ended. Knows no
model and no drafter.

First come, first served, at every turn; only one that waits for what another one is computing lets
those behind it pass, onto rows and slots that it does not need itself::

    submit --> waiting --admit--> prefilling --share--> decoding --remove--> ended
                  ^                    |                    |
                  +------ preempt -----+--------------------+     the one admitted last

A request that is preempted goes to the head of the queue and is computed again from its prompt and
the tokens it has emitted, so its text does not change. The one admitted first is never preempted
for want of slots, hence it ends, and then the next one is first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from outrider.config import FIRST_STEP_TOKENS, AdmissionLimits
from outrider.counters import Counters
from outrider.errors import OverloadedError
from outrider.kv_cache import KVCache
from outrider.prefix_cache import MIN_SHARED, KeptRow, PrefixCache, Reuse, shared_len
from outrider.request import Request
from outrider.types import FinishReason

# A request is admitted only while there are slots for so many more tokens of each one that runs,
# or it would soon be made to wait again and all that was computed of it lost.
_GROWTH = 16


class Claim(NamedTuple):
    """What a request takes: slots while it runs, tokens of the queue while it waits."""

    num_slots: int
    num_tokens: int

    @classmethod
    def of(cls, request: Request) -> Claim:
        """A request's, as it stands."""
        num_tokens = len(request.token_ids)
        return cls(min(num_tokens + _GROWTH, request.max_len), num_tokens)


def num_at_once(
    running: Sequence[Claim], queue: Sequence[Claim], *, num_rows: int, max_slots: int
) -> int:
    """How many of the queue, its head first, run at once on ``num_rows`` free rows.

    The slots must do for all that run then, except for one that is alone.
    """
    used = sum(claim.num_slots for claim in running)
    for place, claim in enumerate(queue[:num_rows]):
        used += claim.num_slots
        if used > max_slots and (running or place):
            return place
    return min(num_rows, len(queue))


def queue_excess(
    running: Sequence[Claim], queue: Sequence[Claim], *, num_rows: int, max_slots: int
) -> tuple[int, int]:
    """Requests and tokens that wait, beyond those that run at once; these are what is limited."""
    first = num_at_once(running, queue, num_rows=num_rows, max_slots=max_slots)
    return len(queue) - first, sum(claim.num_tokens for claim in queue[first:])


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that has just got a row, what it starts on, and what the row held until now."""

    request: Request
    reuse: Reuse | None = None
    dropped: KeptRow | None = None


class Scheduler:
    """First come, first served: a queue, and as many running requests as rows and slots allow.

    Args:
        cache: the target's rows.
        max_slots: most tokens of all running requests together; at least those of any one.
        limits: how long the queue may get.
        prefixes: remembers what ended requests leave in their rows; None forgets it.
        counters: where refusals and preemptions are counted.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_slots: int,
        limits: AdmissionLimits | None = None,
        prefixes: PrefixCache | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.max_slots = max_slots
        self._cache = cache
        self._limits = AdmissionLimits() if limits is None else limits
        self._prefixes = prefixes
        self._counters = Counters() if counters is None else counters
        self._waiting: deque[Request] = deque()
        self._admitted: list[Request] = []  # in the order in which they came

    @property
    def waiting(self) -> list[Request]:
        """The queue, its head first."""
        return list(self._waiting)

    @property
    def running(self) -> list[Request]:
        """Requests with a cache row, the one admitted first in front."""
        return list(self._admitted)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._admitted)

    @property
    def slots_used(self) -> int:
        """Tokens of the requests that hold a row."""
        return sum(len(request.token_ids) for request in self._admitted)

    def holds(self, request: Request) -> bool:
        """Whether a request waits or runs here."""
        return request.cache_row is not None or request in self._waiting

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of these, or none.

        Raises:
            OverloadedError: the queue would get longer than it may.
        """
        assert len({*requests}) == len(requests), "a request is queued once"
        for request in requests:
            is_new = request.num_admissions == 0 and request.finish_reason is None
            assert is_new, "a request is queued once"
            assert request not in self._waiting, "a request is queued once"
        counts = self._queue_excess(requests)
        limits = (self._limits.max_waiting, self._limits.max_waiting_tokens)
        for count, limit, what in zip(counts, limits, ("requests", "tokens"), strict=True):
            if limit is not None and count > limit:
                self._counters.refused += len(requests)
                raise OverloadedError(
                    f"the queue is full: {count} {what} would wait, at most {limit} may; "
                    "send the request again later"
                )
        self._counters.submitted += len(requests)
        self._waiting.extend(requests)

    def _queue_excess(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Requests and tokens that would wait with these, beyond those that run at once."""
        return queue_excess(
            [Claim.of(request) for request in self._admitted],
            [Claim.of(request) for request in (*self._waiting, *requests)],
            num_rows=self._cache.num_free_rows,
            max_slots=self.max_slots,
        )

    def admit(self) -> Admission | None:
        """Give the next of the queue a row, if there is one and there are slots for it.

        What a row that is taken over holds, by :attr:`Admission.reuse`, is committed; a copy is
        still to be made.
        """
        for num_passed, request in enumerate(self._waiting):
            if not self._has_room(num_passed):
                return None
            reuse = self._find_reuse(request)
            if not self._has_twin(request, 0 if reuse is None else reuse.num_tokens):
                row, dropped = self._take_row(reuse)
                request.admit(row)
                self._admitted.append(request)
                del self._waiting[num_passed]
                return Admission(request, reuse, dropped)
        return None

    def shares(self, max_tokens: int) -> list[tuple[Request, int]]:
        """How many tokens of whose prompts to compute next, at most ``max_tokens`` in all.

        A request's last tokens are left to its first step.
        """
        shares = []
        for request in self._admitted:
            count = min(self._num_ahead(request), max_tokens)
            if count > 0:
                shares.append((request, count))
                max_tokens -= count
        return shares

    def ready(self) -> list[Request]:
        """Requests that decode, in cache-row order so that their rows are dense."""
        ready = [request for request in self._admitted if self._num_ahead(request) <= 0]
        return sorted(ready, key=lambda request: request.row)

    def surplus(self) -> Request | None:
        """The request to preempt because the next step needs more slots than there are."""
        if self.slots_used <= self.max_slots:
            return None
        assert len(self._admitted) > 1, "any one request fits"
        return self._admitted[-1]

    def preempt(self, request: Request, *, keeps: bool) -> KeptRow | None:
        """Take a request off its row and put it at the head of the queue.

        ``keeps``: what it leaves may be reused. Returns that, if so.
        """
        kept = self._leave(request, keeps=keeps)
        self._waiting.appendleft(request)
        self._counters.preemptions += 1
        return kept

    def remove(self, request: Request, *, keeps: bool = True) -> KeptRow | None:
        """Take a request that ended out of the queue or off its row, wherever it was.

        Returns what stays of it for reuse: only of one that ended well, and if ``keeps``; or what
        it left, good for others, when it was made to wait.
        """
        if request.cache_row is None:
            if request in self._waiting:
                self._waiting.remove(request)
            return self._left_by(request)
        ended_well = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return self._leave(request, keeps=keeps and ended_well)

    def _leave(self, request: Request, *, keeps: bool) -> KeptRow | None:
        """Free a request's row; what it holds is kept if it is long enough and good for somebody.

        Where no step has been taken, that is the request itself, if it goes on.
        """
        row = request.row
        committed = request.token_ids[: self._cache.committed(row)]  # a stop may have cut some off
        is_sound = keeps and request.has_decoded
        is_good = is_sound or (keeps and request.finish_reason is None)
        is_kept = is_good and self._prefixes is not None and len(committed) >= MIN_SHARED
        self._admitted.remove(request)
        self._cache.free(row, scrub=not (is_sound or is_kept))
        request.cache_row = None
        if not is_kept or self._prefixes is None:
            return None
        kept = KeptRow(
            row,
            request.request_id,
            request.salt,
            tuple(committed),
            request.speculates,
            is_private=not is_sound,
        )
        self._prefixes.keep(kept)
        return kept

    def _left_by(self, request: Request) -> KeptRow | None:
        """What stays, for others, of a request that had to wait again and does not go on."""
        kept = None if self._prefixes is None else self._prefixes.of(request.request_id)
        if kept is None or not kept.is_private:
            return kept
        self._give_away(kept.row)
        return None

    def _give_away(self, row: int) -> KeptRow | None:
        """Forget what a free row holds, and scrub what may not be finite; returns what it was."""
        kept = None if self._prefixes is None else self._prefixes.drop(row)
        if kept is not None and kept.is_private:
            self._cache.scrub(row, self._cache.num_slots)
        return kept

    def _num_ahead(self, request: Request) -> int:
        """Tokens to compute before the first step, which takes the last ones along."""
        committed = self._cache.committed(request.row)
        return len(request.token_ids) - 1 - FIRST_STEP_TOKENS - committed

    def _has_room(self, place: int) -> bool:
        """Whether the one at this place of the queue may run, and those before it too."""
        count = num_at_once(
            [Claim.of(request) for request in self._admitted],
            [Claim.of(request) for request in islice(self._waiting, place + 1)],
            num_rows=self._cache.num_free_rows,
            max_slots=self.max_slots,
        )
        return count == place + 1

    def _find_reuse(self, request: Request) -> Reuse | None:
        """The longest beginning that a kept or a running row of the same salt shares."""
        if self._prefixes is None:
            return None
        tokens = request.token_ids[:-1]  # the last one's logits are what is asked for
        own = self._prefixes.of(request.request_id)
        if own is not None:  # always: a drafter knows a request only once
            return Reuse(own.request_id, own.row, min(len(own.token_ids), len(tokens)), True)
        found = self._prefixes.find(tokens, request.salt)
        best = None
        if found is not None:
            kept, shared = found
            # A long memory is not given up for a short beginning, unless it is the only free row.
            takes_over = 2 * shared >= len(kept.token_ids) or self._cache.num_free_rows == 1
            best = Reuse(kept.request_id, kept.row, shared, takes_over)
        for other in self._admitted:
            if other.salt != request.salt or not other.has_decoded:
                continue
            shared = shared_len(other.token_ids[: self._cache.committed(other.row)], tokens)
            if shared >= MIN_SHARED and (best is None or shared > best.num_tokens):
                best = Reuse(other.request_id, other.row, shared, takes_over=False)
        return best

    def _has_twin(self, request: Request, num_tokens: int) -> bool:
        """Whether a request that is being computed will save this one half of its work or more.

        Then it waits for that one's first step, as several answers to one prompt do. Otherwise it
        would start on ``num_tokens`` tokens.
        """
        if self._prefixes is None:
            return False
        tokens = request.token_ids[:-1]
        worth_waiting = max(MIN_SHARED, (len(tokens) - num_tokens + 1) // 2)
        return any(
            not other.has_decoded
            and other.salt == request.salt
            and other.speculates >= request.speculates  # or its drafter could not follow
            and shared_len(other.token_ids[:-1], tokens) - num_tokens >= worth_waiting
            for other in self._admitted
        )

    def _take_row(self, reuse: Reuse | None) -> tuple[int, KeptRow | None]:
        """A free row for a new request, and what it held until now."""
        if self._prefixes is None:
            return self._cache.allocate(), None
        if reuse is not None and reuse.takes_over:
            dropped = self._prefixes.drop(reuse.row)
            return self._cache.allocate(reuse.row, committed=reuse.num_tokens), dropped
        kept = [row.row for row in self._prefixes.rows]
        empty = [row for row in self._cache.free_rows if row not in kept]
        if reuse is not None and reuse.row in kept:  # it is about to be copied
            self._prefixes.touch(reuse.row)
            kept.remove(reuse.row)
        row = empty[0] if empty else kept[0]
        dropped = self._give_away(row)
        return self._cache.allocate(row), dropped
