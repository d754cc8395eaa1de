"""What a figure depends on besides the program: machine, versions, switches. No torch, no network.

Owns the description of the machine that the client runs on; with servers on the same machine it is
theirs too, and only then. What only a server knows (precision, checkpoint) comes from its arm.
Names of the host and of its user are left out: a report is handed around.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

API_KEY = "OUTRIDER_BENCH_API_KEY"
# What changes how fast a server runs without being a flag of it.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "LRU_CACHE_CAPACITY",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "OUTRIDER_THREADS",
    "THP_MEM_ALLOC_ENABLE",
    "TORCH_NUM_THREADS",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
)
_PACKAGES = (
    "aiohttp", "numpy", "outrider", "safetensors", "sglang", "tensorrt-llm", "tokenizers",
    "torch", "transformers", "uvicorn", "vllm",
)  # fmt: skip
_GPU_FIELDS = (
    "name", "driver_version", "memory.total", "persistence_mode", "power.limit",
    "clocks.sm", "clocks.max.sm", "temperature.gpu", "mig.mode.current",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Processor, memory, governor, huge pages, GPUs and load of this machine, as far as told."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "num_cores": os.cpu_count(),
        "num_usable_cores": _usable_cores(),
        "memory_bytes": _memory_bytes(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "transparent_huge_pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load_average": _load_average(),
        "gpus": gpus(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return {name: value for name, value in found.items() if value not in (None, {}, [])}


def versions() -> dict[str, str]:
    """Python, and the installed packages that measure or serve."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def api_key() -> str | None:
    """The key that servers under test want; from the environment, where other users cannot read."""
    return os.environ.get(API_KEY) or None


def gpus() -> list[Mapping[str, str]]:
    """State of every NVIDIA GPU by field; empty without one, or where the driver does not answer.

    Only asks: settings of a GPU are never touched.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(lines: str) -> list[Mapping[str, str]]:
    """Rows of ``nvidia-smi --format=csv,noheader`` by field."""
    rows = [[cell.strip() for cell in line.split(",")] for line in lines.splitlines() if line]
    return [
        dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)
    ]


def _processor() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    """Cores that this process may use: fewer than the machine's in a container or under taskset."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _load_average() -> list[float] | None:
    """Runnable processes over 1, 5 and 15 minutes: above 0 before a run, somebody else is busy."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (OSError, AttributeError):
        return None


def _chosen(text: str | None) -> str | None:
    """``madvise`` of ``always [madvise] never``."""
    return None if text is None else text.partition("[")[2].partition("]")[0] or text


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None
