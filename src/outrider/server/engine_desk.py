"""Where requests are handed in and answers handed out: between the event loop and one engine.

Owns the crossing to the thread that computes, of which every engine of the process has its turns
(:mod:`~outrider.server.compute_thread`). Coroutines call :meth:`EngineDesk.submit` and read
:class:`~outrider.server.answers.Answers`; they never wait for a step, since whether there is room
is known on their side::

    event loop                          a turn of the compute thread
    submit() ── room? ── inbox ───────> engine.submit, engine.abort
    Answers.put <── one call per step ─ engine.step, what each request got

A step that raises ends this engine and no other: every open answer gets an error, and the server in
front of it goes down.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from outrider.counters import EngineStats
from outrider.engine import Engine
from outrider.errors import OutriderError, OverloadedError
from outrider.llm import LLM
from outrider.request import Request
from outrider.scheduler import Claim, queue_excess
from outrider.server.answers import Answers
from outrider.server.compute_thread import ComputeThread, Turn
from outrider.server.errors import (
    ApiError,
    failed,
    overloaded,
    refused,
    translate,
    unavailable,
)
from outrider.server.metrics import Metrics
from outrider.types import TextChunk

_log = logging.getLogger("outrider.server")
_POLL_S = 0.02
_SHORTEST = Claim(num_slots=1, num_tokens=1)


class State(StrEnum):
    """What the engine is doing for the outside."""

    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class EngineDesk:
    """Serves one engine until it is stopped or fails.

    All methods and properties belong to the event loop's thread, except where said otherwise.

    Attributes:
        state: changes once, away from READY.
        on_death: called on the loop once, when a step has raised.
        metrics: told of every step and of every request that ends.

    Args:
        llm: the loaded model.
        computing: the thread that steps its engine.
        model_name: labels the metrics.
        max_buffered_bytes: what is kept for one client that reads too slowly.
    """

    def __init__(
        self,
        llm: LLM,
        computing: ComputeThread,
        *,
        model_name: str,
        max_buffered_bytes: int,
    ) -> None:
        self.state = State.READY
        self.on_death: Callable[[], None] = _nothing
        self.metrics = Metrics(model_name, lambda: self._stats)
        self._llm = llm
        self._computing = computing
        self._engine: Engine = llm.engine
        self._max_batch_size = llm.engine_config.max_batch_size
        self._limits = llm.engine_config.admission
        self._max_buffered_bytes = max_buffered_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[Answers, None] = {}  # the loop's view, in order: not told to have ended
        self._running: dict[Request, _Progress] = {}  # the thread's view: not yet ended
        self._lock = threading.Lock()
        self._inbox: list[Callable[[], None]] = []  # guarded by the lock, as is the next one
        self._is_stopping = False
        self._has_had_last_turn = threading.Event()
        self._stats = self._engine.stats()

    @property
    def stats(self) -> EngineStats:
        """The engine's own counts after its last step."""
        return self._stats

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(answers.num_open for answers in self._open)

    def stalled_s(self) -> float:
        """How long the step in progress has been running, whichever engine's; 0 between steps."""
        return self._computing.stalled_s()

    def start(self) -> None:
        """Begin to step; from within a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._computing.join(self)

    def submit(self, requests: Sequence[Request], *, streams: bool) -> Answers:
        """Queue all of these requests, or none.

        Raises:
            ApiError: 429 when the queue is full, 400 when they would not fit an empty one, 503
                when the server is going down.
        """
        self._check_ready()
        self._check_fits([Claim.of(request) for request in requests])
        answers = Answers(
            requests,
            streams=streams,
            max_buffered_bytes=self._max_buffered_bytes,
            on_abort=self._abort,
        )
        self._open[answers] = None
        self._post(lambda: self._take_in(answers))
        return answers

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones; False when some had to be aborted."""
        if self.state is State.READY:
            self.state = State.DRAINING
        deadline = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline and self.state is State.DRAINING:
            await asyncio.sleep(_POLL_S)
        is_clean = not self._open
        self.abort_all()
        return is_clean

    def abort_all(self) -> None:
        """End every open request with an error, now."""
        if self.state is State.READY:
            self.state = State.DRAINING
        for answers in list(self._open):
            answers.abort("shutdown", unavailable("the server is shutting down", code="shutdown"))

    async def stop(self) -> None:
        """End every request and step no more; waits for the step in progress."""
        self.abort_all()
        if self.state is not State.DEAD:
            self.state = State.STOPPED
        with self._lock:
            self._is_stopping = True
        self._computing.wake()
        if self._loop is not None:
            await asyncio.to_thread(self._has_had_last_turn.wait)

    def _check_ready(self) -> None:
        if self.state is State.DEAD:
            raise failed("the engine has failed; the server is going down", code="engine_dead")
        if self.state is not State.READY:
            raise unavailable("the server is shutting down", code="shutdown")

    def check_room(self) -> None:
        """Refuse a request that has not been read yet, where not even the shortest would fit.

        Raises:
            ApiError: as :meth:`submit`.
        """
        self._check_ready()
        self._check_fits([_SHORTEST])

    def _check_fits(self, news: Sequence[Claim]) -> None:
        """Refuse what the engine would refuse, by its own rule, without waiting for its step.

        Where each request stands is read while the engine may be moving it; the engine has the last
        word when it takes the new ones in.
        """
        num_waiting, num_tokens = self._excess([], [], news)
        if self._limit_hit(num_waiting, num_tokens) is not None:
            raise refused(
                f"n: of {len(news)} answers {num_waiting} would have to wait, with {num_tokens} "
                f"prompt tokens, even if nothing else ran; {self._allowed()}; ask for fewer at "
                "once",
                param="n",
            )
        running: list[Claim] = []
        queue: list[Claim] = []
        for request in (request for answers in self._open for request in answers.requests):
            if request.finish_reason is None:
                (queue if request.cache_row is None else running).append(Claim.of(request))
        num_waiting, num_tokens = self._excess(running, queue, news)
        if (limit := self._limit_hit(num_waiting, num_tokens)) is not None:
            self.metrics.refused(limit)
            raise overloaded(
                f"{num_waiting} would wait, with {num_tokens} prompt tokens, beside "
                f"{len(running)} that run; {self._allowed()}; try again later"
            )

    def _excess(
        self, running: Sequence[Claim], queue: Sequence[Claim], news: Sequence[Claim]
    ) -> tuple[int, int]:
        """Requests and tokens that would wait."""
        return queue_excess(
            running,
            [*queue, *news],
            num_rows=max(0, self._max_batch_size - len(running)),
            max_slots=self._stats.slots_total,
        )

    def _limit_hit(self, num_waiting: int, num_tokens: int) -> str | None:
        """Which limit of the queue these exceed, if any."""
        max_waiting, max_tokens = self._limits.max_waiting, self._limits.max_waiting_tokens
        if max_waiting is not None and num_waiting > max_waiting:
            return "requests"
        if max_tokens is not None and num_tokens > max_tokens:
            return "tokens"
        return None

    def _allowed(self) -> str:
        """The limits in words."""
        limits = {"may wait": self._limits.max_waiting, "tokens": self._limits.max_waiting_tokens}
        words = [f"{count} {what}" for what, count in limits.items() if count is not None]
        return f"{self._max_batch_size} run at once, at most {' with '.join(words)}"

    def _abort(self, answers: Answers) -> None:
        self.metrics.aborted(answers.abort_reason or "unknown")
        self._post(lambda: self._take_out(answers))

    def _post(self, command: Callable[[], None]) -> None:
        """Have the compute thread run ``command`` before the engine's next step."""
        with self._lock:
            self._inbox.append(command)
        self._computing.wake()

    def _deliver(self, news: Sequence[tuple[Answers, int, TextChunk]]) -> None:
        """(On the loop.) Hand over what a step brought."""
        for answers, index, chunk in news:
            answers.put(index, chunk)
            if answers.num_open == 0:
                self._open.pop(answers, None)

    def _fail(self, answers: Answers, error: ApiError) -> None:
        """(On the loop.) End one client's answers with an error."""
        answers.fail(error)
        answers.num_open = 0
        self._open.pop(answers, None)

    # --- from here on, the compute thread

    def turn(self) -> Turn:
        """(On the compute thread.) Read the inbox, then step once if there is work."""
        try:
            if not self._is_stopping:
                return self._next()
        except BaseException:  # whatever it was, nobody may hang, and the other engines go on
            _log.exception("the engine has failed")
            self._call(self._die)
        self._end()
        return Turn.LAST

    def _next(self) -> Turn:
        has_read = self._read_inbox()
        if self._engine.has_work:
            self._step()
            return Turn.AGAIN
        if has_read:  # while another engine works, a turn that does nothing must cost nothing
            self._stats = self._engine.stats()
        return Turn.REST

    def _end(self) -> None:
        try:
            for request in list(self._running):
                self._engine.abort(request)
            self._stats = self._engine.stats()
        except Exception:  # of an engine that has failed, any part may be out of order
            _log.exception("the engine cannot be cleared up")
        finally:
            self._has_had_last_turn.set()

    def _step(self) -> None:
        _, record = self._engine.step()
        news = self._news()
        self._stats = self._engine.stats()
        if record is not None:
            self.metrics.stepped(record)
        if news:
            self._call(lambda: self._deliver(news))

    def _news(self) -> list[tuple[Answers, int, TextChunk]]:
        """What every request got since it was last looked at."""
        news = []
        for request, progress in list(self._running.items()):
            has_ended = request.finish_reason is not None
            is_wanted = progress.answers.streams and request.num_output > progress.num_taken
            if has_ended or is_wanted:
                chunk = self._llm.take(request, progress.num_taken)
                progress.num_taken += len(chunk.token_ids)
                news.append((progress.answers, progress.index, chunk))
                if chunk.completion is not None:
                    self.metrics.ended(chunk.completion)
                    del self._running[request]
        return news

    def _read_inbox(self) -> bool:
        """Do what the loop has asked for; whether there was anything."""
        with self._lock:
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        return bool(commands)

    def _take_in(self, answers: Answers) -> None:
        """Submit one client's requests; if the engine has no room after all, none of them."""
        try:
            self._engine.submit_all(answers.requests)
        except OutriderError as problem:
            is_full = isinstance(problem, OverloadedError)
            error = overloaded(str(problem)) if is_full else translate(problem)
            self._call(lambda: self._fail(answers, error))
            return
        for index, request in enumerate(answers.requests):
            self._running[request] = _Progress(answers, index)

    def _take_out(self, answers: Answers) -> None:
        """Abort what one client left behind."""
        for request in answers.requests:
            self._engine.abort(request)
            self._running.pop(request, None)
        self._stats = self._engine.stats()
        self._call(lambda: self._fail(answers, failed("the request was aborted", code="aborted")))

    def _call(self, action: Callable[[], None]) -> None:
        """Have the loop run ``action``; a loop that is gone needs nothing any more."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            _log.debug("the event loop has closed before the engine")

    def _die(self) -> None:
        """(On the loop.) Tell everybody; what the problem was is in the log, not in the answer."""
        self.state = State.DEAD
        for answers in list(self._open):
            self._fail(answers, failed("the engine has failed", code="engine_dead"))
        self.on_death()


class _Progress:
    """How far one request's tokens were handed out."""

    def __init__(self, answers: Answers, index: int) -> None:
        self.answers = answers
        self.index = index
        self.num_taken = 0


def _nothing() -> None:
    """Nobody asked to be told."""
