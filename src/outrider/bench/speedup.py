"""A speed-up that cannot be told without what it holds for.

Owns the type: the ratio with its interval is sealed inside, and every way out says at least the
workload and the load. Built by :mod:`outrider.bench.verdict`; plans, consoles and pages only ever
hold this. A bare multiplier is a type error here, not a convention.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

from outrider.bench.records import ArmRecord, Load, Losslessness, RunRecord
from outrider.bench.statistics import RatioInterval
from outrider.config import METHODS_WITH_HEAD, Method

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOSSLESS_WORDS = {
    Losslessness.EXACT: "exact by self-test",
    Losslessness.AUDITED: "audited",
    Losslessness.NOT_AUDITED: "not audited for losslessness",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a figure holds for; a field that nobody knows says ``unknown``.

    Lengths are in tokens: median prompt and median output over all measured requests.
    """

    target: str
    method: str
    draft: str
    speculation: Mapping[str, Any]
    baseline: str
    sampling: str
    workload: str
    prompt_hash: str
    num_prompts: int
    prompt_len: float | None
    output_len: float | None
    load: Load
    machine: str
    precision: str
    engine: str
    engine_version: str
    process: str
    num_blocks: int
    losslessness: Losslessness
    losslessness_detail: str

    @property
    def workload_text(self) -> str:
        """The set of prompts by name and hash."""
        return f"{self.workload} (#{self.prompt_hash})"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Everything, as name and text, for a table."""
        lengths = [
            "unknown" if length is None else f"{length:g} tokens"
            for length in (self.prompt_len, self.output_len)
        ]
        settings = ", ".join(
            _setting_text(name, value)
            for name, value in self.speculation.items()
            if name != "method"
        )
        return [
            ("target", self.target),
            ("method", self.method),
            ("draft", self.draft),
            ("settings", settings or "the engine's own"),
            ("compared with", self.baseline),
            ("sampling", self.sampling),
            ("workload", f"{self.workload_text}, {self.num_prompts} prompts"),
            ("median prompt", lengths[0]),
            ("median output", lengths[1]),
            ("load", self.load.text),
            ("machine", self.machine),
            ("precision", self.precision),
            ("engine", f"{self.engine} {self.engine_version}"),
            ("process", self.process),
            ("blocks", str(self.num_blocks)),
            ("losslessness", self.lossless_text),
        ]

    @property
    def lossless_text(self) -> str:
        """How it is known that the output is the target's."""
        words = LOSSLESS_WORDS[self.losslessness]
        return f"{words} ({self.losslessness_detail})" if self.losslessness_detail else words

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        fields = asdict(self)
        return fields | {"speculation": dict(self.speculation), "load": self.load.name}


