"""The user cache: where it is, who may change it, and how a file appears in it whole or not at all.

Everything Outrider downloads or remembers lives under one folder that may be deleted at any time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import platformdirs

CACHE_VARIABLE = "OUTRIDER_CACHE"


def cache_root() -> Path:
    """The cache folder: ``$OUTRIDER_CACHE``, else the platform's own place for caches."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("outrider"))


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for whoever holds it.

    The operating system lets go of the lock when a process dies, however it dies, so what a killed
    holder left behind may be cleaned up by the next one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _lock(file)
        try:
            yield
        finally:
            _unlock(file)


def publish(finished: Path, target: Path) -> None:
    """Move a finished file to its place so that a crash shows the old state or the new one."""
    with finished.open("rb+") as file:
        os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    finished.replace(target)
    if os.name == "posix":  # elsewhere a folder cannot be opened to be synced
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


if os.name == "posix":
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

else:
    import msvcrt
    import time

    def _lock(file: IO[bytes]) -> None:
        while True:
            file.seek(0)
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # gives up after ten seconds
            except OSError:
                time.sleep(0.1)
            else:
                return

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
