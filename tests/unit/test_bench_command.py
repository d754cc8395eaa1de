"""The command: its exit statuses, what it prints, and what is left when it is interrupted."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider import cli
from outrider.bench import run as run_module
from outrider.bench.blocks import Turn
from outrider.bench.client import Client
from outrider.bench.mock_server import MockChunk, MockReply, MockServer
from outrider.bench.records import BlockKind, ClientProof, RunData
from outrider.bench.run import Progress
from outrider.bench.servers import free_port
from outrider.bench.store import RunFolder, read_run
from outrider.commands.bench import demo_tokens, resume_command
from outrider.commands.bench_display import Display
from tests.bench_runs import ONE_USER, request
from tests.scripted import ScriptedArm, scripted_run

PLAIN = ScriptedArm("off", 0.02)
FAST = ScriptedArm("ngram", 0.02, tokens_per_step=2)
SLOW = ScriptedArm("ngram", 0.03)
# 3 % is the margin, and 15 % of noise between blocks hides on which side of it the arm is.
UNSURE = ScriptedArm("ngram", 0.0195, noise=0.15)
LOOPING = ScriptedArm("ngram", 0.005, text=lambda prompt, num_tokens: "yes " * num_tokens)

SERVE = (
    f"{sys.executable} -c 'import asyncio, sys; from aiohttp import web\n"
    "from outrider.bench.mock_server import *\n"
    "async def main():\n"
    '    script = lambda body: MockReply(chunks=[MockChunk(0.02, "word ")] * 8)\n'
    "    server = MockServer(script)\n"
    "    app = web.Application()\n"
    '    app.router.add_post("/v1/chat/completions", server._complete)\n'
    '    app.router.add_get("/v1/models", server._models)\n'
    "    runner = web.AppRunner(app); await runner.setup()\n"
    '    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()\n'
    "    await asyncio.sleep(3600)\n"
    "asyncio.run(main())' {port}"
)
# A machine that is busy with other tests would rightly be refused; here only the rest is tested.
TOLERANT = (
    "import sys, outrider.bench.selfproof as proof\n"
    "proof.MAX_GAP_ERROR_P50_S = proof.MAX_GAP_ERROR_P99_S = 9.0\n"
    "from outrider.cli import main\n"
    "sys.exit(main(sys.argv[1:]))"
)


def write(data: RunData, out: Path) -> None:
    """Records as a run leaves them."""
    folder = RunFolder(out)
    folder.create(data.run)
    for block in data.blocks:
        folder.write_turn(block, data.requests_of(block))


@pytest.fixture
def proven(monkeypatch):
    """The self-proof has its own tests."""

    async def prove(client: Client, concurrency: int) -> ClientProof:
        return ClientProof(concurrency, 99, 0.0001, 0.001, 20000.0, True)

    monkeypatch.setattr(run_module, "prove_client", prove)


@contextmanager
def servers(*replies: MockReply) -> Iterator[list[MockServer]]:
    """Running servers, in a thread as the command has the main one."""
    found: list[MockServer] = []
    is_up = threading.Event()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            for reply in replies:
                group.create_task(keep(reply))

    async def keep(reply: MockReply) -> None:
        async with MockServer(lambda _: reply) as server:
            found.append(server)
            if len(found) == len(replies):
                is_up.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(20)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(20)
        loop.close()


@pytest.mark.parametrize(
    ("arm", "status", "word"),
    [
        (FAST, 0, "GO"),
        (SLOW, 1, "NO-GO"),
        (UNSURE, 2, "INCONCLUSIVE"),
        (LOOPING, 3, "INVALID"),
    ],
)
def test_the_exit_status_is_the_verdict(tmp_path: Path, capsys, arm, status: int, word: str):
    write(scripted_run([PLAIN, arm]), tmp_path)

    assert status == cli.main(["bench", "--from", str(tmp_path)])
    assert capsys.readouterr().out.startswith(word)


def test_a_report_is_made_again_from_the_records_alone(tmp_path: Path, capsys):
    write(scripted_run([PLAIN, FAST]), tmp_path)

    assert 0 == cli.main(["bench", "--from", str(tmp_path), "--json", "--csv"])
    printed = json.loads(capsys.readouterr().out)
    derived = {"summary.json", "report.html", "requests.csv", "plan.json"}
    for name in derived:
        (tmp_path / name).unlink()

    assert 0 == cli.main(["bench", "--from", str(tmp_path), "--csv"])
    assert derived | {"run.json", "records", "servers"} == {p.name for p in tmp_path.iterdir()}
    assert printed == json.loads((tmp_path / "summary.json").read_text())


def test_two_servers_are_measured_and_judged(tmp_path: Path, capsys, proven):
    text = "The old man saw a red ox on the far hill and ran up to it with two dogs ."
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    plain = MockReply(chunks=[MockChunk(0.005, f"{word} ") for word in words])
    fast = MockReply(chunks=[MockChunk(0.005, f"{a} {b} ", 2) for a, b in pairs])
    out = tmp_path / "run"
    flags = "--concurrency 1 --blocks 6 --aa-blocks 2 --requests 1 --max-prompts 8 --json"
    with servers(plain, fast) as (off, ngram):
        arms = ["--target", f"off={off.url}", "--target", f"ngram={ngram.url}"]
        status = cli.main(["bench", *arms, *flags.split(), "--out", str(out)])
    captured = capsys.readouterr()
    document = json.loads(captured.out)

    assert {"GO": 0, "NO-GO": 1, "INCONCLUSIVE": 2, "INVALID": 3}[document["verdict"]] == status
    assert f"the run begins in {out}" in captured.err
    assert "1 user, block 6 of 6: " in captured.err
    assert "report.html" in captured.err
    data = read_run(out)
    assert 6 * 2 + 2 * 2 + 2 == len(data.blocks), "comparisons, noise floor, warm-ups"
    assert not [r for r in data.requests if r.error is not None]
    assert {20} == {r.completion_tokens for r in data.requests}


@pytest.mark.alone
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_is_complete_says_how_to_go_on_and_ends_the_servers(
    tmp_path: Path, sign: signal.Signals
):
    out = tmp_path / "run"
    words = ["bench", "--serve", f"off={SERVE}", "--serve", f"ngram={SERVE}", "--out", str(out)]
    words += ["--concurrency", "1", "--blocks", "50", "--requests", "2", "--max-tokens", "8"]
    process = subprocess.Popen(
        [sys.executable, "-c", TOLERANT, *words], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while len(list(out.glob("records/0001-*"))) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "nothing was measured in two minutes"
        time.sleep(0.05)
    process.send_signal(sign)
    _, told = process.communicate(timeout=60)
    data = read_run(out)

    assert 130 == process.returncode
    kept = re.search(r"interrupted: (\d+) of 53 blocks are kept in ", told)
    assert kept is not None, told
    assert int(kept[1]) == len({b.index for b in data.blocks if b.kind != "warmup"}) >= 2
    assert f"report on what is there: outrider bench --from {out}" in told
    assert "go on: outrider bench --serve 'off=" in told
    assert "Traceback" not in told
    for arm in data.run.arms:
        assert [] == processes_with(arm.url.rpartition(":")[2])


def test_ctrl_c_before_anything_was_measured_says_so(tmp_path: Path, capsys, monkeypatch):
    async def interrupt(client: Client, concurrency: int) -> ClientProof:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "prove_client", interrupt)
    words = ["--target", "off=http://h:1", "--target", "a=http://h:2"]

    assert 130 == cli.main(["bench", *words, "--out", str(tmp_path / "run")])
    assert capsys.readouterr().err.endswith("interrupted: nothing was measured yet\n")


def processes_with(port: str) -> list[str]:
    """Command lines of living processes that end with this port."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        if line[-1] == port.encode():
            found.append(str(line))
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--frobnicate"], "Unknown option"),
        (["--methods", "warp"], "--methods: 'warp' is not one of"),
        (["--concurrency", "x"], "--concurrency: 'x'"),
        (["--target", "off=http://h:1"], "'off' is alone"),
        (["--blocks", "0"], "--blocks: 0"),
        (["--margin", "7"], "margin: 7"),
        (["--slo-ttft-ms", "0"], "--slo-ttft-ms: 0 is not a time"),
        (["--timeout", "0"], "--timeout: 0 is outside"),
        (["--prompts", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--from", "absent"], "absent: holds no run.json"),
        (["--from", "absent", "--blocks", "9"], "--from: judges what was measured"),
        (["--from", "absent", "--out", "x"], "--from: judges what was measured"),
    ],
)
def test_what_keeps_it_from_a_verdict_is_status_3_and_one_line(capsys, words, expected):
    """1 and 2 are verdicts, so a typing error must not end with them."""
    assert 3 == cli.main(["bench", *words])
    captured = capsys.readouterr()

    assert "" == captured.out
    assert expected in captured.err
    assert 1 == captured.err.count("\n")


