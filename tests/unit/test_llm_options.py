"""What a request may ask for beside text, on a tiny checkpoint with its real tokeniser."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, EngineConfig, FinishReason, Method, SamplingParams, SpeculationConfig
from outrider.config import GrammarKind, GrammarSpec
from outrider.errors import ParameterError
from outrider.request import Request
from outrider.types import Completion, PredictionStats, TextChunk, TokenLogprobs
from tests.tiny import write_hf_checkpoint

PROMPT = "around it, and around it, and around it, and around"
SCHEMA = {
    "type": "object",
    "properties": {
        "road": {"enum": ["ford", "bridge"]},
        "miles": {"type": "integer", "minimum": 0, "maximum": 99},
        "stones": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["road", "miles", "stones"],
    "additionalProperties": False,
}
JSON = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint(tmp_path_factory.mktemp("model") / "tiny", scale=0.15)


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield LLM(
            model,
            engine=EngineConfig(max_batch_size=3, dtype="float32"),
            speculation=SpeculationConfig(
                use_dynamic_tree=True, dynamic_tree_max_topK=2, adaptive=False
            ),
        )


@pytest.fixture(scope="module")
def plain(llm: LLM) -> LLM:
    return llm.with_speculation(SpeculationConfig(method=Method.OFF, adaptive=False))


def answer(completion: Completion) -> tuple:
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.logprobs,
    )


def joined(chunks: Sequence[TextChunk]) -> tuple:
    completion = chunks[-1].completion
    logprobs: list[TokenLogprobs] | None = [] if chunks[0].logprobs is not None else None
    for chunk in chunks:
        if logprobs is not None:
            assert chunk.logprobs is not None
            assert len(chunk.token_ids) == len(chunk.logprobs)
            logprobs += chunk.logprobs

    assert completion is not None
    return (
        tuple(token for chunk in chunks for token in chunk.token_ids),
        "".join(chunk.text for chunk in chunks),
        completion.finish_reason,
        None if logprobs is None else tuple(logprobs),
    )


CASES = {
    "greedy": SamplingParams(logprobs=3, max_tokens=40),
    "warm": SamplingParams(logprobs=2, temperature=0.9, seed=5, max_tokens=40),
    "stopped": SamplingParams(logprobs=0, temperature=0.9, seed=5, max_tokens=40, stop=(" a", "e")),
    "penalised": SamplingParams(logprobs=1, frequency_penalty=1.0, max_tokens=30),
    "json": SamplingParams(grammar=JSON, temperature=0.9, seed=3, max_tokens=80, logprobs=1),
    "greedy json": SamplingParams(grammar=JSON, max_tokens=80),
    "off": SamplingParams(temperature=0.9, seed=6, max_tokens=40),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_the_same_with_and_without_drafts_streamed_or_not_alone_or_together(
    llm: LLM, plain: LLM, params: SamplingParams
) -> None:
    expected = answer(plain.generate(PROMPT, params)[0])
    others = [replace(params, seed=seed) for seed in (1, 2)]
    together = llm.generate([PROMPT] * 3, [params, *others])

    assert expected == answer(llm.generate(PROMPT, params)[0])
    assert expected == answer(together[0])
    assert expected == joined(list(plain.stream(PROMPT, params)))
    for limit in (None, 0, 1, 2, 5):  # other groups of tokens in each chunk
        limited = replace(params, max_draft_tokens=limit)
        assert expected == joined(list(llm.stream(PROMPT, limited)))
    if params.logprobs is None:
        assert expected[-1] is None
    else:
        assert len(expected[0]) == len(expected[-1])


def test_those_runs_accept_and_reject_drafts(llm: LLM) -> None:
    drafted = accepted = 0
    for completion in llm.generate([PROMPT] * len(CASES), list(CASES.values())):
        drafted += completion.speculation.drafted
        accepted += completion.speculation.accepted

    assert drafted > accepted > 0


def test_logprobs_belong_to_their_tokens(llm: LLM) -> None:
    """Greedily and untouched, the emitted token is the likeliest, and probabilities are those."""
    (completion,) = llm.generate(PROMPT, SamplingParams(logprobs=20, max_tokens=20))

    assert completion.logprobs is not None
    assert completion.token_ids == tuple(entry.token_id for entry in completion.logprobs)
    for entry in completion.logprobs:
        assert (entry.token_id, entry.logprob) == entry.top[0]
        assert 20 == len(entry.top)
        assert 0 < sum(math.exp(value) for _, value in entry.top) <= 1 + 1e-12


def test_logprobs_are_raw_whatever_is_done_to_the_row(llm: LLM) -> None:
    free = llm.generate(PROMPT, SamplingParams(logprobs=2, max_tokens=1))[0].logprobs
    bound = llm.generate(
        PROMPT,
        SamplingParams(
            logprobs=2,
            max_tokens=1,
            temperature=0.3,
            seed=1,
            top_k=1,
            repetition_penalty=2.0,
            logit_bias={7: 100.0},
        ),
    )[0].logprobs

    assert free is not None
    assert bound is not None
    assert free[0].top == bound[0].top
    assert 7 == bound[0].token_id
    assert bound[0].logprob < free[0].logprob


# --- grammars -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_schema_is_kept_and_its_end_ends_the_answer(llm: LLM, seed: int) -> None:
    """The tiny model knows no JSON at all: only the grammar makes it write some."""
    params = SamplingParams(grammar=JSON, temperature=1.0, seed=seed, max_tokens=400)
    (completion,) = llm.generate(PROMPT, params)
    value = json.loads(completion.text)

    assert FinishReason.STOP is completion.finish_reason
    assert {"road", "miles", "stones"} == value.keys()
    assert value["road"] in ("ford", "bridge")
    assert value["miles"] in range(100)
    assert all(isinstance(stone, bool) for stone in value["stones"])
    assert len(value["stones"]) <= 3


@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        (GrammarSpec(GrammarKind.CHOICE, '["yes", "no", "maybe"]'), {"yes", "no", "maybe"}),
        (GrammarSpec(GrammarKind.REGEX, "[01]{3}"), {f"{n:03b}" for n in range(8)}),
        (GrammarSpec(GrammarKind.LARK, 'start: "a" "b"? "ç"\n'), {"aç", "abç"}),
    ],
)
def test_short_grammars_give_one_of_their_texts(llm: LLM, spec: GrammarSpec, texts: set) -> None:
    params = [SamplingParams(grammar=spec, temperature=1.5, seed=seed) for seed in range(6)]
    found = {completion.text for completion in llm.generate([PROMPT] * 6, params)}

    assert found <= texts
    assert len(found) > 1


def test_ignore_eos_writes_as_much_as_the_grammar_can(llm: LLM) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "a{2,5}")
    params = SamplingParams(grammar=spec, ignore_eos=True)

    assert "aaaaa" == llm.generate(PROMPT, params)[0].text


def test_a_malformed_grammar_ends_nobody_else(llm: LLM, plain: LLM) -> None:
    params = CASES["warm"]
    running = llm.stream(PROMPT, params)
    chunks = [next(running)]
    with pytest.raises(ParameterError, match="grammar: the regex does not compile"):
        llm.generate(PROMPT, SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, "(")))
    chunks += running

    assert answer(plain.generate(PROMPT, params)[0]) == joined(chunks)


# --- predictions --------------------------------------------------------------------------------


def expect(llm: LLM, params: SamplingParams, prediction_ids: Sequence[int], **more) -> Request:
    """One request with a prediction, to its end."""
    engine = llm.engine
    request = engine.new_request(
        llm.tokenizer.encode(PROMPT), params, prediction_ids=prediction_ids, **more
    )
    engine.submit(request)
    while request.finish_reason is None:
        engine.step()
    return request


@pytest.mark.parametrize("speculates", ["with n-gram", "without a drafter"])
@pytest.mark.parametrize("name", ["greedy", "warm", "json"])
def test_a_prediction_saves_steps_and_changes_nothing(
    llm: LLM, plain: LLM, speculates: str, name: str
) -> None:
    params = CASES[name]
    used = llm if speculates == "with n-gram" else plain
    before = plain.generate(PROMPT, params)[0]
    edited = [*before.token_ids]
    edited[len(edited) // 2] = (edited[len(edited) // 2] + 1) % 300
    request = expect(used, params, edited)
    completion = used.take(request, 0).completion

    assert completion is not None
    assert answer(before) == answer(completion)
    assert completion.speculation.verify_steps < before.speculation.verify_steps / 2
    assert completion.prediction is not None
    assert completion.prediction.accepted > len(edited) / 2
    if name != "json":  # there the changed token is no JSON, and not even verified
        assert completion.prediction.rejected > 0


def test_without_a_prediction_there_are_no_figures_for_one(llm: LLM) -> None:
    assert llm.generate(PROMPT, CASES["off"])[0].prediction is None


@pytest.mark.parametrize(("limit", "speculates"), [(0, True), (None, False)])
def test_who_wants_plain_decoding_gets_it_in_spite_of_a_prediction(
    llm: LLM, limit: int | None, speculates: bool
) -> None:
    params = replace(CASES["greedy"], max_draft_tokens=limit)
    request = expect(llm, params, [1, 2, 3], speculates=speculates)

    assert request.prediction is None
    assert 0 == request.stats.drafted


def test_a_wrong_prediction_is_counted_as_rejected(plain: LLM) -> None:
    request = expect(plain, replace(CASES["greedy"], max_tokens=4), [299, 298, 297])
    assert request.prediction is not None
    stats = request.prediction.stats

    assert 0 == stats.accepted
    assert 0 < stats.rejected
    assert isinstance(stats, PredictionStats)


def test_a_predicted_id_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="prediction_ids: token id 5000 is outside"):
        llm.engine.new_request([1], SamplingParams(), prediction_ids=[5000])


# --- preemption ---------------------------------------------------------------------------------


def test_requests_that_had_to_wait_again_answer_the_same(llm: LLM, model: Path) -> None:
    """With all options at once, their grammars and predictions as far as they had come."""
    crowded = LLM(
        model,
        engine=EngineConfig(max_batch_size=3, dtype="float32", max_model_len=120, max_slots=121),
    )
    all_params = [replace(CASES["json"], seed=seed) for seed in range(3)]
    expected = [answer(llm.generate(PROMPT, params)[0]) for params in all_params]
    requests = [
        crowded.engine.new_request(
            crowded.tokenizer.encode(PROMPT), params, prediction_ids=token_ids[:-4]
        )
        for params, (token_ids, *_) in zip(all_params, expected, strict=True)
    ]
    for request in requests:
        crowded.engine.submit(request)
    while crowded.engine.has_work:
        crowded.engine.step()
    completions = [crowded.take(request, 0).completion for request in requests]

    assert crowded.engine.stats().preemptions > 0
    assert expected == [answer(one) for one in completions if one is not None]
    assert all(one.prediction and one.prediction.accepted for one in completions if one)


# --- draft limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_step_verifies_more_than_the_limit(llm: LLM, limit: int) -> None:
    params = replace(CASES["greedy"], max_draft_tokens=limit)
    (completion,) = llm.generate(PROMPT, params)
    stats = completion.speculation

    assert stats.drafted <= limit * stats.verify_steps
    assert (limit > 0) == (stats.drafted > 0)
    assert ("off" if limit == 0 else "ngram") == completion.method
