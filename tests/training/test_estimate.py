"""Estimates: the bytes that really are written and kept, the refusal, and the hours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from outrider.errors import CapacityError, ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.training import estimate as module
from outrider.training.estimate import (
    METHODS,
    Estimate,
    StageFigures,
    TrainingSizes,
    estimate,
    hours,
    scale_rates,
    trained_shapes,
    work_per_token,
)
from outrider.training.recipes.layers import Rotation, TrainableLayer
from outrider.training.store import save_state, verify_folder
from tests.models import random_decoder, tiny_config
from tests.training.test_features import LENGTHS, capture


def wide_config(**changes: object) -> DecoderConfig:
    return tiny_config(
        **{
            "hidden_size": 256,
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 32,
            "mlp_size": 640,
            "vocab_size": 2000,
            **changes,
        }
    )


def size_of(plan: Estimate, what: str) -> int:
    return {item.what: item.size_bytes for item in (*plan.disk, *plan.memory)}[what]


@pytest.mark.parametrize(("method", "captures"), [("eagle3", (0, 2)), ("mtp", ())])
def test_features_take_what_is_estimated(tmp_path, method, captures):
    num_tokens = sum(map(sum, LENGTHS))
    capture(random_decoder(), tmp_path, captures)
    stored = sum(path.stat().st_size for path in tmp_path.glob("shard-*/*"))
    sizes = TrainingSizes(num_captures=2)
    planned = size_of(
        estimate(tiny_config(), method, num_tokens, tmp_path, sizes=sizes), "features"
    )

    assert planned < stored < 1.1 * planned  # headers and manifests are on top


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_takes_what_is_estimated(tmp_path, method):
    config = wide_config()
    shapes = trained_shapes(config, method, TrainingSizes())
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(parameters.values())
    sum(p.sum() for p in parameters.values()).backward()
    optimizer.step()
    save_state(tmp_path / "step-1", parameters, {"optimizer": optimizer.state_dict()})
    stored = sum(size for size, _ in verify_folder(tmp_path / "step-1").files.values())
    sizes = TrainingSizes(checkpoints_kept=3)
    planned = size_of(estimate(config, method, 1000, tmp_path, sizes=sizes), "checkpoints") / 4

    assert planned < stored < 1.02 * planned + 10_000


def kept_by_autograd(layer: TrainableLayer, x_RD: torch.Tensor, counts: list[int]) -> int:
    """Bytes of the tensors that a layer's way back needs, parameters and their casts left out."""
    weights = {p.numel() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    positions = torch.cat([torch.arange(count) for count in counts])
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        out_RD = layer(x_RD, Rotation(layer.config, positions), counts)
    assert out_RD.requires_grad
    return sum(kept.values())


def test_activations_are_about_what_autograd_keeps(tmp_path):
    config, counts = wide_config(), [300, 400, 300]
    x_RD = torch.randn(1000, 256, requires_grad=True)
    kept = kept_by_autograd(TrainableLayer(config), x_RD, counts)
    sizes = TrainingSizes(num_layers=3, tokens_per_batch=1000)
    output = 1000 * 8 * config.hidden_size
    planned = size_of(estimate(config, "draft", 0, tmp_path, sizes=sizes), "activations") - output

    assert kept / 1.5 < planned / 3 < kept * 1.5


def test_the_optimiser_and_gradients_follow_from_the_parameters(tmp_path):
    config = wide_config()
    for method in METHODS:
        trained = sum(
            torch.Size(s).numel() for s in trained_shapes(config, method, TrainingSizes()).values()
        )
        plan = estimate(config, method, 0, tmp_path, dtype=torch.float32)

        assert [4 * trained, 4 * trained, 8 * trained] == [
            size_of(plan, what) for what in ("parameters", "gradients", "optimiser")
        ]
        assert sum(item.size_bytes for item in plan.memory) == plan.memory_bytes


def test_what_belongs_to_the_target_is_not_trained():
    config = wide_config()
    for method in METHODS:
        names = set(trained_shapes(config, method, TrainingSizes(draft_vocab_size=500)))

        assert not names & {"embed.weight", "lm_head.weight", "d2t"}
    with_head = trained_shapes(
        config, "eagle3", TrainingSizes(draft_vocab_size=500, trains_head=True)
    )
    assert (500, 256) == with_head["lm_head.weight"]


def test_recomputing_features_moves_them_from_disk_to_the_targets_weights(tmp_path):
    config = wide_config()
    stored = estimate(config, "eagle3", 10**6, tmp_path)
    live = estimate(config, "eagle3", 10**6, tmp_path, sizes=TrainingSizes(stores_features=False))

    assert size_of(stored, "features") == stored.disk_bytes - live.disk_bytes
    assert size_of(live, "target") > size_of(stored, "target's ends")


def test_smaller_settings_take_less(tmp_path):
    config = wide_config()
    least = estimate(config, "eagle3", 0, tmp_path).memory_bytes
    for larger in ({"tokens_per_batch": 8192}, {"num_steps": 7}, {"num_captures": 4}):
        sizes = TrainingSizes(**larger)

        assert least < estimate(config, "eagle3", 0, tmp_path, sizes=sizes).memory_bytes
    smaller = TrainingSizes(draft_vocab_size=500)
    assert least > estimate(config, "eagle3", 0, tmp_path, sizes=smaller).memory_bytes


@pytest.mark.parametrize("short", ["disk", "memory"])
def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path, monkeypatch, short):
    plan = estimate(wide_config(), "eagle3", 10**6, tmp_path)
    plan.check()
    monkeypatch.setattr(module, "_free_disk", lambda folder: plan.disk_bytes - (short == "disk"))
    monkeypatch.setattr(
        module, "_available", lambda device: plan.memory_bytes - (short == "memory")
    )
    with pytest.raises(CapacityError) as caught:
        estimate(wide_config(), "eagle3", 10**6, tmp_path).check()
    message = str(caught.value)

    assert ("features 1.91 GiB" in message) == (short == "disk")
    assert (str(tmp_path) in message) == (short == "disk")
    assert ("activations" in message) == (short == "memory")
    assert ("lower the tokens per batch" in message) == (short == "memory")


