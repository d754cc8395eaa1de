"""OpenAI's Node client, unchanged.

npm installs it at a pinned version into ``build/node``, once; where there is no node, no npm or no
network, the tests are skipped and say why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer, chat_body

CLIENT = Path(__file__).with_name("node_client.cjs")
PACKAGE = "openai@6.30.1"
FOLDER = Path(__file__).parents[2] / "build" / "node" / PACKAGE
NODE, NPM = shutil.which("node"), shutil.which("npm")
# No lock file: it would name the registry that happens to be used here. No scripts of packages run.
INSTALL = (
    *("install", "--no-save", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund"),
    *("--fetch-retries", "0", "--loglevel", "error", PACKAGE),
)


def run(*command: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NODE_PATH": str(FOLDER / "node_modules")}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=timeout_s,
    )


def install() -> None:
    """The pinned client in its folder, or skip with the reason."""
    if NODE is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules" / "openai").exists():
        if NPM is None:
            pytest.skip("npm is not installed")
        FOLDER.mkdir(parents=True, exist_ok=True)
        try:
            done = run(NPM, *INSTALL, "--prefix", FOLDER, timeout_s=180)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm did not install {PACKAGE} within 180 s")
        if done.returncode:
            pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def seen(server: LiveServer) -> dict[str, Any]:
    """What the Node client got, as JSON."""
    install()
    assert NODE is not None
    done = run(NODE, CLIENT, f"{server.url}/v1", json.dumps(chat_body()))
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def test_the_stream_adds_up_to_the_whole_answer(seen: dict[str, Any], server: LiveServer) -> None:
    expected = server.chat().json()["choices"][0]["message"]["content"]

    assert expected == seen["whole"] == seen["streamed"]
    assert seen["usage"]["completion_tokens"] > 0


def test_log_probabilities_have_bytes(seen: dict[str, Any]) -> None:
    for entry in seen["logprobs"]:
        assert isinstance(entry["bytes"], list)
        assert 2 == len(entry["top_logprobs"])
    assert seen["logprobs"]


def test_several_answers_stop_strings_and_seeds(seen: dict[str, Any]) -> None:
    assert 3 == len(set(seen["several"]))
    assert seen["seeded"][0] == seen["seeded"][1]
    assert seen["stop"] not in seen["stopped"]
    assert seen["whole"].startswith(seen["stopped"])


def test_schemas_and_calls_are_followed(seen: dict[str, Any]) -> None:
    assert isinstance(json.loads(seen["structured"])["is_safe"], bool)
    assert "ask" == seen["call"]["name"]
    assert isinstance(json.loads(seen["call"]["arguments"])["is_safe"], bool)


def test_a_client_fault_has_its_status_and_field(seen: dict[str, Any]) -> None:
    assert {"status": 400, "param": "temperature"} == seen["fault"]
