from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from outrider import cli
from outrider.commands import inspection
from outrider.commands.architecture_text import rope_line
from outrider.config import EngineConfig
from outrider.errors import ParameterError
from outrider.models.architecture import RopeConfig
from outrider.models.layers import linear_shapes
from outrider.models.loading import load
from outrider.models.loading.cache import cache_root
from outrider.models.machine import ResultCache, machine_key
from tests.tiny import write_hf_checkpoint

FLOAT32 = EngineConfig(dtype="float32")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny checkpoint, and a user cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return write_hf_checkpoint(tmp_path / "tiny")


def rendered(found: inspection.Inspection) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for part in found.tables():
            console.print(part)
    return capture.get()


def test_the_facts_are_those_of_the_files(folder):
    found = inspection.inspect(str(folder), FLOAT32)
    weights = load_file(folder / "model.safetensors")
    document = json.loads(json.dumps(found.to_json()))

    assert sum(weight.numel() for weight in weights.values()) == document["num_parameters"]
    assert "LlamaForCausalLM" == document["architecture"]["architecture"]
    assert [0, 2] == document["tokenizer"]["eos_ids"]
    assert document["tokenizer"]["has_chat_template"]
    plan = document["memory_plan"]
    assert plan["total_bytes"] == sum(item["bytes"] for item in plan["items"])
    assert plan["fits"] in (True, None)


def test_the_tables_show_the_same_for_people(folder):
    text = rendered(inspection.inspect(str(folder), FLOAT32))

    for expected in ("LlamaForCausalLM", "<|im_end|> (2)", "KV cache", "total", "untested"):
        assert expected in text


def test_more_requests_take_more_memory_in_the_plan(folder):
    one = inspection.inspect(str(folder), FLOAT32)
    many = inspection.inspect(str(folder), EngineConfig(dtype="float32", max_batch_size=8))
    size = {what: size for what, _, size in one.plan.rows()}
    more = {what: size for what, _, size in many.plan.rows()}

    assert 8 * size["KV cache"] == more["KV cache"]
    assert size["layers"] == more["layers"]


def test_a_plan_that_does_not_fit_says_so_instead_of_failing(folder, monkeypatch):
    monkeypatch.setattr("outrider.models.memory.available_memory", lambda: 1000)
    found = inspection.inspect(str(folder), FLOAT32)

    assert found.fits is False
    assert "DOES NOT FIT" in rendered(found)


def remember(folder, *, rows_exact: bool, model_exact: bool | None) -> None:
    """Leave what a self-test would leave in the cache."""
    from outrider.models.exactness import _exact_key  # the key is the contract under test
    from outrider.models.linear import RowPolicy

    checkpoint = load(folder)
    cache = ResultCache(cache_root())
    policies = {}
    for shape in linear_shapes(checkpoint.config):
        policies[shape] = RowPolicy(1, 16, rows_exact)
        row = {"min_rows": 1, "max_rows": 16, "is_exact": rows_exact}
        cache.put(f"rows {shape} {machine_key(torch.float32)}", row)
    if model_exact is not None:
        key = _exact_key(checkpoint.weights_hash, torch.float32, policies)
        cache.put(key, {"is_exact": model_exact})


@pytest.mark.parametrize(
    ("rows_exact", "model_exact", "level"),
    [(True, True, "L2"), (True, False, "L3"), (False, None, "L3"), (True, None, "untested")],
)
def test_the_level_is_what_an_earlier_self_test_found(folder, rows_exact, model_exact, level):
    remember(folder, rows_exact=rows_exact, model_exact=model_exact)
    found = inspection.inspect(str(folder), FLOAT32)

    assert level == found.to_json()["exactness"]["level"]
    assert level in rendered(found)


def test_a_level_holds_for_its_own_precision_only(folder):
    remember(folder, rows_exact=True, model_exact=True)
    found = inspection.inspect(str(folder), EngineConfig(dtype="bfloat16"))

    assert "untested" == found.to_json()["exactness"]["level"]


def test_a_context_beyond_the_models_is_refused(folder):
    with pytest.raises(ParameterError, match="beyond the model's context"):
        inspection.inspect(str(folder), EngineConfig(max_model_len=2**20))


def test_the_command_prints_tables_or_one_document(folder, capsys):
    assert 0 == cli.main(["inspect", str(folder), "--dtype", "float32"])
    assert "rotary embedding" in capsys.readouterr().out
    assert 0 == cli.main(["inspect", str(folder), "--json", "--max-batch-size", "2"])
    document = json.loads(capsys.readouterr().out)
    assert (1, 2) == (document["schema_version"], document["memory_plan"]["max_batch_size"])


def test_a_model_that_is_not_there_is_a_usage_error(folder, capsys):
    assert 2 == cli.main(["inspect", str(folder / "absent")])
    assert "outrider: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeConfig(theta=100_000.0), "default, theta 100,000"),
        (RopeConfig(kind="linear", factor=2.0), "linear, theta 10,000, factor 2.0"),
        (RopeConfig(kind="yarn", factor=4.0), "beta_fast 32.0, beta_slow 1.0"),
    ],
)
def test_the_rotary_embedding_is_told_with_what_its_kind_uses(rope, expected):
    assert expected in rope_line(rope)
