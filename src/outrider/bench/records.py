"""What a run measured, as it was measured: chunks, requests, blocks, and the run's conditions.

Owns the records' shape and their JSON form, nothing derived: every metric, guard and verdict is
computed from these, so a definition can be corrected later without measuring again. Written by
:mod:`outrider.bench.run`, kept in files by :mod:`outrider.bench.store`, read by all judgement.

All times are seconds of one monotonic clock, counted from the run's start. How the pieces relate::

    RunRecord                      once: arms, workload, sampling, machine, seeds
      BlockRecord (index 7, position 0, arm plain)        the same prompts in the same order ...
        RequestRecord, RequestRecord, ...
      BlockRecord (index 7, position 1, arm eagle3)       ... by the next arm, right after it

A *block* is one index: every arm once at one load; the pair of positions is what is compared. In a
block of the kind ``aa`` the baseline stands at both positions: it shows the noise floor. Indices
are unique over the whole run, loads included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from outrider.errors import ParameterError, RecordError

SCHEMA_VERSION = 1

_Record = TypeVar("_Record")


class LoadKind(StrEnum):
    """How requests come in: as slots get free, or on a schedule that waits for nobody."""

    CLOSED = "closed"  # value: requests in flight
    POISSON = "poisson"  # value: requests per second
    GAMMA = "gamma"  # value: requests per second; burstiness: coefficient of variation of the gaps
    TRACE = "trace"  # value: speed-up of the recorded arrival times; path names the file


class BlockKind(StrEnum):
    """What a block is for; only ``measure`` compares arms."""

    MEASURE = "measure"
    AA = "aa"
    WARMUP = "warmup"


class TokenSource(StrEnum):
    """Where a request's token counts came from, best first."""

    CONTINUOUS_USAGE = "continuous_usage"  # every chunk carried usage: per-chunk counts are exact
    TOKEN_IDS = "token_ids"  # every chunk carried the ids of its tokens
    LOGPROBS = "logprobs"  # every chunk carried one logprob entry per token
    USAGE = "usage"  # the total is the server's, the chunks' shares are unknown
    UNKNOWN = "unknown"  # nobody said


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load. ``value`` is in the unit of its kind.

    Raises:
        ParameterError: a value that no load can have.
    """

    kind: LoadKind
    value: float
    burstiness: float = 1.0
    path: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0.0):
            raise ParameterError(f"load {self.kind}: {self.value} is not a number above 0")
        if self.kind is LoadKind.CLOSED and self.value != int(self.value):
            raise ParameterError(f"concurrency: {self.value} is not a whole number of at least 1")
        if not (math.isfinite(self.burstiness) and self.burstiness > 0.0):
            raise ParameterError(f"burstiness: {self.burstiness} is not a number above 0")

    @property
    def name(self) -> str:
        """Short and unique: ``closed:4``, ``poisson:2.5``, ``gamma:2.5:cv2``, ``trace:x1``."""
        match self.kind:
            case LoadKind.CLOSED:
                return f"closed:{int(self.value)}"
            case LoadKind.GAMMA:
                return f"gamma:{self.value:g}:cv{self.burstiness:g}"
            case LoadKind.TRACE:
                return f"trace:x{self.value:g}"
            case LoadKind.POISSON:
                return f"poisson:{self.value:g}"

    @property
    def text(self) -> str:
        """For people: ``4 users``, ``2.5 requests/s (Poisson)``."""
        match self.kind:
            case LoadKind.CLOSED:
                return "1 user" if self.value == 1 else f"{int(self.value)} users"
            case LoadKind.GAMMA:
                return f"{self.value:g} requests/s (bursts, cv {self.burstiness:g})"
            case LoadKind.TRACE:
                return f"trace {self.path} at {self.value:g}x"
            case LoadKind.POISSON:
                return f"{self.value:g} requests/s (Poisson)"

    @property
    def concurrency(self) -> int | None:
        """Requests in flight, where the load fixes them."""
        return int(self.value) if self.kind is LoadKind.CLOSED else None


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One piece of streamed text as it arrived.

    ``num_tokens`` is None where the server did not say how many tokens the chunk holds.
    """

    at_s: float
    num_tokens: int | None
    num_chars: int


