"""What is kept, found and given away: the bookkeeping of reusable rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.prefix_cache import MIN_SHARED, KeptRow, PrefixCache, shared_len


def kept(row: int, tokens: list[int], *, salt: str = "", speculates: bool = True) -> KeptRow:
    return KeptRow(row, 100 + row, salt, tuple(tokens), speculates)


tokens = st.lists(st.integers(0, 2), max_size=40)


@given(start=tokens, first=tokens, second=tokens)
def test_the_shared_beginning_is_counted_token_by_token(start, first, second) -> None:
    first, second = start + first, start + second
    expected = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        expected += 1

    assert expected == shared_len(first, second)
    assert expected == shared_len(tuple(second), first)


def test_the_longest_beginning_is_found_under_its_own_salt_only() -> None:
    cache = PrefixCache()
    text = list(range(60))
    cache.keep(kept(0, text[:20]))
    cache.keep(kept(1, text[:50], salt="other"))
    cache.keep(kept(2, [*text[:30], 0, 0]))

    assert cache.find(text, "") == (kept(2, [*text[:30], 0, 0]), 30)
    assert cache.find(text, "other") == (kept(1, text[:50], salt="other"), 50)
    assert cache.find(text, "third") is None
    assert 20 + 50 + 32 == cache.num_tokens


def test_too_short_a_beginning_is_none() -> None:
    cache = PrefixCache()
    text = list(range(60))
    cache.keep(kept(0, text))

    assert cache.find([*text[: MIN_SHARED - 1], 99, *text], "") is None
    assert cache.find([*text[:MIN_SHARED], 99], "") == (kept(0, text), MIN_SHARED)


def test_of_equal_ones_that_which_its_drafter_knows_is_taken() -> None:
    cache = PrefixCache()
    text = list(range(30))
    cache.keep(kept(0, text))
    cache.keep(kept(1, text, speculates=False))

    assert cache.find(text, "") == (kept(0, text), 30)


def test_the_row_least_recently_of_use_goes_first() -> None:
    cache = PrefixCache()
    for row in range(3):
        cache.keep(kept(row, list(range(20))))
    cache.touch(0)

    assert [1, 2, 0] == [one.row for one in cache.rows]
    assert kept(1, list(range(20))) == cache.drop(1)
    assert cache.drop(1) is None
    assert [2, 0] == [one.row for one in cache.rows]
    assert cache.of(102) == kept(2, list(range(20)))
    assert cache.of(101) is None
