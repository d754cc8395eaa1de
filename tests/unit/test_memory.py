"""What loading has freed goes back to the system, and oneDNN keeps no more than is used."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.models.memory import return_freed_memory

MIB = 1 << 20


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_memory_that_was_freed_below_something_that_is_kept_goes_back():
    blocks = [b"x" * 50_000 for _ in range(1500)]
    kept = b"y" * 50_000  # above them: the heap cannot simply shrink
    blocks.clear()
    before = resident_bytes()
    return_freed_memory()

    assert before - resident_bytes() > 40 * MIB
    assert len(kept) == 50_000


@pytest.mark.parametrize(("given", "expected"), [(None, "256"), ("77", "77")])
def test_onednns_memory_is_bounded_unless_the_user_says_otherwise(given, expected):
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {} if given is None else dict.fromkeys(names, given)
    code = f"import os, outrider; print([os.environ[name] for name in {names}])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert f"{[expected] * 2}\n" == done.stdout
