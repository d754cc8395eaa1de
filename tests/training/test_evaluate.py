"""Acceptance by the engine and by replay: what is pooled, what is left out, and what is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outrider.step
from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.guards import loop_start
from outrider.bench.prompts import Prompt
from outrider.config import Method, SpeculationConfig
from outrider.errors import CheckpointError, FailureError, ParameterError
from outrider.models.loading.tokenizer import encode_prompt
from outrider.training.acceptance import ALL, Acceptance, EvaluationReport
from outrider.training.evaluate import Setting, evaluate, standard_settings
from outrider.types import SpeculationStats, Verdict
from tests.tiny import write_hf_checkpoint
from tests.tiny_heads import write_eagle3_head

NUM_TOKENS = 64
TURNS = (
    "The outrider left",
    "A river does not",
    "def area(width",
    "it goes around",
    "most of what",
    "How are you",
)
PROMPTS = [
    Prompt(f"p{i}", ("chat", "prose")[i % 2], (turn, "and then?")) for i, turn in enumerate(TURNS)
]
SCALE = 0.08  # of the target's weights: some of its greedy texts fall into a loop, some do not


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        model = write_hf_checkpoint(folder / "tiny", scale=SCALE)
        yield LLM(model, engine=EngineConfig(max_batch_size=4, dtype="float32"))


@pytest.fixture(scope="module")
def draft(folder: Path) -> str:
    """The target with noise on its weights: a draft model that is often right."""
    path = write_hf_checkpoint(folder / "draft", scale=SCALE)
    file = path / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    noisy = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 2
        else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(noisy, file, metadata={"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def settings(draft: str) -> list[Setting]:
    return standard_settings(Method.DRAFT, draft)


@pytest.fixture(scope="module")
def report(llm: LLM, settings: list[Setting]) -> EvaluationReport:
    return evaluate(llm, PROMPTS, settings, max_tokens=NUM_TOKENS)


def cell(
    report: EvaluationReport, setting: str, temperature: float, category: str = ALL
) -> Acceptance:
    (found,) = (
        a
        for a in report.acceptances
        if (a.setting, a.temperature, a.category) == (setting, temperature, category)
    )
    return found


def test_the_standard_shapes_differ_and_pin_what_is_verified(settings: list[Setting]) -> None:
    shapes = [(s.name, s.speculation.num_draft_tokens, s.speculation.with_ngram) for s in settings]

    assert [
        ("draft chain 5", 5, False),
        ("draft tree 16", 16, False),
        ("draft tree 32", 32, False),
        ("draft tree 32 + ngram", 32, True),
    ] == shapes
    assert not any(setting.speculation.adaptive for setting in settings)


def test_every_setting_drafts_accepts_and_rejects(report: EvaluationReport) -> None:
    pooled = [found for found in report.acceptances if found.category == ALL]

    assert len(pooled) == 4 * 2
    for found in pooled:
        assert 0 < found.stats.accepted < found.stats.drafted
        assert sum(found.stats.accepted_at) == found.stats.accepted


def test_a_larger_tree_is_accepted_further(report: EvaluationReport) -> None:
    chain, small, large = (
        cell(report, f"draft {shape}", 0.0).acceptance_length
        for shape in ("chain 5", "tree 16", "tree 32")
    )

    assert 1.0 < chain < small < large


def test_all_texts_are_pooled_from_the_categories(report: EvaluationReport) -> None:
    """Tau is taken over all steps: no mean of means, in which short texts would weigh more."""
    for found in report.acceptances:
        if found.category != ALL:
            continue
        parts = [cell(report, found.setting, found.temperature, name) for name in ("chat", "prose")]
        stats = SpeculationStats()
        for part in parts:
            stats.add(part.stats)

        assert stats == found.stats
        assert sum(part.num_texts for part in parts) == found.num_texts
        assert sum(part.num_loops for part in parts) == found.num_loops
        assert sum(part.num_tokens for part in parts) == found.num_tokens
        # A step emits what it accepts and one token more, but for the last of a text that stops.
        emitted = stats.verify_steps + stats.accepted
        assert found.num_tokens <= emitted <= found.num_tokens + found.num_texts


def test_texts_that_loop_are_counted_and_left_out(llm: LLM, report: EvaluationReport) -> None:
    ids = [encode_prompt(llm.tokenizer, prompt.turns[0]) for prompt in PROMPTS]
    greedy = llm.generate(ids, SamplingParams(max_tokens=NUM_TOKENS))
    is_loop = [loop_start(completion.token_ids) is not None for completion in greedy]
    num_tokens = sum(
        len(c.token_ids) for c, loops in zip(greedy, is_loop, strict=True) if not loops
    )

    assert 0 < sum(is_loop) < len(PROMPTS)
    for setting in ("draft chain 5", "draft tree 32 + ngram"):
        found = cell(report, setting, 0.0)

        assert (len(PROMPTS) - sum(is_loop), sum(is_loop)) == (found.num_texts, found.num_loops)
        assert num_tokens == found.num_tokens


def test_a_replay_of_the_plain_texts_gives_the_same_figures(
    llm: LLM, settings: list[Setting], report: EvaluationReport
) -> None:
    simulated = evaluate(llm, PROMPTS, settings, max_tokens=NUM_TOKENS, simulated=True)

    assert report.acceptances == simulated.acceptances
    assert simulated.is_lossless is None
    assert report.is_lossless is True


def test_a_head_that_reads_states_is_replayed_with_the_targets_own(llm: LLM, folder: Path) -> None:
    """A random head over few draft tokens; what it hits it hits by chance, in both alike."""
    head = write_eagle3_head(folder / "head", llm.config, draft_vocab_size=64)
    settings = standard_settings(Method.EAGLE3, str(head))[1:3]
    measured = evaluate(llm, PROMPTS, settings, temperatures=(1.0,), max_tokens=NUM_TOKENS)
    simulated = evaluate(
        llm, PROMPTS, settings, temperatures=(1.0,), max_tokens=NUM_TOKENS, simulated=True
    )

    assert 0 < cell(measured, settings[1].name, 1.0).stats.accepted
    assert measured.acceptances == simulated.acceptances


def test_a_text_that_is_not_the_targets_own_is_noticed(
    llm: LLM, settings: list[Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deliberate mistake: whatever follows an accepted draft is taken to be token 5."""
    walk = outrider.step.walk

    def spoilt(tree, choice_N) -> Verdict:
        verdict = walk(tree, choice_N)
        if not verdict.path:
            return verdict
        return replace(verdict, tokens=(*verdict.tokens[:-1], 5))

    monkeypatch.setattr(outrider.step, "walk", spoilt)
    report = evaluate(llm, PROMPTS[:2], settings[:1], temperatures=(0.0,), max_tokens=NUM_TOKENS)

    assert report.is_lossless is False
    assert report.differing == (("draft chain 5", 0.0, "p0"), ("draft chain 5", 0.0, "p1"))


