"""Several servers in one process, on one copy of the weights: nobody notices the others.

Contract: each answers as in a process of its own; all compute in one thread; what fails in one
stays there; signals are for all.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM, SpeculationConfig
from outrider.config import Method
from outrider.server.log_names import SERVER_NAME
from tests.server.conftest import ENGINE
from tests.server.live import LiveServer, envelope, slowed, wait_for
from tests.server.test_lifecycle import LONG, FaultyTarget, Reader
from tests.tiny_heads import write_eagle3_head

pytestmark = pytest.mark.alone  # several engines at once

TEXTS = [f"around it and around it and {rest}" for rest in ("around", "the ford", "where it is")]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
]
CHAIN = SpeculationConfig(adaptive=False)
PLAIN = SpeculationConfig(method=Method.OFF)


@pytest.fixture(scope="module")
def head(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> SpeculationConfig:
    """A tree of a random EAGLE-3 head, which is mostly wrong, and of n-gram, which is not."""
    folder = tmp_path_factory.mktemp("head") / "eagle3"
    write_eagle3_head(folder, llm.config)
    return SpeculationConfig(
        method=Method.EAGLE3,
        head=str(folder),
        max_draft_len=3,
        use_dynamic_tree=True,
        dynamic_tree_max_topK=2,
        with_ngram=True,
        adaptive=False,
    )


@pytest.fixture
def arms(llm: LLM, head: SpeculationConfig) -> list[LLM]:
    """Plain, n-gram and a head: three engines on the same weights."""
    return [llm.with_speculation(speculation) for speculation in (PLAIN, CHAIN, head)]


def ask(server: LiveServer) -> list[dict[str, Any]]:
    """Answers with their token ids, several at once."""

    def one(text: str, fields: dict[str, Any]) -> dict[str, Any]:
        more = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True, **fields}
        return server.chat(text, **more).json()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda pair: one(*pair), [(t, f) for t in TEXTS for f in ASKED]))


def ids_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, cache_folder: Path) -> list[list[int]]:
    """Of plain decoding on weights, and behind a server, of its own."""
    with LiveServer(LLM(checkpoint, engine=ENGINE, speculation=PLAIN)) as server:
        return ids_of(ask(server))


def test_a_shared_process_writes_what_separate_ones_write(
    arms: list[LLM], checkpoint: Path, head: SpeculationConfig, expected: list[list[int]]
) -> None:
    apart = []
    for speculation in (PLAIN, CHAIN, head):
        with LiveServer(LLM(checkpoint, engine=ENGINE, speculation=speculation)) as server:
            apart.append(ids_of(ask(server)))
    with LiveServer(*arms) as server:
        together = [ids_of(ask(each)) for each in (server, *server.beside)]

    assert [expected] * 3 == apart
    assert apart == together


def test_engines_asked_at_the_same_time_do_not_disturb_one_another(
    arms: list[LLM], expected: list[list[int]]
) -> None:
    with LiveServer(*arms) as server:
        served = [server, *server.beside]
        with ThreadPoolExecutor(len(served)) as pool:
            found = list(pool.map(ask, served))
        counts = [each.stats().speculation for each in served]

    assert [expected] * 3 == [ids_of(answers) for answers in found]
    assert 0 == counts[0].drafted
    for count in counts[1:]:
        assert count.drafted > 0
        assert count.accepted > 0
        assert count.drafted - count.accepted > 0


def note_threads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads in which the weights that all engines share are used from now on."""
    threads: set[int] = set()
    forward: Callable[..., Any] = llm.target.forward

    def noted(*args: Any, **more: Any) -> Any:
        threads.add(threading.get_ident())
        return forward(*args, **more)

    monkeypatch.setattr(llm.target, "forward", noted)
    return threads


def test_one_thread_computes_for_all(arms: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    threads = note_threads(arms[0], monkeypatch)
    with LiveServer(*arms) as server:
        names = {t.name for t in threading.enumerate() if t.ident in threads}
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(ask, [server, *server.beside]))
        names |= {t.name for t in threading.enumerate() if t.ident in threads}

    assert (1, {"engine"}) == (len(threads), names)


