"""Training prompts: what the target is asked, so that heads learn from its answers.

Owns how prompts are drawn from the prompt book, and the file they are kept in. First stage of
training; ``responses`` has the target answer them. Knows no tokeniser and no model.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.bench.prompts import load_prompts
from outrider.errors import ParameterError, PromptError
from outrider.training.prompt_book import Category, fill, load_book

_TURN = "\n<turn>\n"


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One conversation for the target to answer, turn after turn.

    ``passages`` are ids of earlier prompts whose answers replace ``{passage0}``, ``{passage1}`` and
    so on in the turns. With ``is_opener`` the target completes the user's turn, then answers it.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    passages: tuple[str, ...] = ()
    is_opener: bool = False


def write_prompts(count: int, seed: int) -> list[TrainingPrompt]:
    """Draw ``count`` prompts from the book, each once, the categories evenly mixed throughout.

    Fewer prompts of the same seed are the beginning of more.

    Raises:
        ParameterError: ``count`` is below 1, or more than the book holds in its mix.
    """
    if count < 1:
        raise ParameterError(f"count is {count}; ask for at least one training prompt")
    seen: set[tuple[str, tuple[str, ...]]] = set()
    writers = [_CategoryWriter(category, seed, seen) for category in load_book()]
    sources = _Sources(seed)
    prompts: list[TrainingPrompt] = []
    while len(prompts) < count:
        for writer in writers:
            writer.credit += writer.category.weight
        # Who is furthest behind its share goes next; only the first few may lack passages.
        ready = [writer for writer in writers if writer.is_ready(sources)]
        writer = max(ready, key=lambda writer: writer.credit)
        prompt = writer.write(sources)
        if prompt is None:
            raise ParameterError(
                f"count is {count}, but the prompt book holds {len(prompts)} prompts for seed "
                f"{seed}: {writer.category.name} is used up; ask for fewer or give prompt files"
            )
        writer.credit -= 1
        prompts.append(prompt)
    return prompts


def load_training_prompts(paths: Sequence[Path]) -> list[TrainingPrompt]:
    """Read the user's own prompts: JSONL files as `outrider.bench.prompts.load_prompts` takes them.

    Raises:
        PromptError: a file holds no prompts or is malformed, or two files share an id.
    """
    prompts: dict[str, TrainingPrompt] = {}
    for path in paths:
        for prompt in load_prompts(path):
            if prompt.id in prompts:
                raise PromptError(
                    f"{path}: id {prompt.id!r} is also in an earlier file; give each prompt its own"
                )
            prompts[prompt.id] = TrainingPrompt(prompt.id, prompt.category, prompt.turns)
    return list(prompts.values())


def save_prompts(path: Path, prompts: Sequence[TrainingPrompt]) -> None:
    """Write one JSON object per line; `read_prompts` gives the same prompts back."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(_to_json(prompt) + "\n" for prompt in prompts)


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """Read a file of `save_prompts`.

    Raises:
        PromptError: the file cannot be read, or a line is not a training prompt.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PromptError(
            f"{path}: cannot be read ({error.strerror}); give a file of training prompts"
        ) from None
    prompts: list[TrainingPrompt] = []
    ids: set[str] = set()
    for number, line in enumerate(lines, start=1):
        prompt = _from_json(f"{path}, line {number}", line)
        for passage in prompt.passages:
            if passage not in ids:
                raise PromptError(
                    f"{path}, line {number}: passage {passage!r} is no earlier prompt's id; "
                    "keep the order in which the prompts were saved"
                )
        ids.add(prompt.id)
        prompts.append(prompt)
    return prompts


def prompts_hash(prompts: Sequence[TrainingPrompt]) -> str:
    """Twelve hex digits that name these prompts in this order: SHA-256 over their JSON lines."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_to_json(prompt).encode("ascii") + b"\n")
    return digest.hexdigest()[:12]


def _to_json(prompt: TrainingPrompt) -> str:
    return json.dumps(asdict(prompt), ensure_ascii=True, separators=(",", ":"))


