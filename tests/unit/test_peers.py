from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import openvino_peer
import peers
import peers_figures
import pytest
import torch
import vllm_peer
from outrider_peer import PLAIN, answering
from peer import Answer, Arm, Launch, PeerError, Stopwatch, Worker
from transformers import LlamaForCausalLM
from transformers_peer import generating, hf_name, llama_config

from outrider.bench.prompts import Prompt
from outrider.models.architecture import DecoderConfig
from tests.fake_llm import FakeLLM

TINY = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=64,
    norm_eps=1e-5,
    max_position=128,
    attention_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)
NGRAM = "outrider ngram"
# engine, whether plain, tokens per second
SPEEDS = {
    PLAIN: ("outrider", True, 60.0),
    NGRAM: ("outrider", False, 90.0),
    "transformers plain bfloat16": ("transformers", True, 20.0),
    "transformers plain float32": ("transformers", True, 30.0),
    "transformers prompt lookup bfloat16": ("transformers", False, 25.0),
    "vLLM plain": ("vLLM", True, 40.0),
    "vLLM n-gram": ("vLLM", False, 45.0),
}


def fake_arms(calls=None, lengths=None):
    def answering_at(name, rate):
        def answer(_, max_tokens):
            if calls is not None:
                calls.append(name)
            count = (lengths or {}).get(name, max_tokens)
            seconds = count / rate
            return Answer(tuple(range(count)), seconds, seconds * (count - 1) / count, 1)

        return answer

    return [
        Arm(name, engine, "bfloat16", is_plain, answering_at(name, rate), f"{engine} 1")
        for name, (engine, is_plain, rate) in SPEEDS.items()
    ]


def some_prompts(count=4):
    return [
        (Prompt(id=f"p{i}", category=("rewrite", "chat")[i % 2], turns=("x",)), [1, 2, 3])
        for i in range(count)
    ]


def measured(**options):
    return peers.measure(
        fake_arms(**options), some_prompts(), frozenset({"rewrite"}), max_tokens=10
    )


def test_every_arm_answers_every_prompt_and_the_first_one_rotates():
    calls = []
    measurements = measured(calls=calls)
    names = list(SPEEDS)

    assert names == calls[: len(names)]  # warm-up
    assert [names[index] for index in range(4)] == [item.order[0] for item in measurements]
    assert all(set(item.order) == set(names) for item in measurements)
    assert len(calls) == 5 * len(names)


def test_plain_meets_each_engines_fastest_plain_and_our_fastest_its_fastest():
    measurements = measured()
    found = {
        pair: peers_figures.compare(measurements, *pair)["all"].ratio
        for pair in peers_figures.pairs(measurements, fake_arms())
    }

    assert {
        (NGRAM, PLAIN): pytest.approx(1.5),
        (PLAIN, "transformers plain float32"): pytest.approx(2.0),
        (NGRAM, "transformers plain float32"): pytest.approx(3.0),
        (PLAIN, "vLLM plain"): pytest.approx(1.5),
        (NGRAM, "vLLM n-gram"): pytest.approx(2.0),
    } == found


def test_rates_are_of_whole_requests_and_of_decoding_alone():
    rates = peers_figures.arm_rates(measured(), PLAIN)

    assert {
        "repeats input": pytest.approx(60.0),
        "rest": pytest.approx(60.0),
        "all": pytest.approx(60.0),
        "decode only": pytest.approx(60.0),
    } == rates


def test_unequal_lengths_void_the_run():
    with pytest.raises(PeerError, match=r"vLLM n-gram wrote 9 tokens for p0 instead of 10"):
        measured(lengths={"vLLM n-gram": 9})


def test_the_document_holds_every_figure_as_plain_json():
    document = peers_figures.to_json(measured(), fake_arms(), {"threads": 2})
    document = json.loads(json.dumps(document))

    assert 2 == document["schema_version"]
    assert 4 == len(document["measurements"])
    assert set(document["measurements"][0]["answers"]) == set(SPEEDS)
    assert 4 == document["arms"][NGRAM]["same_texts_as_plain"]
    assert "vLLM 1" == document["arms"]["vLLM plain"]["engine"]
    assert 5 == len(document["comparisons"])


def test_the_tables_name_every_arm_ratio_and_condition(capsys):
    peers_figures.print_tables(measured(), fake_arms(), {"threads": 2})
    shown = " ".join(capsys.readouterr().out.split())

    assert all(word in shown for word in ("vLLM n-gram", "1.50", "threads 2", "transformers 1"))


def test_prompts_are_taken_in_order_within_their_share_and_the_context():
    prompts = [
        Prompt(id="a", category="chat", turns=("x" * 100,)),
        Prompt(id="b", category="chat", turns=("x",)),
        Prompt(id="c", category="chat", turns=("x",)),
        Prompt(id="d", category="math", turns=("x",)),
    ]
    chosen = peers.choose_prompts(FakeLLM(max_model_len=60), prompts, 1, max_tokens=10)

    assert ["b", "d"] == [prompt.id for prompt, _ in chosen]


def test_our_arm_forces_the_length_and_reports_the_engines_clock():
    llm = FakeLLM(["A long enough answer."])
    answer = answering(llm)([1, 2], 5)

    assert answer.token_ids == tuple(ord(char) for char in "A lon")
    assert llm.params[0].ignore_eos
    assert pytest.approx(0.04) == answer.decode_s


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "1"],
        ["--threads", "0"],
        ["--peer-dtypes", "float16"],
        ["--what"],
        ["--vllm", "python"],
        ["--vllm-head", "head"],
    ],
)
def test_a_wrong_command_line_exits_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        peers.parse_arguments(arguments)

    assert 2 == ended.value.code
    assert "error:" in capsys.readouterr().err


