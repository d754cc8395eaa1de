"""Hashes of large files are remembered, and a memory is never trusted past a change."""

from __future__ import annotations

import hashlib
import os

import pytest

from outrider.models.loading.hashing import file_sha256


def test_a_hash_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.models.loading.hashing._WORTH_REMEMBERING", 0)
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    first = file_sha256(path, cache)
    state = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))

    assert hashlib.sha256(b"one").hexdigest() == first
    assert first == file_sha256(path, cache)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert hashlib.sha256(b"two").hexdigest() == file_sha256(path, cache)


@pytest.mark.parametrize("memory", [b"", b"{", b"[]", b'{"sha256": 5}', b"\xff"])
def test_a_damaged_memory_is_ignored(tmp_path, monkeypatch, memory):
    monkeypatch.setattr("outrider.models.loading.hashing._WORTH_REMEMBERING", 0)
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    expected = file_sha256(path, cache)
    for remembered in (cache / "hashes").iterdir():
        remembered.write_bytes(memory)

    assert expected == file_sha256(path, cache)


def test_a_cache_that_cannot_be_written_does_not_stop_hashing(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.models.loading.hashing._WORTH_REMEMBERING", 0)
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    cache.write_text("a file where the folder should be")

    assert hashlib.sha256(b"one").hexdigest() == file_sha256(path, cache)
