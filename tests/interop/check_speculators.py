"""Exported EAGLE-3 heads in ``speculators``' own loader: names, values and logits.

``speculators`` pins other versions of what Outrider needs, so it lives in an environment of its
own. Heads of every option are exported for a tiny target, loaded there, and its logits are compared
with those of our drafting, at the first step and at the steps that feed the head its own output::

    python3 -m venv PEER && PEER/bin/pip install speculators
    python -m tests.interop.check_speculators --peer PEER/bin/python

Prints one line per head and fails on the first difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.commands.console import note, stdout
from outrider.config import Method
from outrider.models.decoder import Decoder
from outrider.models.exactness import random_tokens
from outrider.models.heads.config import Eagle3Config
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.loading import load
from outrider.models.loading.heads import load_head
from outrider.models.loading.heads.mtp import module_layers
from outrider.pairing import TargetFiles
from outrider.training.export import export_head
from tests.parity.head_cases import Driver, head_weights
from tests.parity.reference_heads import Drafted
from tests.tiny import write_hf_checkpoint
from tests.tiny_heads import draft_ids

NUM_TOKENS, NUM_ROWS, DRAFT_VOCAB = 16, 12, 50
TOLERANCE = 1e-4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": 320},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "two layers": {"num_layers": 2},
    "q and k norms": {"qk_norm": True},
    "between the target's ends": {"self_contained": False},
    "the whole vocabulary between them": {"self_contained": False, "draft_vocab_size": 320},
}


def main() -> int:
    parser = argparse.ArgumentParser(description="speculators on our exports")
    parser.add_argument("--peer", required=True, help="python of an environment with speculators")
    peer = parser.parse_args().peer
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = write_hf_checkpoint(work / "model", num_layers=7, tied=True)
        checkpoint = load(model)
        target = TargetFiles.of(model, checkpoint)
        decoder = Decoder(checkpoint.config, checkpoint.weights, dtype=torch.float32, policies=None)
        ours = {name: prepare(work, name, target, decoder) for name in OPTIONS}
        script = Path(__file__).with_name("speculators_logits.py")
        command = [peer, str(script), *(str(folder) for folder, _ in ours.values())]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            note(done.stderr)
            return 1
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        results = zip(ours.values(), found, strict=True)
        return max([compare(part, loading) for part, loading in results])


def prepare(
    work: Path, name: str, target: TargetFiles, decoder: Decoder
) -> tuple[Path, list[torch.Tensor]]:
    """Export one head and compute our logits of its last row, step by step."""
    options = dict(OPTIONS[name])
    self_contained = options.pop("self_contained", True)
    sizes = {key: options.pop(key) for key in ("num_layers", "qk_norm") if key in options}
    config = Eagle3Config(
        **{
            "layers": replace(module_layers(target.config), **sizes),
            "target_hidden_size": target.config.hidden_size,
            "capture_layers": (2, 3, 4),
            "draft_vocab_size": DRAFT_VOCAB,
            "has_own_head": False,
            **options,
        }
    )
    weights = head_weights(config)
    if config.is_reduced:
        ids_W = draft_ids(target.config.vocab_size, DRAFT_VOCAB)
        weights["d2t"] = ids_W - torch.arange(DRAFT_VOCAB)
    folder = work / name.replace(" ", "-")
    export_head(
        Method.EAGLE3,
        config,
        weights,
        folder / "head",
        target=target,
        manifest={},
        self_contained=self_contained,
        dtype=torch.float32,
    )
    _name_target(folder / "head", target.path)
    token = random_tokens(target.config.vocab_size, NUM_TOKENS, seed=2)
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(NUM_TOKENS, 64, generator=generator) for _ in config.capture_layers]
    inputs = {"token": torch.tensor(token), "states": torch.cat(states, dim=1)}
    save_file(inputs, folder / "inputs.safetensors")
    head = load_head(folder / "head", target.config)
    assert isinstance(head.config, Eagle3Config)
    driver = Driver(Eagle3Head(head.config, head.weights, decoder))
    (roots,) = driver.take_in([(token[:NUM_ROWS], [state[:NUM_ROWS] for state in states])])
    chain = Drafted(tuple(token[NUM_ROWS : NUM_ROWS + 2]), (-1, 0))
    (steps,) = driver.grow([roots], [chain])
    return folder, [roots.logits_RW[-1], *steps.logits_RW]


def _name_target(head: Path, model: Path) -> None:
    """Exports name the target as a hub would; the check has it in a folder."""
    path = head / "config.json"
    config = json.loads(path.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(model)
    path.write_text(json.dumps(config))


def compare(ours: tuple[Path, list[torch.Tensor]], loading: dict[str, Any]) -> int:
    """Print what was found of one head; 1 for a difference."""
    folder, expected = ours
    theirs = load_file(folder / "theirs.safetensors")
    pairs = [(expected[k], theirs[f"step{k}"][NUM_ROWS - 1]) for k in range(len(expected))]
    largest = max((a - b).abs().max().item() for a, b in pairs)
    is_same = largest < TOLERANCE and not loading["unknown"] and not loading["changed"]
    size = expected[0].std().item()
    stdout().print(
        f"{'same' if is_same else 'DIFFERS'}: {folder.name}: largest difference {largest:.1e} of "
        f"logits of deviation {size:.2f}; {loading}"
    )
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
