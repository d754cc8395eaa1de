"""Acceptance without the target: the real drafter, replayed along texts that are already known.

Under the ``coupled`` rule a text is a function of weights, prompt, parameters and seed, never of
what was drafted. So once it is recorded, with the target's states at its positions, any drafter
can be tried on it without one more pass of the target: a draft is accepted where it *is* the token
that came next, and the states that a verify step would have computed are those recorded. The
drafter is the engine's own and sees the same noise, in batches filled in the same order; what
comes out is what the engine would have counted, up to the numerics of states captured in other
row blocks::

    recording   prompt | response, states of both
    propose     the drafter, on the states committed so far          as in outrider.step
    judge       walk the tree along the response                     instead of the target
    observe     hand over the states of the rows so committed        as in outrider.step

One thing is not known: what the target would have picked behind the end of a text that stopped.
What a drafter learns from such picks it learns in the engine only; they are few, and touch nothing
but scores.

Everything drafted is verified: pruning by measured times (``adaptive``) has no place where no time
passes. Used by :mod:`outrider.training.evaluate` and by the trainer, to choose settings quickly.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.config import FIRST_STEP_TOKENS, EngineConfig, SamplingParams
from outrider.drafters import Drafter
from outrider.errors import ParameterError
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.sampling import NOT_FINITE, RequestSampler
from outrider.training.states import states_of
from outrider.tree import DraftTree
from outrider.types import Completion, ProgressCallback, SpeculationStats, Verdict
from outrider.verify import walk

_PREFILL_CHUNK = EngineConfig().prefill_chunk


@dataclass(frozen=True, slots=True)
class Recording:
    """One answered prompt, as the target answered it.

    Attributes:
        prompt_ids: as the engine got them.
        response_ids: everything it emitted, the end-of-sequence token included.
        params: what it was asked with; sampled texts with the seed in force.
        hidden_TC: the target's states at every position of prompt and response, in its compute
            dtype, in the order of the drafter's ``captures``; None for a drafter without any.

    Raises:
        ParameterError: a text that cannot be replayed: empty, or not a function of its seed.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    params: SamplingParams
    hidden_TC: Tensor | None

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            raise ParameterError(
                f"recording: {len(self.prompt_ids)} prompt and {len(self.response_ids)} response "
                "tokens; a text to replay has at least one of each"
            )
        if self.params.uses_rejection:
            raise ParameterError(
                "accept: a text under rejection depends on what was drafted and cannot be "
                "replayed; record it under coupled"
            )
        if self.params.seed is None and not self.params.is_greedy:
            raise ParameterError(
                "seed: None for a sampled text, whose noise is then unknown; give the seed it was "
                "generated with"
            )
        num_tokens = len(self.prompt_ids) + len(self.response_ids)
        if self.hidden_TC is not None and len(self.hidden_TC) != num_tokens:
            raise ParameterError(
                f"hidden_TC: states of {len(self.hidden_TC)} positions for {num_tokens} tokens; "
                "capture them over prompt and response"
            )


def simulate(
    drafter: Drafter,
    recordings: Sequence[Recording],
    *,
    vocab_size: int,
    max_model_len: int,
    max_batch_size: int = 1,
    prefill_chunk: int = _PREFILL_CHUNK,
    eos_ids: frozenset[int] = frozenset(),
    on_progress: ProgressCallback | None = None,
) -> list[SpeculationStats]:
    """What the engine would count for each recording, decoded in this order.

    ``vocab_size`` and ``eos_ids`` are the target's; ``max_batch_size`` and ``max_model_len`` those
    that the drafter was built for. What a drafter learns from verdicts it keeps, as in an engine:
    start with a fresh one.

    Raises:
        ParameterError: a recording lacks the states that the drafter reads, or is longer than
            ``max_model_len``.
    """
    replays = [
        _Replay(index, recording, vocab_size, max_model_len, eos_ids)
        for index, recording in enumerate(recordings)
    ]
    for replay in replays:
        replay.check(drafter)
    waiting, running = deque(replays), list[_Replay]()
    free_rows = list(range(max_batch_size))
    with torch.inference_mode():
        while waiting or running:
            while waiting and free_rows:
                replay = waiting.popleft()
                replay.row = heapq.heappop(free_rows)
                running.append(replay)
                _prefill(replay, drafter, prefill_chunk)
            running.sort(key=lambda replay: replay.row)
            _step(running, drafter)
            for replay in [replay for replay in running if replay.has_ended]:
                drafter.release(replay)
                running.remove(replay)
                heapq.heappush(free_rows, replay.row)
                if on_progress is not None:
                    num_left = len(waiting) + len(running)
                    on_progress("simulating", 1 - num_left / len(replays))
    return [replay.stats for replay in replays]


def captured_states(
    captures: Sequence[int],
    *,
    layers: Sequence[int],
    states_TC: Tensor | None,
    final_TD: Tensor | None,
) -> Tensor | None:
    """The columns that a drafter reads, out of what was stored; None where it reads none.

    ``captures`` are the drafter's. ``states_TC`` holds the inputs of ``layers`` side by side, each
    as wide as ``final_TD``, the state behind the final norm.

    Raises:
        ParameterError: a state that was not stored.
    """
    if not captures:
        return None
    stored: dict[int, Tensor] = {}
    if states_TC is not None:
        stored |= zip(layers, states_TC.chunk(len(layers), dim=1), strict=True)
    if final_TD is not None:
        stored[FINAL_STATE] = final_TD
    missing = [index for index in captures if index not in stored]
    if missing:
        raise ParameterError(
            f"captures: the states {missing} were not stored, only {list(stored)}; capture the "
            f"features again with {list(captures)}"
        )
    return torch.cat([stored[index] for index in captures], dim=1)


