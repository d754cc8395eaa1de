"""The memory plan: what a model, its cache and its buffers will take, before anything is allocated.

Owns the arithmetic and the comparison with what the machine has left; allocates nothing. Printed by
``inspect`` and enforced by :mod:`outrider.llm`, which also has it return what loading has freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from outrider.config import FIRST_STEP_TOKENS
from outrider.errors import CapacityError
from outrider.kv_cache import KVCache
from outrider.models.architecture import DecoderConfig


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the plan."""

    what: str
    detail: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything that will be allocated, and what the machine has available (None: unknown)."""

    items: tuple[MemoryItem, ...]
    available_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """Sum of the plan."""
        return sum(item.size_bytes for item in self.items)

    def rows(self) -> list[tuple[str, str, int]]:
        """(what, detail, bytes) for a table."""
        return [(item.what, item.detail, item.size_bytes) for item in self.items]

    def without_weights(self) -> MemoryPlan:
        """What a second engine on the same weights takes."""
        shared = ("layers", "embedding", "output head")
        own = tuple(item for item in self.items if item.what not in shared)
        return MemoryPlan(own, self.available_bytes)

    def plus(self, items: Iterable[MemoryItem]) -> MemoryPlan:
        """The same with further lines."""
        return MemoryPlan((*self.items, *items), self.available_bytes)

    def check(self) -> None:
        """Refuse a plan that does not fit.

        Raises:
            CapacityError: with the plan's numbers and what to lower.
        """
        if self.available_bytes is None or self.total_bytes <= self.available_bytes:
            return
        parts = ", ".join(f"{item.what} {_gib(item.size_bytes)}" for item in self.items)
        raise CapacityError(
            f"the plan needs {_gib(self.total_bytes)} ({parts}) but {_gib(self.available_bytes)} "
            "are available; lower max_model_len or max_batch_size, or take a smaller model"
        )


def plan_memory(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    max_batch_size: int,
    max_model_len: int,
    max_draft_tokens: int,
    prefill_chunk: int = 256,
) -> MemoryPlan:
    """Plan weights, cache and the buffers of the widest pass.

    ``max_draft_tokens`` is the most tree nodes one request verifies in a step, root excluded.
    """
    sizes = {name: prod(shape) for name, shape in config.weight_shapes().items()}
    embedding = sizes.pop("embed.weight")
    head = sizes.pop("lm_head.weight", embedding)
    num_slots = max_model_len + max_draft_tokens
    step_rows = max_batch_size * (FIRST_STEP_TOKENS + 1 + max_draft_tokens)
    rows = max(step_rows, min(prefill_chunk, max_batch_size * max_model_len))
    logits_bytes = max_batch_size * (1 + max_draft_tokens) * config.vocab_size * 8
    attention_bytes = rows * config.num_heads * config.head_dim * 4  # rotated queries
    activation_bytes = rows * (4 * config.mlp_size + 8 * config.hidden_size) * 4
    width = f"{dtype}".removeprefix("torch.")
    items = (
        MemoryItem(
            "layers", f"{config.num_layers} layers, {width}", sum(sizes.values()) * dtype.itemsize
        ),
        MemoryItem("embedding", f"{config.vocab_size:,} tokens", embedding * dtype.itemsize),
        MemoryItem("output head", "packed", head * dtype.itemsize),
        cache_item("KV cache", config, dtype, max_batch_size, num_slots),
        MemoryItem(
            "buffers",
            "logits, attention, activations of the widest pass",
            logits_bytes + attention_bytes + activation_bytes,
        ),
    )
    return MemoryPlan(items, available_memory())


def weights_item(
    what: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> MemoryItem:
    """The line of a set of weights."""
    count = sum(prod(shape) for shape in shapes.values())
    width = f"{dtype}".removeprefix("torch.")
    return MemoryItem(what, f"{len(shapes)} tensors, {width}", count * dtype.itemsize)


def cache_item(
    what: str, layers: DecoderConfig, dtype: torch.dtype, max_batch_size: int, num_slots: int
) -> MemoryItem:
    """The line of a KV cache for these layers."""
    size = KVCache.size_bytes(
        num_layers=layers.num_layers,
        num_kv_heads=layers.num_kv_heads,
        head_dim=layers.head_dim,
        max_batch_size=max_batch_size,
        num_slots=num_slots,
        dtype=dtype,
    )
    width = f"{dtype}".removeprefix("torch.")
    return MemoryItem(what, f"{max_batch_size} x {num_slots:,} slots, {width}", size)


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping: the system's, capped by the cgroup's limit."""
    available: int | None = None
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"))
        available = int(match.group(1)) * 1024 if match else None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup, or "max"
        return available
    left = max(0, limit - used)
    return left if available is None else min(available, left)


def return_freed_memory() -> None:
    """Give the system what the allocator still holds of freed tensors; does nothing without glibc.

    A checkpoint's tensors are widened one by one while it is loaded, and glibc keeps their memory
    in the loading thread's arena, where nobody asks for it again: 58 MB of the embedded model.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # each system lacks it otherwise
        ctypes.CDLL(None).malloc_trim(0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