def test_a_server_that_is_down_is_named(capsys, tmp_path: Path, proven):
    url = f"http://127.0.0.1:{free_port()}"
    words = ["--target", f"off={url}", "--target", f"a={url[:-1]}", "--out", str(tmp_path / "o")]

    assert 3 == cli.main(["bench", *words])
    assert f"arm off: {url}: cannot be reached (Connection refused)" in capsys.readouterr().err
    assert not (tmp_path / "o" / "run.json").exists()


def test_a_disk_that_fills_ends_the_run_with_what_is_kept_and_the_way_on(
    tmp_path: Path, capsys, proven
):
    """A second run of the same command then measures what is missing."""
    out = tmp_path / "run"
    (out / "records").mkdir(parents=True)
    chunks = [MockChunk(0.001, f"w{place} ") for place in range(20)]
    flags = "--concurrency 1 --blocks 2 --aa-blocks 0 --requests 1 --max-prompts 8"
    with servers(MockReply(chunks=chunks), MockReply(chunks=chunks)) as (off, ngram):
        words = ["--target", f"off={off.url}", "--target", f"ngram={ngram.url}", *flags.split()]
        words += ["--out", str(out)]
        assert 2 == cli.main(["bench", *words])
        (out / "records" / "0001-0.jsonl.gz").unlink()
        (out / "records" / "0001-0.jsonl.gz.part").symlink_to("/dev/full")
        capsys.readouterr()
        status = cli.main(["bench", *words])
        told = capsys.readouterr().err
        again = cli.main(["bench", *words])

    assert 3 == status
    assert "No space left on device" in told
    assert "stopped: 1 of 2 blocks are kept in " in told
    assert "go on: outrider bench --target" in told
    assert 2 == again
    assert {0, 1} == {b.index for b in read_run(out).blocks if b.kind is BlockKind.MEASURE}


