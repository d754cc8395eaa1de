"""The demonstration: plain decoding and speculation, prompt by prompt, and what came of it.

Owns the choice of prompts, the interleaving, and the figures; the model comes in as an argument.
:mod:`outrider.cli` runs it (``make demo``) and prints what ``demo_report`` makes of it.

Both arms share one set of weights. Each prompt is answered four times, greedy and sampled, plain
and speculative, in an order that alternates (ABBA), so that a machine that drifts favours neither::

    prompt 0   greedy: plain, speculative     sampled: speculative, plain
    prompt 1   greedy: speculative, plain     sampled: plain, speculative

Rates count the tokens after the first step over the time from the first step to the last; the ratio
is taken per prompt, so prompts of different lengths weigh the same.
"""

from __future__ import annotations

import datetime
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import outrider
from outrider.bench.prompts import Prompt, prompt_set_hash
from outrider.bench.statistics import RatioInterval, ratio_interval
from outrider.config import Method, SamplingParams, SpeculationConfig
from outrider.errors import ParameterError
from outrider.models.loading.tokenizer import encode_prompt
from outrider.types import Completion, SpeculationStats

if TYPE_CHECKING:
    from outrider.llm import LLM

SCHEMA_VERSION = 1
REPEATING_CATEGORIES = frozenset({"code-edit", "answer", "rewrite", "summarize"})
REPEATING, REST, ALL = "repeats input", "rest", "all"
GROUPS = (REPEATING, REST, ALL)
OVERRUN = 1.15  # the share of the planned time at which no further round is begun


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """How long to measure and what to ask for.

    Raises:
        ParameterError: a value is out of range.
    """

    minutes: float = 3.0
    max_tokens: int = 96
    temperature: float = 0.8
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.minutes <= 600.0:
            raise ParameterError(f"minutes: {self.minutes} is outside (0, 600]")
        if not 2 <= self.max_tokens <= 4096:
            raise ParameterError(f"max_tokens: {self.max_tokens} is outside 2 .. 4096")

    def modes(self, index: int) -> dict[str, SamplingParams]:
        """Sampling settings of the ``index``-th prompt by their name in the table."""
        sampled = SamplingParams(
            temperature=self.temperature, seed=self.seed + index, max_tokens=self.max_tokens
        )
        return {
            "greedy": SamplingParams(max_tokens=self.max_tokens),
            f"temperature {self.temperature:g}": sampled,
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt answered by both arms with the same sampling settings."""

    prompt_id: str
    category: str
    mode: str
    plain: Completion
    speculative: Completion

    @property
    def group(self) -> str:
        """Whether the answer is expected to repeat parts of its prompt."""
        return REPEATING if self.category in REPEATING_CATEGORIES else REST

    @property
    def is_same(self) -> bool:
        """Same tokens, text and end, and no error on either side."""
        plain, other = self.plain, self.speculative
        return (
            plain.token_ids == other.token_ids
            and plain.text == other.text
            and plain.finish_reason == other.finish_reason
            and plain.error is None
            and other.error is None
        )

    @property
    def total_s(self) -> float:
        """Time both answers took, prompts included."""
        return self.plain.timing.total_s + self.speculative.timing.total_s


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one sampling mode and group of prompts; None where there is nothing to divide.

    Rates are tokens per second over all answers of the group; ``ratio`` is speculative over plain.
    """

    mode: str
    group: str
    num_pairs: int
    num_same: int
    plain_rate: float | None
    speculative_rate: float | None
    ratio: RatioInterval | None
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What a display may show between two pairs."""

    num_done: int
    num_pairs: int
    next_prompt: Prompt | None
    last_pair: Pair | None
    plain_rate: float | None
    speculative_rate: float | None
    left_s: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything that was measured, with its conditions."""

    pairs: tuple[Pair, ...]
    conditions: dict[str, Any]
    elapsed_s: float
    peak_memory_bytes: int

    @property
    def rows(self) -> list[Row]:
        """One row per sampling mode and group, in the table's order."""
        modes = list(dict.fromkeys(pair.mode for pair in self.pairs))
        return [summarise(self.pairs, mode, group) for mode in modes for group in GROUPS]

    @property
    def differing(self) -> list[Pair]:
        """The pairs whose two answers are not the same."""
        return [pair for pair in self.pairs if not pair.is_same]

    @property
    def is_lossless(self) -> bool:
        """Every text was the same with and without speculation."""
        return not self.differing


def run(
    llm: LLM,
    prompts: Sequence[Prompt],
    settings: DemoSettings,
    on_progress: Callable[[Progress], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> DemoResult:
    """Answer a balanced choice of prompts with both arms and collect the figures.

    ``llm`` speculates; the plain arm shares its weights. ``on_progress`` is called between pairs,
    never while an answer is timed.

    Raises:
        ParameterError: no prompt fits the model's context together with ``max_tokens``.
    """
    started = clock()
    arms = (llm.with_speculation(SpeculationConfig(method=Method.OFF)), llm)
    rounds = balanced_rounds(_that_fit(llm, prompts, settings.max_tokens))
    round_s = _warm_up(arms, rounds[-1], settings)
    planned_s = settings.minutes * 60.0
    num_rounds = max(1, min(len(rounds), int(planned_s / round_s)))
    num_pairs = 2 * sum(len(one_round) for one_round in rounds[:num_rounds])

    pairs: list[Pair] = []
    measured_from = clock()
    for index, one_round in enumerate(rounds[:num_rounds]):
        spent_s = clock() - measured_from
        if index and spent_s * (index + 1) / index > OVERRUN * planned_s:
            break  # slower than the warm-up promised; whole rounds keep the choice balanced
        for prompt in one_round:
            number = len(pairs) // 2
            on_progress(_progress(pairs, num_pairs, prompt, round_s / (2 * len(one_round))))
            pairs += _answer(arms, prompt, settings, number)
    on_progress(_progress(pairs, num_pairs, None, 0.0))
    return DemoResult(
        tuple(pairs), _conditions(llm, prompts, settings, pairs), clock() - started, peak_memory()
    )


def balanced_rounds(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Rounds of one prompt per category, as many as the smallest category allows.

    Within a round, prompts that repeat their input take turns with the others.
    """
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    repeating = [name for name in by_category if name in REPEATING_CATEGORIES]
    rest = [name for name in by_category if name not in REPEATING_CATEGORIES]
    order: list[str] = []
    for queue in cycle((repeating, rest)):
        if len(order) == len(by_category):
            break
        if queue:
            order.append(queue.pop(0))
    num_rounds = min((len(group) for group in by_category.values()), default=0)
    return [[by_category[name][index] for name in order] for index in range(num_rounds)]


def summarise(pairs: Sequence[Pair], mode: str, group: str) -> Row:
    """The figures of the pairs of one mode and group (``ALL`` takes every group)."""
    chosen = [pair for pair in pairs if pair.mode == mode and group in (ALL, pair.group)]
    timed = [
        (speculative, plain)
        for pair in chosen
        if (speculative := pair.speculative.decode_rate) is not None
        and (plain := pair.plain.decode_rate) is not None
    ]
    speculation = SpeculationStats()
    for pair in chosen:
        speculation.add(pair.speculative.speculation)
    return Row(
        mode=mode,
        group=group,
        num_pairs=len(chosen),
        num_same=sum(pair.is_same for pair in chosen),
        plain_rate=total_rate([pair.plain for pair in chosen]),
        speculative_rate=total_rate([pair.speculative for pair in chosen]),
        ratio=ratio_interval([above for above, _ in timed], [below for _, below in timed])
        if timed
        else None,
        acceptance_length=speculation.acceptance_length,
    )


def total_rate(completions: Sequence[Completion]) -> float | None:
    """Tokens per second after the first step's, over all answers; None when there are none."""
    tokens = sum(c.usage.completion_tokens - c.timing.num_first for c in completions)
    seconds = sum(completion.timing.decode_s for completion in completions)
    return tokens / seconds if tokens and seconds > 0 else None


def peak_memory() -> int:
    """The most bytes of memory this process ever held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes everywhere but on macOS


def prompt_ids(llm: LLM, prompt: Prompt) -> list[int]:
    """The prompt's first turn as the model expects it: in its chat template, where it has one."""
    return encode_prompt(llm.tokenizer, prompt.turns[0])


def _that_fit(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> list[Prompt]:
    room = llm.max_model_len - max_tokens
    fitting = [prompt for prompt in prompts if len(prompt_ids(llm, prompt)) <= room]
    if not fitting:
        raise ParameterError(
            f"max_tokens: {max_tokens} leaves {room} of {llm.max_model_len} context tokens for "
            "the prompt, which is too few for every prompt; lower it or raise max_model_len"
        )
    return fitting


def _answer(
    arms: tuple[LLM, LLM], prompt: Prompt, settings: DemoSettings, number: int
) -> list[Pair]:
    """Both modes of one prompt; which arm goes first alternates with mode and prompt."""
    ids = prompt_ids(arms[1], prompt)
    pairs = []
    for turn, (mode, params) in enumerate(settings.modes(number).items()):
        completions: dict[int, Completion] = {}
        for arm in (0, 1) if (number + turn) % 2 == 0 else (1, 0):
            completions[arm] = arms[arm].generate([ids], params)[0]
        pairs.append(Pair(prompt.id, prompt.category, mode, completions[0], completions[1]))
    return pairs


def _warm_up(arms: tuple[LLM, LLM], prompts: Sequence[Prompt], settings: DemoSettings) -> float:
    """Run two prompts that are not counted; seconds that a round of prompts will take.

    The first prompt only brings kernels and caches to life and is not believed.
    """
    short = DemoSettings(minutes=settings.minutes, max_tokens=min(16, settings.max_tokens))
    _answer(arms, prompts[0], short, 0)
    believed = [_answer(arms, prompt, settings, 0) for prompt in prompts[:2]]
    seconds = sum(pair.total_s for pairs in believed for pair in pairs)
    return max(seconds, 1e-6) / len(believed) * len(prompts)


def _progress(
    pairs: Sequence[Pair], num_pairs: int, next_prompt: Prompt | None, pair_s: float
) -> Progress:
    """A display's view; the time left follows what was measured once there is something."""
    if pairs:
        pair_s = sum(pair.total_s for pair in pairs) / len(pairs)
    return Progress(
        num_done=len(pairs),
        num_pairs=num_pairs,
        next_prompt=next_prompt,
        last_pair=pairs[-1] if pairs else None,
        plain_rate=total_rate([pair.plain for pair in pairs]),
        speculative_rate=total_rate([pair.speculative for pair in pairs]),
        left_s=0.0 if next_prompt is None else pair_s * (num_pairs - len(pairs)),
    )


def _conditions(
    llm: LLM, prompts: Sequence[Prompt], settings: DemoSettings, pairs: Sequence[Pair]
) -> dict[str, Any]:
    """What the figures hold for."""
    speculation = asdict(llm.speculation)
    return {
        "fingerprint": llm.fingerprint.to_json(),
        "conditions": llm.fingerprint.text,
        "speculation": speculation,
        "num_prompts": len({pair.prompt_id for pair in pairs}),
        "num_prompts_available": len(prompts),
        "num_categories": len({pair.category for pair in pairs}),
        "prompt_set_hash": prompt_set_hash(prompts),
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "concurrency": 1,
        "version": outrider.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
