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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.config import EngineConfig, Method, SpeculationConfig
from outrider.errors import CheckpointError, ParameterError, PromptError, TrainingError
from outrider.llm import LLM
from outrider.models.loading.cache import exclusive, publish
from outrider.training.answers import Response, read_responses
from outrider.training.expectation import MIN_TOKENS, describe_goal
from outrider.training.files import read_json, write_json, writing
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
    ResponseSettings,
    answer_prompts,
    turn_id,
)
from outrider.types import ProgressCallback
from outrider.vocabulary import DraftVocabulary

PROMPTS, SETTINGS, FEATURES = "prompts.jsonl", "data.json", "features"
_LOCK = ".data.lock"
HELD_OUT = 50  # one sequence in so many is never learnt from
MAX_HELD_OUT = 256
MIN_ANSWER = 4  # tokens; a shorter answer leaves a head nothing to predict


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
    failed: int = 0

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
    return read_data(folder, prompts, too_long=counts.too_long, failed=counts.failed)


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
    wanted = _wanted(settings)
    with ExitStack() as held:
        with writing(folder):
            held.enter_context(exclusive(folder / _LOCK, lambda: None))  # parts start together
        identity.claim(folder)
        _claim(folder / SETTINGS, _settings_json(settings.responses))
        prompts = _stored(folder / PROMPTS, wanted)
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


def read_prepared(folder: Path, settings: DataSettings) -> TrainingData:
    """What :func:`prepare_data` made, read by another process, which runs no target.

    Raises:
        CheckpointError, PromptError, TrainingError: as :func:`prepare_data`.
    """
    return read_data(folder, _wanted(settings), too_long=0)


def read_data(
    folder: Path, prompts: Sequence[TrainingPrompt], *, too_long: int, failed: int = 0
) -> TrainingData:
    """The answers in a folder, in the prompts' order, split by their ids.

    ``too_long`` and ``failed`` prompts have none.

    Raises:
        TrainingError: there is too little to learn from.
    """
    answers = read_responses(folder)
    ids = (turn_id(prompt, turn) for prompt in prompts for turn in range(len(prompt.turns)))
    found = [answers[id_] for id_ in ids if id_ in answers]
    usable = [response for response in found if len(response.response_ids) >= MIN_ANSWER]
    chosen = [response for response in usable if _is_held_out(response.id)][:MAX_HELD_OUT]
    conversations = {_conversation(response.id) for response in chosen}
    held_out = [response for response in usable if _conversation(response.id) in conversations]
    learnt = [response for response in usable if _conversation(response.id) not in conversations]
    data = TrainingData(learnt, held_out, prompts_hash(prompts), too_long, failed)
    if data.num_response_tokens < MIN_TOKENS or not held_out:
        raise TrainingError(
            f"{folder}: {data.num_response_tokens:,} response tokens from {len(learnt)} answers, "
            f"{len(held_out)} held out{_passed_over(data)}; a head that is of any use needs at "
            f"least {MIN_TOKENS:,} and some held out, {describe_goal(data.num_response_tokens)}: "
            "give more prompts (--num-prompts) or answer more of them (--response-tokens)"
        )
    return data


def choose_vocabulary(
    responses: Sequence[Response], size: int, target_size: int, required: Sequence[int] = ()
) -> DraftVocabulary:
    """The tokens that the target writes most often, ascending; ties go to the lowest id.

    ``required`` tokens (the end of an answer) are in it whatever their count. Tokens that were
    never written fill up in the order of their ids, which in a BPE vocabulary is that of merges.

    Raises:
        ParameterError: ``size`` is not below the target's, or too small for ``required``.
    """
    if not 0 < size < target_size:
        raise ParameterError(
            f"draft vocabulary: {size} of {target_size:,} tokens; allowed: 1 .. {target_size - 1}"
        )
    if len(set(required)) > size:
        raise ParameterError(
            f"draft vocabulary: {size} tokens have no room for the {len(set(required))} that end "
            "an answer; choose more"
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


def _passed_over(data: TrainingData) -> str:
    """Why prompts have no answer, where some have none."""
    reasons = []
    if data.too_long:
        reasons.append(f"{data.too_long:,} prompts do not fit the context: --max-model-len")
    if data.failed:
        reasons.append(f"at {data.failed:,} prompts the target's logits were not finite")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _wanted(settings: DataSettings) -> list[TrainingPrompt]:
    """The prompts asked for."""
    if not settings.files:
        return write_prompts(settings.num_prompts or DEFAULT_NUM_PROMPTS, settings.responses.seed)
    wanted = load_training_prompts(settings.files)[: settings.num_prompts]
    # A later turn's answer is kept under an id of its own, which no prompt may have.
    ids = {prompt.id for prompt in wanted}
    for prompt in wanted:
        taken = [
            id_ for turn in range(1, len(prompt.turns)) if (id_ := turn_id(prompt, turn)) in ids
        ]
        if taken:
            raise PromptError(
                f"id {taken[0]!r} stands for a later turn of {prompt.id!r}; rename that prompt"
            )
    return wanted


def _stored(path: Path, wanted: list[TrainingPrompt]) -> list[TrainingPrompt]:
    """Keep the prompts; those in the folder must be the same as far as both go."""
    stored = read_prompts(path) if path.exists() else []
    common = min(len(stored), len(wanted))
    if stored[:common] != wanted[:common]:
        raise CheckpointError(
            f"{path}: holds other prompts than were asked for; ask for the same files and seed, or "
            "choose another data folder"
        )
    if len(wanted) > len(stored):
        partial = path.with_name(f".{path.name}.partial")
        with writing(path):
            save_prompts(partial, wanted)
            publish(partial, path)
    return wanted


def _claim(path: Path, settings: dict[str, Any]) -> None:
    """Record settings, or compare with those recorded."""
    recorded = read_json(path)
    if recorded is None:
        write_json(path, settings)
        return
    names = sorted(recorded.keys() | settings.keys())
    changed = [
        f"{name} was {recorded.get(name)}, is {settings.get(name)}"
        for name in names
        if recorded.get(name) != settings.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{path.parent}: its answers were drawn otherwise: {'; '.join(changed)}; use the same "
            "settings, or another data folder"
        )


def _settings_json(settings: ResponseSettings) -> dict[str, Any]:
    values = asdict(settings)
    values["temperatures"] = list(settings.temperatures)
    return values


def _is_held_out(response_id: str) -> bool:
    """By the conversation, so that it is on one side as a whole."""
    digest = hashlib.sha256(_conversation(response_id).encode()).digest()
    return int.from_bytes(digest[:4], "little") % HELD_OUT == 0


def _conversation(response_id: str) -> str:
    """What the ids of its turns have in common."""
    return response_id.partition("#")[0]
