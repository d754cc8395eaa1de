"""The engine: prefill, then speculative steps, for all running requests, until none is left.

Owns the target, its cache, the drafter and the scheduler, and the order in which they work. Used by
:mod:`outrider.llm` and the server; knows no prompts as text and no user interface. One step::

    admit      rows to those that wait; what earlier requests left is reused
    prefill    the next tokens of new prompts, at most prefill_chunk in all
    decode     a speculative step of all whose prompt is there
    settle     rows of those that ended become free; too many slots: the last one waits again

A fault of the drafter costs guesses alone (:mod:`outrider.drafters.guarded`). Any other fault, that
is an exception in a pass or an admission, ends the request that is to blame and no other:

- Nothing of a prefill pass is kept until it is over, so its requests are simply tried one by one;
  the one that fails alone is to blame.
- A decoding step may have changed part of the caches, the drafter and the texts when it raises.
  All its requests wait again, to be computed afresh from their tokens, and decode their next step
  alone: the one that fails alone is to blame. A request whose text was hit in the middle of a
  change is to blame at once.
- What fails only in company is nobody's fault: such requests go on, and ``EngineStats.faults``
  counts it. What cannot be caught at all (the process is killed, a kernel never returns) ends
  everybody.
- What is no ``Exception`` (Ctrl-C) ends all requests of the pass, or the one that is being
  admitted, and is raised on.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from outrider.budget import Budget
from outrider.config import EngineConfig, SamplingParams
from outrider.costs import CostTable
from outrider.counters import Counters, EngineStats
from outrider.drafters import Drafter
from outrider.drafters.guarded import GuardedDrafter
from outrider.drafters.prediction import PREDICTION_DEPTH
from outrider.errors import ParameterError, PromptError
from outrider.grammar import GrammarCompiler, GrammarConstraint
from outrider.models.decoder import Decoder
from outrider.output import TextDecoder
from outrider.prefill import prefill
from outrider.prefix_cache import KeptRow, PrefixCache
from outrider.request import Request
from outrider.scheduler import Admission, Scheduler
from outrider.step import speculative_step
from outrider.types import SpeculationStats, StepRecord

_log = logging.getLogger(__name__)


class Engine:
    """Decodes up to ``max_batch_size`` requests at once, refilling rows as requests end.

    Several threads may use one engine: each call holds ``lock``, and whoever reads a request's
    tokens and text while others may step holds it too.

    Args:
        target: the model.
        decoder: turns token ids into text.
        eos_ids: the model's end-of-sequence tokens.
        config: sizes.
        max_model_len: prompt plus output tokens of one request.
        drafter: what proposes; None decodes plainly.
        max_draft_tokens: most nodes one request verifies in a step, root excluded.
        costs: the target's cost table; None verifies everything drafted.
        uses_blocks: the ``rejection`` rule takes drawn chains as a whole.
        grammars: compiles requests' grammars; None refuses them.
        clock: seconds, for the requests' and the steps' times.

    Raises:
        ParameterError: ``config.max_slots`` is less than one request may need.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        decoder: TextDecoder,
        eos_ids: frozenset[int],
        config: EngineConfig,
        max_model_len: int,
        drafter: Drafter | None,
        max_draft_tokens: int,
        costs: CostTable | None,
        uses_blocks: bool = True,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_model_len = max_model_len
        self.lock = threading.RLock()
        self._threads = torch.get_num_threads()
        self._target = target
        self._decoder = decoder
        self._eos_ids = eos_ids
        self._prefill_chunk = config.prefill_chunk
        vocab_size = target.config.vocab_size
        self._drafter = None if drafter is None else GuardedDrafter(drafter, vocab_size)
        self._uses_blocks = uses_blocks
        self._grammars = grammars
        self._cache = target.new_cache(
            max_batch_size=config.max_batch_size,
            num_slots=max_model_len + max_draft_tokens,
        )
        self._clock = clock
        self._counters = Counters()
        self._prefixes = PrefixCache()
        self._scheduler = Scheduler(
            self._cache,
            max_slots=_max_slots(config, max_model_len),
            limits=config.admission,
            prefixes=self._prefixes if config.prefix_cache else None,
            counters=self._counters,
        )
        self._suspects: set[Request] = set()
        max_rows = config.max_batch_size * (1 + max_draft_tokens + PREDICTION_DEPTH)
        if costs is not None:
            max_rows = min(max_rows, costs.rows[-1])
        self._budget = Budget(costs, max_rows=max_rows)
        self._next_id = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work

    def new_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculates: bool = True,
        salt: str = "",
        prediction_ids: Sequence[int] = (),
    ) -> Request:
        """A request, checked but not yet queued; ``speculates=False`` decodes it plainly.

        Keys and values are reused only between requests of the same ``salt``. ``prediction_ids``
        are tokens that the caller expects, in the target's ids; they are drafted from even where
        there is no drafter, unless ``speculates`` is False. A new grammar is compiled here, in the
        caller's thread.

        Raises:
            PromptError: an empty prompt, an id outside the vocabulary, or no room for one token.
            ParameterError: a token id among the parameters or in the prediction is outside the
                vocabulary, or the grammar does not compile.
        """
        self._check_prompt(prompt_ids)
        return Request(
            next(self._next_id),
            prompt_ids,
            params,
            decoder=self._decoder,
            eos_ids=self._eos_ids,
            vocab_size=self._target.config.vocab_size,
            max_model_len=self.max_model_len,
            speculates=speculates and self._drafter is not None,
            prediction_ids=prediction_ids if speculates else (),
            salt=salt,
            clock=self._clock,
            constraint=self._constraint(params, salt),
        )

    def _constraint(self, params: SamplingParams, salt: str) -> GrammarConstraint | None:
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise ParameterError(
                "grammar: this engine has no compiler for grammars; leave the grammar out"
            )
        return self._grammars.constraint(params.grammar, ignores_eos=params.ignore_eos, salt=salt)

    def submit(self, request: Request) -> None:
        """Queue a request; it runs as soon as a cache row is free.

        Raises:
            OverloadedError: the queue is as long as ``EngineConfig.admission`` lets it be.
        """
        self.submit_all([request])

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Queue several requests that belong together: all of them, or none.

        Raises:
            OverloadedError: there is not room for all of them.
        """
        with self.lock:
            self._scheduler.submit(requests)

    def step(self) -> tuple[list[Request], StepRecord | None]:
        """Admit what fits, prefill a share of it, and advance every request that decodes.

        Returns the requests that got tokens or ended, and where the step's time went (None when
        nothing ran).
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # somebody else's setting would change kernels
        with self.lock, torch.inference_mode():
            refused = self._admit()
            started = self._clock()
            num_prefilled, failed = self._prefill()
            prefill_s = self._clock() - started
            decoded, record = self._decode()
            self._make_room()
            if record is None and num_prefilled:
                record = StepRecord(num_requests=0, num_rows=0, draft_s=0, verify_s=0, rest_s=0)
            if record is not None and num_prefilled:
                record = replace(record, prefill_s=prefill_s, prefill_tokens=num_prefilled)
            if record is not None:
                self._counters.count_step(record)
            return [*refused, *failed, *decoded], record

    def abort(self, request: Request) -> None:
        """Cancel a request at any stage; its row is free at once. Ended requests are left alone."""
        with self.lock:
            if request.finish_reason is None:
                request.abort()
                self._remove(request)

    def stats(self) -> EngineStats:
        """What waits and runs at this moment, and the totals so far."""
        with self.lock:
            waiting, running = self._scheduler.waiting, self._scheduler.running
            num_ready = len(self._scheduler.ready())
            totals: dict[str, Any] = {
                field.name: getattr(self._counters, field.name) for field in fields(Counters)
            }
            speculation = SpeculationStats()
            speculation.add(self._counters.speculation)
            for request in (*waiting, *running):
                speculation.add(request.stats)
                totals["emitted_tokens"] += request.num_output
            totals["speculation"] = speculation
            return EngineStats(
                waiting=len(waiting),
                waiting_tokens=sum(len(request.token_ids) for request in waiting),
                prefilling=len(running) - num_ready,
                running=num_ready,
                slots_used=self._scheduler.slots_used,
                slots_total=self._scheduler.max_slots,
                kept_rows=len(self._prefixes.rows),
                kept_tokens=self._prefixes.num_tokens,
                draft_faults=0 if self._drafter is None else self._drafter.num_faults,
                drafting_off=self._drafter is not None and self._drafter.is_off,
                **totals,
            )

    def _admit(self) -> list[Request]:
        """Give rows to those that wait; returns the ones that failed at it."""
        failed = []
        while (admission := self._scheduler.admit()) is not None:
            try:
                self._start(admission)
            except Exception as error:
                self._counters.faults += 1
                self._fail(admission.request, error)
                failed.append(admission.request)
            except BaseException:
                self._end(admission.request)
                raise
            finally:
                # Of one that was interrupted: the scheduler has forgotten it, nobody else would.
                if admission.request.cache_row is None and admission.dropped is not None:
                    self._release(admission.dropped)
        return failed

    def _start(self, admission: Admission) -> None:
        """Copy what is reused, tell the drafter, and go back to where it can follow."""
        request, reuse, dropped = admission.request, admission.reuse, admission.dropped
        is_first = request.num_admissions == 1
        if is_first:
            self._counters.prompt_tokens += request.prompt_len
        is_adopted = request.speculates and reuse is not None and reuse.takes_over
        if dropped is not None and not is_adopted:
            self._release(dropped)
        num_tokens = 0 if reuse is None else reuse.num_tokens
        if reuse is not None and not reuse.takes_over:
            self._cache.copy_prefix(reuse.row, request.row, num_tokens)
        if self._drafter is not None and request.speculates:
            if reuse is None:
                self._drafter.admit(request)
            else:
                num_tokens = self._drafter.adopt(
                    request, reuse.source_id, num_tokens, takes_over=reuse.takes_over
                )
                self._cache.rollback(request.row, num_tokens)
        if is_first:
            request.num_reused = num_tokens
        if reuse is not None and num_tokens and reuse.source_id != request.request_id:
            self._counters.prefix_hits += 1
            self._counters.prefix_hit_tokens += num_tokens

    def _prefill(self) -> tuple[int, list[Request]]:
        """Compute the next tokens of new prompts; how many, and the requests that failed."""
        shares = self._scheduler.shares(self._prefill_chunk)
        try:
            outcome = prefill(shares, self._target, self._cache, self._drafter)
        except BaseException:
            for request, _ in shares:
                self._end(request)
            raise
        self._counters.faults += outcome.num_faults
        for request, error in outcome.failed:
            self._fail(request, error)
        return outcome.num_tokens, [request for request, _ in outcome.failed]

    def _decode(self) -> tuple[list[Request], StepRecord | None]:
        """Advance every request whose prompt is there; a suspect of a fault on its own."""
        batch = self._scheduler.ready()
        suspects = [request for request in batch if request in self._suspects]
        batch = suspects[:1] or batch
        if not batch:
            return [], None
        try:
            record = speculative_step(
                batch,
                self._target,
                self._cache,
                self._drafter,
                self._budget,
                uses_blocks=self._uses_blocks,
            )
        except Exception as error:
            self._counters.faults += 1
            return self._part(batch, error), None
        except BaseException:
            # Interrupted half-way (Ctrl-C), cache and texts may be out of step.
            for request in batch:
                if request.finish_reason is None:
                    request.abort()
                self._remove(request, keeps=False)
            raise
        self._suspects.difference_update(batch)
        for request in batch:
            request.has_decoded = True  # all that its rows hold was seen by finite logits
            if request.finish_reason is not None:
                self._remove(request)
        return batch, record

    def _part(self, batch: Sequence[Request], error: Exception) -> list[Request]:
        """After a step that failed: who is to blame ends, the others start again from their tokens.

        Returns those that ended.
        """
        ended = []
        for request in reversed(self._scheduler.running):  # so that the queue keeps their order
            if request not in batch:
                continue
            if request.finish_reason is not None:
                self._remove(request, keeps=False)
                ended.append(request)
            elif len(batch) == 1 or not request.is_consistent:
                self._fail(request, error)
                ended.append(request)
            else:
                self._preempt(request, keeps=False)
                self._suspects.add(request)
        if not ended:
            _log.warning("a step of %d failed; each goes on alone", len(batch), exc_info=error)
        return ended

    def _make_room(self) -> None:
        """Let the requests admitted last wait again until the others fit."""
        while (request := self._scheduler.surplus()) is not None:
            self._preempt(request, keeps=True)

    def _preempt(self, request: Request, *, keeps: bool) -> None:
        if self._scheduler.preempt(request, keeps=keeps) is None:
            self._release(request)

    def _fail(self, request: Request, error: Exception) -> None:
        """End the one request that a fault is to blame on."""
        _log.error("request %d failed", request.request_id, exc_info=error)
        if request.finish_reason is None:
            request.fail(f"an internal fault ended this request ({type(error).__name__})")
        self._remove(request, keeps=False)

    def _end(self, request: Request) -> None:
        """End a request whose pass was interrupted."""
        request.abort()
        self._remove(request, keeps=False)

    def _remove(self, request: Request, *, keeps: bool = True) -> None:
        """Let an ended request go, from wherever it was."""
        self._suspects.discard(request)
        assert request.finish_reason is not None
        if self._scheduler.holds(request):
            self._counters.count_end(request.finish_reason, request.num_output, request.stats)
        if self._scheduler.remove(request, keeps=keeps) is None:
            self._release(request)

    def _release(self, request: Request | KeptRow) -> None:
        if self._drafter is not None and request.speculates:
            self._drafter.release(request)

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise PromptError("the prompt is empty; give at least one token")
        vocab_size = self._target.config.vocab_size
        for token in prompt_ids:
            if not 0 <= token < vocab_size:
                raise PromptError(
                    f"prompt token {token} is outside the vocabulary: 0 .. {vocab_size - 1}"
                )
        if len(prompt_ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens, but at most {self.max_model_len - 1} "
                f"fit a context of {self.max_model_len} with one token of output; shorten it or "
                "raise max_model_len"
            )


def _max_slots(config: EngineConfig, max_model_len: int) -> int:
    """The slots in force: those asked for, or as many as requests of full length take."""
    if config.max_slots is None:
        return config.max_batch_size * max_model_len
    if config.max_slots < max_model_len:
        raise ParameterError(
            f"max_slots: {config.max_slots} is less than one request may need; use at least "
            f"max_model_len, which is {max_model_len}, or lower that"
        )
    return config.max_slots
