from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from outrider import LLM, cli
from outrider.commands.inspection import Inspection, inspect
from outrider.config import EngineConfig, Method, SpeculationConfig
from outrider.models.architecture import DecoderConfig
from outrider.models.loading.heads import load_head
from tests.tiny import TinyModel, write_gguf_checkpoint, write_hf_checkpoint
from tests.tiny_heads import (
    LAYOUTS,
    ORDERS,
    write_eagle3_head,
    write_medusa_head,
    write_mtp_target,
)

FLOAT32 = EngineConfig(dtype="float32", self_test="off")
TARGET = TinyModel()


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    """A tiny checkpoint, and a user cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return str(write_hf_checkpoint(tmp_path / "model"))


def document_of(found: Inspection) -> dict[str, Any]:
    """What ``--json`` says about the head."""
    return json.loads(json.dumps(found.to_json()))["head"]


def gates_of(found: Inspection) -> dict[str, str]:
    """Each gate's state."""
    assert found.head is not None
    return {gate.name: gate.state for gate in found.head.gates}


def rendered(found: Inspection) -> str:
    console = Console(width=300)
    with console.capture() as capture:
        for part in found.tables():
            console.print(part)
    return capture.get()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_captured_layers_are_told_in_one_convention_whatever_the_layout(tmp_path, model, layout):
    head = write_eagle3_head(tmp_path / "head", TARGET, layout, capture_layers=(1, 2))
    found = inspect(model, FLOAT32, head=str(head))
    document = document_of(found)

    assert "eagle3" == document["method"]
    assert load_head(head, found.checkpoint.config).layout == document["layout"]
    assert [1, 2] == document["captured_layers"]
    assert any("captured layers" in sentence for sentence in document["conventions"])
    assert {"draft_size": 40, "target_size": 320, "coverage": 0.125} == document["vocabulary"]
    text = rendered(found)
    assert all(sentence in text for sentence in document["conventions"])
    assert "the states that enter layers 1, 2" in text
    assert "40 of the target's 320 tokens (12.5%)" in text


def test_parameters_are_those_of_the_file_without_the_vocabulary_map(tmp_path, model):
    head = write_eagle3_head(tmp_path / "head", TARGET, own_embedding=True)
    weights = load_file(head / "model.safetensors")
    document = document_of(inspect(model, FLOAT32, head=str(head)))
    numbers = [w.numel() for name, w in weights.items() if name not in ("d2t", "t2d")]

    assert sum(numbers) == document["num_parameters"]
    assert document["architecture"]["has_own_embedding"]
    assert (head / "model.safetensors").stat().st_size == document["source_bytes"]


def test_a_recorded_acceptance_length_is_shown(tmp_path, model):
    ours = {"capture_layers": [1, 2], "recorded_acceptance": 2.75}
    head = write_eagle3_head(tmp_path / "head", TARGET, "speculators", extra={"outrider": ours})
    found = inspect(model, FLOAT32, head=str(head))

    assert 2.75 == document_of(found)["recorded_acceptance"]
    assert "2.75" in rendered(found)


def test_medusa_says_how_deep_it_can_draft(tmp_path, model):
    head = write_medusa_head(tmp_path / "head", TARGET, num_heads=3)
    found = inspect(model, FLOAT32, head=str(head))
    document = document_of(found)

    assert ("medusa", []) == (document["method"], document["captured_layers"])
    assert "the last state, behind the target's final norm" == document["reads"]
    assert 1.0 == document["vocabulary"]["coverage"]
    assert {"ok"} == set(gates_of(found).values())
    assert "both, at most 3 deep" in rendered(found)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.usefixtures("model")
def test_an_mtp_module_is_found_in_the_models_own_checkpoint(tmp_path, order):
    folder = str(write_mtp_target(tmp_path / "mtp", order))
    found = inspect(folder, FLOAT32, head=folder)
    document = document_of(found)

    assert found.to_json()["has_mtp"]
    assert "yes (--method mtp)" in rendered(found)
    assert "mtp" == document["method"]
    assert ("before" if order == "mimo" else "behind") in document["reads"]
    assert {"ok"} == set(gates_of(found).values())


