"""L1 and L2 on the embedded model: every token id identical, zero exceptions.

The quick share runs in ``make test``. ``make test-exact`` runs up to 200 prompts x 128 tokens, some
20 minutes per sampling setting on two cores. ``OUTRIDER_PROMPTS`` may name a JSONL file with more
prompts than the bundled 72; with ``OUTRIDER_THREADS=1`` two settings can run side by side.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outrider import LLM, Completion, EngineConfig, Method, SamplingParams, SpeculationConfig
from outrider.bench.prompts import load_prompts
from outrider.types import SpeculationStats
from tests.models import compute_threads

BATCH = 8
THREADS = int(os.environ.get("OUTRIDER_THREADS", "2"))
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "T=0.8": {"temperature": 0.8},
    "T=1.0": {"temperature": 1.0},
    "T=1.0, filters": {
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
    },
}
PLAIN = SpeculationConfig(method=Method.OFF)
CHAIN = SpeculationConfig(adaptive=False)
TREE = SpeculationConfig(
    use_dynamic_tree=True, dynamic_tree_max_topK=4, max_total_draft_tokens=24, adaptive=False
)


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with compute_threads(THREADS):
        yield LLM(speculation=PLAIN, engine=EngineConfig(max_model_len=1024))


@pytest.fixture(scope="module")
def batched() -> Iterator[LLM]:
    with compute_threads(THREADS):
        yield LLM(speculation=PLAIN, engine=EngineConfig(max_model_len=1024, max_batch_size=BATCH))


def prompt_ids(llm: LLM, count: int) -> list[list[int]]:
    """Chat prompts, spread over the file's categories, that leave room for the answer."""
    source = os.environ.get("OUTRIDER_PROMPTS")
    prompts = load_prompts(Path(source) if source else None)
    ids = [llm.tokenizer.encode_chat([{"role": "user", "content": p.turns[0]}]) for p in prompts]
    ids = [tokens for tokens in ids if len(tokens) < 800]
    stride = max(1, len(ids) // count)
    return ids[::stride][:count]


def params_for(name: str, count: int, max_tokens: int) -> list[SamplingParams]:
    settings = SAMPLING[name]
    return [SamplingParams(seed=1000 + i, max_tokens=max_tokens, **settings) for i in range(count)]


def assert_identical(
    expected: Sequence[Completion], completions: Sequence[Completion], *, speculates: bool
) -> None:
    """Ids, text, finish reason and usage; and that there was something to get wrong."""
    stats = SpeculationStats()
    for index, (one, other) in enumerate(zip(expected, completions, strict=True)):
        assert one.token_ids == other.token_ids, f"prompt {index}"
        assert one.text == other.text
        assert (one.finish_reason, one.usage) == (other.finish_reason, other.usage)
        stats.add(other.speculation)
    if speculates:
        assert stats.drafted > stats.accepted > 0


def compare(alone: LLM, batched: LLM, name: str, count: int, max_tokens: int) -> None:
    prompts = prompt_ids(alone, count)
    params = params_for(name, len(prompts), max_tokens)
    arms = {
        "plain, alone": (alone, False),
        "chain, alone": (alone.with_speculation(CHAIN), True),
        "plain, batch": (batched, False),
        "tree, batch": (batched.with_speculation(TREE), True),
    }
    expected: list[Completion] = []
    for arm, (llm, speculates) in arms.items():
        sys.stderr.write(f"\n{name}: {arm}, {len(prompts)} prompts x {max_tokens} tokens ...")
        sys.stderr.flush()
        completions = llm.generate(prompts, params)
        expected = expected or completions
        assert_identical(expected, completions, speculates=speculates)


@pytest.mark.embedded
@pytest.mark.parametrize("name", SAMPLING)
def test_a_quick_share_is_identical(alone: LLM, batched: LLM, name: str) -> None:
    assert alone.fingerprint.is_exact
    compare(alone, batched, name, count=8, max_tokens=24)


@pytest.mark.exact
@pytest.mark.embedded
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("name", SAMPLING)
def test_all_prompts_are_identical(alone: LLM, batched: LLM, name: str) -> None:
    assert alone.fingerprint.is_exact
    compare(alone, batched, name, count=200, max_tokens=128)
