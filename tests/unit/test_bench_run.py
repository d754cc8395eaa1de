"""Whole runs against scripted servers on loopback: order, files, faults, resuming."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from outrider.bench import run as run_module
from outrider.bench.arms import PORT, ArmSpec, given_arms, port_of
from outrider.bench.client import Client, Endpoint
from outrider.bench.mock_server import Ending, MockChunk, MockReply, MockServer
from outrider.bench.probe import probe
from outrider.bench.records import (
    BlockKind,
    ClientProof,
    Load,
    LoadKind,
    Losslessness,
    RunData,
    TokenSource,
)
from outrider.bench.run import BenchSettings, Progress, run_bench
from outrider.bench.servers import Server
from outrider.bench.speedup import process_text
from outrider.bench.store import read_run
from outrider.bench.workloads import Selection, Workload, load_workload
from outrider.errors import EndpointError, ParameterError
from tests.bench_runs import ONE_USER, question, sampling

_Result = TypeVar("_Result")

PROOF = ClientProof(1, 99, 0.0001, 0.001, 20000.0, True)
# A server in four lines: what --serve starts in these tests.
SERVE = (
    "import asyncio, sys; from aiohttp import web; from outrider.bench.mock_server import *\n"
    "async def main():\n"
    "    server = MockServer(lambda body: MockReply(chunks=[MockChunk(0, 'a')] * 3))\n"
    "    app = web.Application(); app.router.add_post('/v1/chat/completions', server._complete)\n"
    "    app.router.add_get('/v1/models', server._models)\n"
    "    runner = web.AppRunner(app); await runner.setup()\n"
    "    for port in sys.argv[1:]:\n"
    "        await web.TCPSite(runner, '127.0.0.1', int(port)).start()\n"
    "    print('up', flush=True)\n"
    "    await asyncio.sleep(3600)\n"
    "asyncio.run(main())"
)


@pytest.fixture(autouse=True)
def _quick_proof(monkeypatch):
    """The self-proof has its own tests; a process per run would only cost time here."""

    async def prove(client: Client, concurrency: int) -> ClientProof:
        return replace(PROOF, concurrency=concurrency)

    monkeypatch.setattr(run_module, "prove_client", prove)


def workload() -> Workload:
    return load_workload(None, Selection(max_prompts=8))


def settings(arms: list[ArmSpec], **more: Any) -> BenchSettings:
    fields: dict[str, Any] = {
        "arms": tuple(arms),
        "sampling": sampling(),
        "loads": (ONE_USER,),
        "num_blocks": 2,
        "num_aa_blocks": 1,
        "requests": 2,
        "idle_s": 20.0,
    }
    return BenchSettings(**{**fields, **more})


def reply(text: str = "a", **more: Any) -> MockReply:
    return MockReply(chunks=[MockChunk(0, text)] * 3, **more)


def with_servers(
    act: Callable[[MockServer, MockServer], Coroutine[Any, Any, _Result]],
    plain: MockReply | Callable[[Mapping[str, Any]], MockReply] | None = None,
    fast: MockReply | Callable[[Mapping[str, Any]], MockReply] | None = None,
    **more: Any,
) -> _Result:
    def script(given):
        return given if callable(given) else lambda _: given or reply()

    async def run() -> _Result:
        async with (
            MockServer(script(plain)) as off,
            MockServer(script(fast), **more) as ngram,
        ):
            return await act(off, ngram)

    return asyncio.run(run())


def arms_at(off: MockServer, ngram: MockServer) -> list[ArmSpec]:
    return given_arms([f"off={off.url}", f"ngram={ngram.url}"], [])


def test_a_run_measures_every_block_and_keeps_its_conditions(tmp_path: Path):
    told: list[Progress] = []

    async def act(off: MockServer, ngram: MockServer) -> RunData:
        loads = (ONE_USER, Load(LoadKind.CLOSED, 2))
        asked = settings(arms_at(off, ngram), loads=loads, judging={"margin": 0.05})
        return await run_bench(asked, workload(), tmp_path / "out", told.append)

    data = with_servers(act)
    measured = [b for b in data.blocks if b.kind is not BlockKind.WARMUP]
    warm_ups = [b for b in data.blocks if b.kind is BlockKind.WARMUP]

    order = ("off ngram", "ngram off", "off off")  # and the same again at the second load
    assert [
        (arm, index, position)
        for index, arms in enumerate(order * 2)
        for position, arm in enumerate(arms.split())
    ] == [(b.arm, b.index, b.position) for b in measured]
    assert [("off", 1), ("ngram", 1), ("off", 2), ("ngram", 2)] == [
        (b.arm, b.load.concurrency) for b in warm_ups
    ]
    assert not {b.index for b in warm_ups} & {b.index for b in measured}
    for block in measured:
        asked = [(r.prompt_hash, r.prompt_id) for r in data.requests_of(block)]
        other = next(b for b in measured if b.index == block.index and b is not block)
        assert asked == [(r.prompt_hash, r.prompt_id) for r in data.requests_of(other)]
    assert {TokenSource.CONTINUOUS_USAGE} == {r.token_source for r in data.requests}
    assert {"margin": 0.05} == data.run.settings["judging"]
    assert ("off", "mock", "mock") == (
        data.run.baseline.name,
        data.run.baseline.model,
        data.run.baseline.engine,
    )
    assert replace(PROOF, concurrency=2) == data.run.client
    assert {"sampling": 7, "arrivals": 1} == data.run.seeds
    assert data == read_run(tmp_path / "out")
    assert ("measured", 12, 12, 0.0) == (
        told[-1].stage,
        told[-1].num_done,
        told[-1].num_turns,
        told[-1].left_s,
    )
    assert any(0 < (progress.left_s or 0) for progress in told)


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path):
    """Cut in the middle of block 1: its first turn is measured again, block 0 is not."""
    out = tmp_path / "out"

    async def act(off: MockServer, ngram: MockServer) -> tuple[RunData, RunData, int]:
        asked = settings(arms_at(off, ngram))

        def stop(progress: Progress) -> None:
            if progress.num_done == 3:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            await run_bench(asked, workload(), out, stop)
        first = read_run(out)
        off.requests.clear()
        ngram.requests.clear()
        whole = await run_bench(asked, workload(), out, lambda _: None)
        return first, whole, len(ngram.requests)

    first, whole, num_asked = with_servers(act)
    kept = [b for b in first.blocks if b.kind is BlockKind.MEASURE]

    assert [0, 0] == [b.index for b in kept]
    assert kept == [b for b in whole.blocks if b.index == 0]
    assert {0, 1, 2} == {b.index for b in whole.blocks if b.kind is not BlockKind.WARMUP}
    assert 1 + 2 + 2 == num_asked, "the probe, the warm-up, block 1"
    started = [b.started_s for b in whole.blocks]
    assert sorted(started) == started, "one clock, also over the interruption"


def test_a_folder_with_another_run_is_refused_and_says_what_differs(tmp_path: Path):
    async def act(off: MockServer, ngram: MockServer) -> None:
        asked = settings(arms_at(off, ngram))
        await run_bench(asked, workload(), tmp_path, lambda _: None)
        with pytest.raises(ParameterError, match="num_blocks was 2 and is now 3"):
            await run_bench(replace(asked, num_blocks=3), workload(), tmp_path, lambda _: None)

    with_servers(act)


def test_a_server_that_was_exchanged_ends_a_resumed_run(tmp_path: Path):
    async def act(off: MockServer, ngram: MockServer) -> None:
        off.pages["/version"] = ngram.pages["/version"] = '{"version": "1.0"}'
        asked = settings(arms_at(off, ngram))
        await run_bench(asked, workload(), tmp_path, lambda _: None)
        ngram.pages["/version"] = '{"version": "2.0"}'
        with pytest.raises(EndpointError, match=r"arm ngram: engine_version was 1\.0 .* 2\.0 now"):
            await run_bench(asked, workload(), tmp_path, lambda _: None)

    with_servers(act)


def test_another_model_in_one_arm_is_refused(tmp_path: Path):
    async def act(off: MockServer, ngram: MockServer) -> None:
        with pytest.raises(EndpointError, match="arm ngram serves 'other' and arm off serves"):
            await run_bench(settings(arms_at(off, ngram)), workload(), tmp_path, lambda _: None)

    with_servers(act, models=("other",))
    assert not (tmp_path / "run.json").exists()


def test_a_client_that_is_the_bottleneck_measures_nothing(tmp_path: Path, monkeypatch):
    async def prove(client: Client, concurrency: int) -> ClientProof:
        return replace(PROOF, is_sound=False, reason="half of the gaps are 9 ms wrong")

    monkeypatch.setattr(run_module, "prove_client", prove)

    async def act(off: MockServer, ngram: MockServer) -> int:
        with pytest.raises(EndpointError, match="would be measured instead of the servers: half"):
            await run_bench(settings(arms_at(off, ngram)), workload(), tmp_path, lambda _: None)
        return len(off.requests)

    assert 0 == with_servers(act)


def test_a_server_that_fails_now_and_then_is_recorded_and_one_that_died_ends_the_run(
    tmp_path: Path,
):
    calls = 0

    def failing(body: Mapping[str, Any]) -> MockReply:
        nonlocal calls
        calls += 1
        # Answer 1 is the probe, 2 and 3 warm up, 4 is half of a block.
        return reply() if calls < 5 else reply(status=500, body="out of memory")

    async def act(off: MockServer, ngram: MockServer) -> None:
        with pytest.raises(
            EndpointError, match=r"arm ngram: all 2 requests of a block failed.*out of memory"
        ):
            await run_bench(settings(arms_at(off, ngram)), workload(), tmp_path, lambda _: None)

    with_servers(act, fast=failing)
    failed = [r for r in read_run(tmp_path).requests if r.error is not None]

    assert [("ngram", 0, "HTTP 500: out of memory")] == [(r.arm, r.block, r.error) for r in failed]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_blocks": 0}, "--blocks: 0"),
        ({"num_aa_blocks": -1}, "--aa-blocks: -1"),
        ({"requests": 0}, "--requests: 0"),
        ({"loads": ()}, "no load: give --concurrency"),
        ({"loads": (ONE_USER, ONE_USER)}, "closed:1 is there twice"),
        ({"loads": (Load(LoadKind.CLOSED, 4),)}, "2 is fewer than the 4 in flight"),
    ],
)
def test_settings_that_measure_nothing_are_refused(fields, expected: str):
    with pytest.raises(ParameterError, match=expected):
        settings(given_arms(["off=http://h:1", "a=http://h:2"], []), **fields)


@pytest.mark.parametrize(
    ("more", "expected"), [({}, [8, 16, 64, 32]), ({"rounds": 2}, [4, 8, 32, 32])]
)
def test_a_block_fills_its_slots_several_times(more, expected):
    asked = settings(given_arms(["off=http://h:1", "a=http://h:2"], []), requests=None, **more)

    assert expected == [
        asked.num_requests(load)
        for load in (
            ONE_USER,
            Load(LoadKind.CLOSED, 4),
            Load(LoadKind.CLOSED, 16),
            Load(LoadKind.POISSON, 3),
        )
    ]


# --- probing


def probed(script: MockReply | Callable[[Mapping[str, Any]], MockReply], **more: Any) -> Any:
    async def act() -> Any:
        given = script if callable(script) else lambda _: script
        model = more.pop("model", "")
        async with MockServer(given, **more) as server, Client(idle_s=0.5) as client:
            endpoint = Endpoint(url=server.url, model=model)
            return await probe(client, "spec", endpoint, question(), sampling())

    return asyncio.run(act())


def test_a_strict_server_is_asked_without_running_usage():
    found = probed(reply(allows_running_usage=False))

    assert not found.endpoint.asks_running_usage
    assert probed(reply()).endpoint.asks_running_usage


def test_a_field_that_the_server_refuses_is_left_out_and_the_other_kept():
    def strict(body: Mapping[str, Any]) -> MockReply:
        return reply(status=422, body="return_token_ids") if "return_token_ids" in body else reply()

    found = [
        (each.endpoint.asks_running_usage, each.endpoint.asks_token_ids)
        for each in (
            probed(reply()),
            probed(reply(allows_running_usage=False)),
            probed(strict),
        )
    ]

    assert [(True, True), (False, True), (True, False)] == found


def test_a_server_that_hangs_is_asked_once():
    asked = 0

    def hangs(body: Mapping[str, Any]) -> MockReply:
        nonlocal asked
        asked += 1
        return MockReply(chunks=[MockChunk(0, "a")], ending=Ending.HANG)

    with pytest.raises(EndpointError, match="silent for"):
        probed(hangs)
    assert 1 == asked


def test_our_server_says_how_exact_it_is():
    page = (
        '{"version": "0.1", "fingerprint": "m abc123 · bfloat16 · 2 threads · cpu · torch 2 amx · '
        'exactness L2"}'
    )
    pages = {"/status.json": page}
    found = probed(reply(), pages=pages)

    # The mock calls itself mock: nobody else's word on exactness is taken.
    assert Losslessness.NOT_AUDITED == found.losslessness
    assert ("bfloat16", "0.1") == (found.precision, found.engine_version)
    assert "exactness L2" in found.losslessness_detail


@pytest.mark.parametrize(
    ("level", "expected"),
    [("L2", Losslessness.EXACT), ("L3", Losslessness.NOT_AUDITED), ("untested", "not_audited")],
)
def test_only_a_passed_self_test_of_our_engine_is_exact(monkeypatch, level: str, expected: str):
    async def models(self, request):
        from aiohttp import web

        return web.json_response({"data": [{"id": "m", "owned_by": "outrider"}]})

    monkeypatch.setattr(MockServer, "_models", models)
    pages = {"/status.json": f'{{"fingerprint": "m · float32 · exactness {level}"}}'}

    assert expected == probed(reply(), pages=pages).losslessness


@pytest.mark.parametrize(
    ("script", "more", "expected"),
    [
        (reply(), {"models": ("a", "b")}, "serves a, b; choose one with --served-model"),
        (reply(), {"model": "x"}, "serves mock and not 'x'"),
        (reply(), {"models": ()}, "serves nothing; choose one"),
        (
            MockReply(body="<html>Hello</html>", content_type="text/html"),
            {},
            "answers text/html instead of a stream",
        ),
        (MockReply(chunks=[MockChunk(0, "a")], ending=Ending.HANG), {}, "silent for 0.5 s"),
        (
            MockReply(chunks=[MockChunk(0, "a")], ending=Ending.DROP),
            {},
            "dropped the connection",
        ),
        (reply(has_usage=False, allows_running_usage=False), {}, "streams without usage"),
        (
            reply(status=400, body="ignore_eos: unknown field"),
            {},
            "ignore_eos: unknown field; leave out --ignore-eos",
        ),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused_before_the_run(script, more, expected):
    with pytest.raises(EndpointError) as caught:
        probed(script, **more)

    assert "arm spec: " in str(caught.value)
    assert expected in str(caught.value)


def test_an_address_of_a_web_page_is_no_server():
    async def act() -> None:
        async with MockServer(lambda _: reply()) as server, Client() as client:
            endpoint = Endpoint(url=f"{server.url}/docs", model="")
            await probe(client, "spec", endpoint, question(), sampling())

    with pytest.raises(EndpointError, match="answers HTTP 404 and no list of models"):
        asyncio.run(act())


# --- servers that the run starts


def started_arms() -> list[ArmSpec]:
    command = (sys.executable, "-c", SERVE, PORT)
    return [
        ArmSpec(name="off", method="off", is_baseline=True, command=command),
        ArmSpec(name="ngram", method="ngram", command=command),
    ]


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_servers_are_started_measured_and_gone(tmp_path: Path, one_at_a_time: bool):
    asked = settings(started_arms(), num_blocks=2, num_aa_blocks=0, one_at_a_time=one_at_a_time)
    data = asyncio.run(run_bench(asked, workload(), tmp_path, lambda _: None))
    warm_ups = [b.arm for b in data.blocks if b.kind is BlockKind.WARMUP]

    # A server that was started again is cold again: AB BA has three starts in turn.
    assert (["off", "ngram", "off"] if one_at_a_time else ["off", "ngram"]) == warm_ups
    assert not [r for r in data.requests if r.error is not None]
    assert "up" in (tmp_path / "servers" / "off.log").read_text()
    assert PORT in (data.run.baseline.command or ())
    for arm in data.run.arms:
        assert not is_answering(arm.url)


def shared_arms(*words: str) -> list[ArmSpec]:
    """The same two arms, by one process."""
    command = (sys.executable, "-c", SERVE, PORT, port_of("ngram"), *words)
    return [replace(arm, command=command, process=("off", "ngram")) for arm in started_arms()]


def test_arms_that_share_a_process_have_an_address_each_and_the_records_say_so(
    tmp_path: Path, monkeypatch
):
    started: list[tuple[str, ...]] = []
    enter = Server.__aenter__

    async def counted(server: Server) -> Server:
        started.append(server.command)
        return await enter(server)

    monkeypatch.setattr(Server, "__aenter__", counted)
    told: list[str] = []
    run = run_bench(settings(shared_arms()), workload(), tmp_path, lambda p: told.append(p.stage))
    data = asyncio.run(run)
    off, ngram = data.run.arms

    assert 1 == len(started)
    assert [arm.url.rpartition(":")[2] for arm in (off, ngram)] == list(started[0][-2:])
    assert off.url != ngram.url
    assert [("off", "ngram")] * 2 == [off.process, ngram.process]
    assert off.command == ngram.command
    assert "one for off, ngram: one copy of the weights" in process_text(ngram)
    assert not [r for r in data.requests if r.error is not None]
    assert "up" in (tmp_path / "servers" / "shared.log").read_text()
    assert "starting off, ngram: 0 s" in told
    assert [False, False] == [is_answering(arm.url) for arm in (off, ngram)]


def test_an_interrupted_run_of_a_shared_process_starts_it_again_and_goes_on(tmp_path: Path):
    def stop(progress: Progress) -> None:
        if progress.num_done == 3:
            raise KeyboardInterrupt

    asked = settings(shared_arms())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run_bench(asked, workload(), tmp_path, stop))
    first = read_run(tmp_path)
    whole = asyncio.run(run_bench(asked, workload(), tmp_path, lambda _: None))

    assert not any(is_answering(arm.url) for arm in first.run.arms)
    assert {0, 1, 2} == {b.index for b in whole.blocks if b.kind is not BlockKind.WARMUP}
    assert [b for b in first.blocks if b.index == 0] == [b for b in whole.blocks if b.index == 0]


def test_a_shared_process_that_does_not_start_names_its_arms_and_shows_its_last_words(
    tmp_path: Path,
):
    code = "import sys; sys.exit('outrider: error: --also 8001=ngram: no such head')"
    arms = [
        replace(arm, command=(sys.executable, "-c", code, PORT, port_of("ngram")))
        for arm in shared_arms()
    ]
    with pytest.raises(EndpointError) as caught:
        asyncio.run(run_bench(settings(arms), workload(), tmp_path, lambda _: None))

    assert str(caught.value).startswith("arms off, ngram: ")
    assert "ended with status 1 before it served" in str(caught.value)
    assert "--also 8001=ngram: no such head" in str(caught.value)


def test_a_shared_process_that_serves_only_one_of_its_arms_is_not_ready(tmp_path: Path):
    async def act() -> None:
        command = (sys.executable, "-c", SERVE, PORT)
        server = Server(["off", "ngram"], command, tmp_path / "log")
        async with Client() as client, server:
            with pytest.raises(EndpointError, match="arms off, ngram: not ready after 2 s"):
                await server.wait_ready(client, 2.0, lambda _: None)

    asyncio.run(act())


def is_answering(url: str) -> bool:
    async def act() -> bool:
        async with Client() as client:
            return (await client.get(Endpoint(url=url, model=""), "/v1/models"))[0] is not None

    return asyncio.run(act())


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path: Path):
    code = "import sys; print('loading'); sys.exit('outrider: error: no head for model m')"
    arms = started_arms()
    arms[1] = replace(arms[1], command=(sys.executable, "-c", code, PORT))

    with pytest.raises(EndpointError) as caught:
        asyncio.run(run_bench(settings(arms), workload(), tmp_path / "o", lambda _: None))

    assert "ended with status 1 before it served" in str(caught.value)
    assert "no head for model m" in str(caught.value)
    assert "ngram.log" in str(caught.value)


def test_a_command_that_does_not_exist_is_named(tmp_path: Path):
    arms = started_arms()
    arms[0] = replace(arms[0], command=("no-such-server", PORT))

    with pytest.raises(EndpointError, match=r"arm off: no-such-server \d+ cannot be started"):
        asyncio.run(run_bench(settings(arms), workload(), tmp_path / "o", lambda _: None))


def test_a_server_that_never_serves_is_given_up_and_ended(tmp_path: Path):
    async def act() -> int | None:
        code = "import time; print('thinking', flush=True); time.sleep(60)"
        server = Server(["slow"], (sys.executable, "-c", code, PORT), tmp_path / "slow.log")
        async with Client() as client, server:
            with pytest.raises(EndpointError, match="arm slow: not ready after 1 s"):
                await server.wait_ready(client, 1.0, lambda _: None)
            process = server._process
        assert process is not None
        return process.returncode

    begun = time.monotonic()

    assert 128 + signal.SIGTERM == asyncio.run(act())
    assert time.monotonic() - begun < 15


# A server with a worker that does not listen to SIGTERM; both write down who they are.
STUBBORN = """
import os, signal, subprocess, sys, time
if len(sys.argv) == 3:
    worker = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", worker])
    with open(sys.argv[1], "w") as file:
        file.write(f"{os.getpid()} {child.pid} ")
time.sleep(600)
"""
RUN = """
import asyncio, sys
from pathlib import Path
from outrider.bench.servers import Server

async def main():
    folder = Path(sys.argv[1])
    command = (sys.executable, "-c", sys.argv[2], str(folder / "pids"), "{port}")
    async with Server(["off"], command, folder / "log"):
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_run_that_is_killed_leaves_no_server_and_no_worker_behind(tmp_path: Path):
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), STUBBORN])
    pids: list[int] = []
    deadline = time.monotonic() + 60
    while len(pids) < 2:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):
            pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    time.sleep(0.5)  # the worker shuts its ears
    assert [True, True] == [is_alive(pid) for pid in pids]
    run.send_signal(signal.SIGKILL)
    run.wait(10)
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert [False, False] == [is_alive(pid) for pid in pids]


def is_alive(pid: int) -> bool:
    """Running, or stopped; a dead process whose parent has not asked yet is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