def test_an_mtp_module_in_another_model_of_this_width_is_still_a_head(tmp_path, model):
    alone = inspect(model, FLOAT32)
    beside = inspect(model, FLOAT32, head=str(write_mtp_target(tmp_path / "mtp")))

    assert not alone.has_mtp
    assert alone.to_json()["head"] is None
    assert not beside.has_mtp
    assert "mtp" == document_of(beside)["method"]


def draft_folder(path: Path) -> Path:
    return write_hf_checkpoint(path, hidden_size=32, num_layers=1)


def draft_file(path: Path) -> Path:
    return write_gguf_checkpoint(path / "draft.gguf", hidden_size=32, num_layers=1)


def draft_with_mtp(path: Path) -> Path:
    """Its module is for a model of its own width, so not for the target."""
    return write_mtp_target(path, hidden_size=32, num_layers=1)


@pytest.mark.parametrize("write", [draft_folder, draft_with_mtp])
def test_a_whole_model_is_inspected_as_a_draft_model(
    tmp_path, model, write: Callable[[Path], Path]
):
    found = inspect(model, FLOAT32, head=str(write(tmp_path / "draft")))
    document = document_of(found)

    assert ("draft", None) == (document["method"], document["layout"])
    assert (32, 1) == (
        document["architecture"]["hidden_size"],
        document["architecture"]["num_layers"],
    )
    assert "tokens only" == document["reads"]
    assert "captured layers" not in gates_of(found)
    assert "ok" == gates_of(found)["tokeniser"]
    assert found.checkpoint.tokenizer.fingerprint[:16] in rendered(found)


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_gguf_file_is_a_draft_model(tmp_path, monkeypatch, as_folder):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    target = str(write_gguf_checkpoint(tmp_path / "target.gguf"))
    file = draft_file(tmp_path / "draft")
    found = inspect(target, FLOAT32, head=str(file.parent if as_folder else file))

    assert "draft" == document_of(found)["method"]
    assert not found.has_mtp


def test_a_padded_draft_vocabulary_is_reconciled(tmp_path, model):
    draft = write_hf_checkpoint(tmp_path / "draft", vocab_size=384)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model) / name, draft / name)
    found = inspect(model, FLOAT32, head=str(draft))

    assert "ok" == gates_of(found)["vocabulary"]
    assert 320 == document_of(found)["vocabulary"]["draft_size"]
    assert "384 rows beside the target's 320; the 320 in common are drafted" in rendered(found)


