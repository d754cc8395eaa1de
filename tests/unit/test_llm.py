"""The Python interface on a tiny checkpoint: generate, stream, chat, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import outrider
from outrider import LLM, EngineConfig, FinishReason, Method, SamplingParams, SpeculationConfig
from outrider.errors import CapacityError, ParameterError, PromptError, UnknownModelError
from tests.models import compute_threads
from tests.tiny import write_gguf_checkpoint, write_hf_checkpoint

WARM = SamplingParams(temperature=0.9, seed=5, max_tokens=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint(tmp_path_factory.mktemp("model") / "tiny", scale=0.15)


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield LLM(model, engine=EngineConfig(max_batch_size=3, dtype="float32"))


def test_public_names_are_those_listed() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outrider.nothing  # noqa: B018 - the access is the test


def test_completions_come_in_prompt_order_whatever_the_batch(llm: LLM) -> None:
    prompts = [f"The outrider left {word} " for word in ("one", "two", "three", "four", "five")]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=10 + 5 * i) for i in range(len(prompts))
    ]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, param)[0] for prompt, param in zip(prompts, params, strict=True)]

    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    assert [c.text for c in alone] == [c.text for c in together]
    for completion, prompt in zip(together, prompts, strict=True):
        assert len(llm.tokenizer.encode(prompt)) == completion.usage.prompt_tokens
        assert len(completion.token_ids) == completion.usage.completion_tokens


def test_speculation_on_and_off_share_weights_and_agree(llm: LLM) -> None:
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    prompt = "around it, and around it, and around it, and around"
    with_drafts = llm.generate(prompt, WARM)[0]
    without = plain.generate(prompt, WARM)[0]

    assert plain._loaded is llm._loaded
    assert without.token_ids == with_drafts.token_ids
    assert ("off", "ngram") == (without.method, with_drafts.method)
    assert 0 == without.speculation.drafted
    assert len(without.token_ids) == without.speculation.verify_steps


def test_what_shares_weights_plans_memory_for_the_rest_alone(llm: LLM) -> None:
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    shared = {"layers", "embedding", "output head"}
    whole, rest = ({item.what for item in each.memory_plan.items} for each in (llm, plain))

    assert shared <= whole
    assert not shared & rest
    assert "KV cache" in rest


def test_a_request_counts_the_draft_passes_of_its_steps_in_any_batch(llm: LLM, model: Path) -> None:
    """Its share of a step is then divided by whole passes, as by whole steps."""
    drafting = llm.with_speculation(
        SpeculationConfig(method=Method.DRAFT, head=str(model), max_draft_len=3, adaptive=False)
    )
    params = SamplingParams(max_tokens=21, ignore_eos=True)
    alone = drafting.generate("A river does not", params)[0]
    together = drafting.generate(["A river does not"] * 3, params)

    assert alone.timing.draft_passes > alone.speculation.verify_steps
    assert [alone.timing.draft_passes] * 3 == [c.timing.draft_passes for c in together]
    assert llm.generate("A river does not", params)[0].timing.draft_passes == 0


def test_a_stream_adds_up_to_the_completion(llm: LLM) -> None:
    expected = llm.generate("A river does not", WARM)[0]
    chunks = list(llm.stream("A river does not", WARM))

    assert expected.text == "".join(chunk.text for chunk in chunks)
    assert expected.token_ids == tuple(t for chunk in chunks for t in chunk.token_ids)
    assert [None] * (len(chunks) - 1) == [chunk.completion for chunk in chunks[:-1]]
    assert chunks[-1].completion is not None
    assert expected.text == chunks[-1].completion.text


def test_open_streams_advance_together_and_closing_one_frees_its_row(llm: LLM) -> None:
    expected = llm.generate("A river does not", WARM)[0]
    streams = [llm.stream("A river does not", WARM) for _ in range(3)]
    for stream in streams:
        next(stream)
    streams[0].close()
    never_started = llm.stream("A river", WARM)
    never_started.close()
    rest = ["".join(chunk.text for chunk in stream) for stream in streams[1:]]

    assert all(expected.text.endswith(text) for text in rest)
    assert not llm._engine.has_work
    assert [expected.text] * 3 == [c.text for c in llm.generate(["A river does not"] * 3, WARM)]


def test_an_exception_in_the_callback_aborts_everything(llm: LLM) -> None:
    def fail(index: int, chunk: outrider.TextChunk) -> None:
        raise RuntimeError(f"{index} {chunk.text}")

    with pytest.raises(RuntimeError):
        llm.generate(["one", "two", "three", "four"], WARM, on_chunk=fail)
    assert not llm._engine.has_work
    assert FinishReason.ERROR != llm.generate("one", WARM)[0].finish_reason


def test_a_callback_may_use_the_same_object(llm: LLM) -> None:
    """What a nested call advances, even to its end, still reaches the outer call."""
    expected = [c.token_ids for c in llm.generate(["The bridge", "A river"], WARM)]
    inner = []

    def nested(index: int, chunk: outrider.TextChunk) -> None:
        if not inner:
            inner.append(llm.generate("The ford", WARM)[0])

    assert expected == [
        c.token_ids for c in llm.generate(["The bridge", "A river"], WARM, on_chunk=nested)
    ]
    assert inner[0].token_ids == llm.generate("The ford", WARM)[0].token_ids


def test_another_thread_count_in_between_changes_nothing(llm: LLM) -> None:
    expected = llm.generate("The bridge", WARM)[0].token_ids
    with compute_threads(3):
        assert expected == llm.generate("The bridge", WARM)[0].token_ids


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Which way?"}]
    ids = llm.tokenizer.encode_chat(messages)

    assert llm.generate([ids], WARM)[0].token_ids == llm.chat(messages, WARM).token_ids
    streamed = list(llm.stream_chat(messages, WARM))[-1].completion
    assert streamed is not None
    assert llm.chat(messages, WARM).text == streamed.text


def test_an_unseeded_request_gets_a_private_seed_that_repeats_it(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    first, second = llm.generate(["The bridge", "The bridge"], params)
    again = llm.generate(
        "The bridge", SamplingParams(temperature=1.0, max_tokens=20, seed=first.seed)
    )

    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert first.token_ids == again[0].token_ids


def test_gguf_gives_the_same_text_as_its_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    engine = EngineConfig(dtype="float32")
    folder = LLM(write_hf_checkpoint(tmp_path / "tiny", scale=0.15), engine=engine)
    file = LLM(write_gguf_checkpoint(tmp_path / "tiny.gguf", scale=0.15), engine=engine)
    prompt = folder.tokenizer.encode("The outrider left")

    assert (
        folder.generate([prompt], WARM)[0].token_ids == file.generate([prompt], WARM)[0].token_ids
    )


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    for prompt, message in (
        ([], "empty"),
        ([0, 10**6], "1000000 is outside the vocabulary"),
        ([-1], "-1 is outside"),
        ([5] * 600, "600 tokens"),
    ):
        with pytest.raises(PromptError, match=message):
            llm.generate([[1, 2, 3], prompt], WARM)
        with pytest.raises(PromptError, match=message):
            llm.stream(prompt, WARM)
    assert not llm._engine.has_work


def test_prompts_of_the_wrong_type_are_refused_and_others_go_on(llm: LLM) -> None:
    stream = llm.stream("A river does not", WARM)
    first = next(stream)
    for prompt in (b"hello", None, 5, [None], [1.5, 2.0], [[1, [2]]], [True, False], {"a": 1}):
        with pytest.raises(PromptError, match="neither a string nor a sequence of token ids"):
            llm.generate(prompt, WARM)  # type: ignore[arg-type]
    rest = list(stream)

    assert llm.generate("A river does not", WARM)[0].text == first.text + "".join(
        chunk.text for chunk in rest
    )
    for wrong in ("x", {}, None):
        with pytest.raises(ParameterError, match="is not a SamplingParams"):
            llm.generate("x", wrong)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="is not a SpeculationConfig"):
        llm.with_speculation("ngram")  # type: ignore[arg-type]


def test_threads_that_share_one_object_get_their_own_texts(llm: LLM) -> None:
    prompts = ["The bridge", "A river does not", "around it, and around it"]
    expected = [llm.generate(prompt, WARM)[0] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(lambda p: list(llm.stream(p, WARM)), prompts[i % 3]) for i in range(24)]
    for i, job in enumerate(jobs):
        chunks = job.result()

        assert expected[i % 3].text == "".join(chunk.text for chunk in chunks)
        assert expected[i % 3].token_ids == tuple(t for c in chunks for t in c.token_ids)


def test_bad_parameters_are_refused(llm: LLM, model: Path) -> None:
    with pytest.raises(ParameterError, match="2 for 1 prompts"):
        llm.generate("x", [WARM, WARM])
    with pytest.raises(ParameterError, match="logit_bias"):
        llm.generate("x", SamplingParams(logit_bias={10**6: 1.0}))
    with pytest.raises(ParameterError, match=r"max_model_len: 4096 .* 2 \.\. 512"):
        LLM(model, engine=EngineConfig(max_model_len=4096))
    with pytest.raises(UnknownModelError):
        LLM("no-such-model")


def test_a_plan_that_does_not_fit_is_refused_with_its_numbers(model: Path, monkeypatch) -> None:
    monkeypatch.setattr("outrider.models.memory.available_memory", lambda: 10_000)

    with pytest.raises(CapacityError, match=r"KV cache .* GiB .* lower max_model_len"):
        LLM(model)
