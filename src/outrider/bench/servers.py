"""Servers that a run starts itself: processes with a port per arm, gone when the run is over.

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
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from outrider.bench import guardian
from outrider.bench.arms import PORT, port_of
from outrider.bench.client import Client, Endpoint
from outrider.errors import EndpointError, FailureError

_POLL_S = 0.25
_STOP_S = 20.0
_LOG_TAIL_BYTES, _LOG_TAIL_LINES = 4096, 8


class Server:
    """One server process, started by a command whose ports are filled in.

    Use as an async context manager; leaving it ends the process and all its children.

    Args:
        arms: what it serves; the first one's port is ``{port}`` in the command.
        command: what to start.
        log: where its output goes.
    """

    def __init__(self, arms: Sequence[str], command: Sequence[str], log: Path) -> None:
        self._arms = tuple(arms)
        self._ports = dict(zip(arms, free_ports(len(arms)), strict=True))
        self.command = tuple(self._with_ports(word) for word in command)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    def url(self, arm: str) -> str:
        """Where it will listen for this arm."""
        return f"http://127.0.0.1:{self._ports[arm]}"

    @property
    def _name(self) -> str:
        """For messages: ``arm ngram``, or ``arms off, ngram``."""
        return f"arm{'s' * (len(self._arms) > 1)} {', '.join(self._arms)}"

    def _with_ports(self, word: str) -> str:
        for arm, port in self._ports.items():
            word = word.replace(port_of(arm), str(port))
        return word.replace(PORT, str(self._ports[self._arms[0]]))

    async def __aenter__(self) -> Self:
        if shutil.which(self.command[0]) is None:
            raise EndpointError(
                f"{self._name}: {shlex.join(self.command)} cannot be started: there is no "
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
        """Return once all models are listed and, where there is such a route, ``/ready`` agrees.

        Raises:
            EndpointError: the process ended, or was not ready in time; shows the end of its log.
        """
        missing = [Endpoint(url=self.url(arm), model="") for arm in self._arms]
        begun_s = client.clock()
        while True:
            if self._process is None or self._process.returncode is not None:
                code = None if self._process is None else self._process.returncode
                raise EndpointError(
                    f"{self._name}: {shlex.join(self.command)} ended with status {code} before "
                    f"it served: {self.log_tail()} (all of it: {self._log})"
                )
            missing = [each for each in missing if not await _is_ready(client, each)]
            if not missing:
                return
            waited_s = client.clock() - begun_s
            if waited_s > timeout_s:
                raise EndpointError(
                    f"{self._name}: not ready after {timeout_s:g} s; raise --start-timeout, or "
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
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Different ports of this machine that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def _is_ready(client: Client, endpoint: Endpoint) -> bool:
    models, _, _ = await client.get(endpoint, "/v1/models")
    # Servers with keys answer 401: they are up, and the probe will say what is wrong.
    if models is None or models == 404 or models >= 500:
        return False
    ready, _, _ = await client.get(endpoint, "/ready")
    return ready is not None and ready < 500


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
