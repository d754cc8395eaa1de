"""Answers: the target's own, the same after interruptions, in parts and under speculation."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outrider import LLM, EngineConfig, FinishReason, SamplingParams
from outrider.bench.guards import MIN_TOKENS, loop_start
from outrider.config import Method, SpeculationConfig
from outrider.errors import CapacityError, CheckpointError, ParameterError, PromptError
from outrider.llm import ENOUGH_EVERY
from outrider.models.loading.cache import exclusive
from outrider.training import responses
from outrider.training.answers import Response, read_responses
from outrider.training.prompts import TrainingPrompt
from outrider.training.responses import (
    LOOP,
    TURN_TEMPERATURE,
    TURN_TOKENS,
    AnswerCounts,
    ResponseSettings,
    answer_prompts,
)
from tests.tiny import write_hf_checkpoint

SCALE = 0.08  # of the weights: some greedy answers fall into a loop, some do not
BATCH = 3
SETTINGS = ResponseSettings(max_tokens=64)
PROMPTS = [
    TrainingPrompt("a", "qa", ("The outrider left",)),
    TrainingPrompt("b", "chat", ("A river does not", "and then?", "why?")),
    TrainingPrompt("c", "rag", ("Of {passage1}, what is in {passage0}?",), ("a", "f")),
    TrainingPrompt("d", "opener", ("def area(",), is_opener=True),
    TrainingPrompt("e", "qa", ("it goes around",)),
    TrainingPrompt("f", "qa", ("most of what",)),
    TrainingPrompt("g", "rag", ("Sum up: {passage0}", "Shorter."), ("c",)),
    TrainingPrompt("h", "qa", ("How are you",)),
]
IDS = {"a", "b", "b#2", "b#3", "c", "d", "e", "f", "g", "g#2", "h"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("responses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        model = write_hf_checkpoint(folder / "tiny", scale=SCALE)
        engine = EngineConfig(max_batch_size=BATCH, dtype="float32", self_test="off")
        yield LLM(model, speculation=SpeculationConfig(method=Method.OFF), engine=engine)


@pytest.fixture(scope="module")
def answered(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Response]:
    """What one undisturbed process writes."""
    folder = tmp_path_factory.mktemp("answered")
    counts = answer_prompts(llm, PROMPTS, folder, SETTINGS)
    found = read_responses(folder)

    assert AnswerCounts(len(IDS), tokens_of(found), 0, 0) == counts
    return found


def tokens_of(found: dict[str, Response]) -> int:
    return sum(len(response.response_ids) for response in found.values())


def stop_after(count: int, error: BaseException):
    """A callback that raises when so many answers were written."""
    left = iter(range(count - 1))

    def call(what: str, fraction: float | None) -> None:
        if next(left, None) is None:
            raise error

    return call


def test_every_turn_is_answered_as_the_target_itself_would(llm, answered):
    assert IDS == answered.keys()
    for id_, response in answered.items():
        params = SETTINGS.params(id_)
        (own,) = llm.generate([response.prompt_ids], params)
        assert (params.temperature, params.seed) == (response.temperature, response.seed)
        if response.finish_reason == LOOP:
            assert own.token_ids[: len(response.response_ids)] == response.response_ids
        else:
            assert own.token_ids == response.response_ids
            assert str(own.finish_reason) == response.finish_reason


def test_temperatures_and_seeds_depend_on_settings_and_id_alone():
    settings = ResponseSettings(temperatures=(0.0, 0.7, 0.7, 1.0), seed=3)
    drawn = [settings.params(f"book/{i}") for i in range(2000)]
    share = sum(params.temperature == 0.7 for params in drawn) / len(drawn)

    assert drawn == [settings.params(f"book/{i}") for i in range(2000)]
    assert 0.45 < share < 0.55
    assert 2000 == len({params.seed for params in drawn})
    assert drawn[0].seed != replace(settings, seed=4).params("book/0").seed


def test_a_later_turn_reads_the_answers_before_it(llm, answered):
    def said(id_: str) -> str:
        return llm.tokenizer.decode(answered[id_].response_ids).strip()

    talk = []
    for id_, turn in zip(("b", "b#2", "b#3"), PROMPTS[1].turns, strict=True):
        talk.append({"role": "user", "content": turn})
        assert tuple(llm.tokenizer.encode_chat(talk)) == answered[id_].prompt_ids
        talk.append({"role": "assistant", "content": said(id_)})


def test_passages_are_earlier_answers_in_their_places(llm, answered):
    def said(id_: str) -> str:
        return llm.tokenizer.decode(answered[id_].response_ids).strip()

    texts = {
        "c": f"Of {said('f')}, what is in {said('a')}?",
        "g": f"Sum up: {said('c')}",
    }
    for id_, text in texts.items():
        chat = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        assert tuple(chat) == answered[id_].prompt_ids


def test_an_opener_is_completed_by_the_target_and_then_answered(llm, answered):
    start = llm.tokenizer.encode("<|im_start|>user\ndef area(", add_special_tokens=False)
    params = replace(
        SETTINGS.params("d"), temperature=TURN_TEMPERATURE, max_tokens=TURN_TOKENS, choice=1
    )
    (completion,) = llm.generate([start], params)
    said, _ = responses._without_loop(completion)
    text = ("def area(" + llm.tokenizer.decode(said)).strip()

    assert len(text) > len("def area(")
    assert answered["d"].prompt_ids == tuple(
        llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    )


def test_loops_are_cut_where_they_begin(llm, answered):
    looping = [r for r in answered.values() if r.finish_reason == LOOP]
    others = [r for r in answered.values() if r.finish_reason != LOOP]

    assert looping
    assert others
    for response in looping:
        (own,) = llm.generate([response.prompt_ids], SETTINGS.params(response.id))
        ends = range(ENOUGH_EVERY, len(own.token_ids) + 1, ENOUGH_EVERY)
        starts = [(end, loop_start(own.token_ids[:end])) for end in ends]
        end, start = next((end, start) for end, start in starts if start is not None)
        assert min(end, start + MIN_TOKENS) == len(response.response_ids)
    for response in others:
        assert len(response.response_ids) <= SETTINGS.max_tokens


def test_speculation_changes_no_answer(llm, answered, tmp_path):
    """Not even where a loop is cut, though several tokens come at once."""
    drafting = llm.with_speculation(SpeculationConfig(method=Method.NGRAM, adaptive=False))
    answer_prompts(drafting, PROMPTS, tmp_path, SETTINGS)

    assert answered == read_responses(tmp_path)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_an_interrupted_run_goes_on_where_it_stopped(llm, answered, tmp_path, count):
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(
            llm,
            PROMPTS,
            tmp_path,
            SETTINGS,
            on_progress=stop_after(count, KeyboardInterrupt()),
        )
    assert not llm._engine.has_work
    before = read_responses(tmp_path)
    counts = answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)

    assert count == len(before)
    assert len(IDS) - count == counts.answered
    assert answered == read_responses(tmp_path)
    assert AnswerCounts(0, 0, 0, 0) == answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_goes_on_behind_its_last_whole_line(llm, answered, tmp_path):
    def die(what: str, fraction: float | None) -> None:
        if fraction is not None and fraction > 0.5:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            answer_prompts(llm, PROMPTS, tmp_path, SETTINGS, on_progress=die)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    file = tmp_path / "responses.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole.splitlines()[0][:40])

    assert signal.SIGKILL == os.WTERMSIG(status)
    assert 6 == len(read_responses(tmp_path))
    answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)
    assert answered == read_responses(tmp_path)
    assert file.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "line", [b"{", b"\xff\xfe", b"[]", b"{}", b'{"id": "a", "prompt_ids": 3}', b"null"]
)
def test_a_damaged_line_in_the_middle_is_named(llm, answered, tmp_path, line):
    answer_prompts(llm, PROMPTS[:1], tmp_path, SETTINGS)
    file = tmp_path / "responses.jsonl"
    sound = file.read_bytes()
    file.write_bytes(sound + line + b"\n" + sound)

    for call in (
        lambda: read_responses(tmp_path),
        lambda: answer_prompts(llm, PROMPTS, tmp_path, SETTINGS),
    ):
        with pytest.raises(CheckpointError, match=r"responses.jsonl, line 2: .*remove the line"):
            call()


def test_parts_together_are_one_process(llm, answered, tmp_path):
    """A part may have to wait for another's answers, and says so."""
    first = answer_prompts(llm, PROMPTS, tmp_path, SETTINGS, part=(1, 2))
    second = answer_prompts(llm, PROMPTS, tmp_path, SETTINGS, part=(2, 2))
    again = answer_prompts(llm, PROMPTS, tmp_path, SETTINGS, part=(1, 2))

    # c needs f, which is the second's, and g needs c.
    assert 2 == first.waiting
    assert 0 == second.waiting == again.waiting
    assert len(IDS) == first.answered + second.answered + again.answered
    assert answered == read_responses(tmp_path)
    assert {"responses-1-of-2.jsonl", "responses-2-of-2.jsonl"} == {
        path.name for path in tmp_path.glob("responses*.jsonl")
    }
    assert AnswerCounts(0, 0, 0, 0) == answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)