def test_the_names_cover_a_transformers_llama_exactly():
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(TINY))
    ours = {hf_name(name): shape for name, shape in TINY.weight_shapes().items()}
    theirs = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}

    assert ours == theirs


@pytest.mark.parametrize("way", ["prompt lookup", "assistant"])
def test_transformers_writes_the_asked_number_of_tokens_in_every_way(way):
    """End-of-sequence is no end, however it guesses, and the text is that of plain decoding."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(TINY)).eval()
    torch.manual_seed(1)
    draft = LlamaForCausalLM(llama_config(TINY)).eval()
    prompt = [5, 6, 7, 5, 6]
    plain = generating(model)(prompt, 24)
    answer = {
        "prompt lookup": generating(model, num_lookup_tokens=4),
        "assistant": generating(model, assistant=draft),
    }[way](prompt, 24)

    assert 24 == len(answer.token_ids)
    assert answer.token_ids == plain.token_ids
    assert 0 < answer.decode_s < answer.total_s
    assert 1 <= answer.num_first <= 5


def fake_worker(folder: Path, body: str) -> Launch:
    """A worker under this Python whose ``load`` is ``body``."""
    script = folder / "fake_peer.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(peers.__file__).parent)!r})\n"
        "from peer import Stopwatch, serve\n"
        f"def load(settings):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        "serve(load)\n",
        encoding="utf-8",
    )
    return Launch(
        name="fake plain",
        engine="fake",
        weights="none",
        python=Path(sys.executable),
        script=script,
        model=Path("model"),
        threads=2,
        context=64,
        environment={"FAKE": "yes"},
    )


def test_a_worker_answers_in_its_own_process_and_may_print_what_it_likes(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch = fake_worker(
        tmp_path,
        """
        import os
        assert "OMP_NUM_THREADS" not in os.environ
        print("noise on stdout")
        def answer(prompt, max_tokens):
            print("more noise")
            watch = Stopwatch()
            watch.saw(2)
            return watch.answer([*prompt, max_tokens, settings["threads"]])
        return os.environ["FAKE"], answer
        """,
    )
    with Worker(launch, tmp_path) as worker:
        arm = launch.arm(worker)
        answers = [arm.answer([5], 3), arm.answer([6], 4)]

    assert [(5, 3, 2), (6, 4, 2)] == [answer.token_ids for answer in answers]
    assert [2, 2] == [answer.num_first for answer in answers]
    assert ("fake plain", "fake", True, "yes") == (
        arm.name,
        arm.engine,
        arm.is_plain,
        arm.version,
    )
    assert "noise on stdout" in (tmp_path / "fake-plain.log").read_text()


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('no such model')",
        """
        def answer(prompt, max_tokens):
            raise RuntimeError("no such model")
        return "1", answer
        """,
    ],
    ids=["while loading", "while answering"],
)
def test_a_worker_that_ends_says_why(tmp_path, body):
    launch = fake_worker(tmp_path, body)
    with (
        pytest.raises(PeerError, match=r"fake plain ended early: .*no such model"),
        Worker(launch, tmp_path) as worker,
    ):
        worker.answer([1], 2)


def test_a_python_that_is_not_there_is_named(tmp_path):
    launch = Launch("x plain", "x", "", Path("/no/python"), Path("x.py"), Path("m"), 1, 1)
    with pytest.raises(PeerError, match=r"x plain: /no/python cannot be started"):
        Worker(launch, tmp_path)


def test_an_engine_that_writes_nothing_gets_no_time():
    with pytest.raises(PeerError, match=r"without having written a token"):
        Stopwatch().answer([])


def test_every_engine_is_launched_plain_and_in_its_other_ways_with_the_same_threads(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    arguments = peers.parse_arguments(
        [
            "--vllm",
            "v/python",
            "--vllm-model",
            "folder",
            "--vllm-head",
            "head",
            "--openvino",
            "o/python",
            "--llama-cpp",
            "l/python",
        ]
    )
    found = peers.other_launches(tmp_path, 2, arguments)

    assert {
        "vLLM plain": None,
        "vLLM n-gram": vllm_peer.NGRAM,
        "vLLM EAGLE-3": {"method": "eagle3", "model": "head", "num_speculative_tokens": 3},
        "OpenVINO GenAI plain": None,
        "OpenVINO GenAI prompt lookup": openvino_peer.LOOKUP,
        "llama.cpp plain": None,
    } == {launch.name: launch.speculation for launch in found}
    assert {2} == {launch.threads for launch in found}
    assert {Path("folder")} == {item.model for item in found if item.engine == vllm_peer.NAME}
    assert {gguf} == {item.model for item in found if item.engine != vllm_peer.NAME}
    assert all(launch.script.is_file() for launch in found)


@pytest.mark.parametrize("flag", ["--openvino", "--llama-cpp"])
def test_engines_that_need_a_gguf_file_say_so(tmp_path, flag):
    with pytest.raises(PeerError, match=r"need --model to be one GGUF file"):
        peers.other_launches(tmp_path, 2, peers.parse_arguments([flag, "python"]))
