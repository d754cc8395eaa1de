"""One request's own state, from its submission to its last token.

Owns its tokens, text, sampler, counts and clock. ``step`` appends tokens through
:meth:`Request.emit`, the scheduler gives it a cache row and takes it back. Knows no model and no
other request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outrider.config import SamplingParams
from outrider.drafters.prediction import Prediction
from outrider.output import OutputStream, TextDecoder
from outrider.sampling import RequestSampler, check_ids
from outrider.types import FinishReason, SpeculationStats, Timing, Verdict
from outrider.warping import Constraint


class Request:
    """One prompt on its way to a text.

    ``token_ids`` is prompt plus emitted tokens. Its keys and values are committed up to, and
    excluding, the last token: that one is the next step's root.

    Attributes:
        salt: whose request it is; keys and values are reused only where it is the same.
        num_admissions: how often it was given a cache row; once, unless it had to wait again.
        num_reused: prompt tokens that were not computed when it was first admitted, because an
            earlier request had left them.
        is_consistent: text, tokens and counts agree; a fault in the middle of :meth:`emit` parts
            them for good.
        has_decoded: since it got its row a step has computed finite logits over all that the row
            holds, so others may start on that.
        prediction_ids: tokens that the caller expects.
        prediction: drafts from them; None where there are none or nothing may be drafted.
        constraint: what the output must be, if anything.

    Raises:
        ParameterError: a token id among the parameters or in the prediction is outside the
            vocabulary, or ``min_tokens`` would forbid every token.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        decoder: TextDecoder,
        eos_ids: frozenset[int],
        vocab_size: int,
        max_model_len: int,
        speculates: bool,
        prediction_ids: Sequence[int] = (),
        salt: str = "",
        clock: Callable[[], float] = time.perf_counter,
        constraint: Constraint | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(self.token_ids)
        may_draft = params.max_draft_tokens != 0
        self.speculates = speculates and may_draft
        self.salt = salt
        self.prediction_ids = tuple(prediction_ids)
        check_ids("prediction_ids", self.prediction_ids, vocab_size)
        predicts = may_draft and bool(self.prediction_ids)
        self.prediction = Prediction(self.prediction_ids, max_model_len) if predicts else None
        self.constraint = constraint
        self.sampler = RequestSampler(
            params,
            vocab_size=vocab_size,
            prompt_ids=self.token_ids,
            eos_ids=eos_ids,
            constraint=constraint,
        )
        self._max_output = min(params.max_tokens, max_model_len - self.prompt_len)
        self.output = OutputStream(decoder, params, eos_ids, self._max_output, constraint)
        self.stats = SpeculationStats()
        self.cache_row: int | None = None
        self.num_admissions = 0
        self.num_reused = 0
        self.is_consistent = True
        self.has_decoded = False
        self.error: str | None = None
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.draft_passes = 0
        self._clock = clock
        self._submitted_s = clock()
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._num_first = 0
        self._last_token_s: float | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it waits or runs."""
        return self.output.finish_reason

    @property
    def row(self) -> int:
        """The cache row of a running request."""
        assert self.cache_row is not None, "a request decodes only while it holds a cache row"
        return self.cache_row

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def max_depth(self) -> int:
        """Deepest node that can still be of use: the step's own pick takes one more place."""
        room = max(0, self._max_output - self.num_output - 1)
        limit = self.params.max_draft_tokens
        return room if limit is None else min(room, limit)

    @property
    def max_len(self) -> int:
        """Prompt and output tokens at the very most."""
        return self.prompt_len + self._max_output

    def admit(self, cache_row: int) -> None:
        """Leave the queue for a cache row."""
        self.cache_row = cache_row
        self.num_admissions += 1
        self.has_decoded = False
        if self._admitted_s is None:
            self._admitted_s = self._clock()

    def emit(self, verdict: Verdict) -> int:
        """Append a verdict's tokens one by one, up to the first stop event, and count the step.

        Returns how many there were.
        """
        self.is_consistent = False
        before = self.num_output
        for place, token in enumerate(verdict.tokens):
            self.token_ids.append(token)
            logprobs = verdict.logprobs[place] if verdict.logprobs else None
            if self.output.push(token, logprobs) is not None:
                break
        emitted = self.num_output - before
        # Only what was really emitted counts: nothing behind a stop event was accepted.
        self.stats.record(verdict.num_drafted, min(len(verdict.path), emitted))
        if emitted:
            self._last_token_s = self._clock()
            if self._first_token_s is None:
                self._first_token_s, self._num_first = self._last_token_s, emitted
        if self.finish_reason is None and not verdict.is_finite:
            self.fail(self._dead_end())
        self.is_consistent = True
        return emitted

    def _dead_end(self) -> str:
        """Why the target picks nothing after the last token."""
        message = f"the target's logits at position {len(self.token_ids)} are not finite"
        if self.constraint is None:
            return message
        failure = self.constraint.failure(self.output.token_ids)
        return failure or f"{message}, or rule out every token that the grammar allows"

    def fail(self, message: str) -> None:
        """End with an error; what was emitted stays."""
        self.error = message
        self._close(FinishReason.ERROR)

    def abort(self) -> None:
        """End where it stands, at the caller's wish."""
        self._close(FinishReason.ABORT)

    def _close(self, reason: FinishReason) -> None:
        assert self.finish_reason is None, "the request has ended"
        try:
            self.output.close(reason)
        except Exception:  # a decoder that fails on these tokens must not keep the request alive
            self.error = self.error or "the text that was held back could not be decoded"
            self.output.finish_reason = reason

    def timing(self) -> Timing:
        """The request's clock so far."""
        now = self._clock()
        first = self._first_token_s or now
        return Timing(
            queue_s=(self._admitted_s or now) - self._submitted_s,
            first_token_s=first - self._submitted_s,
            decode_s=(self._last_token_s or first) - first,
            total_s=(self._last_token_s or now) - self._submitted_s,
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            num_first=self._num_first,
            draft_passes=self.draft_passes,
        )