@dataclass(frozen=True, slots=True, repr=False)
class Speedup:
    """How many times the baseline's ``metric`` an arm reached, with interval and conditions.

    Raises:
        TypeError: on construction without conditions, and wherever a bare number is asked for.
    """

    metric: str
    conditions: Conditions
    _interval: RatioInterval = field()

    def __post_init__(self) -> None:
        if not isinstance(self.conditions, Conditions):
            raise TypeError(f"a speed-up needs its Conditions; got {self.conditions!r}")

    def __str__(self) -> str:
        where = self.conditions
        return (
            f"{self._ratio} {self.metric}, {where.method} over {where.baseline}, at "
            f"{where.load.text} on {where.workload_text}"
        )

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(
                f"a speed-up has no format {spec!r}: it is told with workload and load; use str(), "
                "or within() beside a caption that names both"
            )
        return str(self)

    def __float__(self) -> NoReturn:
        raise TypeError("a speed-up is no bare number; use str(), or point() for a chart's axis")

    def within(self, caption: str) -> str:
        """Ratio and interval alone, for a cell or sentence under a caption that says the rest.

        Raises:
            TypeError: the caption names not both the workload's hash and the load.
        """
        wanted = (self.conditions.prompt_hash, self.conditions.load.text)
        missing = [
            words  # whole words: "1 user" is not said by "21 users"
            for words in wanted
            if not re.search(rf"(?<![\w.]){re.escape(words)}(?!\w)", caption)
        ]
        if missing:
            raise TypeError(f"the caption {caption!r} does not say {' and '.join(missing)}")
        return self._ratio

    @property
    def _ratio(self) -> str:
        """``1.41x (1.33-1.50)``; never leaves this class without what it holds for."""
        ratio, low, high = self.point()
        if low is None or high is None:
            return f"{ratio:.2f}x (one block)"
        return f"{ratio:.2f}x ({low:.2f}-{high:.2f})"

    def point(self) -> tuple[float, float | None, float | None]:
        """Ratio, low and high for the axis of a chart, whose caption has the conditions."""
        return self._interval.ratio, self._interval.low, self._interval.high

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document, conditions included."""
        return {
            "metric": self.metric,
            **self._interval.to_json(),
            "conditions": self.conditions.to_json(),
        }


def conditions_of(
    run: RunRecord,
    arm: ArmRecord,
    load: Load,
    *,
    num_blocks: int,
    prompt_len: float | None,
    output_len: float | None,
) -> Conditions:
    """The conditions of one arm at one load, from the run's record."""
    sampling = run.sampling
    how = "greedy" if sampling.temperature == 0.0 else f"temperature {sampling.temperature:g}"
    parts = [how] if sampling.top_p == 1.0 else [how, f"top-p {sampling.top_p:g}"]
    parts += [f"at most {sampling.max_tokens} tokens"]
    parts += ["past the end of sequence"] * sampling.ignore_eos
    settings = {name: value for name, value in arm.speculation.items() if value is not None}
    return Conditions(
        target=arm.model,
        method=arm.name,
        draft=_draft_text(arm, settings),
        speculation=settings,
        baseline=run.baseline.name,
        sampling=", ".join(parts),
        workload=run.workload.source,
        prompt_hash=run.workload.prompt_hash,
        num_prompts=run.workload.num_prompts,
        prompt_len=prompt_len,
        output_len=output_len,
        load=load,
        machine=_where_served(arm, run.machine),
        precision=arm.precision or "unknown",
        engine=arm.engine or "unknown engine",
        engine_version=arm.engine_version or "of unknown version",
        process=process_text(arm),
        num_blocks=num_blocks,
        losslessness=arm.losslessness,
        losslessness_detail=arm.losslessness_detail,
    )


def process_text(arm: ArmRecord) -> str:
    """What else ran in the process that served an arm."""
    if arm.process:
        return (
            f"one for {', '.join(arm.process)}: one copy of the weights, an engine and cache each"
        )
    return "one of its own" if arm.command is not None else "unknown: given by address"


def machine_text(machine: Mapping[str, Any]) -> str:
    """The machine as a person would say it: ``AMD EPYC, 2 cores, 23.5 GiB memory``."""
    names = [str(gpu.get("name", "GPU")) for gpu in machine.get("gpus", ())]
    cards = [
        name if count == 1 else f"{count} x {name}"
        for name, count in sorted(Counter(names).items())
    ]
    parts = [machine.get("processor"), _cores_text(machine), _memory_text(machine), *cards]
    return ", ".join(str(part) for part in parts if part) or "unknown"


def _cores_text(machine: Mapping[str, Any]) -> str:
    """``2 cores``, or ``2 of 8 cores`` where a run may not use all."""
    all_cores = machine.get("num_cores")
    usable = machine.get("num_usable_cores", all_cores)
    if not usable:
        return ""
    share = f"{usable} of {all_cores}" if all_cores and usable != all_cores else str(usable)
    return f"{share} {'core' if share == '1' else 'cores'}"


def _memory_text(machine: Mapping[str, Any]) -> str:
    num_bytes = machine.get("memory_bytes")
    return f"{num_bytes / 2**30:.3g} GiB memory" if num_bytes else ""


def _where_served(arm: ArmRecord, machine: Mapping[str, Any]) -> str:
    """The server's machine, which is the client's only where the address is this machine's."""
    here = machine_text(machine)
    if urlsplit(arm.url).hostname in _LOOPBACK:
        return here
    return f"that of {arm.url}, unknown here (client: {here})"


def _draft_text(arm: ArmRecord, settings: Mapping[str, Any]) -> str:
    """What proposes tokens, as far as it is known."""
    named = next((settings[key] for key in ("head", "draft", "model") if key in settings), None)
    if named is not None:
        return str(named)
    drafter = str(settings.get("method", ""))
    if drafter == Method.NGRAM:
        return "none; words of prompt and answer that came before"
    if drafter in METHODS_WITH_HEAD:
        words = f"the {drafter} head that ships for the target"
        return f"{words}, and n-gram" if settings.get("with_ngram") else words
    return f"as the server named {arm.name} was started"


def _setting_text(name: str, value: object) -> str:
    """``max_draft_len 5``; switches say yes or no."""
    return f"{name} {('no', 'yes')[value] if isinstance(value, bool) else value}"