def test_servers_that_do_not_share_a_process_would_be_seen_to_compute_in_two_threads(
    arms: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = note_threads(arms[0], monkeypatch)
    with LiveServer(arms[0]) as one, LiveServer(arms[1]) as other:
        one.chat()
        other.chat()

    assert 2 == len(threads)


def test_a_fault_in_a_step_of_one_engine_ends_its_own_request_alone(
    arms: list[LLM], expected: list[list[int]]
) -> None:
    written = {token for ids in expected for token in ids}
    read = {token for text in TEXTS for token in arms[0].tokenizer.encode(text)}
    # N-gram drafts only what was read or written, so only the request with it meets this token.
    poison = next(token for token in range(300, 200, -1) if token not in written | read)
    arms[1].engine._target = FaultyTarget(arms[1].target, poison, "exception")  # type: ignore[assignment]
    with LiveServer(*arms) as server, ThreadPoolExecutor(3) as pool:
        served = [server, *server.beside]
        others = [pool.submit(ask, each) for each in served]
        body = {"model": "tiny", "prompt": [5, 6, poison], "max_tokens": 40}
        answer = served[1].post("/v1/completions", body)
        found = [ids_of(other.result()) for other in others]
        counts = [(each.stats().failed, each.stats().faults > 0) for each in served]

    assert "request_failed" == envelope(answer)["code"]
    assert [expected] * 3 == found
    assert [(0, False), (1, True), (0, False)] == counts


def test_an_engine_that_fails_goes_down_alone_and_the_process_tells_it_at_its_end(
    arms: list[LLM], expected: list[list[int]]
) -> None:
    slowed(arms[1], 0.02)
    with LiveServer(*arms) as server:
        served = [server, *server.beside]
        reader = Reader(served[1], **LONG)
        assert reader.has_begun.wait(20)

        def broken() -> None:
            raise KeyboardInterrupt("the engine's end")

        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(ask, each) for each in (served[0], served[2])]
            arms[1].engine.step = broken  # type: ignore[method-assign, assignment]
            last = json.loads(reader.end()[-1])
            found = [ids_of(other.result()) for other in others]
        wait_for(lambda: not is_listening(served[1]))

        assert "engine_dead" == last["error"]["code"]
        assert [expected] * 2 == found
        assert [200, 200] == [each.get("/ready").status_code for each in (served[0], served[2])]
        assert server.status is None, "the process serves on"
        server.signal()
        assert 1 == server.join()


def is_listening(server: LiveServer) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


def test_the_first_signal_drains_all_and_the_second_aborts_all(arms: list[LLM]) -> None:
    for each in arms:
        slowed(each, 0.01)
    with LiveServer(*arms, drain_timeout_s=30.0) as server:
        served = [server, *server.beside]
        readers = [Reader(each, max_tokens=30, ignore_eos=True) for each in served[:2]]
        assert all(reader.has_begun.wait(20) for reader in readers)
        server.signal()
        drained = [reader.end()[-1] for reader in readers]

        assert ["[DONE]", "[DONE]"] == drained
        assert 0 == server.join()


def test_a_second_signal_aborts_whoever_still_runs(arms: list[LLM]) -> None:
    for each in arms:
        slowed(each, 0.05)
    with LiveServer(*arms, drain_timeout_s=30.0) as server:
        readers = [Reader(each, **LONG) for each in (server, *server.beside)]
        assert all(reader.has_begun.wait(20) for reader in readers)
        server.signal()
        server.signal()
        last = [json.loads(reader.end()[-1])["error"]["code"] for reader in readers]

        assert ["shutdown"] * 3 == last
        assert 0 == server.join()


def test_ready_is_said_once_when_all_listen_and_the_thread_ends_with_the_process(
    arms: list[LLM],
) -> None:
    before = engine_threads()
    with LiveServer(*arms) as server:
        ready = [each.get("/ready").status_code for each in (server, *server.beside)]
        methods = [each.get("/status.json").json()["method"] for each in (server, *server.beside)]

    assert ([200] * 3, 1) == (ready, server.num_ready)
    assert ["off", "ngram", "eagle3"] == methods
    assert before == engine_threads()


def engine_threads() -> set[threading.Thread]:
    """Those that compute; the session's own server may have one."""
    return {thread for thread in threading.enumerate() if thread.name == "engine"}


def test_a_line_of_the_log_says_whose_it_is(
    arms: list[LLM],
) -> None:
    names: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            names.append(SERVER_NAME.get())

    arms[1].engine._target = FaultyTarget(arms[1].target, 317, "exception")  # type: ignore[assignment]
    handler = Noting()
    logging.getLogger("outrider.engine").addHandler(handler)
    try:
        with LiveServer(*arms) as server:
            body = {"model": "tiny", "prompt": [5, 6, 317], "max_tokens": 4}
            for each in (server, *server.beside):
                each.post("/v1/completions", body)
    finally:
        logging.getLogger("outrider.engine").removeHandler(handler)

    assert {"ngram"} == set(names)
