from __future__ import annotations

import json
import os
import socket

from outrider.bench import environment


def test_the_machine_is_described_without_naming_its_owner():
    found = environment.machine()
    text = json.dumps(found)

    assert found["processor"]
    assert os.cpu_count() == found["num_cores"]
    assert found["memory_bytes"] > 1 << 28
    assert socket.gethostname() not in text or len(socket.gethostname()) < 3


def test_variables_that_change_speed_are_kept_and_others_are_not(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")

    variables = environment.machine()["variables"]

    assert "3" == variables["OMP_NUM_THREADS"]
    assert "SECRET_TOKEN" not in variables


def test_versions_are_those_of_what_measures():
    found = environment.versions()

    assert {"python", "outrider", "aiohttp"} <= found.keys()


def test_gpus_are_rows_by_field():
    line = "NVIDIA H100, 550.1, 81559 MiB, Enabled, 700.00 W, 1980 MHz, 1980 MHz, 31, Disabled\n"

    assert [("NVIDIA H100", "1980 MHz", "Disabled")] == [
        (gpu["name"], gpu["clocks.sm"], gpu["mig.mode.current"])
        for gpu in environment.parse_gpus(line)
    ]
    assert [] == environment.parse_gpus("No devices were found\n")


def test_a_driver_that_does_not_answer_is_no_gpu(monkeypatch, tmp_path):
    broken = tmp_path / "nvidia-smi"
    broken.write_text("#!/bin/sh\nexit 9\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert [] == environment.gpus()


def test_a_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(environment.API_KEY, "k")
    assert "k" == environment.api_key()
    monkeypatch.setenv(environment.API_KEY, "")
    assert environment.api_key() is None
