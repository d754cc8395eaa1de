"""Which requests run: the queue, the running ones, and what starts on what.

Owns every request's place from its submission to its end. The engine asks it whom to admit, whose
prompt to compute, who decodes and who must wait again, and hands it the ones that ended. Knows no
model and no drafter.

First come, first served, at every turn::

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


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that has just got a row, what it starts on, and what had to go for it."""

    request: Request
    reuse: Reuse | None = None
    evicted: KeptRow | None = None


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
        """Requests and tokens that would wait with these, beyond what the free rows take."""
        num_free = self._cache.num_free_rows
        num_ahead = min(num_free, len(self._waiting))
        excess = [*islice(self._waiting, num_ahead, None), *requests[num_free - num_ahead :]]
        return len(excess), sum(len(request.token_ids) for request in excess)

    def admit(self) -> Admission | None:
        """Give the head of the queue a row, if there is one and there are slots for it.

        What its row holds of other requests' tokens, by :attr:`Admission.reuse`, is committed.
        """
        if not self._waiting or not self._cache.num_free_rows or not self._has_slots():
            return None
        request = self._waiting[0]
        reuse = self._find_reuse(request)
        if self._has_twin(request, 0 if reuse is None else reuse.num_tokens):
            return None
        self._waiting.popleft()
        row, evicted = self._take_row(request, reuse)
        if reuse is not None and not reuse.takes_over:
            self._cache.copy_prefix(reuse.row, row, reuse.num_tokens)
        request.admit(row)
        self._admitted.append(request)
        return Admission(request, reuse, evicted)

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

        Returns what stays of it for reuse: only of one that ended well, and if ``keeps``.
        """
        if request.cache_row is None:
            if request in self._waiting:
                self._waiting.remove(request)
            return None
        ended_well = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return self._leave(request, keeps=keeps and ended_well)

    def _leave(self, request: Request, *, keeps: bool) -> KeptRow | None:
        """Free a request's row; what it holds is kept if it is sound and long enough."""
        row = request.row
        committed = request.token_ids[: self._cache.committed(row)]  # a stop may have cut some off
        keeps = keeps and request.is_sound
        self._admitted.remove(request)
        self._cache.free(row, scrub=not keeps)
        request.cache_row = None
        if not keeps or self._prefixes is None or len(committed) < MIN_SHARED:
            return None
        kept = KeptRow(row, request.request_id, request.salt, tuple(committed), request.speculates)
        self._prefixes.keep(kept)
        return kept

    def _num_ahead(self, request: Request) -> int:
        """Tokens to compute before the first step, which takes the last ones along."""
        committed = self._cache.committed(request.row)
        return len(request.token_ids) - 1 - FIRST_STEP_TOKENS - committed

    def _has_slots(self) -> bool:
        """Whether the head of the queue may join those that run."""
        joined = [*self._admitted, self._waiting[0]]
        needed = sum(min(len(request.token_ids) + _GROWTH, request.max_len) for request in joined)
        return len(joined) == 1 or needed <= self.max_slots

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
            if other.salt != request.salt or not other.is_sound:
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
            not other.is_sound
            and other.salt == request.salt
            and other.speculates >= request.speculates  # or its drafter could not follow
            and shared_len(other.token_ids[:-1], tokens) - num_tokens >= worth_waiting
            for other in self._admitted
        )

    def _take_row(self, request: Request, reuse: Reuse | None) -> tuple[int, KeptRow | None]:
        """A free row for a new request, and whose memory went for it."""
        if self._prefixes is None:
            return self._cache.allocate(), None
        if reuse is not None and reuse.takes_over:
            source = self._prefixes.drop(reuse.row)
            row = self._cache.allocate(reuse.row, committed=reuse.num_tokens)
            return row, None if request.speculates else source  # else the drafter's goes over too
        kept = [row.row for row in self._prefixes.rows]
        if reuse is not None and reuse.row in kept:
            self._prefixes.touch(reuse.row)
            kept.remove(reuse.row)
        empty = [row for row in self._cache.free_rows if row not in kept]
        if reuse is not None and reuse.row in empty:
            empty.remove(reuse.row)
        row = empty[0] if empty else kept[0]
        return self._cache.allocate(row), self._prefixes.drop(row)
