"""The user cache: where it is, who may change it, and how a file appears in it whole or not at all.

Everything Outrider downloads or remembers lives under one folder that may be deleted at any time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import platformdirs

CACHE_VARIABLE = "OUTRIDER_CACHE"
_RETRY_S = 0.2


def cache_root() -> Path:
    """The cache folder: ``$OUTRIDER_CACHE``, else the platform's own place for caches."""
    chosen = os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("outrider")
    return Path(chosen).expanduser().absolute()


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file ``path``; ``on_wait`` is called once if another process holds it.

    The operating system lets go of the lock when a process dies, however it dies, so what a killed
    holder left behind may be cleaned up by the next one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if not _try_lock(file):
            on_wait()
            while not _try_lock(file):
                time.sleep(_RETRY_S)
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

    def _try_lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

else:
    import msvcrt

    def _try_lock(file: IO[bytes]) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