@pytest.mark.parametrize("part", [(0, 1), (2, 1), (1, 0), (-1, 2)])
def test_a_part_that_is_none_is_refused(llm, tmp_path, part):
    with pytest.raises(ParameterError, match=f"part: {part[0]}/{part[1]}"):
        answer_prompts(llm, PROMPTS, tmp_path, SETTINGS, part=part)


def test_two_processes_cannot_write_the_same_part(llm, answered, tmp_path):
    with (
        exclusive(tmp_path / ".responses.jsonl.lock", pytest.fail),
        pytest.raises(ParameterError, match="another process"),
    ):
        answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)
    answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)

    assert answered == read_responses(tmp_path)


def test_a_prompt_without_room_for_an_answer_is_counted(llm, tmp_path):
    long = TrainingPrompt("long", "qa", ("word " * llm.max_model_len,))
    needs_it = TrainingPrompt("n", "rag", ("Of {passage0}?",), ("long",))
    counts = answer_prompts(llm, [long, needs_it, PROMPTS[0]], tmp_path, SETTINGS)

    assert (1, 1, 1) == (counts.too_long, counts.waiting, counts.answered)
    assert ["a"] == list(read_responses(tmp_path))


def test_a_prompt_at_which_the_target_fails_is_counted_and_asked_again(
    llm, answered, tmp_path, monkeypatch
):
    """Of a conversation, a turn and a passage; what needs them waits."""
    generate_each, prompts = LLM.generate_each, PROMPTS[:3]

    def failing(self: LLM, jobs: Iterator[Any], **options: Any) -> Iterator[Any]:
        """Every second answer is none, as where the target's logits are not finite."""
        for index, completion in generate_each(self, jobs, **options):
            if index % 2:
                yield index, replace(completion, finish_reason=FinishReason.ERROR, error="spoilt")
            else:
                yield index, completion

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate_each", failing)
        counts = answer_prompts(llm, prompts, tmp_path, SETTINGS)

    assert ["a"] == list(read_responses(tmp_path))
    assert (1, 1, 1) == (counts.answered, counts.failed, counts.waiting)
    again = answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)
    assert 0 == again.failed
    assert answered == read_responses(tmp_path)


