"""A conversation in the terminal: what it remembers, what fits the context, and the loop.

Owns the history and its trimming (pure) and the reading of lines, with or without a terminal.
Ctrl-C stops an answer, which keeps what came so far; Ctrl-D or ``/exit`` leaves. Stands between
:mod:`outrider.cli` and :class:`outrider.llm.LLM`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.commands import console
from outrider.commands.answer_report import answer_line
from outrider.config import SamplingParams
from outrider.errors import CapacityError, OutriderError, PromptError
from outrider.types import Completion, SpeculationStats

if TYPE_CHECKING:
    from outrider.llm import LLM

HELP = (
    "/clear forgets the conversation, /stats shows counts, /exit or Ctrl-D leaves, "
    "Ctrl-C stops an answer"
)

Encode = Callable[[Sequence[dict[str, str]]], list[int]]


@dataclass(slots=True)
class Conversation:
    """Finished turns (question, answer), oldest first, and the standing instruction."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """The chat messages that end with a new question."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": question}]

    def fit(self, question: str, encode: Encode, context_len: int, answer_len: int) -> list[int]:
        """Token ids of the conversation with the new question, at most ``context_len`` with room.

        Drops the oldest turns, for good, until an answer of ``answer_len`` tokens fits behind; when
        the question stands alone, any room for an answer will do.

        Raises:
            CapacityError: the question alone leaves no room.
        """
        while True:
            ids = encode(self.messages(question))
            if len(ids) + answer_len <= context_len:
                return ids
            if not self.turns:
                break
            del self.turns[0]
        if len(ids) < context_len:
            return ids
        raise CapacityError(
            f"this message takes {len(ids)} tokens; allowed: {context_len - 1} in a context of "
            f"{context_len}. Shorten it, or start again with a larger --max-model-len"
        )


@dataclass(slots=True)
class Session:
    """A running chat: the model, the conversation, and counts over all answers."""

    llm: LLM
    params: SamplingParams
    conversation: Conversation
    num_answers: int = 0
    num_tokens: int = 0
    context_used: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def answer(self, question: str) -> None:
        """Stream one answer to stdout and keep it, complete or not."""
        turns_before = len(self.conversation.turns)
        context_len = self.llm.max_model_len
        answer_len = min(self.params.max_tokens, context_len // 4)
        encode = self.llm.tokenizer.encode_chat
        try:
            ids = self.conversation.fit(question, encode, context_len, answer_len)
        finally:
            dropped = turns_before - len(self.conversation.turns)
            if dropped:
                console.note(
                    f"the conversation outgrew the context of {context_len} tokens: the oldest "
                    f"{dropped} of {turns_before} turns were forgotten (/clear starts anew)"
                )
        self.context_used = len(ids)
        text, completion = console.relay(self.llm.stream(ids, self.params), console.write_text)
        console.write_text("" if text.endswith("\n") else "\n")
        if text:
            self.conversation.turns.append((question, text))
        if completion is None:
            console.note("stopped" if text else "stopped before the answer; nothing was kept")
        else:
            self._count(completion)

    def _count(self, completion: Completion) -> None:
        self.num_answers += 1
        self.num_tokens += completion.usage.completion_tokens
        self.context_used += completion.usage.completion_tokens
        self.speculation.add(completion.speculation)
        console.note(answer_line(completion))
        if completion.error is not None:
            console.error(completion.error)

    def stats_line(self) -> str:
        """Counts over the whole session."""
        return (
            f"{self.num_answers} answers, {self.num_tokens} tokens; "
            f"acceptance length {self.speculation.acceptance_length:.2f} over "
            f"{self.speculation.verify_steps} verify steps; {self.context_used} of "
            f"{self.llm.max_model_len} context tokens used; {self.llm.fingerprint.text}"
        )

    def command(self, word: str) -> bool:
        """Obey a line that starts with a slash; False when the chat is over."""
        if word in ("/exit", "/quit"):
            return False
        if word == "/clear":
            self.conversation.turns.clear()
            self.context_used = 0
            console.note("forgotten")
        elif word == "/stats":
            console.note(self.stats_line())
        elif word == "/help":
            console.note(HELP)
        else:
            console.note(f"{word} is not a command. {HELP}")
        return True


def run(session: Session, read_line: Callable[[], str]) -> int:
    """Answer lines until they end; the exit status.

    ``read_line`` raises EOFError at the end and KeyboardInterrupt for Ctrl-C at the prompt. A
    message that cannot be answered is reported, and the chat goes on.
    """
    while True:
        try:
            line = read_line().strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            console.stderr().print()  # the terminal has echoed ^C behind the prompt
            console.note("Ctrl-D or /exit leaves")
            continue
        except PromptError as problem:  # this line is not text; the next one may be
            console.error(problem)
            continue
        if not line:
            continue
        if line.startswith("/"):
            if not session.command(line):
                return 0
            continue
        try:
            session.answer(line)
        except OutriderError as problem:
            console.error(problem)


def line_reader() -> Callable[[], str]:
    """A reader of lines: with a prompt and line editing on a terminal, plain otherwise.

    Raises:
        PromptError: (when called) a line is not UTF-8; names the offset of the bad byte.
    """
    if not sys.stdin.isatty():
        return _read_plain_line
    with contextlib.suppress(ImportError):  # absent on some systems: then without line editing
        import readline  # noqa: F401 - its import gives input() line editing and a history
    prompt = "> " if sys.stdout.isatty() else ""

    def read() -> str:
        try:
            return input(prompt)
        except EOFError:
            console.write_text("\n" if prompt else "")
            raise

    return read


def _read_plain_line() -> str:
    line = sys.stdin.buffer.readline(console.MAX_PROMPT_BYTES)
    if not line:
        raise EOFError
    return console.decode_text(line, "this line of stdin")
