"""The cache's contract: no slot is lost or shared, what is committed stays as it was written."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.kv_cache import KEY_BLOCK, KVCache

ROWS, SLOTS = 3, KEY_BLOCK + 10


def new_cache() -> KVCache:
    return KVCache(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        max_batch_size=ROWS,
        num_slots=SLOTS,
        dtype=torch.float32,
    )


class CacheMachine(RuleBasedStateMachine):
    """Random passes, commits, scrubs and frees against plain lists of the values written."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache()
        self.expected: dict[int, list[float]] = {}
        self.left: dict[int, list[float]] = {}  # what freed rows still hold
        self.next_value = 1.0

    def room(self, row: int) -> int:
        return SLOTS - self.cache.committed(row)

    @precondition(lambda self: self.cache.num_free_rows > 0)
    @rule()
    def allocate(self) -> None:
        row = self.cache.allocate()

        assert row not in self.expected
        assert row == min(set(range(ROWS)) - set(self.expected))
        self.expected[row] = []
        self.left.pop(row, None)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def write_and_commit(self, data: st.DataObject) -> None:
        """A pass over some running rows, each with its own width, then a path each."""
        rows = data.draw(
            st.lists(st.sampled_from(sorted(self.expected)), min_size=1, unique=True).map(sorted)
        )
        rows = [row for row in rows if self.room(row) > 0]
        if not rows:
            return
        counts = [data.draw(st.integers(1, min(20, self.room(row)))) for row in rows]
        slots = self.cache.begin(rows, counts)
        values = []
        for count in counts:
            values.append([self.next_value + i for i in range(count)])
            self.next_value += count
        packed = torch.tensor([value for row in values for value in row])
        key_RGK = packed.view(-1, 1, 1).expand(-1, 2, 4)
        for layer in range(2):
            self.cache.write(layer, slots, key_RGK + layer, -key_RGK - layer)
        for layer in range(2):
            for b, row in enumerate(rows):
                seen = self.expected[row] + values[b]
                keys_LGSK, values_LGSK = self.cache.read(row, len(seen))

                assert seen == (keys_LGSK[layer, 1, :, 3] - layer).tolist()
                assert seen == (-values_LGSK[layer, 0, :, 0] - layer).tolist()
        for row, written in zip(rows, values, strict=True):
            nodes = range(1, len(written))
            path = data.draw(st.lists(st.sampled_from(nodes), unique=True)) if nodes else []
            path.sort()
            self.cache.commit(row, path)
            self.expected[row] += [written[0]] + [written[node] for node in path]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def scrub_behind(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.expected)))
        self.cache.scrub(row, self.room(row))

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), scrub=st.booleans())
    def free(self, data: st.DataObject, scrub: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.expected)))
        values = self.expected.pop(row)
        self.cache.free(row, scrub=scrub)
        self.left[row] = [] if scrub else values

    @precondition(lambda self: self.cache.num_free_rows > 0)
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        """A freed row is taken with a beginning of what it holds."""
        row = data.draw(st.sampled_from(self.cache.free_rows))
        count = data.draw(st.integers(0, len(self.left.get(row, []))))

        assert row == self.cache.allocate(row, committed=count)
        self.expected[row] = self.left.pop(row, [])[:count]

    @precondition(lambda self: self.expected and self.cache.num_free_rows > 0)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """A new row starts on a beginning of what a running or a freed one holds."""
        row = self.cache.allocate()
        self.left.pop(row, None)
        source = data.draw(st.sampled_from(sorted({*self.expected, *self.left})))
        values = self.expected.get(source, self.left.get(source, []))
        count = data.draw(st.integers(0, len(values)))
        self.cache.copy_prefix(source, row, count)
        self.expected[row] = values[:count]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.expected)))
        count = data.draw(st.integers(0, len(self.expected[row])))
        self.cache.rollback(row, count)
        del self.expected[row][count:]

    @invariant()
    def committed_tokens_are_intact(self) -> None:
        assert self.cache.num_free_rows == ROWS - len(self.expected)
        for row, values in self.expected.items():
            assert self.cache.committed(row) == len(values)
            if values:
                keys_LGSK, values_LGSK = self.cache.read(row, len(values))
                assert values == keys_LGSK[0, 0, :, 0].tolist()
                assert values == (keys_LGSK[1, 1, :, 3] - 1).tolist()
                assert values == (-values_LGSK[1, 0, :, 2] - 1).tolist()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_scrubbing_removes_what_is_not_finite() -> None:
    cache = new_cache()
    row = cache.allocate()
    slots = cache.begin([row], [3])
    bad_RGK = torch.full((3, 2, 4), float("nan"))
    cache.write(0, slots, bad_RGK, bad_RGK)
    cache.free(row, scrub=True)

    assert torch.isfinite(cache._keys).all()
    assert torch.isfinite(cache._values).all()