def test_a_target_that_always_fails_answers_nothing(tmp_path):
    path = write_hf_checkpoint(tmp_path / "broken", scale=SCALE)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] *= 1e30  # all finite as they are stored, but not their product
    weights["lm_head.weight"] *= 1e10
    save_file(weights, file, metadata={"format": "pt"})
    broken = LLM(path, engine=EngineConfig(dtype="float32", self_test="off"))
    counts = answer_prompts(broken, PROMPTS[:2], tmp_path / "data", SETTINGS)

    assert AnswerCounts(0, 0, 0, 0, failed=2) == counts
    assert {} == read_responses(tmp_path / "data")


def test_enough_tokens_end_the_stage(llm, answered, tmp_path):
    wanted = 100
    counts = answer_prompts(llm, PROMPTS, tmp_path, SETTINGS, max_tokens=wanted)
    most = wanted + BATCH * SETTINGS.max_tokens

    assert wanted <= counts.tokens <= most
    assert counts.tokens == tokens_of(read_responses(tmp_path)) < tokens_of(answered)
    assert 0 == answer_prompts(llm, PROMPTS, tmp_path, SETTINGS, max_tokens=wanted).answered
    answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)
    assert answered == read_responses(tmp_path)


def test_progress_ends_at_one(llm, tmp_path):
    told: list[tuple[str, float | None]] = []
    counts = answer_prompts(
        llm, PROMPTS, tmp_path, SETTINGS, on_progress=lambda *now: told.append(now)
    )

    assert (f"answering prompts: {counts.tokens:,} tokens", 1.0) == told[-1]
    assert sorted(fraction for _, fraction in told) == [fraction for _, fraction in told]


