"""The command: what it refuses at once, what it prints, and its signals, as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import cli
from outrider.commands.serve import announcement, in_passing_thread
from outrider.commands.serve_options import KEY_VARIABLE, ServeOptions
from outrider.errors import UsageError
from outrider.models.loading import load
from tests.tiny_heads import write_eagle3_head

pytestmark = pytest.mark.alone  # watches the clock


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_llm(*args: Any, **more: Any) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(cli, "open_llm", open_llm)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "--port: 70000 is outside 0 .. 65535"),
        (["--port", "-1"], "--port: -1"),
        (["--host", "no such host"], "--host no such host"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1"),
        (["--max-waiting", "-1"], "max_waiting: -1"),
        (["--max-batch-size", "0"], "max_batch_size: 0"),
        (["--drain-timeout", "nan"], "--drain-timeout: nan"),
        (["--stream-interval", "-5"], "--stream-interval: -5"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--api-key", "a b\n"], "api_key"),
        (["--api-key-file", "/nonexistent/keys"], "--api-key-file /nonexistent/keys"),
        (["--method", "guess"], "method"),
        (["--also", "8001"], "--also: '8001' is not PORT=METHOD, such as 8001=off"),
        (["--also", "x=off"], "--also: 'x=off' is not PORT=METHOD"),
        (["--also", "8001=ngram="], "--also: '8001=ngram=' is not PORT=METHOD"),
        (["--also", "70000=off"], "port 70000 is outside 0 .. 65535"),
        (["--also", "8001=guess"], "--also: 'guess' is not one of off, ngram"),
        (["--also", "8001=ngram=dir"], "ngram takes no head; leave out =dir"),
        (["--also", "8000=off"], "--also: port 8000 is there twice"),
    ],
)
def test_what_cannot_be_right_is_refused_before_loading(capsys, flags, said) -> None:
    assert 2 == cli.main(["serve", *flags])
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("_no_model")
def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert 2 == cli.main(["serve", "--port", str(port)])
    error = capsys.readouterr().err
    assert str(port) in error
    assert "in use" in error


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "holds no key"), (b"\n \n", "holds no key"), (b"\xff", "ASCII")]
)
def test_a_wrong_key_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        ServeOptions(api_key_file=path).keys()


def test_keys_come_from_flag_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("two\n\n three \none\n")
    monkeypatch.setenv(KEY_VARIABLE, "four")

    assert ("one", "two", "three", "four") == ServeOptions(
        api_key=["one"], api_key_file=path
    ).keys()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x", False)],
)
def test_an_open_server_that_others_reach_is_warned_about(host: str, expected: bool) -> None:
    is_loopback = ServeOptions(host=host).is_loopback
    warned = any(
        "warning" in line for line in announcement({"http://x": "off"}, "m", (), is_loopback)
    )

    assert expected == is_loopback
    assert expected != warned
    assert not any(
        "warning" in line for line in announcement({"http://x": "off"}, "m", ("k",), False)
    )


class Process:
    """``outrider serve`` in a process of its own."""

    def __init__(self, checkpoint: Path, cache_folder: Path, *flags: str) -> None:
        environment = {
            **os.environ,
            "OUTRIDER_CACHE": str(cache_folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        environment.pop(KEY_VARIABLE, None)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "outrider.cli", "serve", "--model", str(checkpoint)),
                *("--port", "0", "--dtype", "float32", "--threads", "1", *flags),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._is_ready.wait(120), self.lines
        self.url = re.search(r"at (http://\S+)", self.text())[1]  # type: ignore[index]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "Ctrl-C" in line:
                self._is_ready.set()
        self._is_ready.set()

    def text(self) -> str:
        return "".join(self.lines)

    def stream(self, num_tokens: int) -> subprocess.Popen[str]:
        """A client in another process, which reads a stream to its end."""
        body = {
            "model": self.model_name(),
            "prompt": "a",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        code = (
            "import httpx, sys, json\n"
            "with httpx.stream('POST', sys.argv[1], json=json.loads(sys.argv[2]), timeout=60,\n"
            "                  verify=False) as r:\n"
            "    for line in r.iter_lines():\n"
            "        print(line, flush=True)\n"
        )
        client = subprocess.Popen(
            [sys.executable, "-c", code, self.url + "/v1/completions", json.dumps(body)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        assert client.stdout.readline().startswith("data: ")
        return client

    def model_name(self) -> str:
        models = httpx.get(self.url + "/v1/models", timeout=60, verify=False).json()
        return models["data"][0]["id"]


@pytest.fixture
def process(checkpoint: Path, cache_folder: Path) -> Iterator[Process]:
    started = Process(checkpoint, cache_folder, "--max-model-len", "1024", "--drain-timeout", "60")
    yield started
    started.process.kill()
    started.process.wait()


def test_the_process_says_where_it_is_and_drains_on_sigterm(process: Process) -> None:
    text = process.text()
    line = re.search(r"try: (curl .*)", text)
    assert line is not None
    answer = subprocess.run(
        ["sh", "-c", line[1].replace('"messages"', '"max_tokens": 4, "messages"')],
        capture_output=True,
        text=True,
        check=False,
    )
    client = process.stream(200)
    process.process.send_signal(signal.SIGTERM)
    output, _ = client.communicate(timeout=60)

    assert "memory plan" in text
    assert "total" in text
    assert "chat.completion" in answer.stdout
    assert "data: [DONE]" in output
    assert 0 == process.process.wait(30)
    assert "stopped" in process.text()


def test_a_second_signal_aborts(process: Process) -> None:
    client = process.stream(1000)
    process.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    started = time.monotonic()
    process.process.send_signal(signal.SIGINT)
    output, _ = client.communicate(timeout=60)

    assert 0 == process.process.wait(30)
    assert time.monotonic() - started < 10
    assert "[DONE]" in output or '"code":"shutdown"' in output


def test_one_process_serves_the_weights_on_several_ports_and_names_each(
    checkpoint: Path, cache_folder: Path, tmp_path: Path
) -> None:
    head = tmp_path / "eagle3"
    write_eagle3_head(head, load(checkpoint).config)
    flags = ["--max-model-len", "256", "--method", "off", "--also", "0=ngram"]
    started = Process(checkpoint, cache_folder, *flags, "--also", f"0=eagle3-tree+ngram={head}")
    try:
        served = re.findall(r"serving tiny at (http://\S+) \(method (\S+),", started.text())
        pages = [httpx.get(f"{url}/status.json", verify=False).json() for url, _ in served]
        started.process.send_signal(signal.SIGTERM)

        assert ["off", "ngram", "eagle3-tree+ngram"] == [method for _, method in served]
        assert ["off", "ngram", "eagle3"] == [page["method"] for page in pages]
        assert 3 == len({url for url, _ in served})
        plan = started.text()
        assert 1 == plan.count(" layers "), "one copy of the weights"
        assert "ngram: KV cache" in plan
        assert "eagle3-tree+ngram: draft weights" in plan
        assert 0 == started.process.wait(30)
    finally:
        started.process.kill()
        started.process.wait()


def test_a_head_that_cannot_be_opened_names_its_server(checkpoint: Path, capsys) -> None:
    words = ["serve", "--model", str(checkpoint), "--dtype", "float32", "--port", "0"]
    status = cli.main([*words, "--also", "0=ngram", "--also", "0=mtp-tree=/no/such/head"])

    assert 2 == status
    assert "error: --also 0=mtp-tree: --head: no such folder or file" in capsys.readouterr().err


def test_the_model_is_loaded_in_a_thread_that_is_gone_afterwards() -> None:
    loading = in_passing_thread(threading.current_thread)

    assert loading is not threading.current_thread()
    assert not loading.is_alive()


def test_what_keeps_a_model_from_loading_is_raised_as_it_was() -> None:
    def fail() -> None:
        raise UsageError("no such model")

    with pytest.raises(UsageError, match="no such model"):
        in_passing_thread(fail)
