from __future__ import annotations

import json

import peers
import pytest
import torch
from peers import OURS_NGRAM, OURS_PLAIN, THEIRS_LOOKUP, THEIRS_PLAIN
from transformers import LlamaForCausalLM
from transformers_peer import Answer, hf_name, llama_config, their_arm

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
DTYPES = ["bfloat16", "float32"]
SPEEDS = {
    OURS_PLAIN: 60.0,
    OURS_NGRAM: 90.0,
    f"{THEIRS_PLAIN} bfloat16": 20.0,
    f"{THEIRS_LOOKUP} bfloat16": 25.0,
    f"{THEIRS_PLAIN} float32": 30.0,
    f"{THEIRS_LOOKUP} float32": 24.0,
}


def fake_arms(calls, lengths=None):
    def arm(name, rate):
        def answer(_, max_tokens):
            calls.append(name)
            count = (lengths or {}).get(name, max_tokens)
            seconds = count / rate
            return Answer(tuple(range(count)), seconds, seconds * (count - 1) / count, 1)

        return answer

    return {name: arm(name, rate) for name, rate in SPEEDS.items()}


def some_prompts(count=4):
    return [
        (Prompt(id=f"p{i}", category=("rewrite", "chat")[i % 2], turns=("x",)), [1, 2, 3])
        for i in range(count)
    ]


def measured(calls=None, **options):
    arms = fake_arms([] if calls is None else calls, **options)
    return peers.measure(arms, some_prompts(), frozenset({"rewrite"}), max_tokens=10)


def test_every_arm_answers_every_prompt_and_the_first_one_rotates():
    calls = []
    measurements = measured(calls)
    names = list(SPEEDS)

    assert names == calls[: len(names)]  # warm-up
    assert [names[index] for index in range(4)] == [item.order[0] for item in measurements]
    assert all(set(item.order) == set(names) for item in measurements)
    assert len(calls) == 5 * len(names)


def test_ratios_compare_with_the_better_precision_of_each_kind():
    found = {
        (fast, slow): ratios["all"].ratio
        for fast, slow, ratios in peers.comparisons(measured(), DTYPES)
    }

    assert {
        (OURS_PLAIN, f"{THEIRS_PLAIN} float32"): pytest.approx(2.0),
        (OURS_NGRAM, OURS_PLAIN): pytest.approx(1.5),
        (OURS_NGRAM, f"{THEIRS_LOOKUP} bfloat16"): pytest.approx(3.6),
        (OURS_NGRAM, f"{THEIRS_PLAIN} float32"): pytest.approx(3.0),
        (f"{THEIRS_LOOKUP} bfloat16", f"{THEIRS_PLAIN} float32"): pytest.approx(25 / 30),
    } == found


def test_rates_are_of_whole_requests_and_of_decoding_alone():
    rates = peers.arm_rates(measured(), OURS_PLAIN)

    assert {
        "repeats input": pytest.approx(60.0),
        "rest": pytest.approx(60.0),
        "all": pytest.approx(60.0),
        "decode only": pytest.approx(60.0),
    } == rates


def test_unequal_lengths_void_the_run():
    with pytest.raises(SystemExit, match=r"outrider n-gram wrote 9 tokens for p0 instead of 10"):
        measured(lengths={OURS_NGRAM: 9})


def test_the_document_holds_every_figure_as_plain_json():
    document = json.loads(json.dumps(peers.to_json(measured(), DTYPES, {"threads": 2})))

    assert 1 == document["schema_version"]
    assert 4 == len(document["measurements"])
    assert set(document["measurements"][0]["answers"]) == set(SPEEDS)
    assert 4 == document["arms"][OURS_NGRAM]["same_texts_as_plain"]
    assert 5 == len(document["comparisons"])


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
    answer = peers.our_arm(llm)([1, 2], 5)

    assert answer.token_ids == tuple(ord(char) for char in "A lon")
    assert llm.params[0].ignore_eos
    assert pytest.approx(0.04) == answer.decode_s


@pytest.mark.parametrize(
    "arguments",
    [["--max-tokens", "1"], ["--threads", "0"], ["--peer-dtypes", "float16"], ["--what"]],
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


@pytest.mark.parametrize("num_lookup_tokens", [None, 4])
def test_the_transformers_arm_writes_the_asked_number_of_tokens(num_lookup_tokens):
    """End-of-sequence is no end, in both ways of generating, and both write the same text."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(TINY)).eval()
    prompt = [5, 6, 7, 5, 6]
    plain = their_arm(model, None)(prompt, 24)
    answer = their_arm(model, num_lookup_tokens)(prompt, 24)

    assert 24 == len(answer.token_ids)
    assert answer.token_ids == plain.token_ids
    assert 0 < answer.decode_s < answer.total_s
    assert 1 <= answer.num_first <= 5