def test_the_disk_of_a_folder_to_be_is_looked_at(tmp_path):
    plan = estimate(wide_config(), "mtp", 10, tmp_path / "not" / "yet")

    assert plan.free_disk_bytes is not None
    assert plan.free_disk_bytes > 0
    assert not (tmp_path / "not").exists()


def test_bad_values_are_refused(tmp_path):
    with pytest.raises(ParameterError, match="'medusa2' is not one of eagle3, mtp, medusa, draft"):
        estimate(wide_config(), "medusa2", 10, tmp_path)
    with pytest.raises(ParameterError, match="num_steps: 0 is below 1"):
        estimate(wide_config(), "mtp", 10, tmp_path, sizes=TrainingSizes(num_steps=0))


def test_hours_follow_from_tokens_and_rates():
    rates = StageFigures(generation=100.0, features=1000.0, training=500.0)
    found = hours(response_tokens=360_000, num_tokens=720_000, epochs=2.5, rates=rates)

    assert StageFigures(generation=1.0, features=0.2, training=1.0) == found
    assert pytest.approx(2.2) == found.total


def test_rates_scale_with_the_work():
    small, large = wide_config(), wide_config(num_layers=8)
    sizes = TrainingSizes(draft_vocab_size=1000)
    rates = StageFigures(generation=100.0, features=1000.0, training=500.0)
    work = work_per_token(small, "eagle3", sizes)
    more = work_per_token(large, "eagle3", sizes)
    scaled = scale_rates(rates, work, more, speedup=2.0)

    assert pytest.approx(4, rel=0.01) == more.features / work.features
    assert work.training == more.training  # the head stays as it is
    assert pytest.approx(500, rel=0.01) == scaled.features
    assert scaled.training == 1000.0
    assert 50.0 < scaled.generation < 200.0
    assert work.training < work_per_token(small, "eagle3", replace(sizes, num_steps=6)).training
