"""Servers as a process: their sockets, its signals, its end.

Owns the way from bound sockets to an exit status. One process serves one model, by one *front* or
by several that draft differently; they have the weights and the thread that computes in common. The
first SIGTERM or SIGINT drains: running requests may end, new ones get 503; a second one, or the
timeout, aborts them. The process ends when no engine is left; with status 1 if one has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from outrider.errors import UsageError
from outrider.llm import LLM
from outrider.server.app import create_app
from outrider.server.compute_thread import ComputeThread
from outrider.server.limits import bounded_protocol
from outrider.server.log_names import SERVER_NAME
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A model with one way to draft, behind a socket of its own.

    Attributes:
        llm: the model.
        settings: names, keys, limits.
        bound: what to listen on; closed at the end.
        name: what its lines in the log begin with; empty where it is alone.
    """

    llm: LLM
    settings: ServerSettings
    bound: socket.socket
    name: str = ""


class RunningServer:
    """Any number of fronts, whose engines share the one thread that computes.

    Signals are for all of them. A front whose engine fails goes down alone; the others serve on.

    Args:
        fronts: what to serve.
        on_ready: called when requests are taken, by all.
    """

    def __init__(
        self, fronts: Sequence[Front], *, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        computing = ComputeThread()
        self._served = [_ServedFront(front, computing, self._on_started) for front in fronts]
        self._num_to_start = len(fronts)
        self._on_ready = on_ready
        self._draining: asyncio.Task[None] | None = None

    @property
    def services(self) -> list[Service]:
        """What stands behind each front."""
        return [served.service for served in self._served]

    async def serve(self) -> int:
        """Serve until told to stop, or until every engine has failed; the exit status."""
        with self._handled_signals(asyncio.get_running_loop()):
            await asyncio.gather(*(served.serve() for served in self._served))
        return 1 if any(served.has_died for served in self._served) else 0

    def stop(self) -> None:
        """What a signal does: the first call drains, the second aborts. On the loop's thread."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            for served in self._served:
                served.abort()

    async def _drain(self) -> None:
        await asyncio.gather(*(served.drain() for served in self._served))

    def _on_started(self) -> None:
        self._num_to_start -= 1
        if self._num_to_start == 0:
            self._on_ready()

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


class _ServedFront:
    """One front's service and HTTP server."""

    def __init__(
        self, front: Front, computing: ComputeThread, on_started: Callable[[], None]
    ) -> None:
        self.has_died = False
        self.service = Service(front.llm, front.settings, computing)
        self.service.desk.on_death = self._on_death
        self._front = front
        settings = front.settings
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
        self._server.on_started = on_started

    async def serve(self) -> None:
        """Serve until the end, in a context that says whose log lines these are."""
        SERVER_NAME.set(self._front.name)
        await self._server.serve(sockets=[self._front.bound])

    async def drain(self) -> None:
        """Let running requests end, then go down."""
        await self.service.desk.drain(self._front.settings.drain_timeout_s)
        self._server.should_exit = True

    def abort(self) -> None:
        """End running requests and go down."""
        self.service.desk.abort_all()
        self._server.should_exit = True

    def _on_death(self) -> None:
        self.has_died = True
        self._server.should_exit = True


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
