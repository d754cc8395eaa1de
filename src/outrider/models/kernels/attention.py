"""Rotation, cache writes and attention of all rows of a pass, in one call per layer.

Owns the order in which a row's sums are taken, and nothing else decides a bit of it:

1. queries and keys are rotated, keys and values written to the cache in its precision;
2. scores: for each key the sum over the head's dimensions, from the first to the last;
3. the keys that a row sees are moved together, in the order of their positions, so that masked
   siblings between them leave no trace;
4. softmax over those, sixteen partial sums folded at the end;
5. values: for each dimension the sum over those keys, from the first to the last.

A row that is computed alone, in a chunk of a prompt or as a node of a tree sees the same keys in
the same order, so it goes through the same operations. All of it is in float32.

The cache's layout (:mod:`outrider.kv_cache`) is made for it: keys lie in blocks of ``KEY_BLOCK``
slots with a dimension's keys side by side, so that scores of neighbouring keys are neighbouring
lanes; values lie slot by slot, so that neighbouring dimensions are.

Called by :mod:`outrider.models.layers`; its plain twin is
:func:`outrider.models.attention.reference_attention`.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from outrider.kv_cache import KEY_BLOCK, VALUE_MULTIPLE
from outrider.models.kernels.compiler import helper, kernel, parallel_kernel
from outrider.models.kernels.vector import (
    LANES,
    add,
    exp,
    fma,
    larger,
    largest_of,
    load,
    multiply,
    narrowed,
    splat,
    store,
    subtract,
    sum_of,
    widened,
)

_LOWEST = np.float32(-3e38)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_WIDE = 4 * LANES  # keys of a block, and columns of values that one loop over the keys takes
assert KEY_BLOCK == _WIDE
assert VALUE_MULTIPLE == LANES


@helper
def _rotate_head(source, start, norm, eps, cosine, sine, place, size, target, target_start, scale):
    """One head of one row: normed (Qwen3), rotated, scaled, to float32."""
    half = size // 2
    factor = _ONE
    if len(norm) > 0:
        total = _ZERO
        for i in range(size):
            x = widened(source[start + i])
            total += x * x
        factor = _ONE / np.sqrt(total / np.float32(size) + eps)
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        first = multiply(load(source, start + i), splat(factor))
        second = multiply(load(source, start + half + i), splat(factor))
        if len(norm) > 0:
            first = multiply(first, load(norm, i))
            second = multiply(second, load(norm, half + i))
        if len(cosine) > 0:
            cosines, sines = load(cosine, place + i), load(sine, place + i)
            turned = multiply(second, sines)
            second = fma(second, cosines, multiply(first, sines))
            first = subtract(multiply(first, cosines), turned)
        store(target, target_start + i, multiply(first, splat(scale)))
        store(target, target_start + half + i, multiply(second, splat(scale)))
    for i in range(whole, half):
        a = widened(source[start + i]) * factor
        b = widened(source[start + half + i]) * factor
        if len(norm) > 0:
            a *= norm[i]
            b *= norm[half + i]
        if len(cosine) > 0:
            c, s = cosine[place + i], sine[place + i]
            a, b = a * c - b * s, b * c + a * s
        target[target_start + i] = a * scale
        target[target_start + half + i] = b * scale


@helper
def _enter(r, qkv, rope, norms, eps, keys, values, sizes, row_R, slot_R, query, rotated):
    """A row's queries, rotated and scaled, to ``query``; its keys and values to the cache."""
    num_heads, num_groups, size, width, num_blocks = sizes
    start = r * (num_heads + 2 * num_groups) * size
    place = r * (size // 2)
    scale = _ONE / np.sqrt(np.float32(size))
    for head in range(num_heads):
        own = (r * num_heads + head) * size
        _rotate_head(
            qkv,
            start + head * size,
            norms[0],
            eps,
            rope[0],
            rope[1],
            place,
            size,
            query,
            own,
            scale,
        )
    block, lane = slot_R[r] // KEY_BLOCK, slot_R[r] % KEY_BLOCK
    for g in range(num_groups):
        key_start = start + (num_heads + g) * size
        _rotate_head(qkv, key_start, norms[1], eps, rope[0], rope[1], place, size, rotated, 0, _ONE)
        panel = row_R[r] * num_groups + g
        first = (panel * num_blocks + block) * size * KEY_BLOCK + lane
        for i in range(size):
            keys[first + i * KEY_BLOCK] = narrowed(rotated[i], keys[0])
        value_start = key_start + num_groups * size
        first = (panel * num_blocks * KEY_BLOCK + slot_R[r]) * width
        for i in range(size):
            values[first + i] = qkv[value_start + i]


@helper
def _store_wide(out, start, v0, v1, v2, v3):
    """Four vectors side by side."""
    store(out, start, v0)
    store(out, start + LANES, v1)
    store(out, start + 2 * LANES, v2)
    store(out, start + 3 * LANES, v3)


@helper
def _score_block(query, first, second, size, keys, block, scores, first_out, second_out):
    """Two query heads times one block of keys."""
    a0 = a1 = a2 = a3 = splat(_ZERO)
    b0 = b1 = b2 = b3 = splat(_ZERO)
    for i in range(size):
        at = block + i * KEY_BLOCK
        k0, k1 = load(keys, at), load(keys, at + LANES)
        k2, k3 = load(keys, at + 2 * LANES), load(keys, at + 3 * LANES)
        a, b = splat(query[first + i]), splat(query[second + i])
        a0, a1, a2, a3 = fma(a, k0, a0), fma(a, k1, a1), fma(a, k2, a2), fma(a, k3, a3)
        b0, b1, b2, b3 = fma(b, k0, b0), fma(b, k1, b1), fma(b, k2, b2), fma(b, k3, b3)
    _store_wide(scores, first_out, a0, a1, a2, a3)
    _store_wide(scores, second_out, b0, b1, b2, b3)


@helper
def _softmax(scores, start, count):
    """Exponentials of ``count`` scores in place; returns one over their sum.

    Up to the next multiple of ``LANES`` what lies behind them becomes zero.
    """
    padded = -(-count // LANES) * LANES
    for i in range(count, padded):
        scores[start + i] = _LOWEST
    top = splat(_LOWEST)
    for i in range(0, padded, LANES):
        top = larger(top, load(scores, start + i))
    minus_top = splat(-largest_of(top))
    for i in range(0, padded, LANES):
        store(scores, start + i, exp(add(load(scores, start + i), minus_top)))
    for i in range(count, padded):
        scores[start + i] = _ZERO
    total = splat(_ZERO)
    for i in range(0, padded, LANES):
        total = add(total, load(scores, start + i))
    return _ONE / sum_of(total)


@helper
def _mix_wide(weights, first, second, values, start, low, high, tail, width, mixed, column):
    """Values weighted for two heads: ``_WIDE`` columns, the prefix's slots and then the tail's."""
    a0 = a1 = a2 = a3 = splat(_ZERO)
    b0 = b1 = b2 = b3 = splat(_ZERO)
    count = high - low
    for i in range(count + len(tail)):
        at = start + (low + i if i < count else tail[i - count]) * width + column
        v0, v1 = load(values, at), load(values, at + LANES)
        v2, v3 = load(values, at + 2 * LANES), load(values, at + 3 * LANES)
        a, b = splat(weights[first + i]), splat(weights[second + i])
        a0, a1, a2, a3 = fma(a, v0, a0), fma(a, v1, a1), fma(a, v2, a2), fma(a, v3, a3)
        b0, b1, b2, b3 = fma(b, v0, b0), fma(b, v1, b1), fma(b, v2, b2), fma(b, v3, b3)
    _store_wide(mixed, column, a0, a1, a2, a3)
    _store_wide(mixed, width + column, b0, b1, b2, b3)


@helper
def _mix_narrow(weights, first, second, values, start, low, high, tail, width, mixed, column):
    """The same for the last columns, ``LANES`` of them."""
    a, b = splat(_ZERO), splat(_ZERO)
    count = high - low
    for i in range(count + len(tail)):
        at = start + (low + i if i < count else tail[i - count]) * width + column
        value = load(values, at)
        a = fma(splat(weights[first + i]), value, a)
        b = fma(splat(weights[second + i]), value, b)
    store(mixed, column, a)
    store(mixed, width + column, b)


@helper
def _write_head(mixed, start, scale, size, out, out_start):
    """A head's weighted values over the sum of its weights, in the compute precision."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store(out, out_start + i, multiply(load(mixed, start + i), splat(scale)))
    for i in range(whole, size):
        out[out_start + i] = narrowed(mixed[start + i] * scale, out[0])


@helper
def _attend_item(item, query, keys, values, sizes, row_R, seen, out):
    """Some consecutive rows of one request, for the heads of one group of keys and values."""
    first_row, num_rows, group, end = item
    num_heads, num_groups, size, width, num_blocks = sizes
    low_R, high_R, tail_R, tail_slots = seen
    share = num_heads // num_groups
    panel = row_R[first_row] * num_groups + group
    key_start = panel * num_blocks * KEY_BLOCK * size
    value_start = panel * num_blocks * KEY_BLOCK * width
    used_blocks = -(-end // KEY_BLOCK)
    stride = used_blocks * KEY_BLOCK + LANES
    num_vectors = num_rows * share
    scores = np.empty(num_vectors * stride, np.float32)
    mixed = np.empty(2 * width, np.float32)
    for m in range(0, num_vectors, 2):
        n = min(m + 1, num_vectors - 1)  # an odd one out is computed twice
        first = ((first_row + m // share) * num_heads + group * share + m % share) * size
        second = ((first_row + n // share) * num_heads + group * share + n % share) * size
        for block in range(used_blocks):
            at = block * KEY_BLOCK
            _score_block(
                query, first, second, size, keys, key_start + at * size,
                scores, m * stride + at, n * stride + at,
            )  # fmt: skip
    for t in range(num_rows):
        r = first_row + t
        low, high = low_R[r], high_R[r]
        tail = tail_slots[tail_R[r] : tail_R[r + 1]]
        count = high - low
        for head in range(0, share, 2):
            other = min(head + 1, share - 1)
            first, second = (t * share + head) * stride, (t * share + other) * stride
            for i in range(len(tail)):
                scores[first + high + i] = scores[first + tail[i]]
            first_scale = _softmax(scores, first + low, count + len(tail))
            second_scale = first_scale
            if other != head:
                for i in range(len(tail)):
                    scores[second + high + i] = scores[second + tail[i]]
                second_scale = _softmax(scores, second + low, count + len(tail))
            column = 0
            while column + _WIDE <= width:
                _mix_wide(
                    scores, first + low, second + low, values, value_start, low, high, tail, width,
                    mixed, column,
                )  # fmt: skip
                column += _WIDE
            while column < width:
                _mix_narrow(
                    scores, first + low, second + low, values, value_start, low, high, tail, width,
                    mixed, column,
                )  # fmt: skip
                column += LANES
            own = (r * num_heads + group * share) * size
            _write_head(mixed, 0, first_scale, size, out, own + head * size)
            _write_head(mixed, width, second_scale, size, out, own + other * size)


@kernel
def attend(qkv, rope, norms, eps, keys, values, sizes, row_R, slot_R, seen, items, query, out):
    """One layer's attention for all rows of a pass.

    Args:
        qkv: the rows' queries, keys and values side by side, in the compute precision.
        rope: cosine and sine by row, float32 ``[R * K / 2]``; empty where nothing is rotated.
        norms: weights of queries' and keys' own norm, float32 ``[K]``; empty where there is none.
        eps: of that norm.
        keys: one layer of the cache.
        values: one layer of the cache.
        sizes: query heads, key heads, head size, values' padded size, blocks per cache row.
        row_R: each row's cache row.
        slot_R: each row's own slot.
        seen: what each row sees: slots ``low .. high``, then ``tail_slots[tail_R[r] :
            tail_R[r + 1]]``.
        items: pieces of work as (first row, number of rows, group, end of the slots they see).
        query: float32 ``[R * H * K]``, written here.
        out: ``[R * H * K]`` in the compute precision, written here.
    """
    rotated = np.empty(sizes[2], np.float32)
    for r in range(len(row_R)):
        _enter(r, qkv, rope, norms, eps, keys, values, sizes, row_R, slot_R, query, rotated)
    for i in range(len(items)):
        _attend_item(items[i], query, keys, values, sizes, row_R, seen, out)


@parallel_kernel
def attend_in_threads(
    qkv, rope, norms, eps, keys, values, sizes, row_R, slot_R, seen, items, query, out
):
    """:func:`attend` by several threads."""
    for r in prange(len(row_R)):
        rotated = np.empty(sizes[2], np.float32)
        _enter(r, qkv, rope, norms, eps, keys, values, sizes, row_R, slot_R, query, rotated)
    for i in prange(len(items)):
        _attend_item(items[i], query, keys, values, sizes, row_R, seen, out)
