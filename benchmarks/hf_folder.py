"""Writes a target that we can load as a Hugging Face folder, for engines that read nothing else.

The embedded model is a GGUF file, and vLLM wants ``config.json``, safetensors and a tokeniser. Both
``peers.py`` and ``server_peers.py`` are given the folder; it holds the very numbers that we compute
with (quantised blocks widened to bfloat16) and the same chat template.

    python benchmarks/hf_folder.py --out smollm2-hf
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

# isort: off
# outrider comes before torch: it sets how torch is to allocate memory.
import outrider  # noqa: F401 - for that effect
import torch

# isort: on
from transformers_peer import hf_name, llama_config

from outrider import OutriderError
from outrider.commands.console import error, note
from outrider.errors import ParameterError
from outrider.models.loading import DEFAULT_MODEL, load, resolve
from outrider.models.loading.safetensors_file import write_tensors


def write_folder(model: str, out: Path) -> None:
    """Write ``model`` into the new folder ``out``, in bfloat16.

    Raises:
        ParameterError: ``out`` holds something.
        OutriderError: the model cannot be loaded.
        SystemExit: its architecture has no words in transformers' Llama.
    """
    if out.exists() and any(out.iterdir()):
        raise ParameterError(f"--out: {out} is not empty; give a new folder")
    checkpoint = load(resolve(model, pull=True))
    try:
        config = llama_config(checkpoint.config)
        config.dtype = torch.bfloat16
        config.architectures = [checkpoint.config.architecture]
        stops = sorted(checkpoint.tokenizer.eos_ids)
        config.bos_token_id = checkpoint.tokenizer.bos_id
        config.eos_token_id = stops[0] if len(stops) == 1 else stops
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(config.to_dict(), indent=2), encoding="utf-8")
        write_tensors(
            out / "model.safetensors",
            {
                hf_name(name): weight.to(torch.bfloat16)
                for name, weight in checkpoint.weights.items()
            },
        )
        for name, data in checkpoint.tokenizer.files().items():
            (out / name).write_bytes(data)
    finally:
        checkpoint.weights.close()


def main(command_line: Sequence[str] | None = None) -> int:
    """Write the folder; the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; new or empty")
    arguments = parser.parse_args(command_line)
    try:
        write_folder(arguments.model, arguments.out)
    except OutriderError as problem:
        error(problem)
        return problem.exit_status
    note(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
