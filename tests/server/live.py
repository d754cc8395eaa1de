"""A live server for tests: its own thread and event loop, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from copy import copy
from typing import Any, Self

import httpx

from outrider.llm import LLM
from outrider.request import Request
from outrider.server.running import Front, RunningServer, bind
from outrider.server.settings import ServerSettings

NAME = "tiny"
HOST = "127.0.0.1"


class LiveServer:
    """Serves ``llm`` while entered; ``settings`` are fields of ServerSettings.

    ``others`` are served by the same process, each on an address of its own; ``beside`` are they.
    """

    def __init__(self, llm: LLM, *others: LLM, **settings: Any) -> None:
        fields = {"model_name": NAME, "drain_timeout_s": 0.0, **settings}
        bound = [bind(HOST, 0) for _ in (llm, *others)]
        self.num_ready = 0
        self._is_ready = threading.Event()
        fronts = [
            Front(
                llm=one, settings=ServerSettings(**fields), bound=each, name=one.speculation.method
            )
            for one, each in zip((llm, *others), bound, strict=True)
        ]
        self._server = RunningServer(fronts, on_ready=self._on_ready)
        self._view(self, 0, bound[0])
        self.beside = [
            self._view(copy(self), place, each) for place, each in enumerate(bound[1:], 1)
        ]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.status: int | None = None

    def _view(self, view: Self, place: int, bound: socket.socket) -> Self:
        """Make ``view`` stand for one of the addresses."""
        view.port = bound.getsockname()[1]
        view.url = f"http://{HOST}:{view.port}"
        view.service = self._server.services[place]
        return view

    def _on_ready(self) -> None:
        self.num_ready += 1
        self._is_ready.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.signal()
            self.signal()
        self.join()

    def signal(self) -> None:
        """What SIGTERM does."""
        self._loop.call_soon_threadsafe(self._server.stop)

    def join(self) -> int | None:
        """Wait for the end; the exit status."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not stop"
        return self.status

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self.status = runner.run(self._server.serve())

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """One request on a connection of its own; ``body`` is sent as JSON."""
        return httpx.post(self.url + path, json=body, timeout=60, verify=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=False, **more)

    def chat(self, text: str = "The ford and the bridge", **fields: Any) -> httpx.Response:
        """A chat request; greedy and short unless told otherwise."""
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def stats(self) -> Any:
        return self.service.desk.stats

    def wait_until_idle(self, timeout_s: float = 20.0) -> None:
        """Until no request runs or waits and no slot is held."""
        wait_for(lambda: self.service.desk.num_open == 0, timeout_s)
        wait_for(lambda: (0, 0, 0) == self.load(), timeout_s)

    def load(self) -> tuple[int, int, int]:
        stats = self.stats()
        return stats.waiting, stats.running + stats.prefilling, stats.slots_used


def chat_body(text: str = "The ford and the bridge", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}


def wait_for(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def slowed(llm: LLM, pause_s: float) -> Callable[[], None]:
    """Make every step of a model's engine take longer; returns what undoes it."""
    engine = llm.engine
    step = engine.step

    def slow_step() -> Any:
        time.sleep(pause_s)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]

    def undo() -> None:
        del engine.step  # type: ignore[method-assign]

    return undo


def envelope(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which must have all four keys and nothing else."""
    body = response.json()

    assert {"error"} == set(body)
    assert {"message", "type", "param", "code"} == set(body["error"])
    assert body["error"]["message"]
    return body["error"]


def new_request(llm: LLM, prompt_len: int = 5, max_tokens: int = 8) -> Request:
    """A request of an engine, not yet submitted."""
    from outrider.config import SamplingParams

    return llm.engine.new_request(range(5, 5 + prompt_len), SamplingParams(max_tokens=max_tokens))
