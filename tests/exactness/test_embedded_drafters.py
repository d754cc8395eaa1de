"""L1 and L2 of every drafter on the embedded model: same ids with speculation on and off.

Heads of the model's own sizes with random weights, hardly ever right, and oracles in their place,
always right; part of ``make test-exact``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider import EngineConfig, SamplingParams, SpeculationConfig
from outrider.bench.prompts import load_prompts
from outrider.config import Method
from outrider.engine import Engine
from outrider.models.decoder import Decoder
from outrider.models.exactness import is_exact, row_policies
from outrider.models.loading import LoadedCheckpoint, load
from outrider.models.loading.cache import cache_root
from outrider.models.loading.hub import DEFAULT_MODEL, resolve
from outrider.models.machine import ResultCache, preferred_dtype
from outrider.types import SpeculationStats
from tests.draft_modules import oracle_drafter, random_drafter
from tests.exactness.test_embedded import SAMPLING, THREADS
from tests.models import compute_threads

NUM_PROMPTS, NUM_TOKENS, MAX_LEN, DEPTH = 5, 32, 512, 3
METHODS = (Method.DRAFT, Method.EAGLE3, Method.MTP, Method.MEDUSA)

pytestmark = [pytest.mark.exact, pytest.mark.embedded, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[LoadedCheckpoint, Decoder]]:
    with compute_threads(THREADS):
        checkpoint = load(resolve(DEFAULT_MODEL, pull=True))
        results, dtype = ResultCache(cache_root()), preferred_dtype()
        policies = row_policies(checkpoint.config, dtype, results)
        target = Decoder(checkpoint.config, checkpoint.weights, dtype=dtype, policies=policies)
        assert is_exact(target, checkpoint.weights_hash, results)
        yield checkpoint, target


def run(embedded, drafter, sampling: str, batch: int):
    checkpoint, target = embedded
    engine = Engine(
        target,
        decoder=checkpoint.tokenizer,
        eos_ids=checkpoint.tokenizer.eos_ids,
        config=EngineConfig(max_batch_size=batch),
        max_model_len=MAX_LEN,
        drafter=drafter,
        max_draft_tokens=16,
        costs=None,
    )
    requests = [
        engine.new_request(
            prompt, SamplingParams(seed=50 + i, max_tokens=NUM_TOKENS, **SAMPLING[sampling])
        )
        for i, prompt in enumerate(prompts(checkpoint))
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)
    return [tuple(request.token_ids) for request in requests], stats


def prompts(checkpoint: LoadedCheckpoint) -> list[list[int]]:
    """Short ones of unequal length, over the bundled categories."""
    encoded = [
        checkpoint.tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        for prompt in load_prompts()
    ]
    short = [tokens for tokens in encoded if len(tokens) < MAX_LEN // 4]
    return short[:: len(short) // NUM_PROMPTS][:NUM_PROMPTS]


_PLAIN: dict[str, list[tuple[int, ...]]] = {}


@pytest.mark.parametrize("sampling", ["greedy", "T=0.8", "T=1.0, filters"])
@pytest.mark.parametrize("use_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_no_drafter_changes_the_text(
    embedded, method: Method, use_tree: bool, sampling: str
) -> None:
    _, target = embedded
    if sampling not in _PLAIN:
        _PLAIN[sampling] = run(embedded, None, sampling, batch=1)[0]
    expected = _PLAIN[sampling]
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4} if use_tree else {}
    config = SpeculationConfig(method=method, head="-", max_draft_len=DEPTH, **tree)
    for batch in (1, NUM_PROMPTS):
        sizes = {"max_batch_size": batch, "max_model_len": MAX_LEN}
        wrong = random_drafter(method, target, config, **sizes)
        texts, stats = run(embedded, wrong, sampling, batch)

        assert expected == texts
        assert stats.drafted > stats.accepted

        right = oracle_drafter(method, target, config, expected, **sizes)
        texts, stats = run(embedded, right, sampling, batch)

        assert expected == texts
        assert stats.acceptance_length > 0.6 * (DEPTH + 1)
