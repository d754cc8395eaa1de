"""Servers that a run starts itself: a process each, a port each, gone when the run is over.

Owns processes and their logs. Each is started through :mod:`outrider.bench.guardian`, which ends it
should the run itself be killed. Whether a server may be measured is :mod:`outrider.bench.probe`'s
question; which commands there are is :mod:`outrider.bench.arms`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from outrider.bench import guardian
from outrider.bench.arms import PORT
from outrider.bench.client import Client, Endpoint
from outrider.errors import EndpointError, FailureError

_POLL_S = 0.25
_STOP_S = 20.0
_LOG_TAIL_BYTES, _LOG_TAIL_LINES = 4096, 8


class Server:
    """One server process, started by a command whose ``{port}`` is filled in.

    Use as an async context manager; leaving it ends the process and all its children.
    """

    def __init__(self, arm: str, command: Sequence[str], log: Path) -> None:
        self.arm = arm
        self.port = free_port()
        self.command = tuple(word.replace(PORT, str(self.port)) for word in command)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it will listen."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        if shutil.which(self.command[0]) is None:
            raise EndpointError(
                f"arm {self.arm}: {shlex.join(self.command)} cannot be started: there is no "
                f"program {self.command[0]}"
            )
        with self._open_log() as log:
            self._process = await asyncio.create_subprocess_exec(
                # Isolated and without site-packages: it needs neither, and starts in no time.
                *(sys.executable, "-I", "-S", guardian.__file__, *self.command),
                stdin=asyncio.subprocess.PIPE,  # held open, never written to
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                # A group of its own: Ctrl-C must reach the client alone, and the end everybody.
                start_new_session=True,
            )
        return self

    def _open_log(self) -> BinaryIO:
        try:
            return self._log.open("ab")
        except OSError as problem:
            raise FailureError(f"{self._log}: cannot be written ({problem.strerror})") from None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Shielded: a second Ctrl-C must not leave a server behind that holds the memory.
        await asyncio.shield(self._stop())

    async def wait_ready(
        self, client: Client, timeout_s: float, on_wait: Callable[[float], None]
    ) -> None:
        """Return once models are listed and, where there is such a route, ``/ready`` agrees.

        Raises:
            EndpointError: the process ended, or was not ready in time; shows the end of its log.
        """
        endpoint = Endpoint(url=self.url, model="")
        begun_s = client.clock()
        while True:
            if self._process is None or self._process.returncode is not None:
                code = None if self._process is None else self._process.returncode
                raise EndpointError(
                    f"arm {self.arm}: {shlex.join(self.command)} ended with status {code} before "
                    f"it served: {self.log_tail()} (all of it: {self._log})"
                )
            models, _, _ = await client.get(endpoint, "/v1/models")
            # Servers with keys answer 401: they are up, and the probe will say what is wrong.
            if models is not None and models != 404 and models < 500:
                ready, _, _ = await client.get(endpoint, "/ready")
                if ready is not None and ready < 500:
                    return
            waited_s = client.clock() - begun_s
            if waited_s > timeout_s:
                raise EndpointError(
                    f"arm {self.arm}: not ready after {timeout_s:g} s; raise --start-timeout, or "
                    f"see {self._log}: {self.log_tail()}"
                )
            on_wait(waited_s)
            await asyncio.sleep(_POLL_S)

    def log_tail(self) -> str:
        """The last lines of its output, as one line."""
        try:
            data = self._log.read_bytes()[-_LOG_TAIL_BYTES:]
        except OSError:
            return "(no log)"
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
        return " | ".join([line for line in lines if line][-_LOG_TAIL_LINES:]) or "(an empty log)"

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            # The whole group: vLLM and others leave workers behind when only the parent is told.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                continue
            if sign is signal.SIGTERM and not _group_lives(process.pid):
                return


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
