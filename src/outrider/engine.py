"""The engine: prefill, then speculative steps, for all running requests, until none is left.

Owns the target, its cache, the drafter and the scheduler, and the order in which they work. Used by
:mod:`outrider.llm`; knows no prompts as text and no user interface.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch

from outrider.budget import Budget, CostTable
from outrider.config import FIRST_STEP_TOKENS, EngineConfig, SamplingParams
from outrider.drafters import Drafter
from outrider.errors import PromptError
from outrider.models.decoder import Decoder
from outrider.models.layers import Segment
from outrider.output import TextDecoder
from outrider.scheduler import Request, Scheduler
from outrider.step import speculative_step
from outrider.types import StepRecord


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
    ) -> None:
        self.max_model_len = max_model_len
        self.lock = threading.RLock()
        self._threads = torch.get_num_threads()
        self._target = target
        self._decoder = decoder
        self._eos_ids = eos_ids
        self._prefill_chunk = config.prefill_chunk
        self._drafter = drafter
        self._uses_blocks = uses_blocks
        self._cache = target.new_cache(
            max_batch_size=config.max_batch_size,
            num_slots=max_model_len + max_draft_tokens,
        )
        self._scheduler = Scheduler(self._cache)
        max_rows = config.max_batch_size * (1 + max_draft_tokens)
        if costs is not None:
            max_rows = min(max_rows, costs.rows[-1])
        self._budget = Budget(costs, max_rows=max_rows)
        self._next_id = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work

    def new_request(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, speculates: bool = True
    ) -> Request:
        """A request, checked but not yet queued; ``speculates=False`` decodes it plainly.

        Raises:
            PromptError: an empty prompt, an id outside the vocabulary, or no room for one token.
            ParameterError: a token id among the parameters is outside the vocabulary.
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
        )

    def submit(self, request: Request) -> None:
        """Queue a request; it runs as soon as a cache row is free."""
        with self.lock:
            self._scheduler.submit(request)

    def step(self) -> tuple[list[Request], StepRecord | None]:
        """Admit and prefill what fits, then advance every running request.

        Returns the requests that got tokens or ended, and where the step's time went (None when
        nothing ran).
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # somebody else's setting would change kernels
        with self.lock, torch.inference_mode():
            self._admit()
            running = self._scheduler.running
            if not running:
                return [], None
            try:
                record = speculative_step(
                    running,
                    self._target,
                    self._cache,
                    self._drafter,
                    self._budget,
                    uses_blocks=self._uses_blocks,
                )
            except BaseException:
                # Interrupted half-way (Ctrl-C, memory), cache and texts may be out of step.
                for request in running:
                    if request.finish_reason is None:
                        request.abort()
                raise
            finally:
                for request in running:
                    if request.finish_reason is not None:
                        self._remove(request)
        return running, record

    def abort(self, request: Request) -> None:
        """Cancel a request at any stage; its row is free at once. Ended requests are left alone."""
        with self.lock:
            if request.finish_reason is None:
                request.abort()
                self._remove(request)

    def _admit(self) -> None:
        """Admit and prefill what fits; interrupted, those that are not done end."""
        unready = self._scheduler.admit()
        try:
            while unready:
                self._prefill(unready[0])
                del unready[0]
        except BaseException:
            for request in unready:
                request.abort()
                self._remove(request)
            raise

    def _prefill(self, request: Request) -> None:
        """Commit the prompt but its last tokens, which the first step takes along."""
        row = request.row
        tokens = request.token_ids[: -1 - FIRST_STEP_TOKENS]
        drafter = self._drafter if request.speculates else None
        capture = () if drafter is None else drafter.captures
        if drafter is not None:
            drafter.admit(request)
        for start in range(0, len(tokens), self._prefill_chunk):
            chunk = tokens[start : start + self._prefill_chunk]
            segment = Segment(row, chunk, range(len(chunk)), num_silent=len(chunk))
            output = self._target.forward([segment], self._cache, capture=capture)
            self._cache.extend(row, len(chunk))
            if drafter is not None:
                drafter.prefill(request, start + len(chunk), output.hidden_RC)

    def _remove(self, request: Request) -> None:
        was_admitted = request.cache_row is not None
        self._scheduler.remove(request)
        if self._drafter is not None and request.speculates and was_admitted:
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
