from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import cli
from outrider.commands.options import SpeculationOptions
from outrider.config import Accept, Method
from outrider.errors import CapacityError, DownloadError, UnknownModelError
from outrider.models.loading.heads import LAYOUTS
from tests.fake_llm import FakeLLM, FakeTokenizer
from tests.tiny import TinyModel, write_hf_checkpoint
from tests.tiny_heads import write_eagle3_head, write_medusa_head


@pytest.fixture
def llm(monkeypatch):
    """A fake model behind every verb; ``opened`` holds what it was opened with."""
    fake = FakeLLM()
    fake.opened = []

    def open_llm(engine, speculation, **more):
        fake.opened.append((engine.config(**more), speculation.config()))
        return fake

    monkeypatch.setattr(cli, "open_llm", open_llm)
    return fake


def give_stdin(monkeypatch, data: bytes, *, is_tty: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stdin.isatty = lambda: is_tty
    monkeypatch.setattr(sys, "stdin", stdin)


def run_python(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )


def error_of(capsys) -> str:
    """The single line on stderr; stdout must be empty."""
    captured = capsys.readouterr()

    assert "" == captured.out
    assert 1 == captured.err.count("\n")
    assert captured.err.startswith("outrider: error: ")
    return captured.err


def test_generate_streams_the_text_and_ends_the_line(llm, capsys):
    status = cli.main(["generate", "Hi"])

    assert 0 == status
    assert "Hello there.\n" == capsys.readouterr().out
    assert [[{"role": "user", "content": "Hi"}]] == llm.tokenizer.chats
    assert 1 == llm.num_closed


def test_generate_adds_no_second_line_break(llm, capsys):
    llm.answers = ["A line.\n"]

    assert 0 == cli.main(["generate", "Hi"])
    assert "A line.\n" == capsys.readouterr().out


def test_generate_raw_continues_the_text_as_it_is(llm):
    assert 0 == cli.main(["generate", "--raw", "Once\n"])
    assert [] == llm.tokenizer.chats
    assert llm.prompts == [[ord(char) for char in "Once\n"]]


def test_generate_puts_the_system_text_in_front(llm):
    assert 0 == cli.main(["generate", "Hi", "--system", "Be brief."])
    assert [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ] == llm.tokenizer.chats


def test_generate_without_a_chat_template_takes_raw_text(llm):
    llm.tokenizer = FakeTokenizer(has_chat_template=False)

    assert 0 == cli.main(["generate", "Hi"])
    assert [[72, 105]] == llm.prompts


@pytest.mark.parametrize("flags", [["--raw"], []])
def test_a_system_text_that_would_be_ignored_is_refused(llm, capsys, flags):
    llm.tokenizer = FakeTokenizer(has_chat_template=False)

    assert 2 == cli.main(["generate", "Hi", "--system", "Be brief.", *flags])
    assert "--system" in error_of(capsys)


def test_generate_reads_a_file_or_stdin_without_the_last_line_break(llm, monkeypatch, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("Grüße\n".encode())
    give_stdin(monkeypatch, "Grüße\r\n".encode())

    assert 0 == cli.main(["generate", "--file", str(file)])
    assert 0 == cli.main(["generate"])
    assert ["Grüße", "Grüße"] == [chat[-1]["content"] for chat in llm.tokenizer.chats]


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["generate", ""], b"", "the prompt is empty"),
        (["generate"], b" \n", "the prompt is empty"),
        (["generate"], b"caf\xe9", "stdin: byte 0xe9 at offset 3 is not UTF-8"),
        (["generate", os.fsdecode(b"a\xff")], b"", "PROMPT: byte 0xff at offset 1 is not UTF-8"),
        (["generate", "--file", "absent.txt"], b"", "--file: absent.txt cannot be read: No such"),
        (["generate", "Hi", "--file", "x"], b"", "PROMPT and --file"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_a_usage_error(
    llm, monkeypatch, capsys, arguments, stdin, expected
):
    """Refused before a model is loaded, in one line, with exit status 2."""
    give_stdin(monkeypatch, stdin)

    assert 2 == cli.main(arguments)
    assert expected in error_of(capsys)
    assert [] == llm.opened


def test_no_prompt_on_a_terminal_is_a_usage_error_instead_of_a_hang(llm, monkeypatch, capsys):
    give_stdin(monkeypatch, b"never read", is_tty=True)

    assert 2 == cli.main(["generate"])
    assert "give PROMPT, --file FILE, or text on stdin" in error_of(capsys)
    assert [] == llm.opened


def test_every_sampling_flag_reaches_the_engine(llm):
    flags = (
        "--temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 "
        "--presence-penalty -0.5 --frequency-penalty 0.25 --seed 7 --max-tokens 9 --min-tokens 2 "
        "--stop END --stop -x --ignore-eos --accept rejection"
    )

    assert 0 == cli.main(["generate", "Hi", *flags.split()])
    params = llm.params[0]
    assert (0.7, 5, 0.9, 0.1) == (params.temperature, params.top_k, params.top_p, params.min_p)
    assert (1.1, -0.5, 0.25) == (
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    assert (7, 9, 2) == (params.seed, params.max_tokens, params.min_tokens)
    assert (("END", "-x"), True) == (params.stop, params.ignore_eos)
    assert Accept.REJECTION is params.accept


def test_engine_and_speculation_flags_reach_the_engine(llm):
    flags = (
        "--dtype float32 --threads 2 --max-model-len 512 --method ngram --tree --max-draft-len 3 "
        "--dynamic-tree-max-topk 2 --max-total-draft-tokens 5"
    )

    assert 0 == cli.main(["generate", "Hi", *flags.split()])
    engine, speculation = llm.opened[0]
    assert ("float32", 2, 512) == (engine.dtype, engine.threads, engine.max_model_len)
    assert Method.NGRAM is speculation.method
    assert speculation.use_dynamic_tree
    assert (3, 2, 5) == (
        speculation.max_draft_len,
        speculation.dynamic_tree_max_topK,
        speculation.max_total_draft_tokens,
    )


def test_without_speculation_flags_the_choice_is_the_engines():
    assert SpeculationOptions().config() is None
    assert SpeculationOptions(method="off").config().method is Method.OFF


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "--temprature", "1", "Hi"], "Did you mean --temperature?"),
        (["genrate"], 'Did you mean "generate"?'),
        (["generate", "two", "words"], "put a prompt with spaces in quotes"),
        (["generate", "Hi", "--top-k", "many"], "--top-k"),
        (["generate", "Hi", "--seed"], "--seed requires an argument"),
        (["generate", "Hi", "--temperature", "nan"], "temperature: nan is not a number in"),
        (["generate", "Hi", "--temperature", "-1"], "temperature: -1 is outside [0, 100]"),
        (["generate", "Hi", "--max-tokens", "0"], "max_tokens: 0 is outside"),
        (["generate", "Hi", "--method", "magic"], "'magic' is not one of off, ngram"),
        (["generate", "Hi", "--dynamic-tree-max-topk", "4"], "--tree"),
        (["generate", "Hi", "--device", "cuda"], "'cuda' is not one of cpu"),
        (["generate", "Hi", "--accept", "typical"], "'typical' is not one of coupled, rejection"),
        (["chat", "--top-p", "0"], "top_p: 0 is outside (0, 1]"),
        (["demo", "--methods", "magic"], "--methods: 'magic' is not one of off, ngram, ngram-tree"),
        (["demo", "--concurrency", "0"], "is not a number above 0"),
        (["inspect", "--max-batch-size", "0"], "max_batch_size: 0 is outside"),
        (["convert", "head"], "--model"),
        (
            ["convert", "h", "--model", "m", "--out", "o", "--layout", "gguf"],
            'Choose from: "safeailab", "speculators"',
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_status_2(llm, capsys, arguments, expected):
    assert 2 == cli.main(arguments)
    assert expected in error_of(capsys)
    assert [] == llm.tokenizer.chats


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (UnknownModelError("no model 'x';\nallowed: y"), 2),
        (DownloadError("the download broke off"), 1),
        (CapacityError("too big"), 1),
        (RuntimeError("unforeseen"), 1),
    ],
)
def test_failures_are_one_line_with_their_exit_status(monkeypatch, capsys, problem, status):
    def fail(*_, **__):
        raise problem

    monkeypatch.setattr(cli, "open_llm", fail)

    assert status == cli.main(["generate", "Hi"])
    assert " ".join(str(problem).split()) in error_of(capsys)


