"""Keys and values of every running request, in preallocated slots.

Owns slots: nothing else in the program knows where a token's keys lie. The decoder writes and
reads through a :class:`StepSlots`, ``step`` commits the accepted path, the scheduler takes and
frees rows. One cache row per request, half-open intervals of slots::

    [0 ............ committed)[committed .... committed + T)[........ num_slots)
     tokens of the request     this pass: root, then nodes    free (zero or stale, masked)

    commit(path = 2, 4):       root  1  2  3  4              write order
                               root  2  4  |                 kept, moved together; rest is stale

Keys are stored after rotation, each at its token's own position, so moving a node to its final
slot changes nothing in it. Stale slots may hold any numbers, since no kernel reads what a row does
not see; a row that may hold what is not finite is scrubbed all the same when it is given back.

Values lie slot by slot. Keys lie in blocks of ``KEY_BLOCK`` slots, a dimension's keys side by side,
as the attention kernel (:mod:`outrider.models.kernels.attention`) computes their scores.

A freed row keeps its contents until it is taken again, and a prefix of any row is good for whoever
begins with the same tokens: a row can be taken with that prefix committed, or get it copied. Which
rows hold what, and who may have it, :mod:`outrider.prefix_cache` knows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

KEY_BLOCK = 64
"""Slots whose keys lie together, dimension by dimension."""

VALUE_MULTIPLE = 16
"""Values are padded to a multiple of this many dimensions: whole vectors of the kernel."""


@dataclass(frozen=True, slots=True)
class StepSlots:
    """Where one forward pass writes and reads: a segment of consecutive slots per request.

    ``row_R`` and ``slot_R`` are the cache row and slot of each of the pass' packed rows.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    row_R: np.ndarray
    slot_R: np.ndarray

    @property
    def live_lens(self) -> tuple[int, ...]:
        """Committed plus new tokens of each request."""
        return tuple(s + n for s, n in zip(self.starts, self.counts, strict=True))


