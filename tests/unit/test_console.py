from __future__ import annotations

import sys

import pytest

from outrider.commands import console
from outrider.errors import PromptError


def test_an_error_is_one_line_and_its_brackets_are_not_markup(capsys):
    console.error("a [b] is\n  wrong; " + "long " * 60)

    line = capsys.readouterr().err
    assert 1 == line.count("\n")
    assert line.startswith("outrider: error: a [b] is wrong; long long")


def test_a_terminal_gets_no_control_characters_from_an_answer(capsys, monkeypatch):
    """Escape sequences in an answer could rewrite the screen; a file gets the text unchanged."""
    text = "a\x1b]0;title\x07\tb\n\x9b2J"
    console.write_text(text)
    as_file = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console.write_text(text)
    as_terminal = capsys.readouterr().out

    assert text == as_file
    assert "a]0;title\tb\n2J" == as_terminal


def test_stages_without_a_terminal_are_one_line_each(capsys):
    with console.Stages() as stages:
        for stage, fraction in (("reading", None), ("reading", 0.5), ("testing", 0.1)):
            stages(stage, fraction)

    assert "outrider: reading\noutrider: testing\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (271_319_040, "258.8 MiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_bytes_have_binary_units(size, expected):
    assert expected == console.format_bytes(size)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4211, "0.42 s"), (12.4, "12 s"), (185.2, "3 min 05 s")]
)
def test_seconds_are_short(seconds, expected):
    assert expected == console.format_seconds(seconds)


def test_json_has_no_nan(capsys):
    console.print_json({"text": "Grüße"})

    assert '{\n  "text": "Grüße"\n}\n' == capsys.readouterr().out
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"rate": float("nan")})


def test_bytes_that_are_not_utf8_are_named_by_offset():
    assert "Grüße" == console.decode_text("\ufeffGrüße\r\n".encode(), "stdin")
    assert "two\n" == console.decode_text(b"two\n\n", "stdin")
    with pytest.raises(PromptError, match="stdin: byte 0x80 at offset 2 is not UTF-8"):
        console.decode_text(b"ab\x80", "stdin")
