"""Guards on how it was timed: bundled chunks, usage, the client, waits outside the latency.

Owns the rules by which times or counts describe something other than the server. Reads the two
sides of a comparison (:mod:`outrider.bench.findings`); :mod:`outrider.bench.verdict` acts on what
is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, median

from outrider.bench.findings import Finding, Severity, Sides, in_order, requests_of
from outrider.bench.metrics import BlockMetrics, RequestMetrics, pooled
from outrider.bench.output_guards import MIN_TOKENS
from outrider.bench.records import LoadKind
from outrider.bench.samples import percentile

MAX_AT_ONCE = 0.10  # of the requests: most of the answer in the first chunk
MAX_PLAIN_TOKENS_PER_CHUNK = 2.0
MAX_USAGE_ERROR = 0.02
SILENT_TOKENS = 2  # an end-of-sequence token, or half a character, is in usage but in no chunk
MAX_CHARS_RATIO = 1.10
MAX_LAG_SHARE = 0.10  # of the median latency
MAX_CLIENT_LOAD = 0.5  # of the stream rate that the client was proven to keep up with
MAX_WAIT_SHARE = 0.10  # of the median TTFT
MIN_WAIT_S = 0.005
MIN_IN_FLIGHT = 0.9  # of the asked concurrency
MIN_ARRIVALS = 0.9  # of the asked rate, beyond what chance explains


def bundling(sides: Sides) -> Iterator[Finding]:
    """A server that holds tokens back and sends them together has no first token and no pace."""
    for name, blocks in sides.named:
        long = [r for r in requests_of(blocks) if r.is_sound and r.num_tokens >= MIN_TOKENS]
        at_once = sum(request.token_events()[0][1] > request.num_tokens / 2 for request in long)
        if long and at_once > MAX_AT_ONCE * len(long):
            yield Finding(
                "bundling",
                Severity.VOID,
                f"{name}: {at_once} of {len(long)} answers came mostly in their first chunk: TTFT "
                "and TPOT describe a buffer; switch off tool or reasoning parsers and proxies that "
                "collect a stream",
            )
    plain = [request for request in requests_of(sides.baseline) if request.is_sound]
    if not plain:
        return
    per_chunk = sum(r.num_tokens for r in plain) / sum(len(r.record.chunks) for r in plain)
    if per_chunk >= MAX_PLAIN_TOKENS_PER_CHUNK:
        yield Finding(
            "bundling",
            Severity.VOID,
            f"plain decoding sent {per_chunk:.1f} tokens per chunk, though it writes one per step: "
            "the server collects tokens, so its TTFT and gaps are not comparable; set its stream "
            "interval to 1",
        )
    unknown = any(
        request.record.chunks[0].num_tokens is None
        for request in requests_of(sides.speculative)
        if request.is_sound
    )
    if unknown:
        yield Finding(
            "bundling",
            Severity.WARNING,
            f"{sides.arm.name} does not say what a chunk holds: TPOT is its upper bound",
        )


def usage(sides: Sides) -> Iterator[Finding]:
    """Token counts are the server's; they must agree with its chunks and with the texts."""
    for name, blocks in sides.named:
        sound = [request for request in requests_of(blocks) if request.is_sound]
        yield from _against_chunks(name, sound)
        limit = sides.run.sampling.max_tokens
        above = sum(request.num_tokens > limit for request in sound)
        if above:
            yield Finding(
                "usage",
                Severity.VOID,
                f"{name}: usage says more than max_tokens={limit} for {above} answers; its counts "
                "cannot be used",
            )
    rates = [
        sum(len(r.record.text) for r in sound) / sum(r.num_tokens for r in sound)
        for _, blocks in sides.named
        if (sound := [request for request in requests_of(blocks) if request.is_sound])
    ]
    if len(rates) == 2 and max(rates) > MAX_CHARS_RATIO * min(rates):
        base, arm = rates
        yield Finding(
            "usage",
            Severity.VOID,
            f"a token of {sides.arm.name} has {arm:.2f} characters, one of the baseline "
            f"{base:.2f}: allowed is a ratio of {MAX_CHARS_RATIO}; one of the two counts wrongly",
        )


def _against_chunks(name: str, sound: list[RequestMetrics]) -> Iterator[Finding]:
    """Where chunks carry counts these must sum to the usage; a chunk has at least one token."""
    known = [
        (sum(chunk.num_tokens or 0 for chunk in request.record.chunks), request.num_tokens)
        for request in sound
        if all(chunk.num_tokens is not None for chunk in request.record.chunks)
    ]
    wrong = sum(
        abs(counted - said) > max(SILENT_TOKENS, MAX_USAGE_ERROR * said) for counted, said in known
    )
    if wrong > MAX_USAGE_ERROR * len(known):
        counted, said = (sum(column) for column in zip(*known, strict=True))
        yield Finding(
            "usage",
            Severity.VOID,
            f"{name}: usage says {said} tokens, its chunks {counted}, and {wrong} of {len(known)} "
            f"answers disagree by more than {SILENT_TOKENS} tokens and {MAX_USAGE_ERROR:.0%}; its "
            "counts cannot be used",
        )
    texts = [(sum(c.num_chars > 0 for c in r.record.chunks), r.num_tokens) for r in sound]
    fewer = sum(chunks > said * (1 + MAX_USAGE_ERROR) for chunks, said in texts)
    if fewer > MAX_USAGE_ERROR * len(texts):
        yield Finding(
            "usage",
            Severity.VOID,
            f"{name}: {fewer} of {len(texts)} answers have more chunks with text than tokens by "
            "their usage; its counts cannot be used",
        )