def test_a_prompts_text_is_the_same_in_a_smaller_selection(
    llm: LLM, settings: list[Setting], report: EvaluationReport
) -> None:
    """Its seed is its own, not that of its place."""
    prose = [prompt for prompt in PROMPTS if prompt.category == "prose"]
    alone = evaluate(llm, prose, settings[:1], temperatures=(1.0,), max_tokens=NUM_TOKENS)
    name = settings[0].name

    assert cell(report, name, 1.0, "prose").num_tokens == cell(alone, name, 1.0, "prose").num_tokens
    again = evaluate(llm, prose, settings[:1], temperatures=(1.0,), max_tokens=NUM_TOKENS, seed=9)

    assert cell(alone, name, 1.0).stats != cell(again, name, 1.0).stats


def test_the_table_has_a_line_per_setting_and_a_column_per_category(
    report: EvaluationReport,
) -> None:
    head, *lines = report.rows()
    chain = cell(report, "draft chain 5", 0.0)

    assert ["T", "setting", "all", "chat", "prose", "texts", "loops", "accepted", "drafted"] == head
    assert ["0"] * 4 + ["1"] * 4 == [line[0] for line in lines]
    assert [
        "0",
        "draft chain 5",
        f"{chain.acceptance_length:.2f}",
        f"{cell(report, 'draft chain 5', 0.0, 'chat').acceptance_length:.2f}",
        f"{cell(report, 'draft chain 5', 0.0, 'prose').acceptance_length:.2f}",
        str(chain.num_texts),
        str(chain.num_loops),
        str(chain.stats.accepted),
        str(chain.stats.drafted),
    ] == lines[0]


def test_a_category_whose_texts_all_loop_shows_a_dash() -> None:
    stats = SpeculationStats(verify_steps=4, drafted=8, accepted=2, accepted_at=[2])
    cells = (
        Acceptance("a", 0.0, ALL, 1, 1, 6, stats),
        Acceptance("a", 0.0, "chat", 1, 0, 6, stats),
        Acceptance("a", 0.0, "prose", 0, 1, 0, SpeculationStats()),
    )
    report = EvaluationReport(cells, (), (), {}, 0.0)

    assert ["0", "a", "1.50", "1.50", "-", "1", "1", "2", "8"] == report.rows()[1]
    assert {ALL: 1.5, "chat": 1.5} == report.by_category("a", 0.0)


def test_the_report_is_a_json_document(report: EvaluationReport) -> None:
    document = json.loads(json.dumps(report.to_json()))
    first, found = document["acceptance"][0], report.acceptances[0]

    assert document["schema_version"] == 1
    assert document["is_lossless"] is True
    assert document["differing"] == []
    assert document["conditions"]["settings"]["draft tree 16"]["max_total_draft_tokens"] == 16
    assert len(report.acceptances) == len(document["acceptance"])
    assert ("draft chain 5", 0.0, ALL) == (
        first["setting"],
        first["temperature"],
        first["category"],
    )
    assert 1 + found.stats.accepted / found.stats.verify_steps == first["acceptance_length"]
    assert first["rejected"] == first["drafted"] - first["accepted"]
    assert [n / first["verify_steps"] for n in found.stats.accepted_at] == first["per_position"]


