"""Atomic folders: whole or absent under kills and full disks, damage found and named."""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.errors import CapacityError, CheckpointError, ParameterError
from outrider.training import store
from outrider.training.store import (
    MANIFEST,
    latest_valid,
    load_state,
    prune,
    random_state,
    restore_random_state,
    save_state,
    sole_writer,
    verify_folder,
    write_folder,
)

NUM_KILLS = 40


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def content(number: int) -> dict[str, bytes]:
    return {"weights.bin": random.Random(number).randbytes(4000), "state.json": b"%d" % number}


def save_slowly(folder: Path, number: int) -> None:
    """Write in small pieces, so that a kill hits every phase."""

    def write(path: Path, data: bytes) -> None:
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(data), 500):
                file.write(data[start : start + 500])
                time.sleep(0.0005)

    files = {
        name: lambda path, data=data: write(path, data) for name, data in content(number).items()
    }
    write_folder(folder, files, {"number": number})


def leftovers(parent: Path) -> list[Path]:
    return [path for path in parent.glob(".*") if not path.name.startswith(".lock")]


@pytest.mark.parametrize("same_name", [False, True], ids=["new-names", "replaced"])
def test_a_kill_at_any_moment_leaves_the_older_or_the_newer_folder(
    tmp_path, monkeypatch, same_name
):
    real_sync = os.fsync

    def slow_sync(handle: int) -> None:
        time.sleep(0.001)
        real_sync(handle)

    monkeypatch.setattr(store.os, "fsync", slow_sync)
    moment = random.Random(7)

    def name(number: int) -> Path:
        return tmp_path / ("state" if same_name else f"step-{number}")

    last, num_interrupted, num_saved = 0, 0, 0
    save_slowly(name(0), 0)
    for _ in range(NUM_KILLS):
        reader, writer = os.pipe()

        def train(first: int = last + 1, writer: int = writer) -> None:
            with sole_writer(tmp_path):
                for number in range(first, first + 10_000):
                    save_slowly(name(number), number)
                    os.write(writer, number.to_bytes(4, "little"))
                    # The older folders would only slow the test down.
                    if not same_name:
                        prune(tmp_path, "step-*", keep=2, current=name(number))

        child = in_child(train)
        time.sleep(moment.uniform(0.005, 0.12))
        kill(child)
        os.close(writer)
        reported = b"".join(iter(lambda reader=reader: os.read(reader, 4096), b""))
        os.close(reader)
        done = int.from_bytes(reported[-4:], "little") if reported else last
        num_interrupted += bool(leftovers(tmp_path))
        num_saved += len(reported) // 4
        with sole_writer(tmp_path):
            assert [] == leftovers(tmp_path)
        skipped: list[str] = []
        found = latest_valid(
            tmp_path, "st*", lambda path, reason, told=skipped: told.append(reason)
        )

        assert [] == skipped
        assert found is not None
        last = found[1].meta["number"]
        assert last in (done, done + 1)
        assert content(last) == {file: (found[0] / file).read_bytes() for file in content(last)}

    assert num_interrupted >= NUM_KILLS // 4
    assert num_saved >= NUM_KILLS // 4


def test_what_a_kill_between_the_two_renames_left_is_put_back(tmp_path):
    write_folder(tmp_path / "runs" / "step-1", content(1), {"number": 1})
    (tmp_path / "runs" / "step-1").rename(tmp_path / "runs" / ".step-1.0123abcd.retired")

    assert latest_valid(tmp_path / "runs", "step-*") is None
    with sole_writer(tmp_path):
        assert verify_folder(tmp_path / "runs" / "step-1").meta == {"number": 1}


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("file", [store.TENSORS, store.STATE, MANIFEST])
def test_a_flipped_bit_is_found_and_its_file_named(tmp_path, file):
    folder = tmp_path / "step-1"
    save_state(folder, {"w": torch.randn(3, 5)}, {"position": 3}, {"loss": 1.5, "note": "a b"})
    path = folder / file
    rng = random.Random(0)
    size = path.stat().st_size
    for place in range(size):
        bit = rng.randrange(8)
        flip(path, place, bit)

        with pytest.raises(CheckpointError, match=f"step-1/{file}"):
            verify_folder(folder)

        flip(path, place, bit)
    verify_folder(folder)


def test_missing_and_cut_files_are_named(tmp_path):
    write_folder(tmp_path / "a", content(1), {})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "a" / "weights.bin").unlink()
    os.truncate(tmp_path / "b" / "weights.bin", 3999)
    (tmp_path / "c" / MANIFEST).unlink()

    with pytest.raises(CheckpointError, match=r"a/weights\.bin: missing"):
        verify_folder(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"b/weights\.bin: 3,999 bytes, but 4,000"):
        verify_folder(tmp_path / "b", hashes=False)
    with pytest.raises(CheckpointError, match=r"c/manifest\.json: missing"):
        verify_folder(tmp_path / "c")


