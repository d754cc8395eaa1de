"""A server as a process: its socket, its signals, its end.

Owns the way from a bound socket to an exit status. The first SIGTERM or SIGINT drains: running
requests may end, new ones get 503; a second one, or the timeout, aborts them. An engine that fails
ends the process with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from outrider.errors import UsageError
from outrider.llm import LLM
from outrider.server.app import create_app
from outrider.server.limits import bounded_protocol
from outrider.server.service import Service
from outrider.server.settings import ServerSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_S = 2  # for responses to get out, once nothing is left to compute


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; nobody can connect before the server listens. Port 0 takes any free one.

    Raises:
        UsageError: the address is taken, not ours, or no address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as problem:
        raise UsageError(f"--host {host} --port {port}: {problem}; choose another") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as problem:
        bound.close()
        raise UsageError(
            f"--host {host} --port {port}: {problem.strerror or problem}; choose another --port"
        ) from None
    return bound


class RunningServer:
    """One server on one socket.

    Args:
        llm: the model to serve.
        settings: names, keys, limits.
        bound: what to listen on; closed at the end.
        on_ready: called when requests are taken.
    """

    def __init__(
        self,
        llm: LLM,
        settings: ServerSettings,
        bound: socket.socket,
        *,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.service = Service(llm, settings)
        self.service.thread.on_death = self._on_death
        self._settings = settings
        self._bound = bound
        self._on_ready = on_ready
        self._has_died = False
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            create_app(self.service),
            http=bounded_protocol(
                max_connections=settings.max_connections,
                max_header_bytes=settings.max_header_bytes,
                max_body_bytes=settings.max_body_bytes,
                read_timeout_s=settings.read_timeout_s,
            ),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = _Server(config)

    async def serve(self) -> int:
        """Serve until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._handled_signals(loop))
            self._server.on_started = self._on_ready
            await self._server.serve(sockets=[self._bound])
        return 1 if self._has_died else 0

    def stop(self) -> None:
        """What a signal does: the first call drains, the second aborts. On the loop's thread."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.service.thread.abort_all()
            self._server.should_exit = True

    async def _drain(self) -> None:
        await self.service.thread.drain(self._settings.drain_timeout_s)
        self._server.should_exit = True

    def _on_death(self) -> None:
        self._has_died = True
        self._server.should_exit = True

    @contextlib.contextmanager
    def _handled_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Handlers as long as the server runs; a thread that is not the main one gets none."""
        handled = []
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            for number in SIGNALS:
                loop.add_signal_handler(number, self.stop)
                handled.append(number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """uvicorn's server without its own signal handlers, which would close the socket at once."""

    on_started: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Leave the signals to :class:`RunningServer`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        if self.started:
            self.on_started()
