"""What heads compute inside a running engine, against references that read the finished texts.

Pins what the heads alone cannot: which token and which of the target's states make a row, at which
position, after steps that accepted much, little or nothing. Afterwards the whole text is known, so
the references get it in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.config import Method, SamplingParams, SpeculationConfig
from outrider.drafters.medusa import MedusaDrafter
from outrider.kv_cache import KVCache
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.exactness import chain_segment, random_tokens
from outrider.models.heads.base import DraftOutput
from outrider.models.heads.config import Eagle3Config, MtpConfig
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.heads.mtp import MtpHead
from outrider.models.layers import Segment
from outrider.request import Request
from tests.draft_modules import random_drafter, random_source
from tests.engines import new_engine, submit
from tests.models import random_decoder, random_weights, tiny_config
from tests.parity.reference_heads import Drafted, ReferenceEagle3, ReferenceMtp

TOLERANCE = 1e-3  # these heads' weights are larger: rounding grows along a tree, mistakes more so
FEW_TOKENS = dict.fromkeys(range(12), 6.0)  # a bias with which random heads are sometimes right
PROMPT_LENGTHS = (37, 4, 1)
SHAPES = {
    "chain": {},
    "tree": {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 10,
    },
}


@dataclass(frozen=True)
class Pass:
    """One request's share of a head's pass."""

    segment: Segment
    num_committed: int
    is_true: bool
    logits_RW: Tensor


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder()


def run_requests(target: Decoder, drafter, *, is_greedy: bool) -> list[Request]:
    engine = new_engine(target, drafter, max_batch_size=len(PROMPT_LENGTHS))
    requests = []
    for length in PROMPT_LENGTHS:
        params = SamplingParams(
            max_tokens=20,
            temperature=0.0 if is_greedy else 1.0,
            seed=length,
            logit_bias=FEW_TOKENS,
        )
        prompt = random_tokens(target.config.vocab_size, length, seed=length)
        requests.append(submit(engine, prompt, params))
    while engine.has_work:
        engine.step()
    return requests


def states_of(target: Decoder, tokens: list[int], capture: tuple[int, ...]) -> list[Tensor]:
    """The target's states at every position, from one pass over the finished text."""
    cache = target.new_cache(max_batch_size=1, num_slots=len(tokens))
    output = target.forward([chain_segment(cache.allocate(), tokens)], cache, capture=capture)
    assert output.hidden_RC is not None
    return list(output.hidden_RC.chunk(len(capture), dim=1))


def record(monkeypatch: pytest.MonkeyPatch, kind: type) -> dict[int, list[Pass]]:
    """Passes of every head of this kind from now on, by cache row."""
    passes: dict[int, list[Pass]] = {}
    original = kind.forward

    def forward(
        self, segments: list[Segment], feature_RX: Tensor, cache: KVCache, *, from_target: bool
    ) -> DraftOutput:
        committed = [cache.committed(segment.cache_row) for segment in segments]
        output = original(self, segments, feature_RX, cache, from_target=from_target)
        counts = [len(segment.tokens) - segment.num_silent for segment in segments]
        pieces = output.logits_RW.split(counts)
        for segment, before, logits_RW in zip(segments, committed, pieces, strict=True):
            passes.setdefault(segment.cache_row, []).append(
                Pass(segment, before, from_target, logits_RW)
            )
        return output

    monkeypatch.setattr(kind, "forward", forward)
    return passes


def parents_of(segment: Segment) -> list[int]:
    """Of the segment's nodes, by place among all drafted rows: the last row seen before its own."""
    parents = []
    for i in range(len(segment.tokens)):
        own = segment.num_earlier + i
        mask = segment.ancestor_mask_TT
        seen = range(own) if mask is None else mask[i, :own].nonzero().flatten().tolist()
        parents.append(max(seen, default=-1))
    return parents


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [Method.EAGLE3, Method.MTP])
def test_every_row_of_a_run_equals_the_reference(
    target: Decoder,
    method: Method,
    shape: str,
    is_greedy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculation = SpeculationConfig(method=method, head="-", max_draft_len=4, **SHAPES[shape])  # type: ignore[arg-type]
    by_row = record(monkeypatch, Eagle3Head if method is Method.EAGLE3 else MtpHead)
    drafter = random_drafter(method, target, speculation, max_batch_size=len(PROMPT_LENGTHS))
    requests = run_requests(target, drafter, is_greedy=is_greedy)
    source = random_source(method, target)
    kind = ReferenceEagle3 if isinstance(source.config, Eagle3Config) else ReferenceMtp
    assert isinstance(source.config, Eagle3Config | MtpConfig)
    shared = random_weights(tiny_config())
    reference = kind(
        source.config,  # type: ignore[arg-type]
        source.weights,
        embedding=shared["embed.weight"],
        output=shared["lm_head.weight"],
    )
    num_taken_in: list[int] = []
    num_drafted = 0
    for row, request in enumerate(requests):
        tokens = request.token_ids
        states = states_of(target, tokens, drafter.captures)
        drafted = Drafted()
        for step in by_row[row]:
            known = step.num_committed
            if step.is_true:
                drafted = Drafted()
                known += len(step.segment.tokens)
                num_taken_in.append(len(step.segment.tokens))

                assert tokens[step.num_committed + 1 : known + 1] == list(step.segment.tokens)
            else:
                assert step.segment.num_earlier == len(drafted.tokens)

                new = parents_of(step.segment)
                drafted = Drafted((*drafted.tokens, *step.segment.tokens), (*drafted.parents, *new))
                num_drafted += len(new)
            expected_RW = reference.run(
                tokens[1 : known + 1], [state[:known] for state in states], drafted
            ).logits_RW
            num_rows = len(step.logits_RW)

            torch.testing.assert_close(
                step.logits_RW.double(),
                expected_RW[len(expected_RW) - num_rows :],
                rtol=0,
                atol=TOLERANCE,
            )

    assert {1, 2} < set(num_taken_in)  # steps that accepted nothing, one token, and more
    assert num_drafted > 100


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
def test_medusa_reads_the_state_before_the_root(
    target: Decoder, is_greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's own state is not there yet; the first head predicts what follows the root."""
    seen: list[tuple[Request, int]] = []
    states: list[Tensor] = []
    original, propose = MedusaHeads.forward, MedusaDrafter.propose

    def forward(self, state_RD: Tensor, num_heads: int) -> list[Tensor]:
        states.extend(state_RD)
        return original(self, state_RD, num_heads)

    def propose_and_note(self, requests, max_depth, min_score=0.0):
        ready = [r for r in requests if r.request_id in self._state_of]
        pairs = zip(requests, max_depth, strict=True)
        drafting = [r for r, depth in pairs if depth > 0 and r in ready]
        seen.extend((request, len(request.token_ids)) for request in drafting)
        return propose(self, requests, max_depth, min_score)

    monkeypatch.setattr(MedusaHeads, "forward", forward)
    monkeypatch.setattr(MedusaDrafter, "propose", propose_and_note)
    speculation = SpeculationConfig(method=Method.MEDUSA, head="-", max_draft_len=3)
    drafter = random_drafter(Method.MEDUSA, target, speculation, max_batch_size=len(PROMPT_LENGTHS))
    requests = run_requests(target, drafter, is_greedy=is_greedy)
    finals = {r.request_id: states_of(target, r.token_ids, (FINAL_STATE,))[0] for r in requests}

    assert len(seen) > 20
    for (request, length), state_D in zip(seen, states, strict=True):
        torch.testing.assert_close(
            state_D, finals[request.request_id][length - 2], rtol=0, atol=TOLERANCE
        )
