"""Server-sent events: the response that writes them, and the cadence at which they go out.

Owns the connection of a stream from its first byte to its last: a client that leaves, one that
stops reading, and an error behind the status line. Knows no field of any event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.server.answers import Answers
from outrider.server.errors import ApiError
from outrider.server.limits import DROP
from outrider.types import TextChunk

PADDED_BYTES = 256
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A response of events; ends with ``[DONE]``, or with an error event alone.

    Args:
        events: the JSON objects to send; may raise ApiError.
        answers: aborted when the client leaves or stops reading.
        write_timeout_s: longest wait for the client to take an event.
        pads: whether every event is made as long as a multiple of ``PADDED_BYTES``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Mapping[str, Any]],
        answers: Answers,
        *,
        write_timeout_s: float,
        pads: bool = False,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._answers = answers
        self._write_timeout_s = write_timeout_s
        self._pads = pads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, the first error, or the client's departure."""
        with watching(receive, self._answers):
            try:
                await self._send_all(send)
            except TimeoutError:
                self._answers.abort("slow_reader")
                scope.get("extensions", {}).get(DROP, _nothing)()
            finally:
                self._answers.abort("failed")  # of several answers, those that are left

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]  # a generator
                async for event in events:
                    await self._send(send, self._written(event))
            await self._send(send, DONE)
        except ApiError as error:
            await self._send(send, b"data: " + to_json(error.envelope()) + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _written(self, event: Mapping[str, Any]) -> bytes:
        """One event's bytes; padded, their number does not tell how much text they carry."""
        data = to_json(event)
        if self._pads:
            opened = data[:-1] + b',"obfuscation":"'
            missing = -(len(opened) + len(b'"}')) % PADDED_BYTES
            data = opened + b"x" * missing + b'"}'
        return b"data: " + data + b"\n\n"

    async def _send(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})


class watching:  # noqa: N801 - used as a verb
    """While entered, a client that closes its connection aborts its answers."""

    def __init__(self, receive: Receive, answers: Answers) -> None:
        self._receive = receive
        self._answers = answers

    def __enter__(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def __exit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        with suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._answers.abort("disconnect")


async def batches(
    answers: Answers, interval_s: float
) -> AsyncIterator[list[tuple[int, TextChunk]]]:
    """What has come, as it comes; or, with an interval, at fixed times whatever has come.

    At fixed times a batch may be empty: that nothing came is not to be seen either. The clock
    starts with the first token, and the number of batches depends on the time alone.

    Raises:
        ApiError: the answers do not end well.
    """
    while not answers.is_over or answers.num_buffered:
        first = await answers.take()
        yield first
        if interval_s > 0:
            break
    clock = asyncio.get_running_loop()
    due_s = clock.time()
    while interval_s > 0 and (not answers.is_over or answers.num_buffered):
        due_s += interval_s
        await asyncio.sleep(max(0.0, due_s - clock.time()))
        yield answers.take_now()
    answers.take_now()  # nothing is left; but what failed while a batch was being sent is told here


def _nothing() -> None:
    """Where the server in front offers no way to cut the connection."""
