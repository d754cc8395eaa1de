"""Which freed cache rows hold what, and which of them a new request may start on.

Owns the memory of ended requests: the tokens whose keys and values a free row still holds, and the
salt under which they were computed. The scheduler keeps a row when its request ends well or has to
wait again, looks here before it gives a row away, and takes the row over or has the shared part
copied. Pure
bookkeeping: the contents themselves stay in :class:`~outrider.kv_cache.KVCache`.

Only tokens of the same salt are ever compared, so that the time an answer takes tells nobody what
others have asked. Rows are given away in the order in which they were last of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.sequences import shared_len

# A shorter shared prefix saves less than the copy and the lookup cost.
MIN_SHARED = 16


@dataclass(frozen=True, slots=True)
class KeptRow:
    """What a free row holds: the committed tokens of a request that ended well or waits again.

    ``request_id`` names the request to its drafter, which remembers it (if ``speculates``) until
    the row is given away. ``is_private``: the request alone may go on from it, since no logits have
    been seen behind it and it may hold what is not finite.
    """

    row: int
    request_id: int
    salt: str
    token_ids: tuple[int, ...]
    speculates: bool
    is_private: bool = False


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where a new request's first ``num_tokens`` tokens are taken from.

    ``takes_over``: the source's own row, of which the source keeps nothing; else a copy.
    """

    source_id: int
    row: int
    num_tokens: int
    takes_over: bool


class PrefixCache:
    """The kept rows, the one least recently of use first."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptRow] = {}

    @property
    def rows(self) -> list[KeptRow]:
        """Every kept row, the first to go first."""
        return list(self._kept.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that could be reused."""
        return sum(len(kept.token_ids) for kept in self._kept.values())

    def keep(self, kept: KeptRow) -> None:
        """Remember what a row holds that has just become free."""
        assert kept.row not in self._kept
        self._kept[kept.row] = kept

    def drop(self, row: int) -> KeptRow | None:
        """Forget a row that is being given away; returns what it held, None if nothing."""
        return self._kept.pop(row, None)

    def touch(self, row: int) -> None:
        """This row was of use: the others go first."""
        self._kept[row] = self._kept.pop(row)

    def of(self, request_id: int) -> KeptRow | None:
        """What a request left that was made to wait again."""
        return next((kept for kept in self._kept.values() if kept.request_id == request_id), None)

    def find(self, token_ids: Sequence[int], salt: str) -> tuple[KeptRow, int] | None:
        """The kept row that shares the longest beginning with these tokens, and how long it is.

        At equal length one whose drafter remembers it too, then the latest. None where fewer than
        ``MIN_SHARED`` tokens are shared.
        """
        best: tuple[KeptRow, int] | None = None
        for kept in self._kept.values():
            if kept.salt != salt or kept.is_private:
                continue
            shared = shared_len(kept.token_ids, token_ids)
            if shared < MIN_SHARED:
                continue
            if best is None or (shared, kept.speculates) >= (best[1], best[0].speculates):
                best = kept, shared
        return best
