"""What a bench has to know of a model before it starts a server on it.

Owns the process that finds out, which ends with its answer: reading a model takes torch, and a
client that kept 200 MB of it would keep them for the whole run, beside the servers. Started by
:mod:`outrider.commands.bench_options`; inside it :mod:`outrider.commands.available` does the work::

    survey() ── JSON on stdin ──> python -m outrider.commands.survey ── JSON on stdout ──> Survey
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider import errors
from outrider.commands import console
from outrider.errors import FailureError, OutriderError

Prompt = str | Sequence[tuple[str, str]]
"""A text to go on with, or the (role, content) pairs of a conversation."""

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Survey:
    """The methods to compare, and in tokens the longest prompt and the model's context.

    ``longest_prompt`` is None where the model cannot take these prompts, as the server will say.
    """

    methods: list[str]
    longest_prompt: int | None
    max_position: int


def survey(
    asked: Sequence[str], model: str, heads: Mapping[str, str], prompts: Sequence[Prompt]
) -> Survey:
    """The answer about this model; it is fetched if it is not there, with progress on stderr.

    Raises:
        OutriderError: as :func:`outrider.commands.available.chosen_methods`.
    """
    question = {"asked": asked, "model": model, "heads": dict(heads), "prompts": prompts}
    done = subprocess.run(
        [sys.executable, "-m", "outrider.commands.survey"],
        input=json.dumps(question),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    if done.returncode == _INTERRUPTED:
        raise KeyboardInterrupt
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise FailureError(
            f"{model}: the process that reads the model ended with status {done.returncode} and "
            "without an answer; see above, and try: outrider inspect MODEL"
        ) from None
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["text"])
    return Survey(**answer)


def main() -> int:
    """Answer the question on stdin; the exit status."""
    console.make_robust()
    try:
        answer = _answer(**json.load(sys.stdin))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OutriderError as problem:
        answer = {"error": type(problem).__name__, "text": str(problem)}
    json.dump(answer, sys.stdout)
    return 0


def _answer(
    asked: Sequence[str], model: str, heads: Mapping[str, str], prompts: Sequence[Any]
) -> dict[str, Any]:
    with console.Stages() as stages:
        from outrider.commands.available import chosen_methods, prompt_room

        methods = chosen_methods(asked, model, heads, stages)
        return asdict(Survey(methods, *prompt_room(model, prompts, stages)))


if __name__ == "__main__":
    sys.exit(main())
