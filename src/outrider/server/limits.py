"""How much a client may send, and how long it may take over it.

Owns the ceilings on head, body and wire bytes. Two gates: :class:`BoundedProtocol` counts bytes on
the connection, before anything is parsed into memory; :class:`BodyGate` reads the body up to its
limit and its deadline before a route sees the request.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.server.errors import ApiError

# A body in chunks costs a few bytes more than itself; one in tiny chunks many times as much, and
# as much more time to parse.
_WIRE_FACTOR = 2
DROP = "outrider.drop"


def bounded_protocol(
    *, max_connections: int, max_header_bytes: int, max_body_bytes: int, read_timeout_s: float
) -> type[HttpToolsProtocol]:
    """A protocol of uvicorn's with limits; uvicorn makes one object of the class per connection."""
    max_wire_bytes = max_header_bytes + _WIRE_FACTOR * max_body_bytes

    class BoundedProtocol(HttpToolsProtocol):
        """Counts the bytes of each request, and cuts off a head that is too long or too slow."""

        _num_bytes = 0
        _is_in_head = True
        _is_refused = False
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Start the clock of the first head."""
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self._refuse(503, f"{max_connections} connections are open already")
            else:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the clock."""
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Parse at most as much as the limits allow."""
            if self._is_refused:
                return
            if self._is_in_head and self._head_timer is None:
                self._start_timer()
            self._num_bytes += len(data)
            limit = max_header_bytes if self._is_in_head else max_wire_bytes
            if self._is_in_head and self._num_bytes > limit:
                # The head may have ended inside these bytes: parse what could still belong to it.
                room = len(data) - (self._num_bytes - limit)
                super().data_received(data[:room])
                if self._is_in_head and not self.transport.is_closing():
                    self._refuse(431, f"the head is longer than {max_header_bytes} bytes")
                elif not self.transport.is_closing():
                    super().data_received(data[room:])
            elif self._num_bytes > limit:
                self._refuse(413, f"the request is longer than {max_wire_bytes} bytes on the wire")
            else:
                super().data_received(data)

        def on_message_begin(self) -> None:
            """A new request on this connection; keep-alive starts the count again."""
            super().on_message_begin()
            self._is_in_head = True
            self.scope["extensions"] = {DROP: self._drop}  # type: ignore[typeddict-item]

        def on_headers_complete(self) -> None:
            """The head is complete; the body's own limits take over."""
            self._is_in_head = False
            self._stop_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            """The next bytes are another request's."""
            super().on_message_complete()
            self._num_bytes = 0
            self._is_in_head = True

        def on_response_complete(self) -> None:
            """A body that the response did not wait for does not count as the next head."""
            super().on_response_complete()
            if not self.transport.is_closing():
                self._num_bytes = 0

        def send_400_response(self, msg: str) -> None:
            """What the parser cannot read gets our envelope, not plain text."""
            self._refuse(400, msg)

        def _head_is_late(self) -> None:
            self._refuse(408, f"no complete request head within {read_timeout_s:g} seconds")

        def _refuse(self, status: int, message: str) -> None:
            """Answer and close, unless an answer is on its way already: then only close."""
            self._is_refused = True
            self._stop_timer()
            if self.transport.is_closing():
                return
            is_silent = self.cycle is None or self.cycle.response_complete
            if is_silent or not self.cycle.response_started:
                self.transport.write(
                    _raw_response(ApiError(status, message, code=f"http_{status}"))
                )
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # the route's own answer has no reader any more
                self.cycle.message_event.set()
            self.transport.close()

        def _start_timer(self) -> None:
            self._head_timer = self.loop.call_later(read_timeout_s, self._head_is_late)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _drop(self) -> None:
            """Cut the connection without waiting for the client to take what was written."""
            self.transport.abort()

    return BoundedProtocol


def _raw_response(error: ApiError) -> bytes:
    """A response as bytes, for when there is no ASGI request yet."""
    response = error.response()
    head = [f"HTTP/1.1 {error.status} \r\n".encode()]
    head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([*head, b"connection: close\r\n\r\n", bytes(response.body)])


class BodyGate:
    """Reads the whole body up front; too long is 413, too slow 408, a wrong type 415."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, read_timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through that is small enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            # The rest of the body is not read, so the connection is good for nothing else.
            error.headers["Connection"] = "close"
            await error.response()(scope, receive, send)
            return
        if body is None:
            return  # the client left; there is nobody to answer
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        announced = headers.get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced) > self._max_body_bytes:
            raise self._too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(self._read_timeout_s):
                while True:
                    message: dict[str, Any] = dict(await receive())
                    if message["type"] != "http.request":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._max_body_bytes:
                        raise self._too_long()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self._read_timeout_s:g} seconds",
                code="http_408",
            ) from None
        return bytes(body)

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body is longer than {self._max_body_bytes} bytes; shorten it",
            code="http_413",
        )
