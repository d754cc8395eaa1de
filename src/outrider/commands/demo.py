"""The demonstration: plain decoding and every way to draft, prompt by prompt, and what came of it.

Owns the choice of prompts, the interleaving and the time; the model and the arms come in as
arguments. :mod:`outrider.cli` runs it (``make demo``)::

    demo_arms      what there is to measure
    demo           pairs of answers
    demo_figures   rates and ratios of them
    demo_report    tables, verdict, JSON

All arms share one set of weights. Each prompt is answered by every arm, greedy and sampled, in an
order that turns from prompt to prompt and is mirrored between the two modes, so that a machine that
drifts favours none. With plain decoding and two methods::

    prompt 0   greedy: plain, A, B     sampled: B, A, plain
    prompt 1   greedy: A, B, plain     sampled: plain, B, A
    prompt 2   greedy: B, plain, A     sampled: A, plain, B

Rates count the tokens after the first step over the time from the first step to the last; the ratio
is taken per prompt, so prompts of different lengths weigh the same.
"""

from __future__ import annotations

import datetime
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import outrider
from outrider.bench.prompts import Prompt, prompt_set_hash
from outrider.commands.demo_arms import Arm
from outrider.commands.demo_figures import REPEATING_CATEGORIES, DemoResult, Pair, total_rate
from outrider.config import SamplingParams
from outrider.errors import ParameterError
from outrider.models.loading.tokenizer import encode_prompt
from outrider.types import Completion

if TYPE_CHECKING:
    from outrider.llm import LLM

SCHEMA_VERSION = 2
PLAIN = "plain"
MINUTES, MINUTES_OF_SEVERAL = 3.0, 5.0  # to measure one method, and more than one
MIN_PROMPTS = 4  # measured however little time there is: two that repeat their input, two others
OVERRUN = 1.15  # the share of the planned time at which no further round is begun


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """How long to measure and what to ask for.

    Raises:
        ParameterError: a value is out of range.
    """

    minutes: float = MINUTES
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
class Progress:
    """What a display may show between two prompts; ``rates`` are tokens per second by arm."""

    num_done: int
    num_pairs: int
    next_prompt: Prompt | None
    rates: tuple[tuple[str, float | None], ...]
    left_s: float


