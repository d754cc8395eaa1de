"""OpenAI's Node client, unchanged; skipped where node or the package is missing.

The package is looked for where node finds it, or under ``OUTRIDER_NODE_MODULES``.
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
NODE = shutil.which("node")


def run_node(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    environment = {**os.environ, "NODE_PATH": os.environ.get("OUTRIDER_NODE_MODULES", "")}
    return subprocess.run(
        [NODE, *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.fixture(scope="module")
def seen(server: LiveServer) -> dict[str, Any]:
    """What the Node client got, as JSON."""
    if NODE is None:
        pytest.skip("node is not installed")
    if run_node("-e", "require('openai')").returncode:
        pytest.skip("the npm package openai is not installed (OUTRIDER_NODE_MODULES)")
    done = run_node(str(CLIENT), f"{server.url}/v1", json.dumps(chat_body()))
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
