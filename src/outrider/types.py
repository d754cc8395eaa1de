"""The words that all modules share: dimension key, verdicts, finish reasons, step records.

Owns no behaviour. Sits at the bottom of the flow, above :mod:`outrider.errors` only.

Tensor names end in their dimensions, from this one key:

===  =======================================  ===  =====================================
B    request (row of the batch)               H    query heads
T    query tokens of one request              G    key/value heads
N    tree nodes of one request, root first    K    dimension of one head
R    packed rows of one forward pass          V    target vocabulary
S    cache slots                              W    draft vocabulary
D    hidden size                              L    layers
===  =======================================  ===  =====================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

# What is being done, and the fraction done where it is known.
ProgressCallback = Callable[[str, float | None], None]

DIMENSIONS = {
    "B": "request",
    "T": "query tokens of one request",
    "N": "tree nodes of one request, root first",
    "R": "packed rows of one forward pass",
    "S": "cache slots",
    "D": "hidden size",
    "H": "query heads",
    "G": "key/value heads",
    "K": "dimension of one head",
    "V": "target vocabulary",
    "W": "draft vocabulary",
    "L": "layers",
}


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence token, a stop id, a stop string or the end of a grammar
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # cancelled by the caller
    ERROR = "error"  # logits that are not finite, a grammar's dead end, or an internal fault


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the target found an emitted token: the natural logarithm of its probability.

    From the softmax of the raw float32 logits, before penalties, bias, grammar, temperature and
    filters. ``top`` are the likeliest tokens with theirs, falling, ties by id; those with no
    probability at all are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verify step decided for one request.

    ``path`` holds the accepted nodes' indices in the request's tree, root excluded, parents first.
    ``tokens`` are the emitted tokens: the accepted ones, then the correction or bonus token, so
    ``len(tokens) == len(path) + 1``. ``num_drafted`` counts the nodes that were verified. When the
    target's logits at the end of the path are not finite, ``is_finite`` is False and ``tokens``
    ends with the last accepted one. ``logprobs`` has an entry per token where the request asked for
    them, else none.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    num_drafted: int
    is_finite: bool = True
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request (or a sum over requests) from which all acceptance figures follow.

    ``accepted_at[i]`` is the number of verify steps whose path reached depth ``i + 1``; hence
    ``acceptance_length == 1 + sum(accepted_at) / verify_steps`` (bonus included).
    """

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verify step, and the nodes of its tree that were verified and accepted."""
        self.verify_steps += 1
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.accepted_at.extend([0] * max(0, num_accepted - len(self.accepted_at)))
        for depth in range(num_accepted):
            self.accepted_at[depth] += 1

    def add(self, other: SpeculationStats) -> None:
        """Add another request's counts to these."""
        self.verify_steps += other.verify_steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        missing = len(other.accepted_at) - len(self.accepted_at)
        self.accepted_at.extend([0] * max(0, missing))
        for depth, count in enumerate(other.accepted_at):
            self.accepted_at[depth] += count

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step, bonus included; 1.0 when nothing was ever accepted."""
        return 1.0 + self.accepted / self.verify_steps if self.verify_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, in 0..1; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def per_position(self) -> list[float]:
        """Marginal rate of each depth: steps that reached it over all verify steps."""
        return [count / self.verify_steps for count in self.accepted_at]


@dataclass(frozen=True, slots=True)
class PredictionStats:
    """Tokens of a request's ``prediction`` that were verified, by what became of them."""

    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    ``cached_tokens`` of the prompt were not computed: an earlier request had left them.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """A request's clock in seconds, from its submission.

    ``decode_s`` runs from the first emitted tokens, of which there were ``num_first``, to the last;
    ``draft_s`` and ``verify_s`` are its shares of the steps it took part in, and ``draft_passes``
    counts the draft module's passes in them (0 for n-gram).
    """

    queue_s: float
    first_token_s: float
    decode_s: float
    total_s: float
    draft_s: float
    verify_s: float
    num_first: int = 1
    draft_passes: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request; text and token ids are cut at the same stop event.

    ``text`` excludes a stop string and everything after it; ``token_ids`` ends with the token that
    completed the stop (or with the end-of-sequence token). ``error`` is set when ``finish_reason``
    is ``error``. ``fingerprint`` names weights, kernels, precision, threads and exactness level.
    ``logprobs`` has an entry for each of ``token_ids`` where they were asked for, and
    ``prediction`` is set where the request came with one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    method: str
    speculation: SpeculationStats
    timing: Timing
    fingerprint: str
    seed: int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prediction: PredictionStats | None = None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first step's; None when that was all.

        The first step may emit several at once, and none of them is paid for by ``decode_s``.
        """
        later = self.usage.completion_tokens - self.timing.num_first
        return later / self.timing.decode_s if later > 0 and self.timing.decode_s > 0 else None

    @property
    def draft_cost(self) -> float | None:
        """Time of one draft pass over one target pass; None where no draft module ran."""
        timing, steps = self.timing, self.speculation.verify_steps
        if not (timing.draft_passes and steps and timing.verify_s > 0):
            return None
        return (timing.draft_s / timing.draft_passes) / (timing.verify_s / steps)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a streamed answer; ``completion`` comes with the last one.

    Text lags behind its tokens where it might begin a stop string or an unfinished character;
    ``logprobs`` go with the tokens, None where they were not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Where one engine step's time went, in seconds, and how many rows it verified.

    ``draft_passes`` counts the drafter's own forward passes in it (0 for n-gram), and ``was_asked``
    says whether it was asked at all; ``num_tokens`` is what the step emitted; ``prefill_s`` is
    the time of the ``prefill_tokens`` prompt tokens that were computed ahead, beside the rest.
    """

    num_requests: int
    num_rows: int
    draft_s: float
    verify_s: float
    rest_s: float
    draft_passes: int = 0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    num_tokens: int = 0
    was_asked: bool = False