def test_random_prompts_are_refused_unless_they_are_meant(capsys, tmp_path: Path):
    prompts = tmp_path / "random.jsonl"
    lines = [
        {"prompt": " ".join(f"w{50 * row + place}q" for place in range(50))} for row in range(5)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    words = ["bench", "--methods", "ngram", "--prompts", str(prompts), "--out", str(prompts)]

    assert 3 == cli.main([*words])
    assert "look like random tokens" in capsys.readouterr().err
    # The next thing to be wrong is the folder, so the prompts were taken.
    assert 3 == cli.main([*words, "--allow-random-prompts"])
    assert "random tokens" not in capsys.readouterr().err


def turn_progress(arm: str, position: int, *, is_over: bool, kind=BlockKind.MEASURE) -> Progress:
    """Of the third of eight blocks of two arms."""
    return Progress(
        f"1 user: {arm}",
        3 + position + is_over,
        12,
        185.0,
        turn=Turn(2, position, arm, ONE_USER, kind, 2),
        num_of_kind=8,
        last=[request(arm, 2, position)] if is_over else (),
        is_block_done=is_over and position == 1,
    )


def test_without_a_terminal_there_is_a_line_per_stage_and_per_block(capsys):
    with Display() as display:
        for waited_s in range(3):
            display(Progress(f"starting off: {waited_s} s", 0, 12, None))
        for position, arm in enumerate(("off", "ngram")):
            for is_over in (False, True):
                display(turn_progress(arm, position, is_over=is_over))
        display(Progress("measured", 12, 12, 0.0))

    assert [
        "outrider: starting off",
        "1 user, block 3 of 8: off 2.7, ngram 2.7 tokens/s (about 3 min 05 s left)",
        "outrider: measured",
    ] == capsys.readouterr().err.splitlines()


def test_an_aa_block_is_told_as_what_it_is(capsys):
    with Display() as display:
        for position in (0, 1):
            display(turn_progress("off", position, is_over=True, kind=BlockKind.AA))

    told = capsys.readouterr().err
    assert told.startswith("1 user, off against itself 3 of 8: off 2.7, off 2.7 tokens/s")


def test_a_demonstration_of_more_arms_has_shorter_answers():
    assert [64, 26, 20] == [demo_tokens(num_arms) for num_arms in (2, 5, 7)]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["bench"], "outrider bench --out 'a b'"),
        (["bench", "--out", "x"], "outrider bench --out x"),
        (["bench", "--out=x"], "outrider bench --out=x"),
        (["bench", "--serve", "off=a b"], "outrider bench --serve 'off=a b' --out 'a b'"),
    ],
)
def test_the_way_on_is_the_same_command_in_the_same_folder(typed: Sequence[str], expected: str):
    assert expected == resume_command(typed, Path("a b"))
