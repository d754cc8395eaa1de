"""Settings of the whole suite."""

from __future__ import annotations

import logging
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

# A slow example is a busy machine, not a failure; pytest's own timeout catches what hangs.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")


@pytest.fixture(autouse=True, scope="session")
def _one_compute_thread():
    """Tiny models gain nothing from a second thread, and spinning threads slow a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The embedded model computes on every core: ``make test`` runs its tests one after another."""
    for item in items:
        if item.get_closest_marker("embedded"):
            item.add_marker(pytest.mark.alone)


class _DraftFaults(logging.Handler):
    """Collects what the engine forgives a drafter: in a test it is a mistake, unless expected."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.seen.append(repr(error or record.getMessage()))


_draft_faults = _DraftFaults()
_guard_log = logging.getLogger("outrider.drafters.guarded")
_guard_log.addHandler(_draft_faults)
_guard_log.setLevel(logging.DEBUG)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    _draft_faults.seen.clear()
    result = yield
    if item.get_closest_marker("draft_faults") is None:
        assert not _draft_faults.seen, f"a drafter failed: {_draft_faults.seen[:3]}"
    return result
