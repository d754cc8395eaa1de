"""Acceptance length of a head on prompts it was never trained on, by the engine itself.

Owns the measurement: which texts count, what is pooled, and that every text is the one plain
decoding gives. Stands above :mod:`outrider.llm`; ``outrider train`` runs it as its last stage but
one, and the report's figures are :mod:`outrider.training.acceptance`'s.

Per temperature, every prompt's first turn is answered plainly, once; then each setting decodes the
same prompts with the same seeds, and its verify steps are counted::

    plain       text of each prompt  ->  loops found, left out of every setting alike
    setting 1   same texts, counted: drafted, accepted at each depth, steps
    setting 2   ...

``simulated`` replays the plain texts instead (:mod:`outrider.training.simulate`): the same figures
without a pass of the target per setting, but for one that captures its states.
"""

from __future__ import annotations

import datetime
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import outrider
from outrider.bench.guards import loop_start
from outrider.bench.prompts import Prompt, prompt_set_hash
from outrider.config import MAX_SEED, Method, SamplingParams, SpeculationConfig
from outrider.errors import FailureError, ParameterError
from outrider.llm import LLM
from outrider.models.decoder import Decoder
from outrider.models.loading.tokenizer import encode_prompt
from outrider.pairing import build_drafter, open_drafter
from outrider.training.acceptance import ALL, Acceptance, EvaluationReport
from outrider.training.simulate import Recording, recordings_of, simulate
from outrider.types import Completion, FinishReason, ProgressCallback, SpeculationStats, TextChunk


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to draft, by the name it has in the report.

    Raises:
        ParameterError: ``adaptive`` is on: what is verified would then depend on this machine's
            times, and the figures with it.
    """

    name: str
    speculation: SpeculationConfig

    def __post_init__(self) -> None:
        if self.speculation.adaptive:
            raise ParameterError(
                f"adaptive: True in setting {self.name!r}; set it to False, so that the acceptance "
                "length is the head's and not the machine's"
            )


def standard_settings(method: Method, head: str | None) -> list[Setting]:
    """The four shapes that a head is judged by: a chain, two trees, and the larger with n-gram.

    A chain of 5 is what published figures are mostly given for. 16 drafted nodes and the root are
    as many rows as cost hardly more than one on a CPU with prepacked weights, 32 about as many as
    still pay. Four children fill 16 nodes to depth 5; twice the nodes go one deeper and to six
    children. More did worse when sampling: with 8 guesses nearly any share of the target's noise
    contains the pick, so a drafter cannot tell which share serves it.
    """
    shapes: dict[str, dict[str, Any]] = {
        "chain 5": {"max_draft_len": 5},
        "tree 16": _tree(depth=5, num_children=4, num_nodes=16),
        "tree 32": _tree(depth=6, num_children=6, num_nodes=32),
    }
    shapes["tree 32 + ngram"] = {**shapes["tree 32"], "with_ngram": True}
    return [
        Setting(
            f"{method} {name}", SpeculationConfig(method=method, head=head, adaptive=False, **shape)
        )
        for name, shape in shapes.items()
    ]


def _tree(*, depth: int, num_children: int, num_nodes: int) -> dict[str, Any]:
    return {
        "use_dynamic_tree": True,
        "max_draft_len": depth,
        "dynamic_tree_max_topK": num_children,
        "max_total_draft_tokens": num_nodes,
    }


def evaluate(
    llm: LLM,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_tokens: int = 128,
    seed: int = 1,
    simulated: bool = False,
    head_sha256: str | None = None,
    known: EvaluationReport | None = None,
    on_progress: ProgressCallback | None = None,
) -> EvaluationReport:
    """Measure every setting on every prompt at every temperature.

    ``llm`` lends its weights, its batch size and its context; how it drafts itself is of no
    account. A prompt's seed depends on ``seed`` and the prompt's id alone, so a text stays the same
    in a smaller selection. ``simulated`` holds the states of all texts in memory. ``head_sha256``
    names the tensors of the head that all settings draft with; ``known``, an earlier report, is
    returned as it is where it :meth:`holds <EvaluationReport.holds_for>` for this one's conditions.

    Raises:
        ParameterError: nothing to measure, a name or temperature twice, or no prompt that fits the
            context.
        FailureError: the target's logits were not finite.
        OutriderError: as :meth:`LLM.with_speculation`.
    """
    started = time.perf_counter()
    _check(prompts, settings, temperatures)
    asked, skipped = _that_fit(llm, prompts, max_tokens)
    conditions = {
        **_conditions(llm, prompts, settings, num_prompts=len(asked)),
        "head_sha256": head_sha256,
        "temperatures": list(temperatures),
        "max_tokens": max_tokens,
        "seed": seed,
        "is_simulated": simulated,
    }
    if known is not None and known.holds_for(conditions):
        return known
    told = _Progress(on_progress, num_parts=len(temperatures) * (1 + len(settings)))
    texts = [
        _Texts.answered(llm, asked, told, temperature=t, max_tokens=max_tokens, seed=seed)
        for t in temperatures
    ]
    found: list[Acceptance] = []
    differing: list[tuple[str, float, str]] = []
    for setting in settings:
        measured = _ReplayedSetting(llm, setting) if simulated else _DecodedSetting(llm, setting)
        for answered in texts:
            told.begin(f"evaluating {setting.name}, temperature {answered.temperature:g}")
            stats, different = measured.run(answered, told)
            found += _by_category(setting.name, answered, stats)
            differing += [(setting.name, answered.temperature, prompt.id) for prompt in different]
    return EvaluationReport(
        acceptances=tuple(found),
        differing=None if simulated else tuple(differing),
        skipped=tuple(prompt.id for prompt in skipped),
        conditions=conditions,
        elapsed_s=time.perf_counter() - started,
    )


def _conditions(
    llm: LLM, prompts: Sequence[Prompt], settings: Sequence[Setting], *, num_prompts: int
) -> dict[str, Any]:
    """Machine, prompts and settings, of what the figures hold for."""
    return {
        "fingerprint": llm.fingerprint.to_json(),
        "conditions": llm.fingerprint.text,
        "settings": {setting.name: asdict(setting.speculation) for setting in settings},
        "num_prompts": num_prompts,
        "prompt_set_hash": prompt_set_hash(prompts),
        "version": outrider.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class _Progress:
    """Shares one progress bar out among parts that are about equally long."""

    def __init__(self, on_progress: ProgressCallback | None, *, num_parts: int) -> None:
        self._on_progress = on_progress
        self._num_parts = num_parts
        self._num_begun = 0
        self._what = ""

    def begin(self, what: str) -> None:
        """The next part starts."""
        self._what = what
        self._num_begun += 1
        self.part(what, 0.0)

    def part(self, _what: str, fraction: float | None) -> None:
        """So much of the part is done; has the form of a ``ProgressCallback``."""
        if self._on_progress is not None:
            done = self._num_begun - 1 + (fraction or 0.0)
            self._on_progress(self._what, done / self._num_parts)


@dataclass(slots=True)
class _Texts:
    """All prompts as plain decoding answers them at one temperature."""

    temperature: float
    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    params: list[SamplingParams]
    completions: list[Completion]
    recordings: dict[tuple[int, ...], list[Recording]] = field(default_factory=dict)

    @classmethod
    def answered(
        cls,
        llm: LLM,
        asked: Mapping[Prompt, list[int]],
        told: _Progress,
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
    ) -> _Texts:
        """Answer the prompts, each with a seed of its own."""
        told.begin(f"plain decoding, temperature {temperature:g}")
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=(seed + zlib.crc32(prompt.id.encode())) % (MAX_SEED + 1),
            )
            for prompt in asked
        ]
        ids = list(asked.values())
        plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
        return cls(temperature, list(asked), ids, params, _generate(plain, ids, params, told))

    @property
    def is_loop(self) -> list[bool]:
        """Which texts fell into a repetition loop."""
        return [loop_start(completion.token_ids) is not None for completion in self.completions]

    def recorded(self, target: Decoder, captures: tuple[int, ...]) -> list[Recording]:
        """The texts with their states, captured once for all settings that read the same ones."""
        if captures not in self.recordings:
            self.recordings[captures] = recordings_of(
                target, self.prompt_ids, self.completions, self.params, captures
            )
        return self.recordings[captures]


class _DecodedSetting:
    """A setting in the engine."""

    def __init__(self, llm: LLM, setting: Setting) -> None:
        self._llm = llm.with_speculation(setting.speculation)

    def run(self, known: _Texts, told: _Progress) -> tuple[list[SpeculationStats], list[Prompt]]:
        """Decode the same prompts; each text's counts, and the prompts whose text differs."""
        completions = _generate(self._llm, known.prompt_ids, known.params, told)
        different = [
            prompt
            for prompt, plain, other in zip(
                known.prompts, known.completions, completions, strict=True
            )
            if (plain.token_ids, plain.text) != (other.token_ids, other.text)
        ]
        return [completion.speculation for completion in completions], different


