"""A drafter that fails under a server: the same answers, and an operator who is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider import LLM
from tests.server.live import LiveServer

pytestmark = pytest.mark.draft_faults
TEXTS = [f"around it and around it and around {way}" for way in ("it", "and", "where")]


def ask(server: LiveServer, text: str) -> dict[str, Any]:
    return server.chat(text, max_tokens=60, ignore_eos=True).json()


def ask_all(server: LiveServer) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        return list(pool.map(lambda text: ask(server, text), TEXTS))


def break_drafter(llm: LLM, *, marker: str | None) -> None:
    """From now on it fails: on requests with the marker in their prompt, or on all."""
    guard = llm.engine._drafter
    assert guard is not None
    propose = guard._drafter.propose

    def wrong(requests: Any, max_depth: Any, min_score: float = 0.0) -> Any:
        prompts = [llm.tokenizer.decode(request.token_ids) for request in requests]
        if marker is None or any(marker in prompt for prompt in prompts):
            raise RuntimeError("secret words of a drafter that fails")
        return propose(requests, max_depth, min_score)

    guard._drafter.propose = wrong  # type: ignore[method-assign]


def test_the_request_that_it_fails_on_goes_on_and_the_others_draft(own_llm: LLM) -> None:
    with LiveServer(own_llm) as server:
        expected = [ask(server, text) for text in TEXTS]
        break_drafter(own_llm, marker="where")
        found = ask_all(server)
        server.wait_until_idle()
        metrics = server.get("/metrics").text

        assert [each["choices"] for each in expected] == [each["choices"] for each in found]
        assert all(each["speculative"]["drafted"] for each in expected)
        assert [True, True, False] == [each["speculative"]["drafted"] > 0 for each in found]
        assert "outrider_draft_faults_total 0.0" not in metrics
        assert "outrider_drafting_off 0.0" in metrics
        assert {"status": "ready"} == server.get("/ready").json()
        assert 0 == server.stats().failed == server.stats().faults


def test_a_drafter_that_always_fails_is_off_and_said_to_be(own_llm: LLM) -> None:
    with LiveServer(own_llm) as server:
        expected = [ask(server, text) for text in TEXTS]
        break_drafter(own_llm, marker=None)
        found = [ask(server, text) for text in TEXTS]
        later = ask_all(server)
        ready = server.get("/ready")

        for answers in (found, later):
            assert [each["choices"] for each in expected] == [each["choices"] for each in answers]
            assert {0} == {each["speculative"]["drafted"] for each in answers}
        assert 200 == ready.status_code
        assert "drafter failed repeatedly" in ready.json()["warning"]
        assert "secret" not in ready.text
        assert "outrider_drafting_off 1.0" in server.get("/metrics").text
        assert server.get("/status.json").json()["drafting_off"]
        assert 3 == server.stats().draft_faults
