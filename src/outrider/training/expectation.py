"""Which acceptance length to expect of a head for how much its target wrote.

Owns a small table of measurements and the words made of it. The data stage
(:mod:`outrider.training.data`) refuses with it, a run (:mod:`outrider.training.run`) tells it
before the long part begins. It says what an amount of data is worth, not what a given target will
reach.
"""

from __future__ import annotations

import math
from itertools import pairwise

MIN_TOKENS = 2_000  # response tokens below which nothing useful can come out
FEW_TOKENS = 50_000  # below which more prompts are the cheapest improvement
MEASURED = ((0, 1.0), (215_000, 1.45), (493_000, 1.56))
"""(response tokens, acceptance length), ascending: EAGLE-3 heads of the embedded model on public
evaluation prompts, greedy chains of 5. A head without data gets nothing right."""
_HOW = "measured with SmolLM2-135M, EAGLE-3, chain of 5, greedy"


def expected_length(num_tokens: int) -> float:
    """Acceptance length (tokens per step, bonus included) at so many response tokens.

    Linear in the logarithm of tokens between two measurements, for which :data:`MIN_TOKENS` stands
    for none; beyond the last one its own, since nothing was measured there.
    """
    for (low, least), (high, most) in pairwise(MEASURED):
        if num_tokens < high:
            start = math.log(max(low, MIN_TOKENS))
            done = (math.log(max(num_tokens, MIN_TOKENS)) - start) / (math.log(high) - start)
            return least + done * (most - least)
    return MEASURED[-1][1]


def describe_expectation(num_tokens: int) -> str:
    """What to expect, as a notice."""
    more = " or more" if num_tokens > MEASURED[-1][0] else ""
    length = expected_length(num_tokens)
    return f"at this size expect an acceptance length of about {length:.2f}{more} ({_HOW})"


def warn_of_few(num_tokens: int, num_answers: int) -> str | None:
    """That more data is worth its time, with how much would bring what; None where there is enough.

    ``num_answers`` are those with ``num_tokens`` in all; as many again are taken to be as long.
    """
    if num_tokens >= FEW_TOKENS:
        return None
    size, length = _next_size(num_tokens)
    answers = round(size * num_answers / max(1, num_tokens))
    return (
        f"warning: {num_tokens:,} response tokens are few; more prompts are worth it "
        f"(--num-prompts, --response-tokens): with {size:,} tokens, here about {answers:,} "
        f"answers, expect about {length:.2f}"
    )


def describe_goal(num_tokens: int) -> str:
    """The next size worth having, for who has too little to begin."""
    size, length = _next_size(num_tokens)
    return f"with {size:,} expect an acceptance length of about {length:.2f} ({_HOW})"


def _next_size(num_tokens: int) -> tuple[int, float]:
    """The next larger measurement; of the last one itself beyond it."""
    return next((point for point in MEASURED if point[0] > num_tokens), MEASURED[-1])
