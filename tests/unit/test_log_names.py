"""Whose line of the log it is: in front where a server has a name, nothing where it has none."""

from __future__ import annotations

import logging

import pytest

from outrider.server.log_names import SERVER_NAME, log_to_stderr


def test_a_line_begins_with_the_name_of_its_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr()
    logging.getLogger("outrider.engine").warning("a step failed")
    name = SERVER_NAME.set("ngram")
    logging.getLogger("outrider.engine").warning("a step failed")
    SERVER_NAME.reset(name)

    assert (
        "outrider.engine: a step failed\n[ngram] outrider.engine: a step failed\n"
        == capsys.readouterr().err
    )
