"""A server under stress: clients that leave, queues that fill, shutdown, an engine that fails."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM, SpeculationConfig
from outrider.config import AdmissionLimits
from outrider.server.app import create_app
from outrider.server.compute_thread import ComputeThread
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from tests.server.conftest import ENGINE
from tests.server.live import NAME, LiveServer, chat_body, envelope, slowed, wait_for

pytestmark = pytest.mark.alone  # watches the clock

LONG = {"max_tokens": 600, "ignore_eos": True}


class Reader(threading.Thread):
    """Reads one stream to its end in the background."""

    def __init__(self, server: LiveServer, **fields: object) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._body = chat_body(stream=True, **fields)
        self.events: list[str] = []
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        url = self._server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=self._body, timeout=60, verify=False) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                if len(self.events) > 2:
                    self.has_begun.set()
        self.has_begun.set()

    def end(self) -> list[str]:
        self.join(30)
        assert not self.is_alive(), "the stream does not end"
        return self.events


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_row_at_once(own_llm: LLM, streams: bool) -> None:
    slowed(own_llm, 0.02)
    with LiveServer(own_llm) as server:
        before = server.load()
        sock = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps(chat_body(stream=streams, **LONG)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: server.load()[1] == 1)
        left_s = time.monotonic()
        sock.close()
        server.wait_until_idle()

        assert before == server.load()
        assert time.monotonic() - left_s < 1.0
        assert 1 == server.stats().aborted
        assert 200 == server.chat().status_code


def test_clients_that_leave_while_they_wait_leave_the_queue(own_llm: LLM) -> None:
    slowed(own_llm, 0.02)
    with LiveServer(own_llm) as server, httpx.Client(timeout=60, verify=False) as client:
        url = server.url + "/v1/chat/completions"
        requests = [
            client.build_request("POST", url, json=chat_body(stream=True, **LONG)) for _ in range(6)
        ]
        responses = [client.send(request, stream=True) for request in requests]
        wait_for(lambda: server.load()[0] == 2)
        for response in responses[4:]:
            response.close()
        wait_for(lambda: server.load()[0] == 0, 1.0)

        assert 4 == server.load()[1]
        for response in responses[:4]:
            response.close()
        server.wait_until_idle(2.0)


def test_a_storm_of_departures_leaks_nothing_and_spares_the_others(own_llm: LLM) -> None:
    """Every other one of 40 clients leaves at some point; the rest get their own text."""
    with LiveServer(own_llm) as server:
        expected = server.chat("alone", max_tokens=30).json()["choices"]
        url = server.url + "/v1/chat/completions"

        def ask(index: int) -> bool:
            if index % 2:
                text = server.chat("alone", max_tokens=30).json()["choices"]
                return text == expected
            body = chat_body(f"leaving {index}", stream=True, **LONG)
            with httpx.stream("POST", url, json=body, timeout=60, verify=False) as response:
                for seen, _ in enumerate(response.iter_lines()):
                    if seen >= index:
                        break
            return True

        with ThreadPoolExecutor(12) as pool:
            outcomes = list(pool.map(ask, range(40)))
        server.wait_until_idle(5.0)

        assert [True] * 40 == outcomes
        assert server.stats().aborted > 0
        assert (0, 0, 0) == server.load()


def limited_llm(checkpoint: Path, **limits: int) -> LLM:
    from dataclasses import replace

    config = replace(ENGINE, max_batch_size=2, admission=AdmissionLimits(**limits))
    return LLM(checkpoint, engine=config, speculation=SpeculationConfig(method="off"))


def test_a_full_queue_refuses_with_retry_after_and_the_sdk_recovers(
    checkpoint: Path, cache_folder: Path
) -> None:
    import openai

    llm = limited_llm(checkpoint, max_waiting=1)
    slowed(llm, 0.02)
    with LiveServer(llm) as server:
        readers = [Reader(server, max_tokens=60, ignore_eos=True) for _ in range(3)]
        wait_for(lambda: server.load()[0] == 1)
        started = time.monotonic()
        refused = server.chat()
        took_s = time.monotonic() - started

        assert 429 == refused.status_code
        assert int(refused.headers["Retry-After"]) >= 1
        assert "overloaded" == envelope(refused)["code"]
        assert took_s < 1.0

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=10)
        answer = client.chat.completions.create(**chat_body())  # type: ignore[call-overload]

        assert answer.choices[0].message.content
        assert ["[DONE]"] * 3 == [reader.end()[-1] for reader in readers]
        assert server.service.desk.metrics.num_refused() >= 1


def test_several_answers_take_all_their_places_or_none(
    checkpoint: Path, cache_folder: Path
) -> None:
    llm = limited_llm(checkpoint, max_waiting=1)
    slowed(llm, 0.02)
    with LiveServer(llm) as server:
        reader = Reader(server, max_tokens=60, ignore_eos=True)
        reader.has_begun.wait(20)

        assert 429 == server.chat(n=3).status_code
        assert 1 == server.service.desk.num_open
        assert 200 == server.chat(n=2, max_tokens=2).status_code
        assert "[DONE]" == reader.end()[-1]


def test_waiting_prompt_tokens_are_bounded_too(checkpoint: Path, cache_folder: Path) -> None:
    llm = limited_llm(checkpoint, max_waiting=10, max_waiting_tokens=100)
    slowed(llm, 0.02)
    with LiveServer(llm) as server:
        readers = [Reader(server, max_tokens=80, ignore_eos=True) for _ in range(2)]
        wait_for(lambda: server.load()[1] == 2)
        refused = server.chat("long " * 60)

        assert 429 == refused.status_code
        assert "prompt tokens" in envelope(refused)["message"]
        assert 200 == server.chat("short", max_tokens=1).status_code
        assert ["[DONE]"] * 2 == [reader.end()[-1] for reader in readers]


def test_draining_lets_streams_end_and_refuses_new_requests(own_llm: LLM) -> None:
    slowed(own_llm, 0.02)
    with LiveServer(own_llm, drain_timeout_s=30.0) as server:
        reader = Reader(server, max_tokens=40, ignore_eos=True)
        reader.has_begun.wait(20)
        server.signal()
        wait_for(lambda: server.get("/ready").status_code == 503)
        refused = server.chat()

        assert 503 == refused.status_code
        assert "Retry-After" in refused.headers
        assert "shutdown" == envelope(refused)["code"]
        assert 200 == server.get("/health").status_code
        assert "[DONE]" == reader.end()[-1]
        assert 0 == server.join()
        with pytest.raises(httpx.ConnectError):
            server.get("/health")


@pytest.mark.parametrize("ends_by", ["second signal", "timeout"])
def test_what_does_not_drain_is_aborted_with_an_error_event(own_llm: LLM, ends_by: str) -> None:
    slowed(own_llm, 0.05)
    timeout_s = 0.3 if ends_by == "timeout" else 60.0
    with LiveServer(own_llm, drain_timeout_s=timeout_s) as server:
        reader = Reader(server, **LONG)
        reader.has_begun.wait(20)
        started = time.monotonic()
        server.signal()
        if ends_by == "second signal":
            wait_for(lambda: server.get("/ready").status_code == 503)
            server.signal()

        assert "shutdown" == json.loads(reader.end()[-1])["error"]["code"]
        assert 0 == server.join()
        assert time.monotonic() - started < timeout_s + 4.0 or ends_by == "second signal"
        assert time.monotonic() - started < 6.0


def test_an_engine_that_fails_ends_every_stream_and_the_process(own_llm: LLM) -> None:
    slowed(own_llm, 0.02)
    with LiveServer(own_llm) as server:
        readers = [Reader(server, **LONG) for _ in range(6)]
        # Whichever come first: the others may have to wait for their rows.
        wait_for(lambda: sum(reader.has_begun.is_set() for reader in readers) >= 2)

        def broken() -> None:
            raise KeyboardInterrupt("the engine's end")

        died_s = time.monotonic()
        own_llm.engine.step = broken  # type: ignore[method-assign, assignment]
        last = [json.loads(reader.end()[-1]) for reader in readers]

        assert ["engine_dead"] * 6 == [event["error"]["code"] for event in last]
        assert time.monotonic() - died_s < 2.0
        assert 1 == server.join()


class FaultyTarget:
    """A target that fails, or writes NaN, where a request with the poison token is computed."""

    def __init__(self, target: Any, poison: int, fault: str) -> None:
        self._target = target
        self._poison = poison
        self._fault = fault
        self.num_faults = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, segments: Any, cache: Any, **more: Any) -> Any:
        bad = [self._poison in segment.tokens for segment in segments]
        self.num_faults += any(bad)
        if any(bad) and self._fault == "exception":
            raise RuntimeError("secret words of a pass that fails")
        output = self._target.forward(segments, cache, **more)
        if any(bad) and self._fault == "nan":
            first = 0
            for segment, is_bad in zip(segments, bad, strict=True):
                num_rows = len(segment.tokens) - segment.num_silent
                if is_bad:
                    output.logits_RV[first : first + num_rows] = float("nan")
                first += num_rows
        return output


@pytest.mark.parametrize("fault", ["exception", "nan"])
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_fault_in_a_step_ends_only_its_own_request(
    own_llm: LLM, fault: str, streams: bool
) -> None:
    poison = 317
    slowed(own_llm, 0.01)
    with LiveServer(own_llm) as server:
        expected = server.chat("the others", max_tokens=40, ignore_eos=True).json()["choices"]
        server.wait_until_idle()
        faulty = FaultyTarget(own_llm.target, poison, fault)
        own_llm.engine._target = faulty  # type: ignore[assignment]
        with ThreadPoolExecutor(3) as pool:
            others = [
                pool.submit(server.chat, "the others", max_tokens=40, ignore_eos=True)
                for _ in range(3)
            ]
            body = {"model": NAME, "prompt": [5, 6, poison], "stream": streams, "max_tokens": 40}
            answer = server.post("/v1/completions", body)
        server.wait_until_idle()

        assert [expected] * 3 == [other.result().json()["choices"] for other in others]
        assert faulty.num_faults > 0
        assert 1 == server.stats().failed
        if streams:
            last = [line for line in answer.text.splitlines() if line][-1]
            assert "request_failed" == json.loads(last.removeprefix("data: "))["error"]["code"]
        else:
            assert 500 == answer.status_code
            assert "request_failed" == envelope(answer)["code"]
        assert "secret words" not in answer.text
        assert 200 == server.get("/health").status_code


def test_health_fails_while_a_step_hangs_and_recovers(own_llm: LLM) -> None:
    release = threading.Event()
    step = own_llm.engine.step

    def hanging() -> object:
        release.wait(30)
        return step()

    with LiveServer(own_llm, stall_s=0.2) as server:
        own_llm.engine.step = hanging  # type: ignore[method-assign, assignment]
        reader = Reader(server)
        wait_for(lambda: server.get("/health").status_code == 503)

        assert "engine_stalled" == envelope(server.get("/ready"))["code"]
        release.set()
        assert "[DONE]" == reader.end()[-1]
        assert 200 == server.get("/health").status_code


def test_health_answers_at_once_while_the_batch_is_full(own_llm: LLM) -> None:
    slowed(own_llm, 0.3)
    with LiveServer(own_llm) as server:
        readers = [Reader(server, max_tokens=8) for _ in range(4)]
        wait_for(lambda: server.load()[1] == 4)
        times = []
        with httpx.Client(verify=False) as client:
            for _ in range(20):
                started = time.monotonic()
                assert 200 == client.get(server.url + "/health").status_code
                times.append(time.monotonic() - started)

        assert sorted(times)[10] < 0.1  # the median: a busy machine may hold up single ones
        assert ["[DONE]"] * 4 == [reader.end()[-1] for reader in readers]


def call_app(own_llm: LLM, body: dict, send, **settings) -> Service:
    """Call the application without a socket in between, on a loop of its own."""
    service = Service(own_llm, ServerSettings(model_name=NAME, **settings), ComputeThread())
    app = create_app(service)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "scheme": "http",
    }
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        service.desk.start()
        try:
            await asyncio.wait_for(app(scope, receive, send), 30)
        finally:
            await service.desk.stop()

    asyncio.run(main())
    return service


def test_a_reader_that_stalls_fills_a_bounded_buffer_and_is_aborted(own_llm: LLM) -> None:
    taken = 0

    async def send(message: dict) -> None:
        nonlocal taken
        taken += 1
        if taken == 4:
            await asyncio.sleep(30)

    service = call_app(
        own_llm,
        chat_body(stream=True, **LONG),
        send,
        max_buffered_bytes=8192,
        write_timeout_s=3.0,
    )

    aborts = {
        sample.labels["reason"]
        for metric in service.desk.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "outrider_aborts_total"
    }
    assert {"slow_reader"} == aborts
    assert 1 == service.desk.stats.aborted
    assert service.desk.stats.emitted_tokens < 600


def test_a_reader_that_takes_nothing_is_cut_off_even_without_news(own_llm: LLM) -> None:
    """The buffer never overflows: the time alone tells."""
    slowed(own_llm, 0.1)

    async def send(message: dict) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(30)

    started = time.monotonic()
    service = call_app(own_llm, chat_body(stream=True, **LONG), send, write_timeout_s=0.5)

    assert time.monotonic() - started < 10
    assert 1 == service.desk.stats.aborted
