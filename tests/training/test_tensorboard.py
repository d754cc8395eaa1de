"""TensorBoard's files hold the log's figures; without the package one line says so at once."""

from __future__ import annotations

import importlib.util

import pytest

from outrider.config import Method
from outrider.errors import ParameterError
from outrider.training import tensorboard
from outrider.training.log import LOG, TIMES
from outrider.training.run_log import RunLog
from outrider.training.settings import TrainSettings
from outrider.training.tensorboard import TENSORBOARD, scalars

is_installed = importlib.util.find_spec("tensorboard") is not None


def test_every_figure_of_a_line_gets_a_name():
    line = {
        "tokens": 5,
        "accuracy": [0.5, 0.25],
        "validation": {"losses": [2.0], "acceptance": 1.5},
    }
    expected = {
        "tokens": 5,
        "accuracy/1": 0.5,
        "accuracy/2": 0.25,
        "validation/losses/1": 2.0,
        "validation/acceptance": 1.5,
    }

    assert expected == dict(scalars(line))


def test_a_missing_package_is_named_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ParameterError, match=r"--tensorboard: .* pip install tensorboard"):
        TrainSettings(method=Method.MTP, out=tmp_path, tensorboard=True)


def test_only_the_process_that_writes_leaves_files(tmp_path):
    log = RunLog(tmp_path, last_step=0, is_written=False)
    log.add_figures(1, {"tokens": 1})
    log.add_times(1, {"seconds": 1.0})
    log.sync()
    log.close()

    assert [] == list(tmp_path.iterdir())


@pytest.mark.skipif(not is_installed, reason="needs tensorboard")
def test_the_files_hold_what_the_log_holds(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last_step in (0, 1):  # the second begins behind step 1 again
        log = RunLog(tmp_path, last_step=last_step, tensorboard=True)
        for step in range(last_step + 1, 4):
            log.add_figures(step, {"accuracy": [0.25 * step + last_step]})
        log.sync()
        log.close()
    events = EventAccumulator(str(tmp_path / TENSORBOARD))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("accuracy/1")]

    assert {LOG, TIMES, TENSORBOARD} == {path.name for path in tmp_path.iterdir()}
    assert [(1, 0.25), (2, 1.5), (3, 1.75)] == found
