"""The second stage: the target answers the training prompts through our own engine.

Owns ``responses*.jsonl`` of a data folder: one line per answered turn, appended as it ends, so an
interrupted run goes on where it stopped. Between the prompts (:mod:`.prompts`) and the captured
states (:mod:`.features`). A head learns what the target writes, hence the target's own answers at
the temperatures that it will be used at; an answer that falls into a loop is cut there, since a
loop teaches nothing.

Everything about an answer follows from (weights, prompt, settings): its seed and temperature are
drawn from the prompt's id, so parts, order and interruptions change nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.bench.guards import MIN_TOKENS, loop_start
from outrider.config import SamplingParams
from outrider.errors import ParameterError
from outrider.llm import ENOUGH_EVERY, LLM
from outrider.models.loading.cache import exclusive
from outrider.training.answers import Answers, Response, append, open_to_append
from outrider.training.files import writing
from outrider.training.prompts import TrainingPrompt
from outrider.types import Completion, FinishReason, ProgressCallback

LOOP = "loop"
TURN_TEMPERATURE = 0.9  # of the user turns that the target completes
TURN_TOKENS = 64
MIN_ROOM = 32  # tokens of answer below which a prompt counts as too long
_PLACE = "\u2063"  # an invisible character that marks where the user's turn stands


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSettings:
    """How the answers are drawn.

    Attributes:
        temperatures: each prompt is answered at one of them, drawn by its id; a temperature may be
            listed more than once.
        max_tokens: most tokens of one answer.
        seed: changes every draw.

    Raises:
        ParameterError: no temperature, or a value out of range.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 192
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ParameterError("temperatures: none given; give at least one, such as 0 or 1")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed)

    def params(self, response_id: str) -> SamplingParams:
        """The parameters of one answer."""
        digest = hashlib.sha256(f"{self.seed}/{response_id}".encode()).digest()
        return SamplingParams(
            temperature=self.temperatures[digest[8] % len(self.temperatures)],
            max_tokens=self.max_tokens,
            seed=int.from_bytes(digest[:8], "little"),
        )


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """What a run of this stage did.

    Attributes:
        answered: turns.
        tokens: of their answers.
        too_long: prompts that do not fit the context.
        waiting: prompts that need answers which are not there yet.
        failed: prompts at which the target's logits were not finite; asked again the next time.
    """

    answered: int
    tokens: int
    too_long: int
    waiting: int
    failed: int = 0


