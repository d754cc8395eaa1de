"""The flags of ``outrider bench``: arms, loads, prompts, sampling, and how often.

Owns their names, help and defaults, and their translation into settings of
:mod:`outrider.bench`, which is imported only then: statistics and HTTP take a second to load, and
every verb imports this module. Used by :mod:`outrider.cli`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from outrider.commands.options import EngineOptions, flag, whole
from outrider.commands.survey import survey
from outrider.config import DEFAULT_MAX_MODEL_LEN, METHODS_WITH_HEAD, Method, SamplingParams
from outrider.errors import ParameterError, UsageError

if TYPE_CHECKING:
    from outrider.bench.arms import ArmSpec
    from outrider.bench.records import Load, SamplingRecord
    from outrider.bench.run import BenchSettings
    from outrider.bench.workloads import Question, Selection

DEFAULT_CONCURRENCY = "1,4"
_CONTEXT_STEP = 64  # tokens
_FREE_BATCH = 16  # of our own server under loads that do not say how much runs at once

_Value = TypeVar("_Value")


def _many(text: str) -> Parameter:
    return flag(f"{text} May be repeated.", negative="", show_default=False)


@Parameter(name="*", group=Group("Arms", sort_key=0))
@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOptions:
    """What is compared: our own engine with --methods, or servers given by address or command."""

    methods: Annotated[
        str | None,
        flag(
            "Comma-separated: off,ngram,eagle3,eagle3-tree,eagle3-tree+ngram ... Each gets an "
            "engine and an address of its own, in one process with one copy of the weights. "
            "Without it, --target and --serve: off, ngram, and the best shape of every head that "
            "there is for the model."
        ),
    ] = None
    head: Annotated[list[str], _many("METHOD=DIR, a head that does not ship for the model.")] = (
        field(default_factory=list)
    )
    target: Annotated[list[str], _many("NAME=URL, a running OpenAI-compatible server.")] = field(
        default_factory=list
    )
    serve: Annotated[
        list[str],
        _many("NAME=COMMAND, which starts such a server on the port that stands for {port}."),
    ] = field(default_factory=list)
    baseline: Annotated[str, flag("Which --target or --serve was started without speculation.")] = (
        Method.OFF.value
    )
    served_model: Annotated[
        str, flag("Model to ask for, where a server has several.", show_default=False)
    ] = ""
    one_at_a_time: Annotated[
        bool,
        flag(
            "A process per arm, stopped before the next starts: for servers that do not fit into "
            "memory side by side.",
            negative="",
        ),
    ] = False

    def specs(
        self,
        engine: EngineOptions,
        loads: Sequence[Load],
        questions: Sequence[Question],
        max_tokens: Callable[[int], int],
        *,
        is_chat: bool = True,
    ) -> tuple[ArmSpec, ...]:
        """The checked arms, the baseline first.

        ``questions`` are what will be asked, and ``max_tokens`` is how long an answer may get where
        there are so many arms: our own engine gets caches of that size, if it was given no other.

        Raises:
            ParameterError: as :func:`engine_arms`, :func:`given_arms` and :func:`chosen_methods`.
            UsageError: flags for our own engine together with other servers.
        """
        from outrider.bench.arms import EngineFlags, engine_arms, given_arms

        if self.target or self.serve:
            if self.methods is not None or self.head:
                raise UsageError(
                    "--methods and --head configure our own engine, and --target or --serve give "
                    "other servers; leave out one kind, or serve ours with "
                    "--serve NAME='outrider serve --port {port} ...'"
                )
            return tuple(given_arms(self.target, self.serve, self.baseline))
        if self.baseline != Method.OFF:
            raise UsageError(f"--baseline: {self.baseline!r} needs --target or --serve")
        heads = _heads(self.head)
        asked = [] if self.methods is None else [w.strip() for w in self.methods.split(",")]
        prompts = [question.messages if is_chat else question.text for question in questions]
        found = survey(asked, engine.model, heads, prompts)
        max_model_len = engine.max_model_len
        if max_model_len is None and found.longest_prompt is not None:
            num_arms = len({Method.OFF.value, *found.methods})
            most = found.longest_prompt + max_tokens(num_arms)
            max_model_len = context_for(most, found.max_position)
        flags = EngineFlags(
            model=engine.model,
            dtype=None if engine.dtype == EngineOptions().dtype else engine.dtype,
            device=None if engine.device == EngineOptions().device else engine.device,
            threads=engine.threads,
            max_model_len=max_model_len,
            heads=heads,
        )
        batch = max((load.concurrency or _FREE_BATCH for load in loads), default=_FREE_BATCH)
        return tuple(engine_arms(found.methods, flags, batch, are_apart=self.one_at_a_time))


def context_for(num_tokens: int, max_position: int) -> int | None:
    """The context of a server for requests of at most this length; None: the server's own default.

    In steps, since what the target costs is measured once per context. Never more than the default,
    which ends with the model's positions: longer contexts are for those who ask for them.
    """
    size = -(-num_tokens // _CONTEXT_STEP) * _CONTEXT_STEP
    return size if size < min(DEFAULT_MAX_MODEL_LEN, max_position) else None


@Parameter(name="*", group=Group("Load", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How requests come in; each level is measured and judged on its own."""

    concurrency: Annotated[
        str | None,
        flag(
            "Requests in flight, comma-separated. Without it, --rate and --trace: "
            f"{DEFAULT_CONCURRENCY}."
        ),
    ] = None
    rate: Annotated[str | None, flag("Requests per second, comma-separated; arrive at random.")] = (
        None
    )
    burstiness: Annotated[
        float,
        flag("Coefficient of variation of the gaps of --rate: 1 is Poisson, above it bursts."),
    ] = 1.0
    trace: Annotated[
        Path | None, flag("JSONL of arrivals, at_s in seconds or timestamp in milliseconds.")
    ] = None
    trace_speed: Annotated[str, flag("How many times faster, comma-separated.")] = "1"

    def loads(self) -> tuple[Load, ...]:
        """The checked levels, closed ones first.

        Raises:
            ParameterError: a text that is no list of numbers, or a level that cannot be.
        """
        from outrider.bench.records import Load, LoadKind

        closed = self.concurrency
        if closed is None and self.rate is None and self.trace is None:
            closed = DEFAULT_CONCURRENCY
        loads = [Load(LoadKind.CLOSED, n) for n in _numbers("--concurrency", closed, int)]
        kind = LoadKind.POISSON if self.burstiness == 1.0 else LoadKind.GAMMA
        loads += [Load(kind, n, self.burstiness) for n in _numbers("--rate", self.rate, float)]
        if self.trace is not None:
            speeds = _numbers("--trace-speed", self.trace_speed, float)
            loads += [Load(LoadKind.TRACE, speed, path=str(self.trace)) for speed in speeds]
        return tuple(loads)


