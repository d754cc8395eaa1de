"""What an arm of ``peers.py`` is, and how one lives in a process and an environment of its own.

Standard library alone: the ``*_peer.py`` files import this on both sides, here and under the other
engine's own Python, where nothing of ours is installed::

    peers.py     Arm("vLLM plain", answer=worker.answer)
                   |  {"prompt": [1, 2, 3], "max_tokens": 64}          one JSON line per request
    Worker  -------+------------------------------------------> serve()   the engine's Python
                   <-------------------------------------------+
                      {"token_ids": [...], "total_s": 1.2, "decode_s": 1.1, "num_first": 1}

All workers stay loaded and are asked in turn; one that is not asked waits for a line and computes
nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

_LOG_TAIL_LINES = 12
_STOP_S = 20.0


@dataclass(frozen=True)
class Answer:
    """One prompt answered by one arm; ``decode_s`` runs from the first tokens to the last.

    ``num_first`` tokens came with the first ones, so ``decode_s`` paid for the others.
    """

    token_ids: tuple[int, ...]
    total_s: float
    decode_s: float
    num_first: int

    @property
    def total_rate(self) -> float:
        """Tokens per second of the whole request."""
        return len(self.token_ids) / self.total_s


AnswerFunction = Callable[[list[int], int], Answer]


@dataclass(frozen=True)
class Arm:
    """One way to decode: prompt ids and a length in, an :class:`Answer` out.

    ``engine`` groups arms for comparison, ``weights`` says in which numbers they compute;
    ``is_plain`` decodes without guessing. An engine that still keeps a core busy after it has
    answered does so for ``settle_s`` at most: nobody else is timed before that.
    """

    name: str
    engine: str
    weights: str
    is_plain: bool
    answer: AnswerFunction
    version: str = ""
    settle_s: float = 0.0


class PeerError(Exception):
    """An engine could not be started, or did not answer; a sentence that says which and why."""


class Stopwatch:
    """Times one request; made when it begins, told of the first tokens, read at its end."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s: float | None = None
        self._num_first = 0

    def saw(self, num_tokens: int) -> None:
        """There are this many tokens by now; the first call with any counts."""
        if self._first_s is None and num_tokens:
            self._first_s, self._num_first = time.perf_counter(), num_tokens

    def answer(self, token_ids: list[int] | tuple[int, ...]) -> Answer:
        """The request has ended with these tokens.

        Raises:
            PeerError: no token was ever seen.
        """
        ended_s = time.perf_counter()
        if self._first_s is None:
            raise PeerError("the engine ended without having written a token")
        return Answer(
            tuple(token_ids), ended_s - self._started_s, ended_s - self._first_s, self._num_first
        )


def serve(load: Callable[[dict[str, Any]], tuple[str, AnswerFunction]]) -> None:
    """Be a worker: load with the settings of the command line, then answer line by line.

    ``load`` returns the engine's version and how it answers.
    """
    # Libraries print to stdout; what is meant for the other side goes through a copy of it.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    version, answer = load(json.loads(sys.argv[1]))
    _tell(out, {"version": version})
    for line in sys.stdin:
        request = json.loads(line)
        _tell(out, asdict(answer(request["prompt"], request["max_tokens"])))


def _tell(out: TextIO, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


@dataclass(frozen=True)
class Launch:
    """An arm that is yet to be started: ``python`` runs ``script`` with ``settings``.

    ``speculation`` is in the engine's own words, None for plain decoding. Threads and context are
    the same for all arms of a comparison. ``settle_s`` is as in :class:`Arm`.
    """

    name: str
    engine: str
    weights: str
    python: Path
    script: Path
    model: Path
    threads: int
    context: int
    speculation: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    settle_s: float = 0.0

    def settings(self) -> str:
        """What the worker is told on its command line, as JSON."""
        return json.dumps(
            {
                "model": str(self.model),
                "threads": self.threads,
                "context": self.context,
                "speculation": self.speculation,
            }
        )

    def arm(self, worker: Worker) -> Arm:
        """The arm, once its worker is ready."""
        return Arm(
            name=self.name,
            engine=self.engine,
            weights=self.weights,
            is_plain=self.speculation is None,
            answer=worker.answer,
            version=worker.version,
            settle_s=self.settle_s,
        )


class Worker:
    """One engine in a process of its own. Use as a context manager; leaving it ends the process.

    Its output, stdout included, goes to a file in the folder ``logs``.
    """

    def __init__(self, launch: Launch, logs: Path) -> None:
        self._name = launch.name
        self._log = logs / f"{launch.name.replace(' ', '-')}.log"
        try:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    [str(launch.python), str(launch.script), launch.settings()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    encoding="utf-8",
                    env=_environment(launch.environment),
                    start_new_session=True,  # a group of its own, which ends with it
                )
        except OSError as problem:
            raise PeerError(
                f"{launch.name}: {launch.python} cannot be started ({problem.strerror}); give the "
                "python of the environment that holds the engine"
            ) from None
        self.version = ""

    def __enter__(self) -> Worker:
        try:
            self.version = str(self._read()["version"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its input ends it
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_S)
        # Whatever is left of it: engines have processes of their own, which spin while they wait.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        """Have one prompt answered.

        Raises:
            PeerError: the process has ended; shows the end of its log.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reading says what happened
            _tell(self._process.stdin, {"prompt": prompt, "max_tokens": max_tokens})
        fields = self._read()
        return Answer(**{**fields, "token_ids": tuple(fields["token_ids"])})

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            tail = " | ".join(line.strip() for line in lines[-_LOG_TAIL_LINES:] if line.strip())
            raise PeerError(f"{self._name} ended early: {tail} (all of it: {self._log})")
        return json.loads(line)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without what would lead another Python to our packages or our threads."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    return {**kept, **extra}