class _ReplayedSetting:
    """A setting in the simulator."""

    def __init__(self, llm: LLM, setting: Setting) -> None:
        self._target = llm.target
        self._sizes = {
            "max_batch_size": llm.engine_config.max_batch_size,
            "max_model_len": llm.max_model_len,
        }
        self._prefill_chunk = llm.engine_config.prefill_chunk
        self._eos_ids = llm.tokenizer.eos_ids
        opened = open_drafter(setting.speculation, llm.files, None)
        self._drafter = build_drafter(setting.speculation, opened, self._target, **self._sizes)

    def run(self, known: _Texts, told: _Progress) -> tuple[list[SpeculationStats], list[Prompt]]:
        """Replay the texts; each one's counts, and none that differs."""
        assert self._drafter is not None, "plain decoding is no setting to measure"
        recordings = known.recorded(self._target, self._drafter.captures)
        stats = simulate(
            self._drafter,
            recordings,
            vocab_size=self._target.config.vocab_size,
            prefill_chunk=self._prefill_chunk,
            eos_ids=self._eos_ids,
            on_progress=told.part,
            **self._sizes,
        )
        return stats, []


def _generate(
    llm: LLM,
    prompt_ids: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    told: _Progress,
) -> list[Completion]:
    """Decode all prompts; an answer that failed ends the measurement."""
    num_done = 0

    def count(_: int, chunk: TextChunk) -> None:
        nonlocal num_done
        if chunk.completion is not None:
            num_done += 1
            told.part("", num_done / len(prompt_ids))

    completions = llm.generate(prompt_ids, params, on_chunk=count)
    for completion in completions:
        if completion.finish_reason is FinishReason.ERROR:
            raise FailureError(f"nothing can be measured: {completion.error}; check the target")
    return completions


