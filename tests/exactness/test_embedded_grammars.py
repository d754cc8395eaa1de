"""Grammars on the embedded model: its own tokeniser of 49,152 tokens, and texts it knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from outrider import LLM, EngineConfig, GrammarKind, GrammarSpec, SamplingParams
from outrider.grammar import GrammarCompiler
from outrider.types import FinishReason, SpeculationStats
from tests.exactness.test_embedded import PLAIN, THREADS, TREE
from tests.models import compute_threads

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "is_capital": {"type": "boolean"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["city", "country", "is_capital", "rivers"],
    "additionalProperties": False,
}
SPEC = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
QUESTIONS = [
    "Describe Paris as JSON, and then describe Paris as JSON again.",
    "Which city lies where the river Elbe meets the sea? Answer in JSON.",
]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with compute_threads(THREADS):
        yield LLM(speculation=PLAIN, engine=EngineConfig(max_model_len=512, max_batch_size=2))


@pytest.mark.embedded
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_is_valid_and_the_same_with_and_without_drafts(plain: LLM, temperature: float) -> None:
    drafting = plain.with_speculation(TREE)
    params = SamplingParams(
        grammar=SPEC, temperature=temperature, seed=4, max_tokens=200, logprobs=2
    )
    prompts = [
        plain.tokenizer.encode_chat([{"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    stats = SpeculationStats()
    for prompt, choice in zip(prompts, (0, 1), strict=True):
        chosen = replace(params, choice=choice)
        (expected,) = plain.generate([prompt], chosen)
        (found,) = drafting.generate([prompt], chosen)
        stats.add(found.speculation)

        assert expected.token_ids == found.token_ids
        assert expected.logprobs == found.logprobs
        assert FinishReason.STOP is found.finish_reason
        assert SCHEMA["properties"].keys() == json.loads(found.text).keys()
    assert stats.drafted > stats.accepted > 0


@pytest.mark.embedded
def test_masks_of_the_real_vocabulary_do_not_depend_on_what_was_asked_before(plain: LLM) -> None:
    compiler = GrammarCompiler(plain.tokenizer, plain.config.vocab_size)
    asked = compiler.constraint(SPEC)
    text = '{"city": "Berlin", "country": "Germany", "is_capital": true, "rivers": ["Spree"]}'
    ids = plain.tokenizer.encode(text)
    order = np.random.default_rng(0).permutation(len(ids))
    for length in order.tolist():
        output = ids[:length]
        mask_V = asked.mask(output)

        assert np.array_equal(compiler.constraint(SPEC).mask(output), mask_V)
        assert mask_V[ids[length]]
        assert not mask_V[list(plain.tokenizer.eos_ids)].any()
    assert asked.is_complete(ids)
