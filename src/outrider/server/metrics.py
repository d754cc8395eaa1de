"""What the server counts, in Prometheus' format.

Owns names and labels. Speculation is counted under vLLM's names, so its dashboards work; what is
our own starts with ``outrider_``. Most figures are the engine's own counts, read when somebody
asks; only what the engine does not know (HTTP, distributions of times) is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.counters import EngineStats
from outrider.types import Completion, StepRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)

_GAUGES = {
    "outrider_requests_waiting": ("waiting", "Requests in the queue."),
    "outrider_waiting_tokens": ("waiting_tokens", "Tokens in the queue, still to be computed."),
    "outrider_requests_prefilling": ("prefilling", "Requests whose prompt is being computed."),
    "outrider_requests_running": ("running", "Requests that decode."),
    "outrider_slots_used": ("slots_used", "Tokens of the requests that hold a cache row."),
    "outrider_slots": ("slots_total", "The most tokens there may be."),
    "outrider_kept_rows": ("kept_rows", "Free rows whose contents may be reused."),
    "outrider_kept_tokens": ("kept_tokens", "Tokens in free rows that may be reused."),
    "outrider_drafting_off": ("drafting_off", "1 after repeated faults of the drafter."),
}
_COUNTERS = {
    "outrider_preemptions": ("preemptions", "Times that a running request had to wait again."),
    "outrider_faults": ("faults", "Passes and steps that raised."),
    "outrider_draft_faults": ("draft_faults", "Calls of the drafter that failed."),
    "outrider_aborted_requests": ("aborted", "Requests cancelled."),
    "outrider_failed_requests": ("failed", "Requests ended by an error."),
    "outrider_finished_requests": ("finished", "Requests ended by a stop or their length."),
    "outrider_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "outrider_prefix_hits": ("prefix_hits", "Requests that started on an earlier one's prefix."),
    "outrider_prefix_hit_tokens": ("prefix_hit_tokens", "Tokens that they did not compute."),
    "outrider_emitted_tokens": ("emitted_tokens", "Output tokens."),
    "outrider_steps": ("steps", "Engine steps in which something ran."),
}
_PARTS = ("prefill", "draft", "verify", "rest")


class Metrics:
    """All counters of one server; ``model_name`` labels those that vLLM labels."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, stats))
        self._ended = self._counter("outrider_requests", "Requests that ended.", "finish_reason")
        self._refused = self._counter(
            "outrider_refused", "HTTP requests refused for lack of room.", "limit"
        )
        self._aborted = self._counter("outrider_aborts", "HTTP requests given up.", "reason")
        self._responses = self._counter(
            "outrider_http_responses", "HTTP responses.", "route", "status"
        )
        self._rows = self._counter("outrider_verified_rows", "Roots and drafts verified.")
        self._batch = self._histogram(
            "outrider_batch_requests", "Requests that one step advanced.", _REQUESTS
        )
        self._first_token_s = self._histogram(
            "outrider_time_to_first_token_seconds", "From submission to the first token.", _SECONDS
        )
        self._queue_s = self._histogram(
            "outrider_queue_seconds", "From submission to the batch.", _SECONDS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def stepped(self, record: StepRecord) -> None:
        """Count one engine step."""
        self._rows.inc(record.num_rows)
        self._batch.observe(record.num_requests)

    def ended(self, completion: Completion) -> None:
        """Count a request that ended by itself."""
        self._ended.labels(completion.finish_reason.value).inc()
        self._first_token_s.observe(completion.timing.first_token_s)
        self._queue_s.observe(completion.timing.queue_s)

    def refused(self, limit: str) -> None:
        """Count an HTTP request that found the queue full."""
        self._refused.labels(limit).inc()

    def aborted(self, reason: str) -> None:
        """Count an HTTP request whose work was given up."""
        self._aborted.labels(reason).inc()

    def responded(self, route: str, status: int) -> None:
        """Count an HTTP response; ``route`` is a pattern of ours, never a client's path."""
        self._responses.labels(route, str(status)).inc()

    def num_refused(self) -> int:
        """HTTP requests that found the queue full."""
        return int(
            sum(
                sample.value
                for metric in self._refused.collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
            )
        )

    def page(self) -> bytes:
        """Everything, in the text format that Prometheus reads."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's counts as they are when somebody asks."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Names only: the registry would otherwise ask for values before there are any."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        stats = self._stats()
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        step_s = CounterMetricFamily("outrider_step_seconds", "Time in steps.", labels=["part"])
        for part in _PARTS:
            step_s.add_metric([part], getattr(stats, f"{part}_s"))
        yield step_s
        yield from self._speculation(stats)

    def _speculation(self, stats: EngineStats) -> Iterable[Metric]:
        """Under vLLM's names: ``num_drafts`` counts verify steps of single requests."""
        counts, label = stats.speculation, [self._model_name]
        for name, text, value in (
            ("num_drafts", "Verify steps of a request.", counts.verify_steps),
            ("num_draft_tokens", "Tokens drafted.", counts.drafted),
            ("num_accepted_tokens", "Drafted tokens accepted.", counts.accepted),
        ):
            family = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=["model_name"])
            family.add_metric(label, value)
            yield family
        by_depth = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by place in the draft (0 is the first).",
            labels=["model_name", "position"],
        )
        for depth, count in enumerate(counts.accepted_at):
            by_depth.add_metric([*label, str(depth)], count)
        yield by_depth
