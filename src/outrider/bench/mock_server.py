"""A scripted OpenAI-compatible server: it says what it is told, when it is told, faults included.

Owns no model and no judgement. It has two uses: the client proves itself against it in
:mod:`outrider.bench.selfproof` (there in a process of its own, see :func:`main`), and tests
script it. A chunk of the text ``NOW`` carries the system's monotonic clock instead, so that what a
client saw can be compared with what was done rather than with what was planned: on a busy machine
no server sleeps exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import orjson
from aiohttp import web

MODEL = "mock"
PACED, FLOOD = "mock-paced", "mock-flood"  # what the self-proof asks for
PACED_GAP_S = 0.01
NOW = "{now}"  # a chunk of this text says the monotonic time at which it is sent, on a line


class Ending(StrEnum):
    """How a stream ends."""

    DONE = "done"
    DROP = "drop"  # the connection is cut in the middle
    HANG = "hang"  # nothing more comes
    SILENT = "silent"  # the body ends as if all were well, with neither finish reason nor [DONE]


@dataclass(frozen=True, slots=True)
class MockChunk:
    """One event: its text, how many tokens that is, how long after the one before."""

    after_s: float
    text: str
    num_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MockReply:
    """One answer. ``body`` replaces the stream by a plain response of ``content_type``.

    ``completion_tokens`` is what usage claims; None is the truth. ``allows_running_usage`` False
    refuses ``continuous_usage_stats`` with status 400, as strict servers do.
    """

    chunks: Sequence[MockChunk] = ()
    status: int = 200
    body: str | None = None
    content_type: str = "application/json"
    ending: Ending = Ending.DONE
    finish_reason: str = "length"
    prompt_tokens: int = 7
    completion_tokens: int | None = None
    has_usage: bool = True
    allows_running_usage: bool = True
    speculative: Mapping[str, Any] | None = None
    model: str | None = None


Script = Callable[[Mapping[str, Any]], MockReply]


@dataclass(slots=True)
class MockServer:
    """Answers every completion by ``script(request body)``; ``requests`` keeps the bodies.

    ``pages`` are further GET routes (``/metrics``, ``/version``) with their text, which may change
    while the server runs. Use as an async context manager; ``url`` is known inside.
    """

    script: Script
    models: Sequence[str] = (MODEL,)
    pages: dict[str, str] = field(default_factory=dict)
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/{path:.*}", self._page)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a route
        rows = [{"id": name, "object": "model", "owned_by": "mock"} for name in self.models]
        return web.json_response({"object": "list", "data": rows})

    async def _page(self, request: web.Request) -> web.Response:
        page = self.pages.get(request.path)
        return web.Response(status=404) if page is None else web.Response(text=page)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        reply = self.script(body)
        options = body.get("stream_options") or {}
        runs = bool(options.get("continuous_usage_stats"))
        if runs and not reply.allows_running_usage:
            message = {"message": "stream_options.continuous_usage_stats: unknown field"}
            return web.json_response({"error": message}, status=400)
        if reply.body is not None or reply.status != 200:
            return web.Response(
                status=reply.status, text=reply.body or "", content_type=reply.content_type
            )
        return await self._stream(request, body, reply, runs=runs)

    async def _stream(
        self, request: web.Request, body: Mapping[str, Any], reply: MockReply, *, runs: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body

        async def send(row: dict[str, Any]) -> None:
            row = {"model": reply.model or body.get("model"), **row}
            await response.write(b"data: " + orjson.dumps(row) + b"\n\n")

        def usage(total: int) -> dict[str, Any]:
            counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": total}
            return {"usage": counts}

        if is_chat:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            await send({"choices": [opening], **(usage(0) if runs else {})})
        total = 0
        for chunk in reply.chunks:
            if chunk.after_s:
                await asyncio.sleep(chunk.after_s)
            total += chunk.num_tokens
            text = f"{time.monotonic():.6f}\n" if chunk.text == NOW else chunk.text
            said = {"delta": {"content": text}} if is_chat else {"text": text}
            await send({"choices": [{"index": 0, **said}], **(usage(total) if runs else {})})
        if reply.ending is Ending.HANG:
            await asyncio.sleep(3600)
        if reply.ending is Ending.DROP:
            assert request.transport is not None
            request.transport.abort()
            return response
        if reply.ending is Ending.SILENT:
            return response
        said = {"delta": {}} if is_chat else {"text": ""}
        extra = {} if reply.speculative is None else {"speculative": dict(reply.speculative)}
        claimed = total if reply.completion_tokens is None else reply.completion_tokens
        closing = {"index": 0, **said, "finish_reason": reply.finish_reason}
        await send({"choices": [closing], **(usage(claimed) if runs else {})})
        if reply.has_usage:
            await send({"choices": [], **usage(claimed), **extra})
        await response.write(b"data: [DONE]\n\n")
        return response


def paced_script(body: Mapping[str, Any]) -> MockReply:
    """``max_tokens`` chunks of one token that say when they were sent; paced, or all at once."""
    gap_s = 0.0 if body.get("model") == FLOOD else PACED_GAP_S
    return MockReply(chunks=[MockChunk(gap_s, NOW)] * int(body.get("max_tokens", 1)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve :func:`paced_script` until stdin closes; the first line on stdout is the address."""
    argparse.ArgumentParser(description=main.__doc__).parse_args(arguments)

    async def serve() -> None:
        async with MockServer(paced_script, models=(PACED, FLOOD)) as server:
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
