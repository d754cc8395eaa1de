"""Which requests run: the queue, the running set, and each request's own state.

Owns a request from submission to its last token. The engine asks it whom to admit and hands it the
ones that ended; ``step`` appends tokens through :meth:`Request.emit`. Knows no model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from outrider.config import SamplingParams
from outrider.kv_cache import KVCache
from outrider.output import OutputStream, TextDecoder
from outrider.sampling import RequestSampler
from outrider.types import FinishReason, SpeculationStats, Timing, Verdict


class Request:
    """One prompt on its way to a text.

    ``token_ids`` is prompt plus emitted tokens. Its keys and values are committed up to, and
    excluding, the last token: that one is the next step's root.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        decoder: TextDecoder,
        eos_ids: frozenset[int],
        vocab_size: int,
        max_model_len: int,
        speculates: bool,
        prediction_ids: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(self.token_ids)
        self.speculates = speculates
        self.prediction_ids = tuple(prediction_ids)
        self.sampler = RequestSampler(
            params, vocab_size=vocab_size, prompt_ids=self.token_ids, eos_ids=eos_ids
        )
        self._max_output = min(params.max_tokens, max_model_len - self.prompt_len)
        self.output = OutputStream(decoder, params, eos_ids, self._max_output)
        self.stats = SpeculationStats()
        self.cache_row: int | None = None
        self.error: str | None = None
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.draft_passes = 0
        self._submitted_s = time.perf_counter()
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._num_first = 0
        self._last_token_s: float | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it waits or runs."""
        return self.output.finish_reason

    @property
    def row(self) -> int:
        """The cache row of a running request."""
        assert self.cache_row is not None, "a request decodes only while it holds a cache row"
        return self.cache_row

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def max_depth(self) -> int:
        """Deepest node that can still be of use: the step's own pick takes one more place."""
        return max(0, self._max_output - self.num_output - 1)

    def admit(self, cache_row: int) -> None:
        """Leave the queue for a cache row."""
        self.cache_row = cache_row
        self._admitted_s = time.perf_counter()

    def emit(self, verdict: Verdict) -> None:
        """Append a verdict's tokens one by one, up to the first stop event, and count the step."""
        before = self.num_output
        for token in verdict.tokens:
            self.token_ids.append(token)
            if self.output.push(token) is not None:
                break
        emitted = self.num_output - before
        # Only what was really emitted counts: nothing behind a stop event was accepted.
        self.stats.record(
            Verdict(verdict.path[:emitted], verdict.tokens[:emitted], verdict.num_drafted)
        )
        if emitted:
            self._last_token_s = time.perf_counter()
            if self._first_token_s is None:
                self._first_token_s, self._num_first = self._last_token_s, emitted
        if self.finish_reason is None and not verdict.is_finite:
            self.fail(f"the target's logits at position {len(self.token_ids)} are not finite")

    def fail(self, message: str) -> None:
        """End with an error; what was emitted stays."""
        self.error = message
        self.output.close(FinishReason.ERROR)

    def abort(self) -> None:
        """End where it stands, at the caller's wish."""
        self.output.close(FinishReason.ABORT)

    def timing(self) -> Timing:
        """The request's clock so far."""
        now = time.perf_counter()
        first = self._first_token_s or now
        return Timing(
            queue_s=(self._admitted_s or now) - self._submitted_s,
            first_token_s=first - self._submitted_s,
            decode_s=(self._last_token_s or first) - first,
            total_s=(self._last_token_s or now) - self._submitted_s,
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            num_first=self._num_first,
            draft_passes=self.draft_passes,
        )


class Scheduler:
    """First come, first served: a queue, and as many running requests as the cache has rows."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def running(self) -> list[Request]:
        """Admitted requests, in cache-row order so that their rows are dense."""
        return list(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests into free rows and return them."""
        admitted = []
        while self._waiting and self._cache.num_free_rows:
            request = self._waiting.popleft()
            self._running.append(request)
            request.admit(self._cache.allocate())
            admitted.append(request)
        self._running.sort(key=lambda request: request.row)
        return admitted

    def remove(self, request: Request) -> None:
        """Take a request that ended out of the queue or off its row, wherever it was."""
        for requests in (self._waiting, self._running):
            with suppress(ValueError):  # it is not in this one, or was never queued
                requests.remove(request)
        if request.cache_row is None:
            return
        ended_well = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._cache.free(request.cache_row, scrub=not ended_well)
        request.cache_row = None
