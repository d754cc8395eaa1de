"""A command that is published says what was done, not where."""

from __future__ import annotations

import shlex

import pytest

from outrider.commands.typed import published_command


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train", "train"),
        ("--epochs=3", "--epochs=3"),
        ("0,1", "0,1"),
        ("org/model", "org/model"),
        ("runs/head", "runs/head"),
        ("runs/../head", "head"),
        ("{here}/runs/head", "runs/head"),
        ("--out={here}/runs/head", "--out=runs/head"),
        ("{here}", "."),
        ("/elsewhere/secret/prompts.jsonl", "prompts.jsonl"),
        ("--data=/elsewhere/secret/data", "--data=data"),
        ("../secret/prompts.jsonl", "prompts.jsonl"),
        ("~/secret/prompts.jsonl", "prompts.jsonl"),
        ("--data=~nobody/secret/data", "--data=data"),
        ("/", "/"),
    ],
)
def test_paths_outside_the_working_folder_are_named_without_their_place(
    tmp_path, monkeypatch, word, expected
):
    monkeypatch.chdir(tmp_path)
    command = published_command([word.format(here=tmp_path)])

    assert ["outrider", expected] == shlex.split(command)


def test_words_are_quoted_as_a_shell_needs_them():
    assert "outrider train 'my model' --loss ce" == published_command(
        ["train", "my model", "--loss", "ce"]
    )
