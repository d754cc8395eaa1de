"""Lossless over HTTP: one seed, one text, whatever else the server is doing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM, SpeculationConfig
from tests.server.conftest import ENGINE
from tests.server.live import LiveServer, chat_body

PROMPT = "around it, and around it, and where the bridge was down he went around it"
CASES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 2, "seed": 1},
    {"temperature": 1, "seed": 2, "top_p": 0.5, "frequency_penalty": 0.5},
    {"temperature": 1, "seed": 3, "min_p": 0.05, "logit_bias": {"70": 4}, "stop": "e"},
]


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """What a client sees of one answer, and what drafting did for it."""
    fields = {"max_tokens": 60, "ignore_eos": True, "logprobs": True, **fields}
    reply = server.chat(PROMPT, **fields).json()
    (choice,) = reply["choices"]
    return {
        "seen": (choice["message"]["content"], choice["finish_reason"], choice["logprobs"]),
        "usage": reply["usage"]["completion_tokens"],
        "counts": reply["speculative"],
    }


def ask_streaming(server: LiveServer, **fields: Any) -> tuple[str, str, Any]:
    fields = {"max_tokens": 60, "ignore_eos": True, "logprobs": True, **fields}
    body = chat_body(PROMPT, stream=True, **fields)
    text, reason, entries = "", None, []
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=body, timeout=60, verify=False
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                entries += (choice["logprobs"] or {"content": []})["content"]
    assert reason is not None
    return text, reason, {"content": entries, "refusal": None}


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[dict[str, Any]]:
    """Each case by itself, plainly decoded, on a server without a prefix cache."""
    plain = llm.with_speculation(SpeculationConfig(method="off"))
    with LiveServer(plain) as server:
        return [ask(server, **case) for case in CASES]


def check(alone: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert [each["seen"] for each in alone] == [each["seen"] for each in found]
    assert [each["usage"] for each in alone] == [each["usage"] for each in found]


def test_with_drafts(server: LiveServer, alone: list[dict[str, Any]]) -> None:
    found = [ask(server, **case) for case in CASES]
    accepted = sum(each["counts"]["accepted"] for each in found)
    drafted = sum(each["counts"]["drafted"] for each in found)

    check(alone, found)
    assert 0 < accepted < drafted
    assert 0 == sum(each["counts"]["drafted"] for each in alone)


def test_the_comparison_notices_another_text(
    server: LiveServer, alone: list[dict[str, Any]]
) -> None:
    """A wrong variant: the second case with the next seed."""
    found = [ask(server, **case) for case in CASES]
    found[1] = ask(server, **{**CASES[1], "seed": 2})

    with pytest.raises(AssertionError):
        check(alone, found)


def test_streamed(server: LiveServer, alone: list[dict[str, Any]]) -> None:
    assert [each["seen"] for each in alone] == [ask_streaming(server, **case) for case in CASES]


def test_among_sixteen_others(server: LiveServer, alone: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(16) as pool:
        others = [
            pool.submit(server.chat, f"other traffic {i}", temperature=1, seed=i, max_tokens=40)
            for i in range(12)
        ]
        found = list(pool.map(lambda case: ask(server, **case), CASES))
        assert {200} == {other.result().status_code for other in others}

    check(alone, found)


def test_behind_an_earlier_request_of_the_same_prefix(
    server: LiveServer, alone: list[dict[str, Any]]
) -> None:
    server.chat(PROMPT, max_tokens=30)
    server.wait_until_idle()
    before = server.stats().prefix_hit_tokens
    found = [ask(server, **case) for case in CASES]
    server.wait_until_idle()

    check(alone, found)
    assert server.stats().prefix_hit_tokens > before


def test_after_preemption(
    checkpoint: Path, cache_folder: Path, alone: list[dict[str, Any]]
) -> None:
    """So few slots that four requests at once cannot all stay."""
    config = replace(ENGINE, max_model_len=256, max_slots=256)
    squeezed = LLM(checkpoint, engine=config, speculation=SpeculationConfig(adaptive=False))
    with LiveServer(squeezed) as server, ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(server.chat, PROMPT, temperature=1, seed=i, max_tokens=100)
            for i in range(4)
        ]
        found = list(pool.map(lambda case: ask(server, **case), CASES))
        assert {200} == {other.result().status_code for other in others}
        server.wait_until_idle()

        check(alone, found)
        assert server.stats().preemptions > 0
        assert (0, 0, 0) == server.load()


def test_at_a_fixed_cadence(own_llm: LLM, alone: list[dict[str, Any]]) -> None:
    with LiveServer(own_llm, stream_interval_s=0.05) as server:
        assert [each["seen"] for each in alone] == [ask_streaming(server, **case) for case in CASES]


def test_padded_events_are_of_equal_granularity_and_say_the_same(
    server: LiveServer, alone: list[dict[str, Any]]
) -> None:
    body = chat_body(
        PROMPT,
        stream=True,
        stream_options={"include_obfuscation": True},
        max_tokens=60,
        ignore_eos=True,
        **CASES[1],
    )
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=body, timeout=60, verify=False
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]

    assert {0} == {len(line.encode()) % 256 for line in lines[:-1]}
    assert {True} == {"obfuscation" in event for event in events}
    assert alone[1]["seen"][0] == "".join(
        event["choices"][0]["delta"].get("content", "") for event in events
    )