def test_a_report_comes_back_from_json_as_it_was(report: EvaluationReport) -> None:
    replayed = replace(report, differing=None, skipped=("long",))
    for each in (report, replayed, replace(report, differing=(("a", 1.0, "p0"),))):
        document = json.loads(json.dumps(each.to_json()))
        again = EvaluationReport.from_json(document)

        assert replace(each, conditions=document["conditions"]) == again
        assert document == json.loads(json.dumps(again.to_json()))


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"acceptance": [{"setting": "a"}]},
        {"acceptance": None},
        {"conditions": 3},
        {"differing": [["a"]]},
        {"elapsed_s": "long"},
    ],
)
def test_a_document_that_is_no_report_is_refused(
    report: EvaluationReport, change: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match=r"not an evaluation of schema 1 .* measure again"):
        EvaluationReport.from_json(report.to_json() | change)


def test_a_known_report_stands_for_the_same_conditions_alone(
    llm: LLM, settings: list[Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: dict[str, Any] = {
        "prompts": PROMPTS[:2],
        "settings": settings[:1],
        "temperatures": (0.0,),
        "max_tokens": 4,
        "head_sha256": "aa",
    }
    first = evaluate(llm, **usual)
    stored = EvaluationReport.from_json(json.loads(json.dumps(first.to_json())))
    elsewhere = replace(settings[0].speculation, head="elsewhere")

    def measured(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(LLM, "generate", measured)
    assert stored is evaluate(llm, **usual, known=stored)
    moved = usual | {"settings": [replace(settings[0], speculation=elsewhere)]}
    assert stored is evaluate(llm, **moved, known=stored)
    longer = replace(settings[0].speculation, max_draft_len=6, max_total_draft_tokens=6)
    for change in (
        {"head_sha256": "bb"},
        {"head_sha256": None},
        {"prompts": PROMPTS[1:3]},
        {"settings": settings[:2]},
        {"settings": [replace(settings[0], speculation=longer)]},
        {"temperatures": (1.0,)},
        {"max_tokens": 5},
        {"seed": 2},
    ):
        with pytest.raises(InterruptedError):
            evaluate(llm, **usual | change, known=stored)


def test_prompts_without_room_for_an_answer_are_skipped_by_name(
    llm: LLM, settings: list[Setting]
) -> None:
    long = Prompt("long", "chat", ("x" * 2 * llm.max_model_len,))
    report = evaluate(llm, [long, PROMPTS[0]], settings[:1], temperatures=(0.0,), max_tokens=4)

    assert ("long",) == report.skipped
    assert cell(report, settings[0].name, 0.0).num_texts == 1
    with pytest.raises(ParameterError, match=r"max_tokens: 4 leaves .* too few for every prompt"):
        evaluate(llm, [long], settings[:1], max_tokens=4)


def test_progress_rises_to_the_end(llm: LLM, settings: list[Setting]) -> None:
    told: list[tuple[str, float]] = []
    for simulated in (False, True):
        told.clear()
        evaluate(
            llm,
            PROMPTS[:2],
            settings[:1],
            max_tokens=4,
            simulated=simulated,
            on_progress=lambda what, fraction: told.append((what, fraction or 0.0)),
        )
        fractions = [fraction for _, fraction in told]

        assert sorted(fractions) == fractions
        assert (0.0, 1.0) == (fractions[0], fractions[-1])
        assert "evaluating draft chain 5, temperature 1" == told[-1][0]


def test_what_cannot_be_measured_is_refused(llm: LLM, settings: list[Setting]) -> None:
    off = Setting("plain", SpeculationConfig(method=Method.OFF, adaptive=False))
    for arguments, complaint in (
        (([], settings), "prompts: none were given"),
        ((PROMPTS, []), "settings: none were given"),
        ((PROMPTS, [settings[0], settings[0]]), "settings: 'draft chain 5' is there twice"),
        ((PROMPTS, [off]), "'plain' drafts nothing"),
    ):
        with pytest.raises(ParameterError, match=complaint):
            evaluate(llm, *arguments)
    for temperatures, complaint in (((), "none were given"), ((1.0, 0.5, 1.0), "1.0 is there")):
        with pytest.raises(ParameterError, match=f"temperatures: {complaint}"):
            evaluate(llm, PROMPTS, settings, temperatures=temperatures)
    with pytest.raises(ParameterError, match="adaptive: True in setting 'ngram'"):
        Setting("ngram", SpeculationConfig())


def test_a_target_that_fails_ends_the_measurement(folder: Path, settings: list[Setting]) -> None:
    path = write_hf_checkpoint(folder / "broken", scale=SCALE)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] *= 1e30  # all finite as they are stored, but not their product
    weights["lm_head.weight"] *= 1e10
    save_file(weights, file, metadata={"format": "pt"})
    broken = LLM(path, engine=EngineConfig(dtype="float32", self_test="off"))
    with pytest.raises(FailureError, match=r"nothing can be measured: .* not finite"):
        evaluate(broken, PROMPTS[:1], settings[:1], max_tokens=4)