def test_a_newer_schema_is_refused_as_such(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(store, "SCHEMA_VERSION", 2)
        write_folder(tmp_path / "a", content(1), {})

    with pytest.raises(CheckpointError, match=r"newer version \(schema 2"):
        verify_folder(tmp_path / "a")


def test_the_newest_sound_folder_is_found_and_the_damaged_ones_are_told(tmp_path):
    for number in (8, 9, 10, 100):
        write_folder(tmp_path / f"step-{number}", content(number), {"number": number})
    flip(tmp_path / "step-100" / "weights.bin", 77)
    (tmp_path / "step-10" / MANIFEST).unlink()
    skipped = []
    found = latest_valid(tmp_path, "step-*", lambda path, reason: skipped.append((path, reason)))

    assert found is not None
    assert tmp_path / "step-9" == found[0]
    assert {"number": 9} == found[1].meta
    assert [tmp_path / "step-100", tmp_path / "step-10"] == [path for path, _ in skipped]
    assert "SHA-256" in skipped[0][1]
    assert latest_valid(tmp_path / "nowhere", "step-*") is None


def test_pruning_keeps_the_one_just_written_and_the_newest_before_it(tmp_path):
    for number in (8, 9, 10, 11, 100):
        write_folder(tmp_path / f"step-{number}", content(number), {})
    prune(tmp_path, "step-*", keep=2, current=tmp_path / "step-11")

    assert {"step-10", "step-11"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_at_any_sync_leaves_the_older_folder_and_nothing_else(
    tmp_path, monkeypatch, code
):
    write_folder(tmp_path / "step-1", content(1), {"number": 1})
    real_sync = os.fsync
    num_failed = 0
    for fails_at in range(10):
        calls = iter(range(100))

        def full(handle: int, fails_at: int = fails_at, calls=calls) -> None:
            if next(calls) == fails_at:
                raise OSError(code, os.strerror(code))
            real_sync(handle)

        monkeypatch.setattr(store.os, "fsync", full)
        try:
            write_folder(tmp_path / "step-2", content(2), {"number": 2})
        except CapacityError as error:
            num_failed += 1
            message = str(error)

            assert f"{tmp_path / 'step-2'}: {os.strerror(code)}" in message
            assert "4,001 bytes are needed" in message
            assert "bytes are free" in message
        if next(calls) <= fails_at:
            break  # it was written without reaching the failure

        # The last sync is the parent's, behind the rename: then the new folder is whole.
        assert [] == leftovers(tmp_path)
        for folder in tmp_path.iterdir():
            verify_folder(folder)
        assert (tmp_path / "step-1").exists()
        shutil.rmtree(tmp_path / "step-2", ignore_errors=True)

    assert num_failed == 5  # two files, the manifest, the folder, the parent


def test_too_little_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)

    with pytest.raises(CapacityError, match="2,400 bytes are needed, 1,000 bytes are free"):
        write_folder(tmp_path / "a", {"x": lambda path: pytest.fail("written")}, {}, num_bytes=2400)
    assert [] == list(tmp_path.iterdir())


def test_a_write_of_tensors_that_fails_half_way_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        with pytest.raises(CheckpointError, match="step-1: cannot be written: File too large"):
            save_state(tmp_path / "step-1", {"w": torch.zeros(100, 100)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [] == list(tmp_path.iterdir())


def test_only_one_process_writes_to_a_folder_at_a_time(tmp_path):
    reader, writer = os.pipe()

    def hold() -> None:
        with sole_writer(tmp_path):
            os.write(writer, b".")
            time.sleep(60)

    child = in_child(hold)
    try:
        os.read(reader, 1)
        with (
            pytest.raises(ParameterError, match=f"written by process {child}"),
            sole_writer(tmp_path),
        ):
            pytest.fail("two at once")
    finally:
        kill(child)
    with sole_writer(tmp_path), suppress(ParameterError), sole_writer(tmp_path):
        pytest.fail("two at once in one process")


class Trainee:
    """A model, its optimiser and noise from both generators: everything that must continue."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        groups = [
            {"params": [self.model[0].weight], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p is not self.model[0].weight]},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(4, 6) * random.random()
            loss = self.model(x).square().sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def test_training_continues_bit_for_bit_from_a_saved_state(tmp_path):
    first = Trainee(1)
    first.train(5)
    state = {"optimizer": first.optimizer.state_dict(), "random": random_state(), "position": 5}
    save_state(tmp_path / "step-5", first.model.state_dict(), state, {"loss": 0.5})
    expected = first.train(7)
    second = Trainee(2)
    loaded = load_state(tmp_path / "step-5")
    second.model.load_state_dict(loaded.tensors)
    second.optimizer.load_state_dict(loaded.state["optimizer"])
    restore_random_state(loaded.state["random"])

    assert expected == second.train(7)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert (
        first.optimizer.state_dict()["param_groups"]
        == (second.optimizer.state_dict()["param_groups"])
    )
    assert 5 == loaded.state["position"]
    assert {"loss": 0.5} == loaded.meta


def test_any_nesting_survives_with_its_types(tmp_path):
    shared = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    state = {
        "plain": [None, True, 1, 1e-300, math.inf, "\u00e9", (), [], {}],
        "items": {"a": (1, [2.5, (3,)])},
        "keys": {0: "zero", "0": "text", 10**20: -1},
        "tensors": ({"x": torch.tensor(2.5)}, [torch.zeros(0, 3), shared[1:], shared[1:].T]),
    }
    save_state(tmp_path / "a", {"rows": shared, "again": shared}, state)
    loaded = load_state(tmp_path / "a")

    for name in ("plain", "items", "keys"):
        assert state[name] == loaded.state[name]
        assert repr(state[name]) == repr(loaded.state[name])
    nested, listed = loaded.state["tensors"]
    assert 2.5 == nested["x"].item()
    assert (0, 3) == listed[0].shape
    assert torch.equal(shared[1:], listed[1])
    assert torch.equal(shared[1:].T, listed[2])
    assert torch.equal(shared, loaded.tensors["rows"])
    assert torch.equal(shared, loaded.tensors["again"])


def test_a_folder_that_is_no_training_state_is_refused(tmp_path):
    write_folder(tmp_path / "a", content(1), {})

    with pytest.raises(CheckpointError, match="not a training state"):
        load_state(tmp_path / "a")