def test_an_unforeseen_failure_says_how_to_see_the_traceback(monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(cli, "open_llm", fail)

    assert 1 == cli.main(["generate", "Hi"])
    assert "--debug shows the traceback" in error_of(capsys)
    assert 1 == cli.main(["--debug", "generate", "Hi"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    assert 1 == cli.main(["generate", "Hi"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_after_two_dashes_is_a_prompt(llm):
    assert 0 == cli.main(["generate", "--", "--debug"])
    assert "--debug" == llm.tokenizer.chats[0][-1]["content"]


def test_ctrl_c_while_loading_exits_quietly(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "open_llm", interrupted)

    assert 130 == cli.main(["generate", "Hi"])
    assert ("", "") == capsys.readouterr()


def test_ctrl_c_in_mid_stream_keeps_what_came_and_aborts_the_request(llm, capsys):
    def press(index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGINT)

    llm.before_chunk = press

    before = signal.getsignal(signal.SIGINT)  # ignored, where the suite runs in the background

    assert 130 == cli.main(["generate", "Hi"])
    assert ("Hello\n", "") == capsys.readouterr()
    assert 1 == llm.num_closed
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("action", ["main(['--help'])", "main(['generate', 'Hi'])"])
def test_a_reader_that_left_ends_the_command_without_a_word(action):
    code = f"""
import sys
from tests.fake_llm import FakeLLM
from outrider import cli
cli.open_llm = lambda *_, **__: FakeLLM()
sys.exit(cli.{action})
"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        process = subprocess.run(
            [sys.executable, "-c", code],
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    finally:
        os.close(write_end)

    assert 1 == process.returncode
    assert b"" == process.stderr


@pytest.mark.usefixtures("llm")
def test_generate_json_is_one_document_with_all_fields(capsys):
    status = cli.main(["generate", "Hi", "--json", "--seed", "5"])
    captured = capsys.readouterr()
    document = json.loads(captured.out)

    assert 0 == status
    assert "" == captured.err
    assert 1 == document["schema_version"]
    assert "Hello there." == document["text"]
    assert document["token_ids"] == [ord(char) for char in "Hello there."]
    assert ("stop", 5) == (document["finish_reason"], document["seed"])
    usage = {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16, "cached_tokens": 0}
    assert usage == document["usage"]
    assert {
        "method": "ngram",
        "drafted": 11,
        "accepted": 5,
        "verify_steps": 5,
        "acceptance_length": 2.0,
        "per_position": [1.0],
    } == document["speculation"]
    assert set(document["timing"]) >= {"first_token_s", "decode_s", "total_s"}
    assert pytest.approx(100.0) == document["timing"]["decode_tokens_per_s"]
    assert {"model": "fake", "level": "L2"} == document["fingerprint"]
    assert "smollm2-135m-instruct" == document["model"]


@pytest.mark.usefixtures("llm")
def test_generate_stats_go_to_stderr(capsys):
    assert 0 == cli.main(["generate", "Hi", "--stats"])

    captured = capsys.readouterr()
    assert "Hello there.\n" == captured.out
    assert "acceptance length" in captured.err
    assert "exactness L2" in " ".join(captured.err.split())  # wherever the line was broken


def test_generate_stats_tell_what_a_draft_pass_costs(llm, capsys):
    llm.draft_cost = 0.125

    assert 0 == cli.main(["generate", "Hi", "--stats", "--json"])
    captured = capsys.readouterr()
    assert re.search(r"one draft pass / one target pass +0\.125", captured.err)
    timing = json.loads(captured.out)["timing"]
    assert (5, 0.125) == (timing["draft_passes"], timing["draft_pass_over_target_pass"])


@pytest.mark.usefixtures("llm")
def test_generate_stats_of_n_gram_know_no_draft_pass(capsys):
    assert 0 == cli.main(["generate", "Hi", "--stats", "--json"])

    captured = capsys.readouterr()
    assert re.search(r"one draft pass / one target pass +-", captured.err)
    assert json.loads(captured.out)["timing"]["draft_pass_over_target_pass"] is None


def test_a_request_that_ended_in_an_error_is_a_failure(llm, capsys):
    llm.error = "logits were not finite"

    assert 1 == cli.main(["generate", "Hi"])
    captured = capsys.readouterr()
    assert "Hello there.\n" == captured.out
    assert "outrider: error: logits were not finite\n" == captured.err


def test_chat_answers_every_line_of_stdin(llm, monkeypatch, capsys):
    llm.answers = ["One.", "Two."]
    give_stdin(monkeypatch, b"first\n\nsecond\n")

    assert 0 == cli.main(["chat", "--system", "Count."])
    assert "One.\nTwo.\n" == capsys.readouterr().out
    assert [
        "Count.",
        "first",
        "One.",
        "second",
    ] == [message["content"] for message in llm.tokenizer.chats[-1]]


def test_chat_refuses_a_model_without_a_chat_template(llm, capsys):
    llm.tokenizer = FakeTokenizer(has_chat_template=False)

    assert 2 == cli.main(["chat"])
    assert "no chat template" in error_of(capsys)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["models", "list"]])
def test_light_verbs_do_not_import_torch(arguments, tmp_path):
    code = (
        "import sys\nfrom outrider.cli import main\n"
        f"status = main({arguments!r})\n"
        "sys.exit(status or (9 if 'torch' in sys.modules else 0))"
    )
    process = run_python(code, env={**os.environ, "OUTRIDER_CACHE": str(tmp_path)})

    assert "" == process.stderr
    assert 0 == process.returncode
    assert process.stdout


def test_models_list_json_names_source_licence_and_place(monkeypatch, capsys):
    from outrider.models.loading import hub

    entries = [
        SimpleNamespace(name="a", source="s", licence="MIT", size_bytes=5, path=Path("/m/a")),
        SimpleNamespace(name="b", source="t", licence="MIT", size_bytes=2048, path=None),
    ]
    monkeypatch.setattr(hub, "list_models", lambda: entries)

    assert 0 == cli.main(["models", "list", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert 1 == document["schema_version"]
    assert [
        ("a", "/m/a"),
        ("b", None),
    ] == [(entry["name"], entry["path"]) for entry in document["models"]]
    assert 0 == cli.main(["models", "list"])
    table = capsys.readouterr().out
    assert "in the cache" in table
    assert "2.0 KiB" in table


def test_models_pull_prints_the_path_alone(monkeypatch, capsys):
    from outrider.models.loading import hub

    def pull(name, on_progress):
        on_progress("fetching", 0.5)
        return Path("/m") / name

    monkeypatch.setattr(hub, "pull", pull)

    assert 0 == cli.main(["models", "pull", "a"])
    captured = capsys.readouterr()
    assert "/m/a\n" == captured.out
    assert "outrider: fetching\n" == captured.err


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&-"])
def test_closed_streams_do_not_stop_a_light_verb(redirect: str, tmp_path: Path):
    command = f"{sys.executable} -m outrider.cli models list {redirect}"
    process = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "OUTRIDER_CACHE": str(tmp_path)},
        check=False,
    )

    assert "" == process.stderr
    assert 0 == process.returncode


def test_endless_input_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("outrider.commands.console.MAX_PROMPT_BYTES", 1 << 20)

    assert 2 == cli.main(["generate", "--file", "/dev/zero"])
    assert "/dev/zero: more than 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--seed", "--max-tokens", "--top-k", "--threads"])
@pytest.mark.parametrize("value", ["2.5", "9007199254740993.0", "0x10", "1_000", "1e3"])
def test_a_whole_number_is_never_rounded(flag: str, value: str, capsys):
    assert 2 == cli.main(["generate", "hi", flag, value])
    assert f"'{value}' is not a whole number" in capsys.readouterr().err


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A tiny model with an EAGLE-3 head, in a folder, and a user cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    write_hf_checkpoint(tmp_path / "model")
    write_eagle3_head(tmp_path / "head", TinyModel(), "specforge")
    return tmp_path


def convert(files: Path, head: str, *flags: str, out: str = "out") -> int:
    """Run the verb on ``files``."""
    given = ["--model", str(files / "model"), "--out", str(files / out), *flags]
    return cli.main(["convert", str(files / head), *given])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convert_writes_a_head_that_is_read_again(files, capsys, layout):
    assert 0 == convert(files, "head", "--layout", layout, "--json")
    document = json.loads(capsys.readouterr().out)
    assert (1, "SpecForge", layout) == (
        document["schema_version"],
        document["source_layout"],
        document["layout"],
    )
    assert 0 == convert(files, "out", "--layout", layout, out="again")
    assert f"-> {layout}" in capsys.readouterr().out
    assert (files / "out" / "model.safetensors").read_bytes() == (
        files / "again" / "model.safetensors"
    ).read_bytes()


def last_line_of(capsys) -> str:
    """The error behind the lines that tell the progress; stdout must be empty."""
    captured = capsys.readouterr()
    *progress, line = captured.err.splitlines()

    assert "" == captured.out
    assert all(told.startswith("outrider: reading ") for told in progress)
    assert line.startswith("outrider: error: ")
    return line


def test_convert_leaves_a_folder_in_use_alone(files, capsys):
    before = (files / "head" / "config.json").read_bytes()

    assert 2 == convert(files, "head", "--layout", "safeailab", out="head")
    assert "exists and is not an empty folder; name a new one" in last_line_of(capsys)
    assert before == (files / "head" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("head", "status", "expected"),
    [
        ("absent", 2, "no such folder or file"),
        ("wide", 1, "hidden_size is 32, the target's hidden size is 64"),
        ("pickle", 1, "a pickle, which can run code when opened"),
        ("medusa", 2, "only EAGLE-3 heads have several layouts"),
        ("model", 1, "not a draft head that we know"),
    ],
)
def test_convert_refuses_what_is_no_fitting_head(files, capsys, head, status, expected):
    write_eagle3_head(files / "wide", TinyModel(hidden_size=32), "specforge")
    write_medusa_head(files / "medusa", TinyModel())
    (files / "pickle").mkdir()
    (files / "pickle" / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    assert status == convert(files, head, "--layout", "speculators")
    assert expected in last_line_of(capsys)
    assert not (files / "out").exists()


def test_generate_with_a_head_counts_its_passes(files, capsys):
    model = ["--model", str(files / "model"), "--dtype", "float32"]
    drafting = ["--method", "eagle3", "--head", str(files / "head")]
    flags = ["--ignore-eos", "--max-tokens", "12", "--json", "--stats"]

    assert 0 == cli.main(["generate", "The outrider", *model, *drafting, *flags])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    timing, speculation = document["timing"], document["speculation"]
    assert "eagle3" == speculation["method"]
    assert speculation["drafted"] > 0
    assert timing["draft_passes"] > 0
    assert (
        pytest.approx(timing["draft_pass_over_target_pass"])
        == (timing["draft_s"] / timing["draft_passes"] * speculation["verify_steps"])
        / timing["verify_s"]
    )
    assert re.search(r"one draft pass / one target pass +[0-9]+\.[0-9]{3}", captured.err)
