"""Settings of the whole suite."""

from __future__ import annotations

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