def answer_prompts(
    llm: LLM,
    prompts: Sequence[TrainingPrompt],
    folder: Path,
    settings: ResponseSettings,
    *,
    part: tuple[int, int] = (1, 1),
    max_tokens: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> AnswerCounts:
    """Answer the prompts that have no answer yet; append each to the data folder as it ends.

    Args:
        llm: the target, without speculation or with: the text is the same.
        prompts: in order; passages and earlier turns come before what needs them.
        folder: the data folder.
        settings: how answers are drawn.
        part: (k, n) answers every n-th prompt only, from the k-th: one process for each k may
            work on one folder.
        max_tokens: stop at so many response tokens in the folder; a part at its share of them.
        on_progress: told the rate and the fraction done.

    Returns:
        Counts; what waits needs answers of another part, or of a prompt that was passed over.

    Raises:
        ParameterError: no such part, or another process answers it.
        CheckpointError: a damaged line in the middle of a file, or a file that cannot be written.
        CapacityError: the disk is full; what was answered stays.
    """
    k, n = part
    if not 1 <= k <= n:
        raise ParameterError(f"part: {k}/{n} is not k/n with 1 <= k <= n")
    path = folder / ("responses.jsonl" if n == 1 else f"responses-{k}-of-{n}.jsonl")

    def refuse() -> None:
        raise ParameterError(
            f"part: {path} is being written by another process; wait for it, end it, or give each "
            "process a part of its own"
        )

    with ExitStack() as stack:
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive(folder / f".{path.name}.lock", refuse))
        answers = Answers(folder)
        answers.refresh()
        queue = _Queue(prompts[k - 1 :: n], answers, llm, settings)
        # A part answers for its own file; a single process for whatever parts wrote before it.
        before = sum(answers.tokens_of.values()) if n == 1 else answers.tokens_of.get(path, 0)
        share = None if max_tokens is None else -(-max_tokens // n)
        progress = _Progress(before, queue, share, on_progress)
        with writing(path):
            file = stack.enter_context(open_to_append(path))
        runs = llm.generate_each(_until(queue, progress), is_enough=_is_looping)
        stack.callback(runs.close)
        for index, completion in runs:
            response = queue.take(index, completion)
            if response is not None:
                with writing(path):
                    append(file, json.dumps(asdict(response)).encode() + b"\n")
                progress.count(response)
    return AnswerCounts(
        answered=progress.answered,
        tokens=progress.tokens,
        too_long=queue.too_long,
        waiting=len(queue.blocked),
        failed=queue.failed,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """One request: a user's turn to complete, or a turn to answer."""

    prompt: TrainingPrompt
    turn: int
    ids: list[int]
    params: SamplingParams
    is_opener: bool = False

    @property
    def id(self) -> str:
        return turn_id(self.prompt, self.turn)


class _Queue:
    """What can be asked next, given the answers so far."""

    def __init__(
        self,
        prompts: Sequence[TrainingPrompt],
        answers: Answers,
        llm: LLM,
        settings: ResponseSettings,
    ) -> None:
        self.blocked: deque[tuple[TrainingPrompt, int]] = deque()
        self.too_long = self.failed = 0
        self.num_open = sum(
            len(p.turns) - sum(turn_id(p, turn) in answers.by_id for turn in range(len(p.turns)))
            for p in prompts
        )
        self._fresh = iter(prompts)
        self._ready: deque[_Job] = deque()
        self._answers = answers
        self._tokenizer = llm.tokenizer
        self._room = llm.max_model_len
        self._settings = settings
        self._out: dict[int, _Job] = {}
        self._num_out = 0

    @property
    def is_running(self) -> bool:
        """Whether any job is out."""
        return bool(self._out)

    def next(self) -> _Job | None:
        """The next job; None where all that is left waits for answers."""
        self._unblock()
        while not self._ready:
            prompt = next(self._fresh, None)
            if prompt is None:
                return None
            self._enter(prompt, 0)
        job = self._ready.popleft()
        self._out[self._num_out] = job
        self._num_out += 1
        return job

    def take(self, index: int, completion: Completion) -> Response | None:
        """Turn a completion into a response, or into the next job of its prompt."""
        job = self._out.pop(index)
        if completion.finish_reason is FinishReason.ERROR:
            self.failed += 1
            return None
        if job.is_opener:
            text = job.prompt.turns[0] + self._tokenizer.decode(_without_loop(completion)[0])
            self._enter(replace(job.prompt, turns=(text.strip(),), is_opener=False), 0)
            return None
        ids, reason = _without_loop(completion)
        response = Response(
            id=job.id,
            category=job.prompt.category,
            prompt_ids=tuple(job.ids),
            response_ids=ids,
            temperature=job.params.temperature,
            seed=completion.seed or 0,
            finish_reason=reason,
        )
        self._answers.by_id[response.id] = response
        if job.turn + 1 < len(job.prompt.turns):
            self._enter(job.prompt, job.turn + 1)
        return response

    def _unblock(self) -> None:
        """Look again at what waits for answers, this process' own or another's."""
        if not self.blocked:
            return
        for _ in range(len(self.blocked)):
            self._enter(*self.blocked.popleft())
        if self.blocked and not self._ready:
            self._answers.refresh()

    def _enter(self, prompt: TrainingPrompt, turn: int) -> None:
        """Make the job of a turn, or skip what is answered, or put it aside until it can be."""
        while turn < len(prompt.turns) and self._answers.get(turn_id(prompt, turn)):
            turn += 1
        if turn == len(prompt.turns):
            return
        if any(self._answers.get(source) is None for source in prompt.passages):
            self.blocked.append((prompt, turn))
            return
        params = self._settings.params(turn_id(prompt, turn))
        if prompt.is_opener:
            ids = self._opener_ids(prompt.turns[0])
            params = replace(params, temperature=TURN_TEMPERATURE, max_tokens=TURN_TOKENS, choice=1)
        else:
            ids = self._chat_ids(prompt, turn)
        if len(ids) > self._room - MIN_ROOM:
            self.too_long += 1
            return
        self._ready.append(_Job(prompt, turn, ids, params, prompt.is_opener))

    def _chat_ids(self, prompt: TrainingPrompt, turn: int) -> list[int]:
        """The conversation up to and including a user's turn."""
        messages = []
        for earlier in range(turn):
            answer = self._answers.by_id[turn_id(prompt, earlier)]
            messages += [_user(self._text(prompt, earlier)), _assistant(self._decode(answer))]
        return self._tokenizer.encode_chat([*messages, _user(self._text(prompt, turn))])

    def _text(self, prompt: TrainingPrompt, turn: int) -> str:
        text = prompt.turns[turn]
        for place, source in enumerate(prompt.passages):
            passage = self._decode(self._answers.by_id[source])
            text = text.replace(f"{{passage{place}}}", passage)
        return text

    def _decode(self, response: Response) -> str:
        return self._tokenizer.decode(response.response_ids).strip()

    def _opener_ids(self, opener: str) -> list[int]:
        """The chat template up to the end of an unfinished user's turn."""
        rendered = self._tokenizer.render_chat([_user(_PLACE)], add_generation_prompt=False)
        before, _, _ = rendered.partition(_PLACE)
        return self._tokenizer.encode(before + opener, add_special_tokens=False)


class _Progress:
    """Counts what is written and says so."""

    def __init__(
        self,
        before: int,
        queue: _Queue,
        max_tokens: int | None,
        on_progress: ProgressCallback | None,
    ) -> None:
        self.answered = 0
        self.tokens = 0
        self._before = before
        self._num_open = max(1, queue.num_open)
        self._max_tokens = max_tokens
        self._on_progress = on_progress

    @property
    def is_full(self) -> bool:
        return self._max_tokens is not None and self._before + self.tokens >= self._max_tokens

    def count(self, response: Response) -> None:
        self.answered += 1
        self.tokens += len(response.response_ids)
        if self._on_progress is None:
            return
        fraction = self.answered / self._num_open
        if self._max_tokens is not None:
            fraction = max(fraction, (self._before + self.tokens) / self._max_tokens)
        what = f"answering prompts: {self._before + self.tokens:,} tokens"
        self._on_progress(what, min(1.0, fraction))


def _until(
    queue: _Queue, progress: _Progress
) -> Iterator[tuple[Sequence[int], SamplingParams] | None]:
    """The queue as jobs, until it is empty, or stuck, or enough is written."""
    num_stuck = 0
    while not progress.is_full:
        job = queue.next()
        if job is not None:
            num_stuck = 0
            yield job.ids, job.params
        elif queue.is_running:
            yield None
        elif queue.blocked and num_stuck == 0:
            num_stuck += 1  # another part may just have written what was missing: look once more
        else:
            return


def _is_looping(token_ids: Sequence[int]) -> bool:
    return loop_start(token_ids) is not None


def _without_loop(completion: Completion) -> tuple[tuple[int, ...], str]:
    """An answer up to little more than what it says for the first time, and why it ends there.

    Looked for where the engine asks at the earliest, so that it does not matter how many tokens
    came at once, and when it was therefore aborted.
    """
    ids = completion.token_ids
    for end in range(ENOUGH_EVERY, len(ids) + 1, ENOUGH_EVERY):
        start = loop_start(ids[:end])
        if start is not None:
            return ids[: min(end, start + MIN_TOKENS)], LOOP
    return ids, str(completion.finish_reason)


def turn_id(prompt: TrainingPrompt, turn: int) -> str:
    """Under which id the answer to a turn is kept, counted from 0."""
    return prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
