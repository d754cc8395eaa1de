"""What ``soak.py`` does to a server: the process, the clients, and what they saw.

Owns the server's process and every connection to it; knows no bound. A client's end is one word:
the HTTP status as text, ``cut`` for a stream that broke off, ``refused`` for no connection,
``hung`` for one that did not end in time, ``left`` for one that went by itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from outrider.bench.prompts import load_prompts
from outrider.commands.serve_options import KEY_VARIABLE

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]"
HANG_S = 300.0
START_S = 300.0


class ServerProcess:
    """``outrider serve`` on a free port of the loopback, while entered."""

    def __init__(self, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "outrider.cli", "serve", "--port", "0", *flags]
        environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._lines: list[str] = []
        self._has_spoken = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        self._has_spoken.wait(START_S)
        found = re.search(r"serving (\S+) at (http://\S+)", self.log)
        if found is None or self.process.poll() is not None:
            self.__exit__()
            raise SystemExit(f"the server did not start:\n{self.log}")
        self.model, self.url = found[1], found[2]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        """What it has written so far."""
        return "".join(self._lines)

    def rss_mib(self) -> float:
        """Resident memory."""
        answer = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(answer.stdout) / 1024

    async def stop(self, timeout_s: float) -> tuple[float, int | None]:
        """SIGTERM; seconds until the process has ended, and its exit status."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        while self.process.poll() is None and time.monotonic() - started < timeout_s:
            await asyncio.sleep(0.01)
        return time.monotonic() - started, self.process.returncode

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if "Ctrl-C" in line:
                self._has_spoken.set()
        self._has_spoken.set()


@dataclass
class Clients:
    """Everybody who asks one server; ``ends`` counts how it went for them."""

    server: ServerProcess
    session: aiohttp.ClientSession
    prompts: Sequence[str]
    max_tokens: int
    ends: Counter[str] = field(default_factory=Counter)
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    async def ask(
        self, *, streams: bool = True, leaves_after: int | None = None, **fields: Any
    ) -> str:
        """One request to its end, or to the event after which its client leaves (0: at once)."""
        body = {
            "model": self.server.model,
            "messages": [{"role": "user", "content": self.draw.choice(self.prompts)}],
            "max_tokens": self.max_tokens,
            "seed": self.draw.randrange(2**31),
            "stream": streams,
            **fields,
        }
        try:
            async with asyncio.timeout(HANG_S):
                end = await self._end(body, leaves_after)
        except TimeoutError:
            end = "hung"
        except aiohttp.ClientConnectorError:
            end = "refused"
        except (aiohttp.ClientError, OSError):
            end = "cut"
        self.ends[end] += 1
        return end

    async def _end(self, body: dict[str, Any], leaves_after: int | None) -> str:
        """``left`` drops the connection without a word, wherever the answer is."""
        asking = self.session.post(self.server.url + CHAT, json=body)
        if leaves_after == 0:
            task = asyncio.ensure_future(asking.__aenter__())
            await asyncio.sleep(self.draw.random() * 0.2)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
                return "left"
            response = await task
        else:
            response = await asking
        try:
            if response.status != 200 or not body["stream"]:
                await response.read()
                return str(response.status)
            return await _read_stream(response, leaves_after)
        finally:
            response.close()  # a connection with an answer on it is not used again


async def _read_stream(response: aiohttp.ClientResponse, leaves_after: int | None) -> str:
    num_events, is_done = 0, False
    async for line in response.content:
        num_events += line.startswith(b"data: ")
        is_done = is_done or line.startswith(DONE)
        if leaves_after is not None and num_events > leaves_after:
            return "left"
    return "200" if is_done else "cut"


async def measure_capacity(clients: Clients, users: int, seconds: float) -> float:
    """Requests per second that a closed loop of ``users`` gets answered."""
    started = time.monotonic()
    count = 0

    async def user() -> None:
        nonlocal count
        while time.monotonic() - started < seconds:
            await clients.ask()
            count += 1

    await asyncio.gather(*(user() for _ in range(users)))
    return count / (time.monotonic() - started)


async def offer(clients: Clients, rate: float, seconds: float) -> None:
    """Send ``rate`` requests per second, answered or not, and wait for the last one's end."""
    started = time.monotonic()
    tasks = set()
    for place in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, started + place / rate - time.monotonic()))
        task = asyncio.create_task(clients.ask(streams=bool(place % 2)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def storm(clients: Clients, count: int, at_once: int) -> None:
    """``count`` requests, ``at_once`` at a time; every other client leaves at a random point."""
    places = asyncio.Semaphore(at_once)

    async def one(place: int) -> None:
        leaves_after = clients.draw.randrange(clients.max_tokens) if place % 2 else None
        async with places:
            await clients.ask(leaves_after=leaves_after)

    await asyncio.gather(*(one(place) for place in range(count)))


async def open_streams(clients: Clients, count: int, max_tokens: int) -> list[asyncio.Task[str]]:
    """Streams of which the server is known to be writing all."""
    tasks = [
        asyncio.create_task(clients.ask(max_tokens=max_tokens, ignore_eos=True))
        for _ in range(count)
    ]
    while (await status(clients))["running"] < count:
        await asyncio.sleep(0.02)
    return tasks


async def leave_at_once(tasks: Sequence[asyncio.Task[str]]) -> None:
    """All clients of these streams close their connections."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def status(clients: Clients) -> dict[str, Any]:
    """The server's own account."""
    async with clients.session.get(clients.server.url + "/status.json") as response:
        return await response.json()


async def until_free(clients: Clients, timeout_s: float) -> tuple[float, int]:
    """Seconds until nothing waits, runs or holds a slot; and the slots held after the timeout."""
    started = time.monotonic()
    while True:
        now = await status(clients)
        passed = time.monotonic() - started
        is_free = not (now["waiting"] or now["running"] or now["prefilling"] or now["slots_used"])
        if is_free or passed > timeout_s:
            return passed, now["slots_used"]
        await asyncio.sleep(0.01)


class HealthWatch:
    """Asks ``/health`` ten times a second, on a connection of its own, while entered."""

    def __init__(self, server: ServerProcess) -> None:
        self.seconds: list[float] = []
        self.num_bad = 0
        self._url = server.url + "/health"

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def p99_ms(self) -> float:
        """What one answer in a hundred took longer than."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else float("inf")

    async def _watch(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                started = time.monotonic()
                try:
                    async with session.get(self._url, timeout=aiohttp.ClientTimeout(10)) as answer:
                        self.num_bad += answer.status != 200
                except (aiohttp.ClientError, TimeoutError):
                    self.num_bad += 1
                self.seconds.append(time.monotonic() - started)
                await asyncio.sleep(max(0.0, started + 0.1 - time.monotonic()))


class MemoryWatch:
    """A server's resident memory in MiB, once a second while entered."""

    def __init__(self, server: ServerProcess) -> None:
        self.mib: list[float] = []
        self._server = server

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self.mib.append(self._server.rss_mib())

    async def _watch(self) -> None:
        while True:
            self.mib.append(await asyncio.to_thread(self._server.rss_mib))
            await asyncio.sleep(1.0)


def bundled_prompts(path: Path | None, max_chars: int = 1000) -> list[str]:
    """First turns that are not too long."""
    return [prompt.turns[0] for prompt in load_prompts(path) if len(prompt.turns[0]) <= max_chars]
