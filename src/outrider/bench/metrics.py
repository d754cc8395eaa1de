"""What a user of the server saw, from records alone: latencies, rates, goodput.

Owns the definitions; ``docs/measuring.md`` explains them and how other tools differ. Reads
:mod:`outrider.bench.records`; guards, verdict and report read what is here. Pure functions.

Every latency counts from when the load wanted the request sent, so waiting inside the client is in
it. Token counts are the server's usage. One request, drawn over time::

    scheduled   sent      headers   chunk 0     chunk 1   chunk 2
    |-- wait --|                    |           |         |
    |------------ TTFT -------------|-- gap 0 --|- gap 1 -|
                                    |------- decode ------|     TPOT = decode / later tokens
    |---------------------- latency ----------------------|     rate = tokens / latency
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from outrider.bench.records import BlockRecord, RequestRecord
from outrider.bench.samples import percentile

MIN_TURNS = 4  # requests per slot from which a closed loop has a steady middle
MIN_STEADY_SHARE = 0.5  # of a block's tokens; a smaller middle describes too little of the work


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a request must keep to count as good; None sets no limit. Seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    @property
    def is_set(self) -> bool:
        """There is a limit at all."""
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.latency_s))

    @property
    def text(self) -> str:
        """For people: ``TTFT <= 200 ms, TPOT <= 50 ms``."""
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("latency", self.latency_s))
        limits = [(name, limit) for name, limit in named if limit is not None]
        return ", ".join(f"{name} <= {limit * 1000:g} ms" for name, limit in limits)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """One request's figures; None where the record does not hold them. Seconds and tokens/s."""

    record: RequestRecord

    @property
    def is_sound(self) -> bool:
        """It ended without an error, with text and a token count."""
        record = self.record
        return record.error is None and bool(record.chunks) and bool(record.completion_tokens)

    @property
    def num_tokens(self) -> int:
        """Output tokens by the server's usage; 0 where it gave none."""
        return self.record.completion_tokens or 0

    @property
    def queue_wait_s(self) -> float:
        """How long the client held the request back."""
        return self.record.sent_s - self.record.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from the scheduled moment to the first chunk with text."""
        chunks = self.record.chunks
        return chunks[0].at_s - self.record.scheduled_s if chunks else None

    @property
    def chunk_gaps_s(self) -> tuple[float, ...]:
        """The stalls a user sees: one per pair of neighbouring chunks, however many tokens."""
        at_s = [chunk.at_s for chunk in self.record.chunks]
        return tuple(after - before for before, after in pairwise(at_s))

    @property
    def latency_s(self) -> float | None:
        """From the scheduled moment to the last chunk."""
        chunks = self.record.chunks
        return chunks[-1].at_s - self.record.scheduled_s if chunks else None

    @property
    def rate(self) -> float | None:
        """Per-user rate: output tokens over the latency, waiting included."""
        latency_s = self.latency_s
        return self.num_tokens / latency_s if self.is_sound and latency_s else None

    @property
    def tpot_bounds_s(self) -> tuple[float, float] | None:
        """Time per output token after the first chunk: least and most it can have been.

        (last - first) / (tokens - tokens of the first chunk). Equal where the server said what the
        first chunk held; else from one token to an equal share, the larger if chunks grow.
        """
        chunks = self.record.chunks
        if not self.is_sound or len(chunks) < 2:
            return None
        decode_s = chunks[-1].at_s - chunks[0].at_s
        first = chunks[0].num_tokens
        firsts = (1.0, self.num_tokens / len(chunks)) if first is None else (first, first)
        later = [self.num_tokens - max(num_first, 1.0) for num_first in firsts]
        if min(later) < 1.0:
            return None
        return decode_s / later[0], decode_s / later[1]

    @property
    def tpot_s(self) -> float | None:
        """The larger bound: an unknown first chunk must not flatter whoever bundles tokens."""
        bounds = self.tpot_bounds_s
        return None if bounds is None else bounds[1]

    def is_good(self, level: ServiceLevel) -> bool:
        """It is sound and keeps every limit; what cannot be told is not kept."""
        limits = (
            (self.ttft_s, level.ttft_s),
            (self.tpot_s, level.tpot_s),
            (self.latency_s, level.latency_s),
        )
        return self.is_sound and all(
            limit is None or (value is not None and value <= limit) for value, limit in limits
        )

    def token_events(self) -> list[tuple[float, float]]:
        """``(arrival, tokens)`` per chunk; sums to the usage.

        Where the server did not say what a chunk holds, tokens are shared out by its characters.
        """
        chunks = self.record.chunks
        known = [chunk.num_tokens for chunk in chunks]
        counts = [float(count) for count in known if count is not None]
        if len(counts) < len(chunks) or not sum(counts):
            num_chars = sum(chunk.num_chars for chunk in chunks)
            counts = [chunk.num_chars if num_chars else 1.0 for chunk in chunks]
        scale = self.num_tokens / sum(counts) if counts else 0.0
        return [(c.at_s, count * scale) for c, count in zip(chunks, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class BlockMetrics:
    """One arm's turn in a block: its requests and what they come to together."""

    block: BlockRecord
    requests: tuple[RequestMetrics, ...]

    @property
    def sound(self) -> tuple[RequestMetrics, ...]:
        """The requests that have figures."""
        return tuple(request for request in self.requests if request.is_sound)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all sound requests."""
        return sum(request.num_tokens for request in self.sound)

    @property
    def elapsed_s(self) -> float:
        """From the first scheduled request to the last chunk; 0 for a block without any."""
        ends = [request.record.chunks[-1].at_s for request in self.sound]
        starts = [request.record.scheduled_s for request in self.requests]
        return max(ends) - min(starts) if ends else 0.0

    @property
    def whole_rate(self) -> float | None:
        """Aggregate output tokens/s over the whole block, its ramp and its end included."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0.0 else None

    @property
    def steady_rate(self) -> float | None:
        """Aggregate output tokens/s while every slot of a closed loop was busy.

        From the moment the first request of every slot has ended to the first slot that finds no
        further request; each chunk's tokens count when they arrive. None for an open loop, for one
        user (who has no ramp) and where that middle holds less than half of the tokens.
        """
        slots = self.block.load.concurrency
        requests = sorted(self.requests, key=lambda request: request.record.scheduled_s)
        if slots is None or slots == 1 or len(requests) < MIN_TURNS * slots:
            return None
        begin = max(request.record.ended_s for request in requests[:slots])
        last_sent = requests[-1].record.sent_s
        ends = [r.record.ended_s for r in requests if r.record.ended_s > last_sent]
        if not ends or min(ends) <= begin:
            return None
        end = min(ends)
        tokens = sum(
            count
            for request in self.sound
            for at_s, count in request.token_events()
            if begin < at_s <= end
        )
        return tokens / (end - begin) if tokens >= MIN_STEADY_SHARE * self.num_tokens else None

    @property
    def user_rate(self) -> float | None:
        """Output tokens over the time users waited for them, all requests together."""
        waited_s = sum(request.latency_s or 0.0 for request in self.sound)
        return self.num_tokens / waited_s if waited_s > 0.0 else None

    @property
    def decode_rate(self) -> float | None:
        """1 / TPOT, averaged over requests: what a stream runs at once it runs."""
        tpots = self.samples("tpot_s")
        return 1.0 / fmean(tpots) if tpots and fmean(tpots) > 0.0 else None

    def samples(self, name: str) -> list[float]:
        """One value per sound request of ``ttft_s``, ``tpot_s``, ``latency_s`` or ``rate``."""
        values = (getattr(request, name) for request in self.sound)
        return [value for value in values if value is not None]

    def percentile(self, name: str, percent: float) -> float | None:
        """Percentile over the block's sound requests."""
        return percentile(self.samples(name), percent)

    def goodput(self, level: ServiceLevel) -> float | None:
        """Good requests per second; a failed one is not good."""
        good = sum(request.is_good(level) for request in self.requests)
        return good / self.elapsed_s if self.elapsed_s > 0.0 else None

    def attainment(self, level: ServiceLevel) -> float | None:
        """Share of the requests that were good."""
        good = sum(request.is_good(level) for request in self.requests)
        return good / len(self.requests) if self.requests else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of pooled samples, and how many there were."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        names = ("num_samples", "mean", "p50", "p90", "p95", "p99")
        return {name: getattr(self, name) for name in names}


def distribution(values: Sequence[float]) -> Distribution | None:
    """The percentiles of some samples; None without any."""
    if not values:
        return None
    points = {f"p{percent}": percentile(values, percent) or 0.0 for percent in (50, 90, 95, 99)}
    return Distribution(num_samples=len(values), mean=fmean(values), **points)


def block_metrics(block: BlockRecord, requests: Iterable[RequestRecord]) -> BlockMetrics:
    """The figures of one arm's turn."""
    return BlockMetrics(block, tuple(RequestMetrics(record) for record in requests))


def pooled(blocks: Iterable[BlockMetrics], name: str) -> list[float]:
    """All samples of some blocks: those of :meth:`BlockMetrics.samples`, or ``chunk_gap_s``."""
    if name == "chunk_gap_s":
        return [gap for block in blocks for r in block.sound for gap in r.chunk_gaps_s]
    return [value for block in blocks for value in block.samples(name)]
