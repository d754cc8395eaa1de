"""The answers to one HTTP request on their way from the engine thread to its coroutine.

Owns the bounded buffer between the two. The engine thread never touches it: what it has to say is
handed over on the event loop, so everything here happens on one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from outrider.request import Request
from outrider.server.errors import ApiError, failed
from outrider.types import Completion, FinishReason, TextChunk

# What a chunk costs to keep beside its text, and each alternative of a log probability.
_CHUNK_BYTES, _TOKEN_BYTES = 128, 48


class Answers:
    """``requests`` of one client: their chunks as they come, until all have ended.

    Args:
        requests: already checked, not yet submitted.
        streams: whether chunks are wanted, or only each request's completion.
        max_buffered_bytes: more waiting than this means that the client reads too slowly.
        on_abort: frees the requests in the engine.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        streams: bool,
        max_buffered_bytes: int,
        on_abort: Callable[[Answers], None],
    ) -> None:
        self.requests = list(requests)
        self.streams = streams
        self.num_open = len(self.requests)
        self.abort_reason: str | None = None
        self._max_buffered_bytes = max_buffered_bytes
        self._on_abort = on_abort
        self._chunks: list[tuple[int, TextChunk]] = []
        self._buffered_bytes = 0
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come."""
        return self.num_open == 0 or self._error is not None

    @property
    def num_buffered(self) -> int:
        """Chunks that wait to be taken."""
        return len(self._chunks)

    def put(self, index: int, chunk: TextChunk) -> None:
        """Take over a chunk of one request; a buffer that overflows aborts all of them."""
        if self._error is not None:
            return
        self._chunks.append((index, chunk))
        self._buffered_bytes += _size(chunk)
        if chunk.completion is not None:
            self.num_open -= 1
        if self.streams and self._buffered_bytes > self._max_buffered_bytes:
            self.abort(
                "slow_reader",
                failed("the client reads more slowly than the model writes", code="slow_reader"),
            )
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End with an error in place of whatever has not been taken yet."""
        if self._error is None and self.num_open:
            self._error = error
            self._changed.set()

    def abort(self, reason: str, error: ApiError | None = None) -> None:
        """Free the requests that still run; the coroutine, if it still waits, gets ``error``."""
        if self.num_open and self.abort_reason is None:
            self.abort_reason = reason
            self._on_abort(self)
        self.fail(error or ApiError(499, "the client has left", code="client_closed_request"))

    async def take(self) -> list[tuple[int, TextChunk]]:
        """All chunks that have come since the last call, at least one; with their indices.

        Raises:
            ApiError: the requests will not end well.
        """
        while not self._chunks and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        return self.take_now()

    def take_now(self) -> list[tuple[int, TextChunk]]:
        """Like :meth:`take`, without waiting: there may be none."""
        if self._error is not None:
            raise self._error
        chunks, self._chunks = self._chunks, []
        self._buffered_bytes = 0
        for _, chunk in chunks:
            _check_ended_well(chunk.completion)
        return chunks

    async def completions(self) -> list[Completion]:
        """Every request's completion, in order.

        Raises:
            ApiError: one of them did not end well.
        """
        found: dict[int, Completion] = {}
        while len(found) < len(self.requests):
            for index, chunk in await self.take():
                if chunk.completion is not None:
                    found[index] = chunk.completion
        return [found[index] for index in range(len(self.requests))]


def _check_ended_well(completion: Completion | None) -> None:
    if completion is None:
        return
    if completion.finish_reason is FinishReason.ERROR:
        raise failed(completion.error or "the request failed", code="request_failed")
    if completion.finish_reason is FinishReason.ABORT:
        raise failed("the request was aborted", code="aborted")


def _size(chunk: TextChunk) -> int:
    """Roughly what a chunk takes in memory and on the wire."""
    logprobs = chunk.logprobs or ()
    alternatives = sum(1 + len(entry.top) for entry in logprobs)
    tokens = len(chunk.token_ids) + 2 * alternatives
    return _CHUNK_BYTES + 4 * len(chunk.text) + _TOKEN_BYTES * tokens
