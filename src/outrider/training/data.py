"""The data stages in order: prompts, the target's answers, its states; each done once per folder.

Owns a data folder as a whole: what was asked for (``data.json``), which target it belongs to
(``target.json``), and which sequences are learnt from and which are held out. The four recipes
share one folder. Stands between the stages (:mod:`.prompts`, :mod:`.responses`, :mod:`.features`)
and :mod:`outrider.training.run`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.config import EngineConfig, Method, SpeculationConfig
from outrider.errors import CheckpointError, ParameterError, TrainingError
from outrider.llm import LLM
from outrider.models.loading.cache import publish
from outrider.training.identity import TargetIdentity
from outrider.training.prompts import (
    TrainingPrompt,
    load_training_prompts,
    prompts_hash,
    read_prompts,
    save_prompts,
    write_prompts,
)
from outrider.training.responses import (
    AnswerCounts,
    Response,
    ResponseSettings,
    answer_prompts,
    read_responses,
)
from outrider.types import ProgressCallback
from outrider.vocabulary import DraftVocabulary

PROMPTS, SETTINGS, FEATURES = "prompts.jsonl", "data.json", "features"
HELD_OUT = 50  # one sequence in so many is never learnt from
MAX_HELD_OUT = 256
MIN_ANSWER = 4  # tokens; a shorter answer leaves a head nothing to predict
MIN_TOKENS = 2_000  # response tokens below which nothing useful can come out


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What the data shall be.

    Attributes:
        files: prompt files (JSONL); without any, prompts are written from the prompt book.
        num_prompts: how many; None takes all of the files, or ``DEFAULT_NUM_PROMPTS`` of the book.
        responses: how the target answers.
        max_tokens: stop when there are so many response tokens; None answers every prompt.
        batch_size: prompts that are answered at once.
        max_model_len: most tokens of a prompt and its answer.
        threads: compute threads; None leaves torch's choice.
        part: (k, n), this process answers every n-th prompt from the k-th on.
    """

    files: tuple[Path, ...] = ()
    num_prompts: int | None = None
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    max_tokens: int | None = None
    batch_size: int = 32
    max_model_len: int = 1280
    threads: int | None = None
    part: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(f"{name}: {value} is below 1")