def _from_json(where: str, line: bytes) -> TrainingPrompt:
    """Check one saved line: exactly the fields of a training prompt, each of its type."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptError(f"{where}: is not JSON; write the file with save_prompts") from None
    if not _is_saved_prompt(row):
        raise PromptError(
            f"{where}: is not a training prompt (id and category: strings, turns and passages: "
            "lists of strings, is_opener: true or false); write the file with save_prompts"
        )
    return TrainingPrompt(
        id=row["id"],
        category=row["category"],
        turns=tuple(row["turns"]),
        passages=tuple(row["passages"]),
        is_opener=row["is_opener"],
    )


def _is_saved_prompt(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    if set(row) != {"id", "category", "turns", "passages", "is_opener"}:
        return False
    texts = [row["id"], row["category"]]
    for items in (row["turns"], row["passages"]):
        if not isinstance(items, list):
            return False
        texts += items
    return (
        bool(row["turns"])
        and isinstance(row["is_opener"], bool)
        and all(isinstance(text, str) for text in texts)
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A prompt whose answer serves as a passage."""

    id: str
    topic: str
    questions: tuple[str, ...]


class _Sources:
    """The sources so far; hands out those used least, ties by chance."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}/sources")
        self._heap: list[tuple[int, float, str, _Source]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, source: _Source) -> None:
        heapq.heappush(self._heap, (0, self._rng.random(), source.id, source))

    def take(self, count: int) -> list[_Source]:
        """``count`` different sources in random order, each counted as used once more."""
        taken = [heapq.heappop(self._heap) for _ in range(count)]
        for uses, _, name, source in taken:
            heapq.heappush(self._heap, (uses + 1, self._rng.random(), name, source))
        sources = [source for *_, source in taken]
        self._rng.shuffle(sources)
        return sources


class _Walk:
    """Visits every text of a template once, in a scattered order, then starts again."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self._size = size
        self._start = rng.randrange(size)
        # A step without a common divisor reaches all; about 0.4 of the list, it scatters.
        self._step = size * 2 // 5 + rng.randrange(size // 4 + 1)
        while math.gcd(self._step, size) != 1:
            self._step += 1
        self.visited = 0

    def next(self) -> int:
        index = (self._start + self.visited * self._step) % self._size
        self.visited += 1
        return index

    @property
    def is_over(self) -> bool:
        return self.visited >= self._size


class _CategoryWriter:
    """Draws the prompts of one category; its random numbers do not depend on the others'."""

    def __init__(
        self, category: Category, seed: int, seen: set[tuple[str, tuple[str, ...]]]
    ) -> None:
        self.category = category
        self.credit = 0.0  # prompts it is behind its share
        self._rng = random.Random(f"{seed}/{category.name}")
        self._open = [(entry, _Walk(entry.template.size, self._rng)) for entry in category.entries]
        self._written = 0
        self._seen = seen  # texts with their passages, shared by all categories

    def is_ready(self, sources: _Sources) -> bool:
        """Whether some template needs no more passages than there are (or all are used up)."""
        return not self._open or any(
            entry.template.passage_count <= len(sources) for entry, _ in self._open
        )

    def write(self, sources: _Sources) -> TrainingPrompt | None:
        """The next prompt, unlike all before it; None when all are used up."""
        while self._open:
            usable = [pair for pair in self._open if pair[0].template.passage_count <= len(sources)]
            weights = [entry.weight for entry, _ in usable]
            entry, walk = self._rng.choices(usable, weights)[0]
            text, values = entry.template.expand(walk.next())
            # With passages a template never ends: other passages make another prompt.
            if walk.is_over and not entry.template.passage_count:
                self._open.remove((entry, walk))
            text, passages = self._with_passages(text, entry.template.passage_count, sources)
            if (text, passages) in self._seen:
                continue
            self._seen.add((text, passages))
            name = f"book/{self.category.name}/{self._written:06d}"
            self._written += 1
            if entry.topic is not None:
                questions = tuple(fill(question, values) for question in entry.questions)
                sources.add(_Source(name, fill(entry.topic, values), questions))
            turns = tuple(text.split(_TURN))
            return TrainingPrompt(name, self.category.name, turns, passages, entry.is_opener)
        return None

    def _with_passages(
        self, text: str, count: int, sources: _Sources
    ) -> tuple[str, tuple[str, ...]]:
        """Choose the passages, and fill in what they are about and may be asked."""
        if not count:
            return text, ()
        chosen = sources.take(count)
        for i, source in enumerate(chosen):
            text = text.replace(f"{{topic{i}}}", source.topic)
            text = text.replace(f"{{question{i}}}", self._rng.choice(source.questions))
        return text, tuple(source.id for source in chosen)
