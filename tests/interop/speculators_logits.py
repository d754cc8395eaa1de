"""What ``speculators`` makes of a head that we exported; run by its own Python, without Outrider.

    python speculators_logits.py FOLDER [FOLDER ...]

Each folder holds ``head/`` and ``inputs.safetensors``: ``token`` int64 [T] and ``states`` [T, C].
Loads the head with the package's own ``from_pretrained`` (which takes the target's embedding from
the folder that config.json names) and writes ``theirs.safetensors``: ``step0``, ``step1``, ...,
float32 logits [T, W] of its training-time test. One JSON line per folder says what loading found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Not installed where this is linted, but where it runs.
from speculators import SpeculatorModel  # pyright: ignore[reportMissingImports]
from speculators.models.eagle3 import (  # pyright: ignore[reportMissingImports]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)

NUM_STEPS = 3


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        sys.stdout.write(json.dumps(check(folder)) + "\n")


def check(folder: Path) -> dict[str, Any]:
    config = Eagle3SpeculatorConfig.from_pretrained(folder / "head")
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention needs a GPU
    model = Eagle3DraftModel.from_pretrained(folder / "head", config=config, dtype=torch.float32)
    loading: dict[str, Any] = {}
    stored = load_file(folder / "head" / "model.safetensors")
    state = model.state_dict()
    loading["unknown"] = sorted(set(stored) - set(state))
    loading["changed"] = sorted(
        name
        for name, tensor in stored.items()
        if name in state and not torch.equal(state[name].to(tensor.dtype), tensor)
    )
    loading["not_stored"] = sorted(set(state) - set(stored))
    loading["by_the_base_class"] = SpeculatorModel.from_pretrained(
        folder / "head", config=config
    ).__class__.__name__
    with torch.no_grad():
        fill_ends(model, set(loading["not_stored"]))
    save_file(logits(model.eval(), folder), folder / "theirs.safetensors")
    return {"folder": folder.name, **loading}


def fill_ends(model: Eagle3DraftModel, not_stored: set[str]) -> None:
    """Load the target's ends where the file has none.

    ``from_pretrained`` means to, and tells them by the NaN that its constructor put there; loading
    through the meta device (speculators 0.9 with transformers 5) leaves memory as it was instead.
    Its own MTP model puts the NaN back, as here.
    """
    ends = {"embed_tokens.weight": model.embed_tokens, "lm_head.weight": model.lm_head}
    missing = [module for name, module in ends.items() if name in not_stored]
    for module in missing:
        module.weight.fill_(torch.nan)
    if missing:
        model.load_verifier_weights()


def logits(model: Eagle3DraftModel, folder: Path) -> dict[str, torch.Tensor]:
    inputs = load_file(folder / "inputs.safetensors")
    steps: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: steps.append(call[2][0].float().clone()))
    length = len(inputs["token"])
    with torch.no_grad():
        model(
            inputs["states"].unsqueeze(0),
            inputs["token"].unsqueeze(0),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            ttt_steps=NUM_STEPS,
        )
    return {f"step{k}": logits_TW for k, logits_TW in enumerate(steps)}


if __name__ == "__main__":
    main()