def _by_category(
    setting: str, known: _Texts, stats: Sequence[SpeculationStats]
) -> list[Acceptance]:
    """Pool the counts of the texts that count, all of them first, then by category."""
    is_loop = known.is_loop
    categories = [ALL, *dict.fromkeys(prompt.category for prompt in known.prompts)]
    found = []
    for category in categories:
        chosen = [i for i, prompt in enumerate(known.prompts) if category in (ALL, prompt.category)]
        counted = [i for i in chosen if not is_loop[i]]
        pooled = SpeculationStats()
        for i in counted:
            pooled.add(stats[i])
        found.append(
            Acceptance(
                setting=setting,
                temperature=known.temperature,
                category=category,
                num_texts=len(counted),
                num_loops=len(chosen) - len(counted),
                num_tokens=sum(len(known.completions[i].token_ids) for i in counted),
                stats=pooled,
            )
        )
    return found


def _that_fit(
    llm: LLM, prompts: Sequence[Prompt], max_tokens: int
) -> tuple[dict[Prompt, list[int]], list[Prompt]]:
    """The prompts with room for their whole answer, encoded; and the others."""
    encoded = {prompt: encode_prompt(llm.tokenizer, prompt.turns[0]) for prompt in prompts}
    room = llm.max_model_len - max_tokens
    asked = {prompt: ids for prompt, ids in encoded.items() if len(ids) <= room}
    if not asked:
        raise ParameterError(
            f"max_tokens: {max_tokens} leaves {room} of {llm.max_model_len} context tokens for "
            "the prompt, which is too few for every prompt; lower it or raise max_model_len"
        )
    return asked, [prompt for prompt in prompts if prompt not in asked]


def _check(
    prompts: Sequence[Prompt], settings: Sequence[Setting], temperatures: Sequence[float]
) -> None:
    for name, values in (
        ("prompts", prompts),
        ("settings", settings),
        ("temperatures", temperatures),
    ):
        if not values:
            raise ParameterError(f"{name}: none were given; give at least one")
    names = [setting.name for setting in settings]
    for what, keys in (("settings", names), ("temperatures", list(temperatures))):
        twice = [key for place, key in enumerate(keys) if key in keys[:place]]
        if twice:
            raise ParameterError(f"{what}: {twice[0]!r} is there twice; each has rows of its own")
    for setting in settings:
        if setting.speculation.method is Method.OFF:
            raise ParameterError(
                f"settings: {setting.name!r} drafts nothing (method off); plain decoding is what "
                "the others are compared with already"
            )
