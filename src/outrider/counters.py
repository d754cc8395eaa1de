"""What an engine has done since it was made: counted as it goes, handed out as a snapshot.

Owns the totals; knows nothing of how they come about. The engine and the scheduler count, the
server's metrics and status page read :class:`EngineStats`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.types import FinishReason, SpeculationStats, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine at one moment, and its totals since it was made.

    Attributes:
        waiting: requests in the queue, those that were made to wait again included.
        waiting_tokens: their tokens, prompt and emitted, all still to be computed.
        prefilling: requests with a cache row whose prompt is not computed yet.
        running: requests that decode.
        slots_used: tokens of the requests that hold a row.
        slots_total: the most there may be, ``EngineConfig.max_slots``.
        kept_rows: free rows whose contents may be reused.
        kept_tokens: tokens in them.
        submitted: requests ever queued.
        refused: requests that found the queue full.
        finished: requests ended by a stop event or their length.
        aborted: requests cancelled.
        failed: requests ended by an error.
        preemptions: times that a request was made to wait again, for want of slots or because a
            step that it took part in failed.
        faults: passes and steps that raised; ``failed`` counts those that one request was to
            blame for.
        draft_faults: calls of the drafter that failed; the requests went on without it.
        drafting_off: whether it failed so often that it is not asked any more.
        prompt_tokens: prompt tokens of all admitted requests.
        prefix_hits: admissions that started on an earlier request's keys and values.
        prefix_hit_tokens: tokens that they did not have to compute.
        prefilled_tokens: tokens computed ahead of first steps.
        emitted_tokens: output tokens.
        steps: engine steps in which something ran.
        prefill_s, draft_s, verify_s, rest_s: seconds spent on each.
        speculation: verify steps, drafted and accepted tokens, by depth too.
    """

    waiting: int
    waiting_tokens: int
    prefilling: int
    running: int
    slots_used: int
    slots_total: int
    kept_rows: int
    kept_tokens: int
    draft_faults: int
    drafting_off: bool
    submitted: int
    refused: int
    finished: int
    aborted: int
    failed: int
    preemptions: int
    faults: int
    prompt_tokens: int
    prefix_hits: int
    prefix_hit_tokens: int
    prefilled_tokens: int
    emitted_tokens: int
    steps: int
    prefill_s: float
    draft_s: float
    verify_s: float
    rest_s: float
    speculation: SpeculationStats


@dataclass(slots=True)
class Counters:
    """The totals of :class:`EngineStats`, counting; those of requests that go on are added there.

    Each field is the attribute of that name.
    """

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    faults: int = 0
    prompt_tokens: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    prefilled_tokens: int = 0
    emitted_tokens: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def count_step(self, record: StepRecord) -> None:
        """Add where a step's time went."""
        self.steps += 1
        self.prefill_s += record.prefill_s
        self.draft_s += record.draft_s
        self.verify_s += record.verify_s
        self.rest_s += record.rest_s
        self.prefilled_tokens += record.prefill_tokens

    def count_end(self, reason: FinishReason, num_output: int, stats: SpeculationStats) -> None:
        """Add a request that ended."""
        if reason is FinishReason.ABORT:
            self.aborted += 1
        elif reason is FinishReason.ERROR:
            self.failed += 1
        else:
            self.finished += 1
        self.emitted_tokens += num_output
        self.speculation.add(stats)
