"""One tiny model and one server on it for all tests that do not need their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, EngineConfig, SpeculationConfig
from outrider.config import AdmissionLimits
from tests.server.live import LiveServer
from tests.tiny import write_hf_checkpoint

ENGINE = EngineConfig(
    max_batch_size=4,
    max_model_len=1024,
    dtype="float32",
    self_test="off",
    prefix_cache=True,
    admission=AdmissionLimits(max_waiting=64, max_waiting_tokens=65536),
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    return write_hf_checkpoint(folder, scale=0.15, max_position=2048)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("OUTRIDER_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def llm(checkpoint: Path, cache_folder: Path) -> LLM:
    """Shared weights; its engine belongs to the shared server."""
    return LLM(checkpoint, engine=ENGINE, speculation=SpeculationConfig(adaptive=False))


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm) as live:
        yield live


@pytest.fixture
def own_llm(llm: LLM) -> LLM:
    """The same weights with an engine of the test's own."""
    return llm.with_speculation(llm.speculation)
