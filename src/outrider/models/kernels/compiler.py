"""How a Python function becomes a kernel: compiled once per machine, kept in the user cache.

Owns numba's settings. Compiled code lies under a digest of this package's sources, since numba
itself looks only at the file a kernel is written in and not at those whose functions it uses.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numba
import numba.extending
import torch

from outrider.models.loading.cache import cache_root

# Kernels and torch must share one team of threads: two teams on the same cores wait for each other.
# numba's "omp" layer asks for the OpenMP library by the name under which torch has loaded it.
_HAS_SHARED_THREADS = find_spec("numba.np.ufunc.omppool") is not None and os.name == "posix"


_SETTINGS: Any = import_module("numba.core.config")  # its names are made when it is imported

THREADED_WORK_NS = 40_000  # a hand-over to other threads takes some 5,000

# What numba makes of a function is opaque to a type checker, hence Any.


def operation(function: Callable[..., Any]) -> Any:
    """An operation of kernels that is written as LLVM instructions."""
    return numba.extending.intrinsic(function)


def helper(function: Callable[..., Any]) -> Any:
    """A function that kernels call; compiled as part of them."""
    return numba.njit(function, error_model="numpy")


def kernel(function: Callable[..., Any]) -> Any:
    """A kernel that runs in the calling thread."""
    return _compiled(function, parallel=False)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """The same with its ``prange`` loops shared between torch's threads.

    Where threads cannot be shared with torch it runs in the calling one.
    """
    return _compiled(function, parallel=_HAS_SHARED_THREADS)


def use_threads(work_ns: float) -> int:
    """How many threads some work is worth; where several, parallel kernels get torch's number.

    ``work_ns`` is about how long one thread takes.
    """
    if not _HAS_SHARED_THREADS or work_ns < THREADED_WORK_NS:
        return 1
    count = min(torch.get_num_threads(), _SETTINGS.NUMBA_NUM_THREADS)
    if count > 1:  # a process with one thread starts no others, and so may still be forked
        numba.set_num_threads(count)
    return count


def _compiled(function: Callable[..., Any], *, parallel: bool) -> Any:
    _SETTINGS.THREADING_LAYER = "omp" if _HAS_SHARED_THREADS else "default"
    before = _SETTINGS.CACHE_DIR
    _SETTINGS.CACHE_DIR = str(_folder())
    try:
        return numba.njit(function, parallel=parallel, cache=True, nogil=True, error_model="numpy")
    finally:
        _SETTINGS.CACHE_DIR = before


def _folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return cache_root() / "kernels" / digest.hexdigest()[:16]