def test_a_vocabulary_map_of_zeros_is_a_warning(tmp_path, model):
    t2d = torch.arange(320) < 40
    changes = {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": t2d}
    lost = write_eagle3_head(tmp_path / "lost", TARGET, "speculators", changes=changes)
    sound = write_eagle3_head(tmp_path / "sound", TARGET, "speculators")

    assert "warning" == gates_of(inspect(model, FLOAT32, head=str(lost)))["vocabulary"]
    assert "ok" == gates_of(inspect(model, FLOAT32, head=str(sound)))["vocabulary"]


@pytest.mark.parametrize(("max_model_len", "state"), [(128, "ok"), (129, "warning")])
def test_requests_longer_than_the_drafter_was_made_for_are_a_warning(
    tmp_path, model, max_model_len, state
):
    engine = EngineConfig(dtype="float32", max_model_len=max_model_len)
    head = write_eagle3_head(tmp_path / "head", TARGET, "speculators")  # 128 positions
    draft = write_hf_checkpoint(tmp_path / "draft", max_position=128)

    assert state == gates_of(inspect(model, engine, head=str(head)))["positions"]
    assert state == gates_of(inspect(model, engine, head=str(draft)))["positions"]


def test_a_head_that_names_all_positions_passes(tmp_path, model):
    head = write_eagle3_head(tmp_path / "head", TARGET, extra={"max_position_embeddings": 4096})

    assert "ok" == gates_of(inspect(model, FLOAT32, head=str(head)))["positions"]


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft", "mtp"])
def test_the_plan_is_the_one_that_a_loaded_model_has(tmp_path, model, kind):
    head = {
        "eagle3": lambda: write_eagle3_head(tmp_path / "head", TARGET),
        "medusa": lambda: write_medusa_head(tmp_path / "head", TARGET),
        "draft": lambda: draft_folder(tmp_path / "head"),
        "mtp": lambda: write_mtp_target(tmp_path / "head"),
    }[kind]()
    engine = EngineConfig(dtype="float32", self_test="off", max_batch_size=3, max_model_len=96)
    found = inspect(model, engine, head=str(head))
    speculation = SpeculationConfig(method=Method(kind), head=str(head))
    llm = LLM(model, speculation=speculation, engine=engine)

    assert llm.memory_plan.rows() == found.plan.rows()
    assert any(what == "draft weights" for what, _, _ in found.plan.rows())
    assert speculation.num_draft_tokens == found.to_json()["memory_plan"]["max_draft_tokens"]


def test_the_command_prints_tables_or_one_document(tmp_path, model, capsys):
    head = str(write_eagle3_head(tmp_path / "head", TARGET))
    flags = ["--head", head, "--max-batch-size", "4", "--max-model-len", "64"]

    assert 0 == cli.main(["inspect", model, *flags])
    assert "EAGLE-3 head" in capsys.readouterr().out
    assert 0 == cli.main(["inspect", model, *flags, "--json"])
    document = json.loads(capsys.readouterr().out)
    details = {item["what"]: item["detail"] for item in document["memory_plan"]["items"]}
    assert "eagle3" == document["head"]["method"]
    assert details["draft KV cache"].startswith("4 x ")
    assert details["draft states"].startswith("4 x 256 rows of ")


def write_pickle(path: Path) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def write_empty(path: Path) -> None:
    path.mkdir()


def write_eagle1(path: Path) -> None:
    """As its ``cnets1.py`` stores it: an embedding beside plain layers, no first norm."""
    write_eagle3_head(path, TARGET, "vllm", own_embedding=True)
    weights = load_file(path / "model.safetensors")
    dropped = ("hidden_norm", "input_layernorm", "draft_id_to_target_id", "lm_head", "model.norm")
    kept = {name: w for name, w in weights.items() if not any(part in name for part in dropped)}
    kept["model.fc.weight"] = torch.zeros(64, 128)
    save_file(kept, path / "model.safetensors")


BAD_HEADS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "absent": (lambda _: None, 2, "--head: no such folder, file or model"),
    "wide": (
        lambda path: write_eagle3_head(path, TinyModel(hidden_size=32)),
        1,
        "hidden_size is 32, the target's hidden size is 64",
    ),
    "pickle": (write_pickle, 1, "a pickle, which can run code when opened"),
    "empty": (write_empty, 1, "no weights"),
    "stranger": (
        lambda path: write_hf_checkpoint(path, vocab_size=300),
        1,
        "has another tokeniser than the target: vocabulary",
    ),
    "eagle1": (write_eagle1, 1, "an EAGLE-1 or EAGLE-2 head"),
    "text": (lambda path: path.write_text("no head"), 1, "not a draft head"),
}


@pytest.mark.parametrize("kind", BAD_HEADS)
def test_a_head_that_cannot_be_used_is_one_line(tmp_path, model, capsys, kind):
    write, status, expected = BAD_HEADS[kind]
    write(tmp_path / "head")

    assert status == cli.main(["inspect", model, "--head", str(tmp_path / "head")])
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if "error" in line]
    assert "" == captured.out
    assert 1 == len(errors)
    assert expected in errors[0]


def test_a_head_of_its_own_width_says_what_it_reads(tmp_path, model):
    head = write_eagle3_head(tmp_path / "head", TARGET, hidden_size=32, own_embedding=True)
    found = inspect(model, FLOAT32, head=str(head))

    assert "reads the target's 64, is 32 wide itself" in rendered(found)


def test_a_model_from_the_catalogue_that_was_not_fetched_is_not_fetched(model, capsys):
    assert 1 == cli.main(["inspect", model, "--head", "smollm2-135m-instruct"])
    assert "run `outrider models pull smollm2-135m-instruct` first" in capsys.readouterr().err


def test_a_draft_models_architecture_is_told_like_the_targets(tmp_path, model):
    found = inspect(model, FLOAT32, head=str(draft_folder(tmp_path / "draft")))

    assert found.head is not None
    assert isinstance(found.head.opened.source.config, DecoderConfig)
    assert 2 == rendered(found).count("LlamaForCausalLM")