@dataclass(frozen=True, slots=True)
class SpeculativeCounts:
    """What the server said about one request's drafts; the bonus token is in no count.

    ``acceptance_length`` is the server's own figure (1 + accepted / steps by our definition), kept
    so that another definition shows. A field is None where the server left it out.
    """

    drafted: int | None = None
    accepted: int | None = None
    steps: int | None = None
    acceptance_length: float | None = None
    accepted_per_position: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one request, as the client saw it.

    ``sent_s`` is when its bytes left. A chunk holds text, or counted tokens without text (an
    end-of-sequence token); role announcements and closing usage are no chunks. ``error`` is a
    sentence, None for a sound answer. ``served_model`` is what the answer named, ``token_hash``
    names its token ids where the server told them.
    """

    sent_s: float
    headers_s: float | None
    ended_s: float
    chunks: tuple[ChunkRecord, ...]
    status: int | None
    error: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    token_source: TokenSource
    text: str
    speculative: SpeculativeCounts | None
    served_model: str | None = None
    token_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord(Answer):
    """An answer, and which request it is to: from the moment it should have been sent.

    ``scheduled_s`` is when the load wanted it sent, and what latencies count from. ``block`` and
    ``position`` name its :class:`BlockRecord`. ``prompt_hash`` is over the messages as sent.
    """

    arm: str
    block: int
    position: int
    load: Load
    prompt_id: str
    category: str
    scheduled_s: float
    prompt_hash: str = ""

    @classmethod
    def of(cls, answer: Answer, **place: Any) -> RequestRecord:
        """The record of an answer; ``place`` are the fields that only the load knows."""
        return cls(**{field.name: getattr(answer, field.name) for field in fields(Answer)}, **place)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """A server's ``/metrics`` at one moment: every sample but histogram buckets.

    Keys are as exposed, labels included: ``vllm:spec_decode_num_drafts_total{model_name="m"}``.
    """

    at_s: float
    samples: Mapping[str, float]

    def total(self, name: str) -> float | None:
        """Sum over all label sets of a name; None where the server exposes none of it."""
        found = [value for key, value in self.samples.items() if key.partition("{")[0] == name]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Values of a name by one label's value, summed over the other labels."""
        values: dict[str, float] = {}
        for key, value in self.samples.items():
            base, _, labels = key.partition("{")
            _, found, rest = labels.partition(f'{label}="')
            if base == name and found:
                label_value = rest.partition('"')[0]
                values[label_value] = values.get(label_value, 0.0) + value
        return values


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One arm's turn in a block; its requests name the same ``index`` and ``position``.

    ``metrics_before`` and ``metrics_after`` are None where the server exposes no metrics.
    ``client_lag_s`` is the longest that the client's own event loop was held up meanwhile: times
    finer than that are not to be believed.
    """

    index: int
    position: int
    arm: str
    load: Load
    kind: BlockKind
    started_s: float
    ended_s: float
    metrics_before: MetricsSnapshot | None
    metrics_after: MetricsSnapshot | None
    client_lag_s: float = 0.0


class Losslessness(StrEnum):
    """How it is known that an arm writes what its target writes."""

    EXACT = "exact"  # our engine, and its self-test found equal bits on this machine
    AUDITED = "audited"
    NOT_AUDITED = "not_audited"


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """One server under test. Arms differ in speculation and in nothing else.

    ``method`` is the name in ``--methods`` (``off`` for the baseline), ``speculation`` its settings
    as far as they are known. ``process`` names the arms that one process served from one copy of
    the weights, this one among them; empty for a process of its own, and where nobody knows.
    ``losslessness_detail`` says what the claim rests on.
    """

    name: str
    method: str
    is_baseline: bool
    url: str
    model: str
    command: tuple[str, ...] | None = None
    process: tuple[str, ...] = ()
    speculation: Mapping[str, Any] = field(default_factory=dict)
    engine: str | None = None
    engine_version: str | None = None
    precision: str | None = None
    losslessness: Losslessness = Losslessness.NOT_AUDITED
    losslessness_detail: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkloadRecord:
    """What was asked: the set of prompts and its name by hash.

    ``is_random`` marks random-token prompts, on which acceptance means nothing.
    """

    source: str
    prompt_hash: str
    num_prompts: int
    categories: Mapping[str, int]
    num_chars_min: int
    num_chars_median: float
    num_chars_max: int
    filters: Mapping[str, Any] = field(default_factory=dict)
    is_random: bool = False


@dataclass(frozen=True, slots=True)
class SamplingRecord:
    """Sampling of every request; request ``i`` of a block uses ``seed + i`` in every arm."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None
    ignore_eos: bool
    is_chat: bool = True


@dataclass(frozen=True, slots=True)
class ClientProof:
    """What the client did against the built-in mock server, whose timings are known.

    ``gap_error_p99_s`` is the 99th percentile of the difference between a chunk gap as seen and as
    sent; ``max_tokens_per_s`` the fastest stream rate over all connections that it kept up with.
    ``is_sound`` is False when figures from this client would describe the client.
    """

    concurrency: int
    num_chunks: int
    gap_error_p50_s: float
    gap_error_p99_s: float
    max_tokens_per_s: float
    is_sound: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The conditions of a whole run, fixed before its first request.

    ``started`` is an ISO time in UTC. ``settings`` is what was asked for (loads, blocks, margins),
    ``settings_hash`` names it: a resumed run must have the same.
    """

    arms: tuple[ArmRecord, ...]
    workload: WorkloadRecord
    sampling: SamplingRecord
    loads: tuple[Load, ...]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str
    settings: Mapping[str, Any]
    settings_hash: str
    seeds: Mapping[str, int]
    client: ClientProof | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def baseline(self) -> ArmRecord:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.is_baseline)


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything of one run, as :func:`outrider.bench.store.read_run` returns it."""

    run: RunRecord
    blocks: tuple[BlockRecord, ...]
    requests: tuple[RequestRecord, ...]

    def requests_of(self, block: BlockRecord) -> tuple[RequestRecord, ...]:
        """The requests of one arm's turn, in the order they were scheduled."""
        return tuple(
            request
            for request in self.requests
            if request.block == block.index and request.position == block.position
        )


def to_json(record: object) -> bytes:
    """One record as one line of JSON, without the newline."""
    return _adapter(type(record)).dump_json(record)


def from_json(kind: type[_Record], line: bytes, where: str) -> _Record:
    """Read one record back; ``where`` (a file and line) starts the message of an error.

    Raises:
        RecordError: not JSON, or not such a record; names the first field that is wrong.
    """
    try:
        return _adapter(kind).validate_json(line)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        at = ".".join(str(part) for part in first["loc"]) or "the line"
        raise RecordError(
            f"{where}: is no {kind.__name__}: {at}: {first['msg']}; records are written by "
            f"outrider bench, schema version {SCHEMA_VERSION}"
        ) from None


@cache
def _adapter(kind: type[_Record]) -> TypeAdapter[_Record]:
    """Built once per type: building one compiles its whole schema."""
    return TypeAdapter(kind)
