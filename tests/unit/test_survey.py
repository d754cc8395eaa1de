"""What a model is asked before a run: the answer of another process, errors included."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.commands import survey as survey_module
from outrider.commands.available import num_tokens, prompt_room
from outrider.commands.survey import survey
from outrider.errors import FailureError, ParameterError, UnknownModelError
from outrider.models.loading import load
from tests.tiny import write_hf_checkpoint

PROMPTS = ["a river", [("user", "the ford"), ("assistant", "down"), ("user", "é")]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint(tmp_path_factory.mktemp("surveyed") / "tiny", max_position=512)


def test_the_answer_has_methods_the_longest_prompt_and_the_context(checkpoint: Path):
    found = survey([], str(checkpoint), {}, PROMPTS)
    tokenizer = load(checkpoint).tokenizer
    messages = [{"role": role, "content": text} for role, text in PROMPTS[1]]
    lengths = [len(tokenizer.encode("a river")), len(tokenizer.encode_chat(messages))]

    assert ["off", "ngram"] == found.methods
    assert lengths == [num_tokens(tokenizer, prompt) for prompt in PROMPTS]
    assert max(lengths) == found.longest_prompt
    assert 512 == found.max_position


def test_prompts_that_the_model_cannot_take_leave_the_length_open(checkpoint: Path):
    assert (None, 512) == prompt_room(str(checkpoint), ["a river", []], lambda *_: None)


@pytest.mark.parametrize(
    ("asked", "model", "kind", "expected"),
    [
        (["warp"], None, ParameterError, "--methods: 'warp' is not one of off, ngram"),
        (["eagle3"], None, ParameterError, "--methods: eagle3 has no head for"),
        ([], "/no/such/model", UnknownModelError, "/no/such/model"),
    ],
)
def test_what_is_wrong_is_raised_here_as_what_it_is_there(checkpoint, asked, model, kind, expected):
    with pytest.raises(kind, match=expected):
        survey(asked, model or str(checkpoint), {}, PROMPTS)


def test_a_process_that_dies_is_told_by_its_status(monkeypatch):
    class Done:
        returncode, stdout = -9, ""

    monkeypatch.setattr(survey_module.subprocess, "run", lambda *_, **__: Done)
    with pytest.raises(FailureError, match="ended with status -9 and without an answer"):
        survey([], "m", {}, PROMPTS)


def test_an_interrupted_process_interrupts_the_command(monkeypatch):
    class Done:
        returncode, stdout = 130, ""

    monkeypatch.setattr(survey_module.subprocess, "run", lambda *_, **__: Done)
    with pytest.raises(KeyboardInterrupt):
        survey([], "m", {}, PROMPTS)
