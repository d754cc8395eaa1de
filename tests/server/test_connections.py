"""The wire: heads and bodies that are too long or too slow, and what shares a connection."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from outrider import LLM
from tests.server.live import LiveServer, chat_body, wait_for

pytestmark = pytest.mark.alone  # watches the clock


@pytest.fixture(scope="module")
def strict(llm: LLM) -> Iterator[LiveServer]:
    """A server of short patience."""
    own = llm.with_speculation(llm.speculation)
    with LiveServer(own, read_timeout_s=1.0, max_body_bytes=200_000) as live:
        yield live


def connect(server: LiveServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(20)
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset after its answer is a close too."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def parsed(data: bytes) -> tuple[int, dict]:
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"] if body.startswith(b"{") else {}


def send_quietly(sock: socket.socket, data: bytes) -> None:
    """Send as much as the server takes."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"X-Many: a\r\n" * 20_000,
        b"GET /" + b"a" * 100_000,
    ],
    ids=["one header", "many headers", "target"],
)
def test_a_giant_head_is_refused_before_it_is_kept(strict: LiveServer, head: bytes) -> None:
    with connect(strict) as sock:
        send_quietly(sock, head + b"\r\n\r\n")
        status, error = parsed(read_all(sock))

    assert 431 == status
    assert {"message", "type", "param", "code"} == set(error)
    assert 200 == strict.get("/health").status_code


@pytest.mark.parametrize("is_announced", [True, False], ids=["content-length", "chunked"])
def test_a_body_that_is_too_long_is_refused(strict: LiveServer, is_announced: bool) -> None:
    with connect(strict) as sock:
        if is_announced:
            send_quietly(sock, POST + b"Content-Length: 200001\r\n\r\n")
        else:
            send_quietly(sock, POST + b"Transfer-Encoding: chunked\r\n\r\n")
            chunk = b"%x\r\n" % 10_000 + b"x" * 10_000 + b"\r\n"
            send_quietly(sock, chunk * 30)
        status, error = parsed(read_all(sock))

    assert 413 == status
    assert {"message", "type", "param", "code"} == set(error)


def test_three_megabytes_in_chunks_of_one_byte_are_cut_off_quickly(strict: LiveServer) -> None:
    times = []
    with connect(strict) as sock:
        send_quietly(sock, POST + b"Transfer-Encoding: chunked\r\n\r\n")
        started = time.monotonic()
        send_quietly(sock, b"1\r\nx\r\n" * 3_000_000)
        status, _ = parsed(read_all(sock))
        times.append(time.monotonic() - started)

    assert 413 == status
    assert times[0] < 5.0
    assert 200 == strict.chat().status_code


def test_a_body_in_one_byte_chunks_that_is_short_enough_is_fine(strict: LiveServer) -> None:
    body = json.dumps(chat_body(max_tokens=2)).encode()
    with connect(strict) as sock:
        sock.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        sock.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        data = read_all(sock)

    assert data.startswith(b"HTTP/1.1 200")
    assert b'"chat.completion"' in data


def test_a_head_that_does_not_come_is_given_up(strict: LiveServer) -> None:
    with connect(strict) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost:")
        started = time.monotonic()
        status, _ = parsed(read_all(sock))

    assert 408 == status
    assert time.monotonic() - started < 5.0


def test_a_second_head_that_does_not_come_is_given_up_too(strict: LiveServer) -> None:
    with connect(strict) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in sock.recv(65536)[:20]
        sock.sendall(b"GET /health HTTP/1.1\r\nHost:")
        status, _ = parsed(read_all(sock))

    assert 408 == status


def test_a_body_that_does_not_come_is_given_up(strict: LiveServer) -> None:
    with connect(strict) as sock:
        sock.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        status, error = parsed(read_all(sock))

    assert 408 == status
    assert "body" in error["message"]


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"G\x00T / HTTP/1.1\r\n\r\n", b"\r\n\x00"],
    ids=repr,
)
def test_what_is_not_http_gets_the_envelope_and_the_door(strict: LiveServer, data: bytes) -> None:
    with connect(strict) as sock:
        send_quietly(sock, data)
        status, error = parsed(read_all(sock))

    assert status in (400, 408)
    assert {"message", "type", "param", "code"} == set(error)


def test_more_connections_than_allowed_are_turned_away(own_llm: LLM) -> None:
    with LiveServer(own_llm, max_connections=3) as server:
        held = [connect(server) for _ in range(3)]
        with connect(server) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            status, error = parsed(read_all(sock))
        held.pop().close()
        wait_for(lambda: server.get("/health").status_code == 200)

        assert 503 == status
        assert "3 connections" in error["message"]
        for sock in held:
            sock.close()


def test_one_connection_serves_many_requests(strict: LiveServer) -> None:
    """The counts of head and body begin anew with each; together they are beyond the limits."""
    import httpx

    body = chat_body("a " * 200, max_tokens=1)
    with httpx.Client(base_url=strict.url, verify=False, timeout=60) as client:
        statuses = []
        for _ in range(10):
            statuses.append(client.get("/health", headers={"X": "x" * 20_000}).status_code)
            answer = client.post("/v1/chat/completions", json=body, headers={"X": "x" * 20_000})
            statuses.append(answer.status_code)
        raised = client.post("/tokenize", json={"prompt": "x" * 150_000}).status_code

    assert [200] * 20 == statuses
    assert 200 == raised


def test_pipelined_requests_are_answered_in_order(strict: LiveServer) -> None:
    with connect(strict) as sock:
        sock.sendall(
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        data = read_all(sock)

    assert 2 == data.count(b"HTTP/1.1 200")
    assert data.index(b'"ok"') < data.index(b'"ready"')
