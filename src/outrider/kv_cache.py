"""Keys and values of every running request, in preallocated slots.

Owns slots: nothing else in the program knows where a token's keys lie. The decoder writes and
reads through a :class:`StepSlots`, ``step`` commits the accepted path, the scheduler takes and
frees rows. One cache row per request, half-open intervals of slots::

    [0 ............ committed)[committed .... committed + T)[........ num_slots)
     tokens of the request     this pass: root, then nodes    free (zero or stale, masked)

    commit(path = 2, 4):       root  1  2  3  4              write order
                               root  2  4  |                 kept, moved together; rest is stale

Keys are stored after rotation, each at its token's own position, so moving a node to its final
slot changes nothing in it. Stale slots may hold any finite numbers: masked, they weigh exactly
zero. Non-finite ones would not (0 * inf is not 0), so they are scrubbed.

A freed row keeps its contents until it is taken again, and a prefix of any row is good for whoever
begins with the same tokens: a row can be taken with that prefix committed, or get it copied. Which
rows hold what, and who may have it, :mod:`outrider.prefix_cache` knows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepSlots:
    """Where one forward pass writes and reads: a segment of consecutive slots per request.

    Views of all layers are made once per pass: ``live[b]`` holds request b's keys and values
    ``[G, S_b, K]`` by layer, committed and new, ``own`` a single request's new slots ``[T, G, K]``
    (None for several, whose rows ``row_R``/``slot_R`` address).
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    live: tuple[tuple[Sequence[Tensor], Sequence[Tensor]], ...]
    own: tuple[Sequence[Tensor], Sequence[Tensor]] | None
    row_R: Tensor | None = None
    slot_R: Tensor | None = None

    @property
    def live_lens(self) -> tuple[int, ...]:
        """Committed plus new tokens of each request."""
        return tuple(s + n for s, n in zip(self.starts, self.counts, strict=True))


class KVCache:
    """Preallocated ``max_batch_size`` x ``num_slots`` cache of all layers.

    Shapes: ``[L, B, G, S, K]`` for keys and values alike.
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
        shape = (num_layers, max_batch_size, num_kv_heads, num_slots, head_dim)
        self.num_slots = num_slots
        self._keys_LBGSK = torch.zeros(shape, dtype=dtype)
        self._values_LBGSK = torch.zeros(shape, dtype=dtype)
        self._keys = list(self._keys_LBGSK.unbind(0))
        self._values = list(self._values_LBGSK.unbind(0))
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
        """Give a row back. Stale contents will be masked; scrub them if they may not be finite."""
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
        live = tuple(
            self._views((slice(None), row, slice(None), slice(end)))
            for row, end in zip(rows, ends, strict=True)
        )
        if len(rows) == 1:
            window = slice(starts[0], ends[0])
            own = self._views((slice(None), rows[0], slice(None), window), swap=(1, 2))
            return StepSlots(tuple(rows), starts, tuple(counts), live, own)
        packed = [
            (row, start + offset)
            for row, start, count in zip(rows, starts, counts, strict=True)
            for offset in range(count)
        ]
        row_R, slot_R = torch.tensor(packed).unbind(1)
        return StepSlots(tuple(rows), starts, tuple(counts), live, None, row_R, slot_R)

    def write(self, layer: int, slots: StepSlots, key_RGK: Tensor, value_RGK: Tensor) -> None:
        """Store the pass's keys and values of one layer, rounded to the cache's dtype."""
        if slots.own is not None:
            slots.own[0][layer].copy_(key_RGK)
            slots.own[1][layer].copy_(value_RGK)
            return
        keys, values = self._keys[layer], self._values[layer]
        keys[slots.row_R, :, slots.slot_R] = key_RGK.to(keys.dtype)
        values[slots.row_R, :, slots.slot_R] = value_RGK.to(values.dtype)

    def read(self, layer: int, slots: StepSlots, request: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[G, S_b, K]`` of one request of the pass, committed and new."""
        keys, values = slots.live[request]
        return keys[layer], values[layer]

    def _views(
        self, place: tuple[slice | int, ...], swap: tuple[int, int] | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """One view per layer of the same place in keys and values."""
        keys, values = self._keys_LBGSK[place], self._values_LBGSK[place]
        if swap is not None:
            keys, values = keys.transpose(*swap), values.transpose(*swap)
        return keys.unbind(0), values.unbind(0)

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
            for cache in (self._keys_LBGSK, self._values_LBGSK):
                cache[:, row, :, target] = cache[:, row, :, source]
        self._committed[row] = start + 1 + len(path)

    def rollback(self, row: int, committed: int) -> None:
        """Keep only the first ``committed`` committed slots."""
        assert committed <= self._committed[row]
        self._committed[row] = committed

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        """Commit a copy of another row's first ``count`` slots, bit for bit, as all of this row.

        The source may be a running row or a freed one that still holds them.
        """
        for cache in (self._keys_LBGSK, self._values_LBGSK):
            cache[:, row, :, :count] = cache[:, source, :, :count]
        self._committed[row] = count

    def scrub(self, row: int, count: int) -> None:
        """Zero the ``count`` slots behind the committed prefix: they may hold NaN or infinity."""
        start = self._committed[row]
        self._keys_LBGSK[:, row, :, start : start + count] = 0
        self._values_LBGSK[:, row, :, start : start + count] = 0

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
        per_slot = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
        return per_slot * max_batch_size * num_slots