DEFAULT_NUM_PROMPTS = 2_000


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What the recipes learn from, and what they are looked at with."""

    responses: list[Response]
    held_out: list[Response]
    prompts_hash: str
    too_long: int

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the target wrote, of the sequences that are learnt from."""
        return sum(len(response.response_ids) for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """All tokens, prompts included, held-out sequences too."""
        return sum(
            len(r.prompt_ids) + len(r.response_ids) for r in (*self.responses, *self.held_out)
        )

    def describe(self) -> dict[str, Any]:
        """What a head's manifest says of its data."""
        shares: dict[str, int] = {}
        for response in self.responses:
            tokens = shares.get(response.category, 0) + len(response.response_ids)
            shares[response.category] = tokens
        return {
            "prompts_hash": self.prompts_hash,
            "responses_hash": responses_hash(self.responses),
            "num_responses": len(self.responses),
            "num_response_tokens": self.num_response_tokens,
            "num_held_out": len(self.held_out),
            "response_tokens_by_category": dict(sorted(shares.items())),
        }


def open_target(model: str, settings: DataSettings, on_progress: ProgressCallback | None) -> LLM:
    """The target as it answers prompts: plainly, many at once."""
    engine = EngineConfig(
        max_batch_size=settings.batch_size,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
    )
    plain = SpeculationConfig(method=Method.OFF)
    return LLM(model, speculation=plain, engine=engine, on_progress=on_progress)


def prepare_data(
    llm: LLM,
    folder: Path,
    settings: DataSettings,
    identity: TargetIdentity,
    on_progress: ProgressCallback | None = None,
) -> TrainingData:
    """Bring prompts and answers of a data folder up to date, and read them.

    Raises:
        CheckpointError: the folder belongs to another target, or its answers were drawn otherwise.
        PromptError: a prompt file is empty or not one.
        TrainingError: there is too little to learn from.
    """
    prompts, counts = answer_part(llm, folder, settings, identity, on_progress)
    return read_data(folder, prompts, too_long=counts.too_long)


def answer_part(
    llm: LLM,
    folder: Path,
    settings: DataSettings,
    identity: TargetIdentity,
    on_progress: ProgressCallback | None = None,
) -> tuple[list[TrainingPrompt], AnswerCounts]:
    """The prompts, and answers to those of this part.

    Raises:
        CheckpointError, PromptError: as :func:`prepare_data`.
    """
    identity.claim(folder)
    _claim(folder / SETTINGS, _settings_json(settings.responses))
    prompts = _prompts(folder, settings)
    counts = answer_prompts(
        llm,
        prompts,
        folder,
        settings.responses,
        part=settings.part,
        max_tokens=settings.max_tokens,
        on_progress=on_progress,
    )
    return prompts, counts


def read_data(folder: Path, prompts: Sequence[TrainingPrompt], *, too_long: int) -> TrainingData:
    """The answers in a folder, in the prompts' order, split by their ids.

    Raises:
        TrainingError: there is too little to learn from.
    """
    answers = read_responses(folder)
    ids = (f"{p.id}#{turn + 1}" if turn else p.id for p in prompts for turn in range(len(p.turns)))
    found = [answers[id_] for id_ in ids if id_ in answers]
    usable = [response for response in found if len(response.response_ids) >= MIN_ANSWER]
    held_out = [response for response in usable if _is_held_out(response.id)][:MAX_HELD_OUT]
    kept = {response.id for response in held_out}
    learnt = [response for response in usable if response.id not in kept]
    data = TrainingData(learnt, held_out, prompts_hash(prompts), too_long)
    if data.num_response_tokens < MIN_TOKENS or not held_out:
        raise TrainingError(
            f"{folder}: {data.num_response_tokens:,} response tokens from {len(learnt)} answers, "
            f"{len(held_out)} held out; a head that is of any use needs at least {MIN_TOKENS:,} "
            "and some held out, a good one a million: give more prompts (--num-prompts)"
        )
    return data


def choose_vocabulary(
    responses: Sequence[Response], size: int, target_size: int, required: Sequence[int] = ()
) -> DraftVocabulary:
    """The tokens that the target writes most often, ascending; ties go to the lowest id.

    ``required`` tokens (the end of an answer) are in it whatever their count. Tokens that were
    never written fill up in the order of their ids, which in a BPE vocabulary is that of merges.
    """
    if not 0 < size < target_size:
        raise ParameterError(
            f"draft vocabulary: {size} of {target_size:,} tokens; allowed: 1 .. {target_size - 1}"
        )
    counts = np.zeros(target_size, dtype=np.int64)
    for response in responses:
        np.add.at(counts, np.asarray(response.response_ids, dtype=np.int64), 1)
    counts[list(required)] = np.iinfo(np.int64).max
    best = np.argsort(-counts, kind="stable")[:size]
    return DraftVocabulary(np.sort(best), target_size)


def coverage(vocabulary: DraftVocabulary, responses: Sequence[Response]) -> float:
    """Share of written tokens that the vocabulary holds, in [0, 1]."""
    written = np.concatenate([np.asarray(r.response_ids, dtype=np.int64) for r in responses])
    return float((vocabulary.place_V[written] >= 0).mean())


def responses_hash(responses: Sequence[Response]) -> str:
    """Twelve hex digits that name these sequences in this order."""
    digest = hashlib.sha256()
    for response in responses:
        line = [response.id, response.prompt_ids, response.response_ids]
        digest.update(json.dumps(line).encode())
    return digest.hexdigest()[:12]


def _prompts(folder: Path, settings: DataSettings) -> list[TrainingPrompt]:
    """The prompts asked for; those in the folder must be the same as far as both go."""
    path = folder / PROMPTS
    if settings.files:
        wanted = load_training_prompts(settings.files)[: settings.num_prompts]
    else:
        wanted = write_prompts(settings.num_prompts or DEFAULT_NUM_PROMPTS, settings.responses.seed)
    stored = read_prompts(path) if path.exists() else []
    common = min(len(stored), len(wanted))
    if stored[:common] != wanted[:common]:
        raise CheckpointError(
            f"{path}: holds other prompts than were asked for; ask for the same files and seed, or "
            "choose another data folder"
        )
    if len(wanted) > len(stored):
        save_prompts(path, wanted)
    return wanted


def _claim(path: Path, settings: dict[str, Any]) -> None:
    """Record settings, or compare with those recorded."""
    try:
        if path.exists():
            recorded = json.loads(path.read_text(encoding="utf-8"))
            names = sorted(recorded.keys() | settings.keys())
            changed = [
                f"{name} was {recorded.get(name)}, is {settings.get(name)}"
                for name in names
                if recorded.get(name) != settings.get(name)
            ]
            if changed:
                raise CheckpointError(
                    f"{path.parent}: its answers were drawn otherwise: {'; '.join(changed)}; use "
                    "the same settings, or another data folder"
                )
            return
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        publish(partial, path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise CheckpointError(f"{path}: damaged: it is not JSON") from None


def _settings_json(settings: ResponseSettings) -> dict[str, Any]:
    values = asdict(settings)
    values["temperatures"] = list(settings.temperatures)
    return values


def _is_held_out(response_id: str) -> bool:
    """By the first turn's id, so that a conversation is on one side as a whole."""
    first = response_id.partition("#")[0]
    return int.from_bytes(hashlib.sha256(first.encode()).digest()[:4], "little") % HELD_OUT == 0
