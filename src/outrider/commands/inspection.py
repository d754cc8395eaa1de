"""What a checkpoint is and what running it would take, without building the model.

Owns the facts that ``outrider inspect`` shows: architecture, rotary embedding, tokeniser, memory
plan, and what the self-test found earlier on this machine. Reads headers and hashes; no weight is
loaded. Stands between :mod:`outrider.cli` and :mod:`outrider.models`; what it says about a drafter
beside the model is :mod:`outrider.commands.head_inspection`'s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from rich.table import Table

from outrider.commands.architecture_text import (
    attention_line,
    extras_line,
    rope_line,
    size_line,
)
from outrider.commands.console import format_bytes, table
from outrider.commands.head_inspection import HeadInspection, inspect_head
from outrider.config import EngineConfig, SpeculationConfig
from outrider.llm import plan_pair, resolve_dtype, resolve_max_model_len
from outrider.models.architecture import DecoderConfig
from outrider.models.exactness import remembered_exactness
from outrider.models.loading import LoadedCheckpoint, load
from outrider.models.loading.cache import cache_root
from outrider.models.loading.heads import ShippedHead, has_mtp, shipped_heads
from outrider.models.loading.hub import resolve
from outrider.models.machine import ResultCache, processor_name
from outrider.models.memory import MemoryPlan
from outrider.pairing import TargetFiles
from outrider.types import ProgressCallback

EXACTNESS = {
    True: ("L2", "speculation on, off or with another drafter gives identical text (self-test)"),
    False: ("L3", "this processor's kernels differ in bits: text may differ at numeric near ties"),
    None: ("untested", "the self-test runs when the model is first used on this machine"),
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts about one checkpoint, and a drafter beside it, under given engine settings.

    The plan is for chains of ``max_draft_tokens`` and includes the drafter. ``is_exact`` is None
    when no self-test of this model, precision and thread count was run on this machine yet.
    """

    checkpoint: LoadedCheckpoint
    dtype: str
    threads: int
    max_batch_size: int
    max_model_len: int
    max_draft_tokens: int
    plan: MemoryPlan
    is_exact: bool | None
    has_mtp: bool
    shipped: tuple[ShippedHead, ...]
    head: HeadInspection | None

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        return sum(prod(shape) for shape in self.checkpoint.config.weight_shapes().values())

    def to_json(self) -> dict[str, Any]:
        """All facts as plain values."""
        checkpoint, tokenizer = self.checkpoint, self.checkpoint.tokenizer
        level, meaning = EXACTNESS[self.is_exact]
        return {
            "model": checkpoint.name,
            "weights_hash": checkpoint.weights_hash,
            "source_bytes": checkpoint.source_bytes,
            "num_parameters": self.num_parameters,
            "architecture": asdict(checkpoint.config),
            "has_mtp": self.has_mtp,
            "tokenizer": {
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
                "eos_ids": sorted(tokenizer.eos_ids),
                "has_chat_template": tokenizer.has_chat_template,
                "fingerprint": tokenizer.fingerprint,
            },
            "memory_plan": {
                "max_batch_size": self.max_batch_size,
                "max_model_len": self.max_model_len,
                "max_draft_tokens": self.max_draft_tokens,
                "uses_tree": False,
                "items": [
                    {"what": what, "detail": detail, "bytes": size}
                    for what, detail, size in self.plan.rows()
                ],
                "total_bytes": self.plan.total_bytes,
                "available_bytes": self.plan.available_bytes,
                "fits": self.fits,
            },
            "exactness": {
                "level": level,
                "meaning": meaning,
                "dtype": self.dtype,
                "threads": self.threads,
                "processor": processor_name(),
                "torch_version": torch.__version__,
            },
            "shipped_heads": [_shipped_json(head) for head in self.shipped],
            "head": None if self.head is None else self.head.to_json(),
        }

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits into what is available; None when the system does not tell."""
        available = self.plan.available_bytes
        return None if available is None else self.plan.total_bytes <= available

    def tables(self) -> list[Table]:
        """The same facts for people."""
        return [
            self._architecture_table(),
            self._tokenizer_table(),
            *((_shipped_table(self.shipped),) if self.shipped else ()),
            *(() if self.head is None else self.head.tables()),
            self._memory_table(),
            self._exactness_table(),
        ]

    def _architecture_table(self) -> Table:
        config = self.checkpoint.config
        rows = [
            ("architecture", config.architecture),
            ("parameters", f"{self.num_parameters:,}"),
            ("file", format_bytes(self.checkpoint.source_bytes)),
            ("weights", self.checkpoint.weights_hash),
            ("layers", str(config.num_layers)),
            ("hidden / MLP size", size_line(config)),
            ("attention", attention_line(config)),
            ("vocabulary", f"{config.vocab_size:,}, {_embeddings(config)}"),
            ("context", f"{config.max_position:,} tokens"),
            ("rotary embedding", rope_line(config.rope)),
            ("further", extras_line(config)),
            ("MTP module", "yes (--method mtp)" if self.has_mtp else "no"),
        ]
        return table(("", ""), rows, title=self.checkpoint.name, numbers_from=2)

    def _tokenizer_table(self) -> Table:
        tokenizer = self.checkpoint.tokenizer
        ends = [
            f"{tokenizer.token_bytes(i).decode(errors='replace')} ({i})"
            for i in sorted(tokenizer.eos_ids)
        ]
        rows = [
            ("tokens", f"{tokenizer.vocab_size:,}"),
            ("ends an answer", ", ".join(ends) or "nothing"),
            ("chat template", "yes" if tokenizer.has_chat_template else "no"),
            ("fingerprint", tokenizer.fingerprint),
        ]
        return table(("", ""), rows, title="Tokeniser", numbers_from=2)

    def _memory_table(self) -> Table:
        rows = [(what, detail, format_bytes(size)) for what, detail, size in self.plan.rows()]
        available = self.plan.available_bytes
        verdict = {True: "fits", False: "DOES NOT FIT", None: ""}[self.fits]
        rows.append(("total", verdict, format_bytes(self.plan.total_bytes)))
        rows.append(("available", "", "unknown" if available is None else format_bytes(available)))
        title = (
            f"Memory for {self.max_batch_size} request(s) at once, up to {self.max_model_len:,} "
            f"tokens each, chains of {self.max_draft_tokens} drafts"
        )
        return table(("what", "", "size"), rows, title=title, numbers_from=2)

    def _exactness_table(self) -> Table:
        level, meaning = EXACTNESS[self.is_exact]
        machine = (
            f"{self.dtype}, {self.threads} threads, {processor_name()}, torch {torch.__version__}"
        )
        rows = [("level", level), ("means", meaning), ("on", machine)]
        return table(("", ""), rows, title="Exactness", numbers_from=2)


def inspect(
    model: str,
    engine: EngineConfig,
    *,
    head: str | None = None,
    on_progress: ProgressCallback | None = None,
) -> Inspection:
    """Read a model's facts, and those of a drafter for it.

    Args:
        model: a name, folder or file; one that is only known by name is not fetched.
        engine: what the plan is for.
        head: a draft head or a draft model.
        on_progress: called with what is being done.

    Raises:
        UnknownModelError: no such model or head.
        CheckpointError: the files are broken or not a supported model, or they do not fit together.
        ParameterError: a setting does not fit the model.
    """
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    path = resolve(model)
    checkpoint = load(path, on_progress=on_progress)
    checkpoint.weights.close()
    dtype = resolve_dtype(engine.dtype)
    max_model_len = resolve_max_model_len(checkpoint.config, engine)
    found = None
    if head is not None:
        found = inspect_head(
            head,
            TargetFiles.of(path, checkpoint),
            max_model_len=max_model_len,
            on_progress=on_progress,
        )
    speculation = SpeculationConfig() if found is None else found.speculation
    source = None if found is None else found.opened.source
    return Inspection(
        checkpoint=checkpoint,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        max_batch_size=engine.max_batch_size,
        max_model_len=max_model_len,
        max_draft_tokens=speculation.num_draft_tokens,
        plan=plan_pair(checkpoint.config, speculation, engine, source),
        is_exact=remembered_exactness(
            checkpoint.config, dtype, checkpoint.weights_hash, ResultCache(cache_root())
        ),
        has_mtp=has_mtp(path),
        shipped=tuple(shipped_heads(checkpoint.weights_hash, checkpoint.tokenizer.fingerprint)),
        head=found,
    )


def _shipped_table(heads: tuple[ShippedHead, ...]) -> Table:
    """Heads in the package, a line for each setting that they were measured in."""
    measured = [found for head in heads for found in head.acceptance_lengths.values()]
    temperatures = sorted({t for found in measured for t in found}, key=float)
    rows = []
    for head in heads:
        about = (head.method.value, format_bytes(head.size_bytes))
        for setting, found in head.acceptance_lengths.items():
            lengths = (f"{found[t]:.2f}" if t in found else "-" for t in temperatures)
            rows.append((*about, setting.removeprefix(f"{head.method} "), *lengths))
            about = ("", "")
        if not head.acceptance_lengths:
            rows.append((*about, "-", *("-" for _ in temperatures)))
    columns = ("--method", "size", "drafts", *(f"T = {t}" for t in temperatures))
    title = "Heads that ship for this model: acceptance length at temperature T, as recorded"
    return table(columns, rows, title=title, numbers_from=3)


def _shipped_json(head: ShippedHead) -> dict[str, Any]:
    return {
        "method": head.method.value,
        "path": str(head.path),
        "size_bytes": head.size_bytes,
        "recorded_acceptance": head.recorded_acceptance,
        "acceptance_lengths": {s: dict(found) for s, found in head.acceptance_lengths.items()},
    }


def _embeddings(config: DecoderConfig) -> str:
    return "tied embeddings" if config.tied_embeddings else "untied embeddings"
