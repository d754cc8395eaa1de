"""Two clients beside each other: that their work is equal, and whose figure is which."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from statistics import fmean

import client_peers
import pytest

from outrider.bench.mock_server import MockChunk, MockReply, MockServer
from outrider.errors import EndpointError, ParameterError

# Stands for vLLM's program: finds the file to save in its own arguments and saves what it is told.
VLLM = """#!{python}
import pathlib, sys
flags = dict(zip(sys.argv[3::1], sys.argv[4::1]))
folder = pathlib.Path(flags["--result-dir"])
(folder / flags["--result-filename"]).write_text({saved!r})
(folder / "asked").write_text(pathlib.Path(flags["--dataset-path"]).read_text())
sys.exit({status})
"""


def saved(num_answers: int = 4, num_tokens: int = 12) -> dict[str, object]:
    """What vLLM's client saves of answers of three tokens."""
    values = {
        f"{kind}_{series}_ms": 10.0 * place
        for series in ("ttft", "tpot")
        for place, kind in enumerate(("mean", "median", "p99"), start=1)
    }
    return values | {
        "completed": num_answers,
        "total_output_tokens": num_tokens,
        "request_throughput": 2.0,
        "output_throughput": 6.0,
        "itls": [[0.0001, 0.010, 0.030]] * num_answers,
    }


def program(folder: Path, status: int = 0, **more: int) -> Path:
    path = folder / "vllm"
    text = VLLM.format(python=sys.executable, saved=json.dumps(saved(**more)), status=status)
    path.write_text(text)
    path.chmod(0o755)
    return path


def compare(folder: Path, vllm: Path, num_chunks: int = 3) -> int:
    """The command against a server that answers with so many tokens."""
    reply = MockReply(chunks=[MockChunk(0.02, "a")] * num_chunks)

    async def run() -> int:
        async with MockServer(lambda body: reply) as server:
            words = ["--url", f"{server.url}/v1", "--vllm", str(vllm), "--tokenizer", "t", "--json"]
            words += ["--users", "2", "--num-prompts", "4", "--max-tokens", "3"]
            return await asyncio.to_thread(client_peers.main, [*words, "--out", str(folder / "o")])

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch):
    monkeypatch.setattr(client_peers.vllm_peer, "SETTLE_S", 0.0)


def test_both_clients_are_asked_the_same_in_mirrored_turns(tmp_path: Path, capsys):
    assert 0 == compare(tmp_path, program(tmp_path))
    turns = json.loads(capsys.readouterr().out)["turns"]

    tools = [client_peers.OURS, client_peers.THEIRS]
    assert tools + tools[::-1] == [turn["client"] for turn in turns]
    assert all(set(client_peers.FIGURES) <= set(turn) for turn in turns)
    asked = json.loads((tmp_path / "o" / "asked").read_text())
    questions = client_peers.single_questions(None, 4)
    assert [q.messages[0][1] for q in questions] == [
        row["conversations"][0]["value"] for row in asked
    ]


def test_our_figures_are_those_of_the_requests(tmp_path: Path, capsys):
    compare(tmp_path, program(tmp_path))
    ours = json.loads(capsys.readouterr().out)["turns"][0]

    assert pytest.approx(3.0) == ours["output tokens/s"] / ours["requests/s"]
    assert 20.0 <= ours["TPOT mean"] < 200.0
    assert pytest.approx(ours["TPOT mean"]) == ours["gap mean"], "one token per chunk"


def test_their_gap_before_the_first_text_is_left_out():
    figures = client_peers.their_figures(saved())

    assert pytest.approx(fmean((10.0, 30.0))) == figures["gap mean"]
    assert (10.0, 20.0, 30.0) == tuple(figures[f"TTFT {k}"] for k in ("mean", "median", "p99"))
    assert (2.0, 6.0) == (figures["requests/s"], figures["output tokens/s"])


@pytest.mark.parametrize(
    ("vllm", "num_chunks", "expected"),
    [
        ({"num_tokens": 11}, 3, "4 answers of 11 tokens instead of 4 of 12"),
        ({"num_answers": 3}, 3, "3 answers of 12 tokens instead of 4 of 12"),
        ({"status": 1}, 3, "vllm bench serve ended with status 1"),
        ({}, 2, "wrote 2 tokens"),
    ],
)
def test_unequal_work_is_not_compared(tmp_path: Path, capsys, vllm, num_chunks, expected: str):
    assert EndpointError.exit_status == compare(tmp_path, program(tmp_path, **vllm), num_chunks)
    captured = capsys.readouterr()

    assert expected in captured.err
    assert "" == captured.out


def test_a_row_has_the_difference_of_the_tools_and_how_each_repeats_itself():
    def figures(value: float) -> dict[str, float]:
        return dict.fromkeys(client_peers.FIGURES, value)

    ours, theirs = client_peers.OURS, client_peers.THEIRS
    columns = [
        (ours, figures(11)),
        (theirs, figures(10)),
        (theirs, figures(10)),
        (ours, figures(11)),
    ]
    rows = client_peers.rows_of(columns)

    assert list(client_peers.FIGURES) == [row[0].removesuffix(", ms") for row in rows]
    assert ("11.00", "10.00", "10.00", "11.00", "+10.0%", "0.0%", "0.0%") == rows[0][1:]


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(ParameterError, match="--num-prompts: 9999 are more than"):
        client_peers.single_questions(None, 9999)
