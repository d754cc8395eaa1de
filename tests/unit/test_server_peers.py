"""The comparison of servers: what is started, that work is equal, what the figures are."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import server_peers

from outrider.bench import run as run_module
from outrider.bench.arms import PORT
from outrider.bench.records import (
    BlockKind,
    ChunkRecord,
    ClientProof,
    RunData,
    SamplingRecord,
)
from outrider.errors import ParameterError
from tests.bench_runs import block, request, run_record

# Writes as many tokens as its third argument says, after as many milliseconds as its second.
SERVE = (
    "import asyncio, sys; from aiohttp import web; from outrider.bench.mock_server import *\n"
    "chunk = MockChunk(int(sys.argv[2]) / 1000, 'a')\n"
    "async def main():\n"
    "    server = MockServer(lambda body: MockReply(chunks=[chunk] * int(sys.argv[3])))\n"
    "    app = web.Application(); app.router.add_post('/v1/chat/completions', server._complete)\n"
    "    app.router.add_get('/v1/models', server._models)\n"
    "    runner = web.AppRunner(app); await runner.setup()\n"
    "    await web.TCPSite(runner, '127.0.0.1', int(sys.argv[1])).start()\n"
    "    await asyncio.sleep(3600)\n"
    "asyncio.run(main())"
)
ARMS = ("outrider-plain", "outrider-ngram", "vllm-plain")


def served(milliseconds: int, num_tokens: int = 3) -> tuple[str, ...]:
    return (sys.executable, "-c", SERVE, PORT, str(milliseconds), str(num_tokens))


@pytest.fixture(autouse=True)
def _quick_proof(monkeypatch):
    async def prove(_client, concurrency: int) -> ClientProof:
        return ClientProof(concurrency, 99, 0.0001, 0.001, 20000.0, True)

    monkeypatch.setattr(run_module, "prove_client", prove)


def run_data(seconds: dict[str, float], num_tokens: int = 8, **more: object) -> RunData:
    """Two blocks in which each arm's request took so long."""
    run = replace(run_record(*ARMS), sampling=SamplingRecord(0.0, 1.0, 8, None, True))
    blocks, requests = [], []
    for index in range(2):
        for position, arm in enumerate(ARMS):
            blocks.append(replace(block(arm, index, position), kind=BlockKind.MEASURE))
            chunks = (ChunkRecord(1.5, 1, 1), ChunkRecord(1.0 + seconds[arm], 7, 7))
            fields = {"chunks": chunks, "completion_tokens": num_tokens, **more}
            requests.append(request(arm, index, position, **fields))
    return RunData(run, tuple(blocks), tuple(requests))


def test_ratios_are_of_aggregate_rates_block_by_block():
    seconds = {"outrider-plain": 2.0, "outrider-ngram": 1.0, "vllm-plain": 4.0}
    at_load = server_peers.cells(run_data(seconds))

    assert [[4.0, 4.0], [8.0, 8.0], [2.0, 2.0]] == [cell.rates for cell in at_load]
    assert {
        ("outrider-ngram", "outrider-plain"): pytest.approx(2.0),
        ("outrider-plain", "vllm-plain"): pytest.approx(2.0),
        ("outrider-ngram", "vllm-plain"): pytest.approx(4.0),
    } == {pair: found.ratio for pair, found in server_peers.comparisons(at_load).items()}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_tokens": 7}, "wrote 7 tokens instead of 8"),
        ({"error": "HTTP 503: full"}, "HTTP 503: full"),
    ],
)
def test_unequal_work_is_refused(more, words):
    with pytest.raises(ParameterError, match=words):
        server_peers.cells(run_data(dict.fromkeys(ARMS, 1.0), **more))


def test_a_run_starts_every_server_and_compares_them(tmp_path, monkeypatch, capsys):
    started = {"outrider-plain": served(6), "vllm-plain": served(12)}
    monkeypatch.setattr(server_peers, "commands", lambda _: started)
    arguments = ["--users", "1,2", "--blocks", "2", "--max-tokens", "3", "--json"]
    assert 0 == server_peers.main([*arguments, "--out", str(tmp_path)])
    document = json.loads(capsys.readouterr().out)

    assert [1, 2] == [load["users"] for load in document["loads"]]
    for load in document["loads"]:
        (found,) = load["comparisons"]
        assert ("outrider-plain", "vllm-plain") == (found["faster"], found["slower"])
        assert 1.3 < found["ratio"] < 3.0
        assert 2 == found["num_pairs"]


def test_a_server_that_stops_early_voids_the_run(tmp_path, monkeypatch, capsys):
    started = {"outrider-plain": served(1, 3), "vllm-plain": served(1, 2)}
    monkeypatch.setattr(server_peers, "commands", lambda _: started)
    arguments = ["--users", "1", "--blocks", "1", "--max-tokens", "3", "--out", str(tmp_path)]

    assert 2 == server_peers.main(arguments)
    assert "wrote 2 tokens instead of 3" in capsys.readouterr().err


def test_both_sides_are_started_with_the_same_threads_context_and_without_prefix_caches():
    arguments = server_peers.parse_arguments(
        [
            "--vllm",
            "/opt/vllm",
            "--vllm-model",
            "folder",
            "--threads",
            "1",
            "--users",
            "4,2",
            "--out",
            "x",
        ]
    )
    found = server_peers.commands(arguments)
    ours, theirs = found["outrider-plain"], found["vllm-plain"]

    assert ["outrider-plain", "outrider-eagle3-tree+ngram", "vllm-plain", "vllm-ngram"] == [*found]
    assert ("--method", "off") in pairwise(ours)
    for command, most in ((ours, "--max-batch-size"), (theirs, "--max-num-seqs")):
        flags = dict(pairwise(command))
        assert ("2048", "4", PORT) == (flags["--max-model-len"], flags[most], flags["--port"])
    assert "--no-prefix-cache" in ours
    assert "--no-enable-prefix-caching" in theirs
    bound = [word for word in theirs if word.startswith("VLLM_CPU_OMP_THREADS_BIND=")]
    assert 1 == len(bound[0].partition("=")[2].split(","))
    assert found["vllm-ngram"][: len(theirs)] == theirs


@pytest.mark.parametrize(
    "arguments", [["--vllm", "vllm"], ["--users", "1,x"], ["--blocks", "0"], []]
)
def test_a_wrong_command_line_exits_with_status_2(capsys, arguments):
    out = ["--out", "x"] if arguments else []
    with pytest.raises(SystemExit) as ended:
        server_peers.parse_arguments([*arguments, *out])

    assert 2 == ended.value.code
    assert "error:" in capsys.readouterr().err