def recordings_of(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    params: Sequence[SamplingParams],
    captures: Sequence[int],
) -> list[Recording]:
    """What the simulator needs of texts that were generated: their states, captured afterwards.

    ``captures`` are the drafter's, or none. A passed-over seed is filled in from the completion.
    """
    recordings = []
    for ids, completion, asked in zip(prompts, completions, params, strict=True):
        hidden_TC = None
        if captures:
            hidden_TC = states_of(target, [*ids, *completion.token_ids], captures)
        in_force = replace(asked, seed=completion.seed)
        recordings.append(Recording(ids, completion.token_ids, in_force, hidden_TC))
    return recordings


class _Replay:
    """A recording on its way through the drafter; what a drafter sees of it is a request.

    ``token_ids`` grows along the text, its last token being the next tree's root. As in the engine,
    states are committed up to, and excluding, that one.
    """

    def __init__(
        self,
        request_id: int,
        recording: Recording,
        vocab_size: int,
        max_model_len: int,
        eos_ids: frozenset[int],
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(recording.prompt_ids)
        self.prompt_len = len(self.token_ids)
        self.sampler = RequestSampler(
            recording.params, vocab_size=vocab_size, prompt_ids=self.token_ids, eos_ids=eos_ids
        )
        self.stats = SpeculationStats()
        self.row = -1
        self.num_committed = 0
        self._text = [*recording.prompt_ids, *recording.response_ids]
        self._hidden_TC = recording.hidden_TC
        self._end = min(self.prompt_len + recording.params.max_tokens, max_model_len)
        if len(self._text) > self._end:
            raise ParameterError(
                f"recording {request_id}: a text of {len(self._text)} tokens, but max_tokens and "
                f"max_model_len allow {self._end}; raise them to what it was generated with"
            )

    @property
    def max_depth(self) -> int:
        """Deepest node that can still be of use, as the engine reckons: it does not know the end.

        :attr:`outrider.scheduler.Request.max_depth` is its twin.
        """
        return self._end - len(self.token_ids) - 1

    @property
    def has_ended(self) -> bool:
        """Whether the whole text was replayed."""
        return len(self.token_ids) == len(self._text)

    def check(self, drafter: Drafter) -> None:
        """Refuse a drafter whose states were not recorded."""
        if drafter.captures and self._hidden_TC is None:
            raise ParameterError(
                f"recording {self.request_id}: holds no states, but the drafter reads those of "
                f"{list(drafter.captures)}; capture them"
            )

    def commit(self, num_committed: int) -> Tensor | None:
        """Commit positions up to this one; returns their states ``[T, C]``, where there are any."""
        start, self.num_committed = self.num_committed, num_committed
        return None if self._hidden_TC is None else self._hidden_TC[start:num_committed]

    def judge(self, tree: DraftTree) -> Verdict:
        """What the target, known to go on as recorded, makes of a tree.

        Behind the text's end nothing is known: the walk ends there as at a row without a pick.
        """
        known = self._text[len(self.token_ids) :]
        picks = [known[depth] if depth < len(known) else NOT_FINITE for depth in tree.depth]
        return walk(tree, picks)

    def emit(self, verdict: Verdict) -> None:
        """Append a verdict's tokens and count the step."""
        self.token_ids += verdict.tokens
        self.stats.record(verdict.num_drafted, len(verdict.path))
        self.sampler.release(len(self.token_ids))


def _prefill(replay: _Replay, drafter: Drafter, chunk: int) -> None:
    """Hand over the prompt but its last tokens; the twin of the engine's prefill."""
    drafter.admit(replay)
    num_tokens = max(0, replay.prompt_len - 1 - FIRST_STEP_TOKENS)
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        drafter.prefill(replay, end, _read(drafter, replay.commit(end)))


def _step(running: Sequence[_Replay], drafter: Drafter) -> None:
    """Advance every replay by one verify step; the twin of ``outrider.step``."""
    trees = [DraftTree.root(replay.token_ids[-1]) for replay in running]
    drafting = [b for b, replay in enumerate(running) if replay.max_depth > 0]
    if drafting:
        requests = [running[b] for b in drafting]
        proposed = drafter.propose(requests, [request.max_depth for request in requests])
        for b, tree in zip(drafting, proposed, strict=True):
            trees[b] = tree
    verdicts, hidden = [], []
    for replay, tree in zip(running, trees, strict=True):
        verdict = replay.judge(tree)
        # The root's state and those of the accepted nodes, which are the text's next tokens.
        states_TC = replay.commit(len(replay.token_ids) + len(verdict.path))
        replay.emit(verdict)
        verdicts.append(verdict)
        hidden.append(_read(drafter, states_TC))
    drafter.observe(running, trees, verdicts, hidden)


def _read(drafter: Drafter, states_TC: Tensor | None) -> Tensor | None:
    """The states for a drafter that reads any."""
    return states_TC if drafter.captures else None