def test_a_full_disk_keeps_what_was_answered(llm, answered, tmp_path, monkeypatch):
    append, num_left = responses.append, 2

    def full(file, line: bytes) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            append(file, line[:30])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(file, line)

    with monkeypatch.context() as patch:
        patch.setattr(responses, "append", full)
        with pytest.raises(CapacityError, match=r"responses.jsonl: .*make room"):
            answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)

    assert not llm._engine.has_work
    assert 2 == len(read_responses(tmp_path))
    answer_prompts(llm, PROMPTS, tmp_path, SETTINGS)
    assert answered == read_responses(tmp_path)


def test_each_line_is_one_answered_turn_with_all_its_fields(llm, tmp_path):
    answer_prompts(llm, PROMPTS[:1], tmp_path, SETTINGS)
    (line,) = (tmp_path / "responses.jsonl").read_text().splitlines()

    assert [
        "id",
        "category",
        "prompt_ids",
        "response_ids",
        "temperature",
        "seed",
        "finish_reason",
    ] == list(json.loads(line))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (0.0, -1.0)}, "temperature: -1"),
        ({"temperatures": (float("nan"),)}, "temperature: nan"),
        ({"max_tokens": 0}, "max_tokens: 0"),
    ],
)
def test_settings_out_of_range_are_named(changes, named):
    with pytest.raises(ParameterError, match=f"^{named}"):
        ResponseSettings(**changes)


# --- LLM.generate_each ---------------------------------------------------------------------------

TEXTS = ("The outrider left", "A river does not", "def area(width", "it goes around", "most of")


def params(index: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=index, max_tokens=5 + 7 * index)


def test_each_is_what_generate_gives(llm):
    jobs = [(text, params(i)) for i, text in enumerate(TEXTS)]
    expected = llm.generate([text for text, _ in jobs], [param for _, param in jobs])
    each = dict(llm.generate_each(jobs))

    assert len(TEXTS) == len(each)
    assert [c.token_ids for c in expected] == [each[i].token_ids for i in range(len(TEXTS))]
    assert [c.text for c in expected] == [each[i].text for i in range(len(TEXTS))]


def test_jobs_are_read_as_rows_become_free_and_may_never_end(llm):
    taken = 0

    def endless():
        nonlocal taken
        while True:
            yield TEXTS[taken % len(TEXTS)], params(0)
            taken += 1

    runs = llm.generate_each(endless())
    for _ in range(10):
        next(runs)
        assert taken <= 10 + BATCH
    runs.close()

    assert not llm._engine.has_work


def test_a_job_may_depend_on_what_came_before(llm):
    came: list[int] = []

    def jobs():
        yield TEXTS[0], params(1)
        while not came:
            yield None
        yield TEXTS[came[0] + 1], params(2)

    runs = {}
    for index, completion in llm.generate_each(jobs()):
        came.append(index)
        runs[index] = completion

    assert [0, 1] == came
    assert llm.generate(TEXTS[1], params(2))[0].token_ids == runs[1].token_ids


def test_none_while_nothing_runs_is_refused(llm):
    with pytest.raises(ParameterError, match="None while nothing runs"):
        list(llm.generate_each([(TEXTS[0], params(0)), None, None, None, None, None, None]))
    assert not llm._engine.has_work
    with pytest.raises(ParameterError, match="None"):
        next(llm.generate_each(iter([None])))


def test_a_wrong_prompt_ends_the_others(llm):
    with pytest.raises(PromptError):
        list(llm.generate_each([(TEXTS[0], params(4)), ([10**6], params(0))]))

    assert not llm._engine.has_work
    assert [] == list(llm.generate_each([]))


@pytest.mark.parametrize("method", [Method.OFF, Method.NGRAM])
def test_enough_is_asked_at_the_same_tokens_however_many_come_at_once(llm, method):
    seen: list[int] = []
    text = "around it, and around it, and around it, and around"
    param = SamplingParams(max_tokens=70, ignore_eos=True)
    whole = llm.generate(text, param)[0].token_ids

    def is_enough(token_ids: Sequence[int]) -> bool:
        seen.append(len(token_ids))
        assert whole[: len(token_ids)] == tuple(token_ids)
        return len(token_ids) >= 3 * ENOUGH_EVERY

    drafting = llm.with_speculation(SpeculationConfig(method=method, adaptive=False))
    ((_, completion),) = drafting.generate_each([(text, param)], is_enough=is_enough)

    assert [ENOUGH_EVERY, 2 * ENOUGH_EVERY, 3 * ENOUGH_EVERY] == seen
    assert FinishReason.ABORT == completion.finish_reason
    assert 3 * ENOUGH_EVERY <= len(completion.token_ids) < 70
    assert whole[: len(completion.token_ids)] == completion.token_ids