@Parameter(name="*", group=Group("Prompts and sampling", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What is asked."""

    prompts: Annotated[
        Path | None,
        flag("JSONL with prompt, turns or messages, or ShareGPT's JSON. Without it: bundled ones."),
    ] = None
    categories: Annotated[str | None, flag("Only these, comma-separated.")] = None
    min_chars: Annotated[int, whole("Only prompts of at least this length.")] = 0
    max_chars: Annotated[int | None, whole("Only prompts of at most this length.")] = None
    max_prompts: Annotated[int | None, whole("At most this many, of all categories alike.")] = None
    length_buckets: Annotated[
        str | None,
        flag("Bounds in characters, comma-separated: group by length instead of category."),
    ] = None
    allow_random_prompts: Annotated[
        bool,
        flag(
            "Measure prompts that look like random tokens, on which acceptance means nothing.",
            negative="",
        ),
    ] = False
    temperature: Annotated[float, flag("0 is greedy.")] = 0.0
    top_p: Annotated[float, flag("Keep the smallest likeliest set with this probability.")] = 1.0
    seed: Annotated[int, whole("Of sampling and of arrivals; the same in every arm.")] = 1
    max_tokens: Annotated[int, whole("Most tokens per answer.")] = 128
    ignore_eos: Annotated[
        bool,
        flag(
            "Go on past the model's own end, so that all answers are equally long; servers must "
            "know the field.",
            negative="",
        ),
    ] = False
    raw: Annotated[bool, flag("Ask /v1/completions, without a chat template.", negative="")] = False

    def selection(self) -> Selection:
        """The checked choice of prompts.

        Raises:
            ParameterError: a bound is out of range.
        """
        from outrider.bench.workloads import Selection

        words = [] if self.categories is None else self.categories.split(",")
        return Selection(
            categories=tuple(word.strip() for word in words),
            min_chars=self.min_chars,
            max_chars=self.max_chars,
            max_prompts=self.max_prompts,
            buckets=tuple(_numbers("--length-buckets", self.length_buckets, int)),
        )

    def sampling(self) -> SamplingRecord:
        """The checked sampling settings.

        Raises:
            ParameterError: a value is out of range.
        """
        from outrider.bench.records import SamplingRecord

        SamplingParams(  # knows the ranges
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
        )
        if self.max_tokens < 2:
            raise ParameterError(
                f"--max-tokens: {self.max_tokens} leaves no token after the first to time"
            )
        return SamplingRecord(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            is_chat=not self.raw,
        )


@Parameter(name="*", group=Group("Measuring", sort_key=3))
@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions:
    """How often, and how long to wait."""

    blocks: Annotated[int, whole("Comparisons per load; below 6 nothing can be decided.")] = 8
    aa_blocks: Annotated[
        int, whole("Comparisons of the baseline with itself per load: the noise floor.")
    ] = 3
    requests: Annotated[
        int | None, whole("Per block and arm. Without it: 4 rounds of every slot, at least 8.")
    ] = None
    margin: Annotated[
        float | None,
        flag("Least gain worth deploying for, such as 0.05 for 5 %. Without it: 3 %."),
    ] = None
    slo_ttft_ms: Annotated[float | None, flag("Longest time to the first token.")] = None
    slo_tpot_ms: Annotated[float | None, flag("Longest time per further token.")] = None
    slo_latency_ms: Annotated[float | None, flag("Longest time to the last token.")] = None
    start_timeout: Annotated[float, flag("Seconds that a server may take to start.")] = 600.0
    timeout: Annotated[float, flag("Seconds of silence after which a request has failed.")] = 120.0

    def settings(
        self,
        arms: tuple[ArmSpec, ...],
        loads: tuple[Load, ...],
        sampling: SamplingRecord,
        **more: Any,
    ) -> BenchSettings:
        """The checked settings of a run; ``more`` are further fields of them.

        Raises:
            ParameterError: a value is out of range; names the flag.
        """
        from outrider.bench.run import BenchSettings

        for name in ("start_timeout", "timeout"):
            value = getattr(self, name)
            if not 0.0 < value <= 86_400.0:
                raise ParameterError(f"--{_dashed(name)}: {value:g} is outside (0, 86400] seconds")
        return BenchSettings(
            arms=arms,
            loads=loads,
            sampling=sampling,
            num_blocks=self.blocks,
            num_aa_blocks=self.aa_blocks,
            requests=self.requests,
            start_timeout_s=self.start_timeout,
            idle_s=self.timeout,
            judging=self.judging(),
            **more,
        )

    def judging(self) -> dict[str, float]:
        """The thresholds of the verdict as they were given; fixed before measuring.

        Raises:
            ParameterError: a threshold is out of range.
        """
        from outrider.bench.verdict import JudgeSettings

        names = ("margin", "slo_ttft_ms", "slo_tpot_ms", "slo_latency_ms")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            if name != "margin" and not 0.0 < value < math.inf:
                raise ParameterError(f"--{_dashed(name)}: {value:g} is not a time above 0 ms")
        if self.margin is not None:
            JudgeSettings(margin=self.margin)  # knows the range
        return given


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _numbers(flag: str, text: str | None, parse: Callable[[str], _Value]) -> list[_Value]:
    """The numbers of a comma-separated list; none of none."""
    if text is None:
        return []
    try:
        return [parse(word) for word in text.split(",")]
    except ValueError:
        kind = "whole numbers" if parse is int else "numbers"
        raise ParameterError(
            f"{flag}: {text!r} is no comma-separated list of {kind}, such as 1,4"
        ) from None


def _heads(items: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in items:
        method, _, where = item.partition("=")
        if method not in METHODS_WITH_HEAD or not where or method in found:
            raise ParameterError(
                f"--head: {item!r} is not METHOD=DIR, once per method, with one of "
                f"{', '.join(METHODS_WITH_HEAD)}"
            )
        found[method] = where
    return found
