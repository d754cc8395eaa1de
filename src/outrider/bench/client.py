"""One client for every OpenAI-compatible server: asks, and notes when which bytes came.

Owns HTTP and the clock; what an event says is :mod:`outrider.bench.sse`'s, when a request is due is
:mod:`outrider.bench.drive`'s. Nothing here raises for an answer that failed: a failure is an answer
with an ``error``, because the run's records must show it.

All bytes that one read brings have one time: the moment it returned, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from outrider.bench.records import Answer, MetricsSnapshot, SamplingRecord
from outrider.bench.sse import AnswerReader, EventParser, StreamError, printable
from outrider.bench.workloads import Question

IDLE_S = 120.0  # silence after which a server counts as hung
CONNECT_S = 10.0
_MAX_PAGE_BYTES = 16 << 20
# An answer has an event per chunk and a few more; one that has far more will never end.
_FREE_EVENTS, _EVENTS_PER_TOKEN = 64, 4
_READ_BYTES = 1 << 18  # large enough that a burst of chunks never waits for a second read
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*(?:\{.*\})?)\s+(\S+)(?:\s+-?\d+)?$")

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, and what the server was found to understand.

    ``url`` ends before ``/v1``. ``asks_running_usage`` requests usage in every chunk, which is the
    one exact source of tokens per chunk; ``asks_token_ids`` the ids, by which texts are compared.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    asks_running_usage: bool = False
    asks_token_ids: bool = False

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


class Client:
    """An open session; ``clock`` gives the run's seconds.

    Use as an async context manager.
    """

    def __init__(self, clock: Clock = time.monotonic, *, idle_s: float = IDLE_S) -> None:
        self.clock = clock
        self._idle_s = idle_s
        self._opened: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._idle_s)
        # No limit on connections: a limit would queue requests inside the client, unseen.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
        self._opened = aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=_READ_BYTES, trust_env=False
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()
        self._opened = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._opened is not None, "the client is used outside its with block"
        return self._opened

    async def ask(
        self, endpoint: Endpoint, question: Question, sampling: SamplingRecord, seed: int | None
    ) -> Answer:
        """Send one question and read its stream to the end; never raises for a bad answer."""
        route = "chat/completions" if sampling.is_chat else "completions"
        body = orjson.dumps(request_body(endpoint, question, sampling, seed))
        reader = AnswerReader()
        status: int | None = None
        headers_s: float | None = None
        error: str | None = None
        sent_s = self.clock()
        try:
            async with self._session.post(
                f"{endpoint.url}/v1/{route}", data=body, headers=endpoint.headers()
            ) as response:
                headers_s, status = self.clock(), response.status
                error = await self._refusal(response)
                if error is None:
                    await self._read(response, reader, sampling.max_tokens)
                    error = _unfinished(reader)
        except (aiohttp.ClientError, OSError, TimeoutError, StreamError) as problem:
            advice = "the server hangs, or raise --timeout"
            error = _words(problem, endpoint.url, self._idle_s, advice)
        ended_s = self.clock()
        chunks, source = reader.chunks()
        return Answer(
            sent_s=sent_s,
            headers_s=headers_s,
            ended_s=ended_s,
            chunks=chunks,
            status=status,
            error=error,
            finish_reason=reader.finish_reason,
            prompt_tokens=reader.prompt_tokens,
            completion_tokens=reader.completion_tokens,
            token_source=source,
            text=reader.text,
            speculative=reader.speculative,
            served_model=reader.served_model,
            token_hash=reader.token_hash,
        )

    async def get(self, endpoint: Endpoint, path: str) -> tuple[int | None, str, str | None]:
        """Status, body and error of a GET; the status is None when nobody answered."""
        try:
            async with self._session.get(
                f"{endpoint.url}{path}",
                headers=endpoint.headers(),
                timeout=aiohttp.ClientTimeout(total=CONNECT_S),
            ) as response:
                return response.status, await _page(response), None
        except (aiohttp.ClientError, OSError, TimeoutError, StreamError) as problem:
            return None, "", _words(problem, endpoint.url, CONNECT_S, "the server hangs")

    async def metrics(self, endpoint: Endpoint) -> MetricsSnapshot | None:
        """The server's counters now; None where it has none to show."""
        status, page, _ = await self.get(endpoint, "/metrics")
        samples = parse_metrics(page) if status == 200 else {}
        return MetricsSnapshot(self.clock(), samples) if samples else None

    async def _read(
        self, response: aiohttp.ClientResponse, reader: AnswerReader, max_tokens: int
    ) -> None:
        """The events up to the last; comments, which keep a connection alive, are no sign of life.

        Raises:
            StreamError: far more events than ``max_tokens`` could need.
            TimeoutError: no event for as long as the server may be silent.
        """
        parser, num_events, heard_s = EventParser(), 0, self.clock()
        async for data in response.content.iter_any():
            at_s = self.clock()
            for event in parser.feed(data):
                reader.feed(event, at_s)
                num_events, heard_s = num_events + 1, at_s
            if reader.is_done:
                return
            if num_events > _FREE_EVENTS + _EVENTS_PER_TOKEN * max_tokens:
                raise StreamError(
                    f"the stream goes on after {num_events} events, though max_tokens is "
                    f"{max_tokens}: the server does not keep to it"
                )
            if at_s - heard_s > self._idle_s:
                raise TimeoutError

    async def _refusal(self, response: aiohttp.ClientResponse) -> str | None:
        """Why this response is no stream, if it is none."""
        kind = response.content_type
        if response.status != 200:
            body = (await response.content.read(4096)).decode("utf-8", "replace")
            return f"HTTP {response.status}: {_one_line(body) or _one_line(response.reason or '')}"
        if kind != "text/event-stream":
            body = (await response.content.read(4096)).decode("utf-8", "replace")
            return (
                f"answers {kind} instead of a stream (text/event-stream): {_one_line(body)}; give "
                "the address of an OpenAI-compatible server"
            )
        return None