class KVCache:
    """Preallocated ``max_batch_size`` x ``num_slots`` cache of all layers.

    Keys are ``[L, B, G, S / KEY_BLOCK, K, KEY_BLOCK]``, values ``[L, B, G, S, K]`` with S and K
    padded; see the module's docstring.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch_size: int,
        num_slots: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots = num_slots
        self.head_dim = head_dim
        self.num_blocks, self.value_width = _padded(num_slots, head_dim)
        panels = (num_layers, max_batch_size, num_kv_heads)
        self._keys = torch.zeros(*panels, self.num_blocks, head_dim, KEY_BLOCK, dtype=dtype)
        self._values = torch.zeros(
            *panels, self.num_blocks * KEY_BLOCK, self.value_width, dtype=dtype
        )
        self._layers = [
            (flat(keys), flat(values))
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        self._committed = [0] * max_batch_size
        self._free_rows = list(range(max_batch_size))

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be taken in."""
        return len(self._free_rows)

    @property
    def free_rows(self) -> list[int]:
        """The rows that nobody holds, ascending."""
        return sorted(self._free_rows)

    def allocate(self, row: int | None = None, *, committed: int = 0) -> int:
        """Take a free row, the lowest unless one is named; running requests stay dense.

        Its first ``committed`` slots, left by whoever freed it, count as committed.
        """
        if row is None:
            row = heapq.heappop(self._free_rows)
        else:
            self._free_rows.remove(row)
            heapq.heapify(self._free_rows)
        self._committed[row] = committed
        return row

    def free(self, row: int, *, scrub: bool = False) -> None:
        """Give a row back; scrub it if what it holds may not be finite."""
        assert row not in self._free_rows, "row freed twice"
        self._committed[row] = 0
        if scrub:
            self.scrub(row, self.num_slots)
        heapq.heappush(self._free_rows, row)

    def committed(self, row: int) -> int:
        """Tokens of this request whose keys and values are final."""
        return self._committed[row]

    def begin(
        self, rows: Sequence[int], counts: Sequence[int], earlier: Sequence[int] | None = None
    ) -> StepSlots:
        """Plan a pass that writes ``counts[b]`` tokens behind request ``rows[b]``'s prefix.

        ``earlier[b]`` slots behind the prefix are left as they are: passes before this one wrote
        rows of the same tree there, which are not committed.
        """
        earlier = [0] * len(rows) if earlier is None else earlier
        starts = tuple(self._committed[row] + n for row, n in zip(rows, earlier, strict=True))
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        assert max(ends) <= self.num_slots, "a pass must be clipped to the room left"
        row_R = np.repeat(np.array(rows), counts)
        slot_R = np.concatenate([np.arange(*span) for span in zip(starts, ends, strict=True)])
        return StepSlots(tuple(rows), starts, tuple(counts), row_R, slot_R)

    def layer(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A layer's keys and values as the flat arrays that kernels take; bfloat16 as its bits."""
        return self._layers[index]

    def write(self, layer: int, slots: StepSlots, key_RGK: Tensor, value_RGK: Tensor) -> None:
        """Store a pass' keys and values of one layer: the plain twin of what the kernel does."""
        rows, slot_R = torch.from_numpy(slots.row_R), torch.from_numpy(slots.slot_R)
        keys, values = self._keys[layer], self._values[layer]
        keys[rows, :, slot_R // KEY_BLOCK, :, slot_R % KEY_BLOCK] = key_RGK.to(keys.dtype)
        values[rows, :, slot_R, : self.head_dim] = value_RGK.to(values.dtype)

    def read(self, row: int, count: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values ``[L, G, count, K]`` in a row's first slots."""
        keys_LGSK = self._keys[:, row].transpose(-1, -2).flatten(2, 3)
        return keys_LGSK[:, :, :count], self._values[:, row, :, :count, : self.head_dim].clone()

    def extend(self, row: int, count: int) -> None:
        """Commit the first ``count`` tokens of the last pass as they lie (prefill)."""
        self._committed[row] += count
        assert self._committed[row] <= self.num_slots

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Commit the root and the accepted nodes of the last pass; the rest is rolled back.

        ``path`` are node indices (root is 0 and implied), ascending.
        """
        start = self._committed[row]
        final = list(range(1, len(path) + 1))
        if list(path) != final:
            source = torch.tensor([start + node for node in path])
            target = torch.tensor([start + place for place in final])
            self._values[:, row, :, target] = self._values[:, row, :, source]
            keys = self._keys[:, row]
            moved = keys[:, :, source // KEY_BLOCK, :, source % KEY_BLOCK]
            keys[:, :, target // KEY_BLOCK, :, target % KEY_BLOCK] = moved
        self._committed[row] = start + 1 + len(path)

    def rollback(self, row: int, committed: int) -> None:
        """Keep only the first ``committed`` committed slots."""
        assert committed <= self._committed[row]
        self._committed[row] = committed

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        """Commit a copy of another row's first ``count`` slots, bit for bit, as all of this row.

        The source may be a running row or a freed one that still holds them.
        """
        blocks = -(-count // KEY_BLOCK)
        self._keys[:, row, :, :blocks] = self._keys[:, source, :, :blocks]
        self._values[:, row, :, :count] = self._values[:, source, :, :count]
        self._committed[row] = count

    def scrub(self, row: int, count: int) -> None:
        """Zero the ``count`` slots behind the committed prefix: they may hold NaN or infinity."""
        start = self._committed[row]
        slot_S = torch.arange(start, start + count)
        self._keys[:, row, :, slot_S // KEY_BLOCK, :, slot_S % KEY_BLOCK] = 0
        self._values[:, row, :, start : start + count] = 0

    @staticmethod
    def size_bytes(
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch_size: int,
        num_slots: int,
        dtype: torch.dtype,
    ) -> int:
        """Bytes that a cache of these sizes takes."""
        num_blocks, value_width = _padded(num_slots, head_dim)
        per_slot = num_layers * num_kv_heads * (head_dim + value_width) * dtype.itemsize
        return per_slot * max_batch_size * num_blocks * KEY_BLOCK


def _padded(num_slots: int, head_dim: int) -> tuple[int, int]:
    """Blocks of keys that hold this many slots, and the dimensions that values are padded to."""
    return -(-num_slots // KEY_BLOCK), -(-head_dim // VALUE_MULTIPLE) * VALUE_MULTIPLE


def flat(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor's memory as kernels take it; bfloat16, which numpy lacks, as its bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.view(-1).numpy()
