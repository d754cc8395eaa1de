"""A language model that answers at once, from a script; stands in for LLM where torch would wait.

Its clock is the script: every answer says how long it took, so rates and ratios are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.config import Method, SamplingParams, SpeculationConfig
from outrider.models.memory import MemoryPlan
from outrider.types import (
    Completion,
    FinishReason,
    SpeculationStats,
    TextChunk,
    Timing,
    Usage,
)

PLAIN_S_PER_TOKEN = 0.02


class FakeTokenizer:
    """One token per character; a chat message costs two tokens more."""

    vocab_size = 0x110000
    eos_ids = frozenset({0})
    fingerprint = "fake tokenizer"

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.chats: list[list[dict[str, str]]] = []

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.chats.append([dict(message) for message in messages])
        return [token for message in messages for token in (1, *self.encode(message["content"]), 2)]


@dataclass(frozen=True)
class FakeFingerprint:
    text: str = "fake model · float32 · 1 threads · exactness L2"
    level: str = "L2"

    def to_json(self) -> dict[str, object]:
        return {"model": "fake", "level": self.level}


@dataclass(frozen=True)
class FakeFiles:
    """A target that no head ships for, unless a test ships one for these hashes."""

    tokenizer: FakeTokenizer
    path: Path = Path(__file__)  # any file that can hold no mtp module
    weights_hash: str = "fake weights"


@dataclass
class FakeLLM:
    """Answers with ``answers[i]`` to the i-th request, then repeats the last one.

    The speculative arm emits ``speed`` tokens per verify step and takes ``1 / speed`` of the time;
    ``speeds`` has those of methods that differ.
    With ``draft_cost``, each of its steps had one draft pass, of that share of a target pass.
    ``before_chunk`` is called with the chunk's index while an answer streams.
    """

    answers: list[str] = field(default_factory=lambda: ["Hello there."])
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    speed: float = 2.0
    max_model_len: int = 2048
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    fingerprint: FakeFingerprint = field(default_factory=FakeFingerprint)
    speeds: Mapping[Method, float] = field(default_factory=dict)
    memory_plan: MemoryPlan = field(default_factory=lambda: MemoryPlan((), None))
    warnings: tuple[str, ...] = ()
    error: str | None = None
    draft_cost: float = 0.0
    before_chunk: Callable[[int], None] = lambda _: None
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    num_closed: int = 0

    @property
    def files(self) -> FakeFiles:
        return FakeFiles(self.tokenizer)

    def with_speculation(self, speculation: SpeculationConfig) -> FakeLLM:
        return replace(self, speculation=speculation, prompts=[], params=[], num_closed=0)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Completion]:
        return [self._complete(list(prompt), params) for prompt in prompts]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[TextChunk]:
        completion = self._complete(list(prompt), params)

        def chunks() -> Iterator[TextChunk]:
            try:
                for index, char in enumerate(completion.text):
                    self.before_chunk(index)
                    is_last = index == len(completion.text) - 1
                    yield TextChunk(char, (ord(char),), completion if is_last else None)
                if not completion.text:
                    yield TextChunk("", (), completion)
            finally:
                self.num_closed += 1

        return chunks()

    def _complete(self, ids: list[int], params: SamplingParams) -> Completion:
        is_plain = self.speculation.method is Method.OFF
        self.log.append(self.speculation.method.value)
        self.prompts.append(ids)
        self.params.append(params)
        text = self.answers[min(len(self.prompts), len(self.answers)) - 1][: params.max_tokens]
        later = max(0, len(text) - 1)
        speed = self.speeds.get(self.speculation.method, self.speed)
        stats = SpeculationStats()
        if not is_plain and later:
            stats = SpeculationStats(later // 2, later, later // 2, [later // 2])
        decode_s = later * PLAIN_S_PER_TOKEN / (1.0 if is_plain else speed)
        draft_s = decode_s * self.draft_cost
        num_passes = stats.verify_steps if self.draft_cost else 0
        return Completion(
            text=text,
            token_ids=tuple(ord(char) for char in text),
            finish_reason=FinishReason.ERROR if self.error else FinishReason.STOP,
            usage=Usage(len(ids), len(text)),
            method=self.speculation.method.value,
            speculation=stats,
            timing=Timing(
                0.0, 0.01, decode_s, 0.01 + decode_s, draft_s, decode_s, draft_passes=num_passes
            ),
            fingerprint=self.fingerprint.text,
            seed=params.seed,
            error=self.error,
        )