def run(
    llm: LLM,
    methods: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: DemoSettings,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> DemoResult:
    """Answer a balanced choice of prompts with every arm and collect the figures.

    ``llm`` decodes plainly, and every method is compared with it. ``on_progress`` is called between
    prompts, never while an answer is timed.

    Raises:
        ParameterError: no prompt fits the model's context together with ``max_tokens``.
    """
    started = clock()
    arms = [Arm(PLAIN, llm), *methods]
    rounds = balanced_rounds(_that_fit(llm, prompts, settings.max_tokens))
    prompt_s = _warm_up(arms, rounds[-1], settings)
    planned_s = settings.minutes * 60.0
    rounds = affordable_rounds(rounds, prompt_s, planned_s)
    per_prompt = 2 * len(methods)
    num_pairs = per_prompt * sum(len(one_round) for one_round in rounds)
    expected_s = prompt_s / per_prompt

    pairs: list[Pair] = []
    measured_from = clock()
    for index, one_round in enumerate(rounds):
        spent_s = clock() - measured_from
        if index and spent_s * (index + 1) / index > OVERRUN * planned_s:
            break  # slower than the warm-up promised; whole rounds keep the choice balanced
        for place, prompt in enumerate(one_round):
            on_progress(_progress(arms, pairs, num_pairs, prompt, expected_s))
            # A category has both directions of an order in two rounds, then the next order.
            turn, is_mirrored = place + index // 2, index % 2 == 1
            pairs += _answer(
                arms,
                prompt,
                settings,
                number=len(pairs) // per_prompt,
                turn=turn,
                is_mirrored=is_mirrored,
            )
    on_progress(_progress(arms, pairs, num_pairs, None, 0.0))
    conditions = _conditions(llm, methods, prompts, settings, pairs)
    return DemoResult(tuple(pairs), conditions, clock() - started, peak_memory())


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


def affordable_rounds(
    rounds: Sequence[Sequence[Prompt]], prompt_s: float, planned_s: float
) -> list[Sequence[Prompt]]:
    """As many whole rounds as the time allows; of the first, the part that it allows.

    That part has at least ``MIN_PROMPTS``: every arm answers every prompt, so what little time
    there is, is shared fairly.
    """
    first, num_prompts = rounds[0], int(planned_s / prompt_s)
    if num_prompts >= len(first):
        return list(rounds[: num_prompts // len(first)])
    return [first[: max(MIN_PROMPTS, num_prompts)]]


def arm_order(num_arms: int, turn: int, *, is_mirrored: bool) -> list[int]:
    """Who answers first, second, ...: turned by one each time.

    Over a whole turn every arm is in every place; mirrored ones along with it, it is also before
    every other arm as often as behind it.
    """
    shift = turn % num_arms
    order = [*range(shift, num_arms), *range(shift)]
    return order[::-1] if is_mirrored else order


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
    arms: Sequence[Arm],
    prompt: Prompt,
    settings: DemoSettings,
    *,
    number: int = 0,
    turn: int = 0,
    is_mirrored: bool = False,
) -> list[Pair]:
    """Both modes of one prompt, the second mirrored; ``number`` decides its seed."""
    plain, *methods = arms
    ids = prompt_ids(plain.llm, prompt)
    pairs = []
    for mode, params in settings.modes(number).items():
        completions: dict[str, Completion] = {}
        for index in arm_order(len(arms), turn, is_mirrored=is_mirrored):
            completions[arms[index].name] = arms[index].llm.generate([ids], params)[0]
        pairs += [
            Pair(
                prompt_id=prompt.id,
                category=prompt.category,
                mode=mode,
                method=arm.name,
                plain=completions[plain.name],
                speculative=completions[arm.name],
            )
            for arm in methods
        ]
        is_mirrored = not is_mirrored
    return pairs


def _warm_up(arms: Sequence[Arm], prompts: Sequence[Prompt], settings: DemoSettings) -> float:
    """Run two prompts that are not counted; seconds that a prompt will take.

    The first prompt only brings kernels and caches to life and is not believed.
    """
    short = replace(settings, max_tokens=min(16, settings.max_tokens))
    _answer(arms, prompts[0], short)
    believed = [_answer(arms, prompt, settings) for prompt in prompts[:2]]
    seconds = sum(_answering_s(pairs) for pairs in believed)
    return max(seconds, 1e-6) / len(believed)


def _answering_s(pairs: Sequence[Pair]) -> float:
    """Time the answers took, prompts included; a plain one is in the pairs of all methods."""
    plain = {(pair.prompt_id, pair.mode): pair.plain.timing.total_s for pair in pairs}
    return sum(plain.values()) + sum(pair.speculative.timing.total_s for pair in pairs)


def _progress(
    arms: Sequence[Arm],
    pairs: Sequence[Pair],
    num_pairs: int,
    next_prompt: Prompt | None,
    pair_s: float,
) -> Progress:
    """A display's view; the time left follows what was measured once there is something."""
    if pairs:
        pair_s = _answering_s(pairs) / len(pairs)
    by_arm: dict[str, list[Completion]] = {arm.name: [] for arm in arms}
    for pair in pairs:
        by_arm[PLAIN].append(pair.plain)  # once for every method, which leaves the rate as it is
        by_arm[pair.method].append(pair.speculative)
    return Progress(
        num_done=len(pairs),
        num_pairs=num_pairs,
        next_prompt=next_prompt,
        rates=tuple((name, total_rate(completions)) for name, completions in by_arm.items()),
        left_s=0.0 if next_prompt is None else pair_s * (num_pairs - len(pairs)),
    )


def _conditions(
    llm: LLM,
    methods: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: DemoSettings,
    pairs: Sequence[Pair],
) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "fingerprint": llm.fingerprint.to_json(),
        "conditions": llm.fingerprint.text,
        "speculation": {arm.name: asdict(arm.llm.speculation) for arm in methods},
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
