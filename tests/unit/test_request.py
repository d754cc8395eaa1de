"""What a request refuses before it is queued, and what it says when its text cannot go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.config import GrammarKind, GrammarSpec, SamplingParams
from outrider.errors import ParameterError
from outrider.grammar import GrammarCompiler
from outrider.request import Request
from outrider.tree import DraftTree
from outrider.types import FinishReason
from outrider.verify import walk
from tests.engines import LetterDecoder
from tests.grammars import letters

VOCAB_SIZE = 4
END = 3
COMPILER = GrammarCompiler(letters(VOCAB_SIZE, frozenset({END})), VOCAB_SIZE)


def new_request(*, prediction_ids: tuple[int, ...] = (), grammar: str | None = None) -> Request:
    spec = None if grammar is None else GrammarSpec(GrammarKind.REGEX, grammar)
    return Request(
        0,
        [0],
        SamplingParams(grammar=spec, max_tokens=5),
        decoder=LetterDecoder(),
        eos_ids=frozenset({END}),
        vocab_size=VOCAB_SIZE,
        max_model_len=50,
        speculates=False,
        prediction_ids=prediction_ids,
        constraint=None if spec is None else COMPILER.constraint(spec),
    )


def error_after(request: Request, *logits: float) -> str | None:
    """What the request ends with if these are the target's logits."""
    tree = DraftTree.root(request.token_ids[-1])
    picks = request.sampler.picks(torch.tensor([logits]), request.token_ids, tree)
    request.emit(walk(tree, picks))

    assert (request.error is not None) == (request.finish_reason is FinishReason.ERROR)
    return request.error


@pytest.mark.parametrize("token", [-1, -VOCAB_SIZE, VOCAB_SIZE])
def test_a_predicted_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ParameterError, match=rf"prediction_ids: token id {token} is outside"):
        new_request(prediction_ids=(0, token))


def test_no_more_of_a_prediction_is_looked_at_than_the_context_holds() -> None:
    prediction = new_request(prediction_ids=(1,) * 50 + (2,) * 100_000).prediction

    assert prediction is not None
    assert prediction.propose([0, *(1,) * 45], 1, 16).token[1:] == [1] * 5


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("grammar", "logits", "expected"),
    [
        (None, (0.0, 1.0, 0.0, 0.0), None),
        (None, (0.0, INFINITE, 0.0, 0.0), "the target's logits at position 1 are not finite"),
        ("b+", (0.0, 1.0, 0.0, 0.0), None),
        (
            "b+",
            (0.0, -INFINITE, 0.0, 0.0),
            "the target's logits at position 1 are not finite, or rule out every token that the "
            "grammar allows",
        ),
    ],
)
def test_a_dead_end_is_put_down_to_what_it_may_come_from(
    grammar: str | None, logits: Any, expected: str | None
) -> None:
    assert expected == error_after(new_request(grammar=grammar), *logits)


def test_where_the_grammar_allows_nothing_it_is_named() -> None:
    request = new_request(grammar="bd")  # no token spells "d"

    assert error_after(request, 0.0, 1.0, 0.0, 0.0) is None
    assert "the grammar allows no token after 1 of output" == error_after(request, 0, 0, 0, 0)
