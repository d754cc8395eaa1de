"""The machine: what it is called, what chooses its kernels, and what was found out about it before.

Owns the fingerprint under which a text can be expected to repeat, and the cache of measurements
(row ranges, self-test, costs), which are valid only for the very same machine, libraries, settings
and sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import torch

from outrider.models.linear import has_packed_kernels

Result = TypeVar("Result")

_KERNEL_SWITCHES = frozenset(
    {
        "ONEDNN_MAX_CPU_ISA",
        "DNNL_MAX_CPU_ISA",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "DNNL_DEFAULT_FPMATH_MODE",
        "ATEN_CPU_CAPABILITY",
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "MKL_DEBUG_CPU_TYPE",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
    }
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a text depends on besides prompt, parameters and seed.

    ``is_exact`` is None when the self-test was skipped.
    """

    model: str
    weights_hash: str
    dtype: str
    threads: int
    processor: str
    torch_version: str
    kernels: str
    is_exact: bool | None

    @property
    def level(self) -> str:
        """The exactness level in one word."""
        return {True: "L2", False: "L3", None: "untested"}[self.is_exact]

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"{self.model} {self.weights_hash[:12]} · {self.dtype} · {self.threads} threads · "
            f"{self.processor} · torch {self.torch_version} {self.kernels} · exactness {self.level}"
        )

    def to_json(self) -> dict[str, object]:
        """All fields and the level."""
        return {**asdict(self), "level": self.level}


def processor_name() -> str:
    """The processor's marketing name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


def machine_key(dtype: torch.dtype) -> str:
    """Names everything that chooses kernels, apart from the shapes.

    Model names lie on virtual machines, so the processor's features count too; so do the variables
    and switches by which its libraries can be told to use other kernels, and our own sources.
    """
    variables = {name: os.environ[name] for name in sorted(os.environ) if name in _KERNEL_SWITCHES}
    parts = [
        processor_name(),
        _digest(_processor_features().encode()),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        f"numba={numba.__version__}",
        f"packed={has_packed_kernels(dtype)}",
        str(dtype),
        torch.get_float32_matmul_precision(),
        f"threads={torch.get_num_threads()}",
        f"variables={variables}",
        f"numerics={_numerics_digest()}",
    ]
    return " ".join(parts)


def _processor_features() -> str:
    """The feature lines of one core, where the system lists them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.machine()
    first_core = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    wanted = ("flags", "Features", "CPU part", "CPU implementer", "model\t", "stepping")
    return "\n".join(line for line in first_core.splitlines() if line.startswith(wanted))


@cache
def _numerics_digest() -> str:
    """A digest of the sources that decide a logit's bits: an edit makes old results void."""
    root = Path(__file__).parent
    files = [
        root / f"{name}.py"
        for name in ("attention", "decoder", "exactness", "layers", "linear", "norm")
    ]
    files += [*sorted((root / "kernels").glob("*.py")), root.parent / "kv_cache.py"]
    return _digest(b"".join(file.read_bytes() for file in files))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class ResultCache:
    """A small JSON file per key in the user cache; an unreadable one counts as absent.

    With ``is_trusted`` False nothing is read, so everything is measured and stored anew.
    """

    def __init__(self, folder: Path, *, is_trusted: bool = True) -> None:
        self._folder = folder / "self-test"
        self._is_trusted = is_trusted

    def get(self, key: str, parse: Callable[[dict[str, Any]], Result]) -> Result | None:
        """The remembered result, read by ``parse``; None where there is none that can be read."""
        if not self._is_trusted:
            return None
        try:
            found = json.loads(self._path(key).read_text(encoding="utf-8"))
            return parse(found) if found["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, result: dict[str, object]) -> None:
        """Remember a result; a cache that cannot be written costs a repeat, not the run."""
        temporary: Path | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._folder, suffix=".tmp", delete=False, encoding="utf-8"
            ) as file:
                temporary = Path(file.name)
                json.dump({"key": key, **result}, file)
            temporary.replace(self._path(key))
        except OSError:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def preferred_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it natively (AMX, AVX512-BF16), else float32."""
    has_native = (
        getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    )
    return torch.bfloat16 if has_native and has_packed_kernels(torch.bfloat16) else torch.float32