class LoopLag:
    """Watches how late the event loop wakes up: what a busy client adds to every time it notes.

    Use as an async context manager around what is measured; ``worst_s`` afterwards.
    """

    _EVERY_S = 0.02  # often enough for any latency, and little work beside what is measured

    def __init__(self, clock: Clock) -> None:
        self.worst_s = 0.0
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            before_s = self._clock()
            await asyncio.sleep(self._EVERY_S)
            self.worst_s = max(self.worst_s, self._clock() - before_s - self._EVERY_S)


def request_body(
    endpoint: Endpoint, question: Question, sampling: SamplingRecord, seed: int | None
) -> dict[str, Any]:
    """The request as JSON; only fields that differ from every server's default, or matter."""
    stream_options: dict[str, Any] = {"include_usage": True}
    if endpoint.asks_running_usage:
        stream_options["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": endpoint.model,
        "stream": True,
        "stream_options": stream_options,
        "max_tokens": sampling.max_tokens,
        # Always said: servers take other defaults from a model's own generation settings.
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.is_chat:
        body["messages"] = [
            {"role": role, "content": content} for role, content in question.messages
        ]
    else:
        body["prompt"] = question.text
    if seed is not None:
        body["seed"] = seed
    if endpoint.asks_token_ids:
        body["return_token_ids"] = True
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    return body


def parse_metrics(page: str) -> Mapping[str, float]:
    """The samples of a Prometheus text page by name with labels, without histogram buckets."""
    samples: dict[str, float] = {}
    for line in page.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None or match[1].partition("{")[0].endswith("_bucket"):
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        # JSON, in which records are kept, has no infinity; a counter is never infinite.
        if value - value == 0.0:
            samples[match[1]] = value
    return samples


async def _page(response: aiohttp.ClientResponse) -> str:
    """The text of a page.

    Raises:
        StreamError: it is larger than any page that we ask for can be.
    """
    parts, num_bytes = [], 0
    async for data in response.content.iter_any():
        parts.append(data)
        num_bytes += len(data)
        if num_bytes > _MAX_PAGE_BYTES:
            raise StreamError(
                f"{response.url} is larger than {_MAX_PAGE_BYTES >> 20} MiB; give the address of "
                "an OpenAI-compatible server"
            )
    return b"".join(parts).decode("utf-8", "replace")


def _words(problem: Exception, url: str, silent_s: float, advice: str) -> str:
    """What went wrong, for people; ``silent_s`` is how long the server was waited for."""
    if isinstance(problem, StreamError):
        return str(problem)
    # aiohttp's own timeouts are TimeoutErrors too, and say which one it was.
    if isinstance(problem, aiohttp.ConnectionTimeoutError):
        return f"{url}: no connection within {CONNECT_S:g} s"
    if isinstance(problem, TimeoutError):
        return f"{url}: silent for {silent_s:g} s; {advice}"
    if isinstance(problem, aiohttp.ClientConnectorError):
        # asyncio puts its own words into strerror; the number says what the system meant.
        number = problem.os_error.errno
        reason = os.strerror(number) if number and number > 0 else str(problem.os_error)
        return f"{url}: cannot be reached ({reason})"
    if isinstance(problem, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return f"{url}: dropped the connection in the middle of an answer"
    if isinstance(problem, aiohttp.ClientResponseError):
        return f"{url}: answers something that is not HTTP ({_one_line(problem.message)})"
    return f"{url}: {type(problem).__name__}: {_one_line(str(problem))}"


def _unfinished(reader: AnswerReader) -> str | None:
    if reader.is_done or reader.finish_reason is not None:
        return None
    return (
        f"the stream ended after {len(reader.text)} characters without a finish reason and without "
        "[DONE]"
    )


def _one_line(text: str) -> str:
    return printable(text[:1000])[:200]
