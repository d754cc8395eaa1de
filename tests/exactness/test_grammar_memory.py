"""What a parser remembers changes no text: neither from drafts nor from neighbours.

The requests share one compiled grammar, whose memory is so small that it fills up again and again;
the drafter asks the grammar about many nodes that are never emitted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider import grammar
from outrider.config import EngineConfig, GrammarKind, GrammarSpec, SamplingParams
from outrider.drafters.base import DraftRequest
from outrider.engine import Engine
from outrider.grammar import GrammarCompiler, GrammarConstraint
from outrider.grammar_matcher import Matcher, State
from outrider.models.decoder import Decoder
from outrider.tree import DraftTree
from outrider.types import SpeculationStats
from tests.drafters import ScriptedDrafter
from tests.engines import LetterDecoder, Outcome, outcome
from tests.grammars import Spelled
from tests.models import random_decoder

END = 9
TOKENS = Spelled(
    (b"a", b"b", b"c", b"ab", b"(", b"[", b")", b"]", b"a)", b"<end>", b"a]", b"bb"),
    frozenset({END}),
)
NUM_TOKENS = 150
# What may come depends on the last nine letters: 512 states, and as many paths through them.
LOOKS_BACK = GrammarSpec(GrammarKind.REGEX, "[ab]*a[ab]{8}c")
FEW_STATES = 260
# Whether "a)" or "a]" may come is all that tells one bracket from the other.
NESTED = GrammarSpec(
    GrammarKind.LARK,
    'start: e+\ne: "(" i+ ")" | "[" i+ "]"\ni: "a" | "b" | e\n',
)


class CuriousDrafter(ScriptedDrafter):
    """Looks at the masks of a whole tree, as trees of draft heads do, and guesses among them."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda *_: [], TOKENS.vocab_size)
        self._random = random.Random(seed)

    def propose(
        self, requests: Sequence[DraftRequest], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        return [self._guess(*pair) for pair in zip(requests, max_depth, strict=True)]

    def _guess(self, request: DraftRequest, max_depth: int) -> DraftTree:
        view = request.sampler.draft_view(request.token_ids, None)
        tree = DraftTree.root(request.token_ids[-1])
        layer = [0]
        for _ in range(min(self._random.randint(1, 3), max_depth)):
            below = []
            for node in layer:
                row = view.warp(np.zeros(TOKENS.vocab_size, np.float32), tree.path_tokens(node))
                may_come = np.flatnonzero(np.isfinite(row)).tolist()
                chosen = self._random.sample(may_come, min(2, len(may_come)))
                below += [tree.add(node, token, tree.score[node] * 0.9) for token in chosen]
            layer = below
        return tree


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(
        vocab_size=TOKENS.vocab_size,
        hidden_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=12,
        mlp_size=24,
    )


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", FEW_STATES)


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows whenever a request is given another memory."""
    seen: list[bool] = []
    renew = GrammarCompiler._renew

    def counted(self, key, full):
        found = renew(self, key, full)
        seen.append(found[1])
        return found

    monkeypatch.setattr(GrammarCompiler, "_renew", counted)
    return seen


def texts(
    target: Decoder, spec: GrammarSpec, seeds: Sequence[int], *, batch: int, drafts: bool
) -> tuple[list[Outcome], SpeculationStats]:
    """All requests through one engine, and so with one compiled grammar."""
    engine = Engine(
        target,
        decoder=LetterDecoder(),
        eos_ids=TOKENS.eos_ids,
        config=EngineConfig(max_batch_size=batch),
        max_model_len=NUM_TOKENS + 10,
        drafter=CuriousDrafter(3) if drafts else None,
        max_draft_tokens=16,
        costs=None,
        grammars=GrammarCompiler(TOKENS, TOKENS.vocab_size),
    )
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=1.0,
            seed=seed,
            grammar=spec,
            ignore_eos=True,
            logit_bias={2: -100.0, 4: 1.0, 5: 1.0, 8: 2.0, 10: 2.0},
        )
        for seed in seeds
    ]
    requests = [engine.new_request([1, 2, 3], one) for one in params]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    stats = SpeculationStats()
    for request in requests:
        stats.add(request.stats)
    return [outcome(request) for request in requests], stats


def alone(target: Decoder, spec: GrammarSpec, seeds: Sequence[int]) -> list[Outcome]:
    """Each request in an engine of its own, without drafts."""
    return [texts(target, spec, [seed], batch=1, drafts=False)[0][0] for seed in seeds]


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_memory_that_fills_up_changes_no_text(
    target: Decoder, renewals: list[bool], batch: int
) -> None:
    seeds = [0, 1, 2]
    expected = alone(target, LOOKS_BACK, seeds)
    renewals.clear()
    drafted, stats = texts(target, LOOKS_BACK, seeds, batch=batch, drafts=True)
    num_renewed = len(renewals)
    beside, _ = texts(target, LOOKS_BACK, seeds, batch=batch, drafts=False)

    assert ["length"] * 3 == [one.finish_reason for one in expected]
    assert expected == drafted
    assert expected == beside
    assert stats.drafted > stats.accepted > 0
    assert num_renewed > 0, "it never got full: nothing was tested"


@pytest.mark.parametrize("batch", [1, 3])
def test_masks_that_a_parser_remembers_change_no_text(target: Decoder, batch: int) -> None:
    """Brackets of two kinds: after either one the parser stands at the same place, and yet not."""
    seeds = list(range(6))
    drafted, stats = texts(target, NESTED, seeds, batch=batch, drafts=True)

    assert alone(target, NESTED, seeds) == drafted
    assert stats.drafted > stats.accepted > 0


# --- what is caught -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_memory")
def test_an_answer_of_a_full_memory_is_caught(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(target, LOOKS_BACK, [0, 1, 2])

    def first_answer(self: GrammarConstraint, output_ids: Sequence[int]) -> State:
        return self._matcher.state(tuple(output_ids))

    monkeypatch.setattr(GrammarConstraint, "state", first_answer)

    assert expected != texts(target, LOOKS_BACK, [0, 1, 2], batch=3, drafts=False)[0]
    assert expected != texts(target, LOOKS_BACK, [0, 1, 2], batch=1, drafts=True)[0]


def test_a_parser_that_keeps_its_mask_when_going_back_is_caught(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = list(range(6))
    expected = alone(target, NESTED, seeds)
    go_back = Matcher._go_back

    def keeps_it(self: Matcher, length: int) -> None:
        self._masked_len = 0
        go_back(self, length)

    monkeypatch.setattr(Matcher, "_go_back", keeps_it)

    assert expected != texts(target, NESTED, seeds, batch=1, drafts=True)[0]