def client(sides: Sides) -> Iterator[Finding]:
    """The client must be faster than what it measures."""
    proof = sides.run.client
    if proof is None:
        yield Finding(
            "client", Severity.WARNING, "the client was not tested against the mock server first"
        )
    elif not proof.is_sound:
        yield Finding(
            "client",
            Severity.VOID,
            f"the client failed its own test before the run: {proof.reason or 'no reason kept'}",
        )
    for name, blocks in sides.named:
        latencies = pooled(blocks, "latency_s")
        lags = [block.block.client_lag_s for block in blocks]
        if latencies and median(lags) > MAX_LAG_SHARE * median(latencies):
            yield Finding(
                "client",
                Severity.VOID,
                f"{name}: the client itself was held up for {median(lags) * 1000:.0f} ms in half "
                f"of its blocks, more than {MAX_LAG_SHARE:.0%} of a request's "
                f"{median(latencies) * 1000:.0f} ms; run it on a machine or core of its own",
            )
        rates = [block.whole_rate for block in blocks if block.whole_rate is not None]
        if proof is not None and rates and max(rates) > MAX_CLIENT_LOAD * proof.max_tokens_per_s:
            yield Finding(
                "client",
                Severity.VOID,
                f"{name}: {max(rates):.0f} tokens/s are more than {MAX_CLIENT_LOAD:.0%} of the "
                f"{proof.max_tokens_per_s:.0f} that this client was seen to keep up with",
            )


def waits(sides: Sides) -> Iterator[Finding]:
    """Requests must leave when the load says, or the load was another one.

    The wait is inside every latency here; other tools leave it out (coordinated omission).
    """
    for name, blocks in sides.named:
        held = [request.queue_wait_s for request in requests_of(blocks)]
        wait_s, ttft_s = percentile(held, 95), percentile(pooled(blocks, "ttft_s"), 50)
        if wait_s is not None and ttft_s and wait_s > max(MIN_WAIT_S, MAX_WAIT_SHARE * ttft_s):
            yield Finding(
                "waits",
                Severity.VOID,
                f"{name}: one request in 20 waited {wait_s * 1000:.0f} ms or longer inside the "
                f"client before it was sent (median TTFT {ttft_s * 1000:.0f} ms): a semaphore or "
                "connection limit holds requests back; the wait is in the latencies, but the load "
                "was not the one asked for",
            )
        yield from _load_reached(sides, name, blocks)


def _load_reached(sides: Sides, name: str, blocks: tuple[BlockMetrics, ...]) -> Iterator[Finding]:
    """Whether as many requests were in flight, or came per second, as was asked."""
    load = sides.load
    if load.concurrency is not None:
        found = [share for block in blocks if (share := _in_flight(block)) is not None]
        if found and fmean(found) < MIN_IN_FLIGHT * load.concurrency:
            yield Finding(
                "waits",
                Severity.VOID,
                f"{name}: {fmean(found):.1f} requests were in flight instead of "
                f"{load.concurrency}: something holds requests back",
            )
    elif load.kind in (LoadKind.POISSON, LoadKind.GAMMA):
        gaps = [
            later.record.scheduled_s - earlier.record.scheduled_s
            for block in blocks
            for earlier, later in zip(in_order(block), in_order(block)[1:], strict=False)
        ]
        spread = load.burstiness if load.kind is LoadKind.GAMMA else 1.0
        if not gaps or not sum(gaps) > 0.0:
            return
        rate, chance = len(gaps) / sum(gaps), 4 * spread / math.sqrt(len(gaps))
        if rate < load.value * min(MIN_ARRIVALS, 1.0 - chance):
            yield Finding(
                "waits",
                Severity.VOID,
                f"{name}: requests were due at {rate:.2f}/s, asked were {load.value:g}/s: their "
                "due times follow the server instead of the schedule, which hides its queue",
            )


def _in_flight(block: BlockMetrics) -> float | None:
    """Mean number of requests at the server while there were enough to send."""
    slots = block.block.load.concurrency or 1
    requests = in_order(block)
    if len(requests) < 2 * slots:
        return None
    begin, end = requests[0].record.scheduled_s, requests[-1].record.scheduled_s
    if end <= begin:
        return None
    busy_s = sum(
        max(0.0, min(r.record.ended_s, end) - max(r.record.sent_s, begin)) for r in requests
    )
    return busy_s / (end - begin)


TIMING_GUARDS = (bundling, usage, client, waits)
