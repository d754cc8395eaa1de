"""What a checkpoint is and what running it would take, without building the model.

Owns the facts that ``outrider inspect`` shows: architecture, rotary embedding, tokeniser, memory
plan, and what the self-test found earlier on this machine. Reads headers and hashes; no weight is
loaded. Stands between :mod:`outrider.cli` and :mod:`outrider.models`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from rich.table import Table

from outrider.commands.console import format_bytes, table
from outrider.config import EngineConfig, SpeculationConfig
from outrider.llm import resolve_dtype, resolve_max_model_len
from outrider.models.architecture import DecoderConfig, RopeConfig
from outrider.models.exactness import remembered_exactness
from outrider.models.loading import LoadedCheckpoint, load
from outrider.models.loading.cache import cache_root
from outrider.models.loading.hub import resolve
from outrider.models.machine import ResultCache, processor_name
from outrider.models.memory import MemoryPlan, plan_memory

EXACTNESS = {
    True: ("L2", "speculation on, off or with another drafter gives identical text (self-test)"),
    False: ("L3", "this processor's kernels differ in bits: text may differ at numeric near ties"),
    None: ("untested", "the self-test runs when the model is first used on this machine"),
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts about one checkpoint under given engine settings.

    ``is_exact`` is None when no self-test of this model, precision and thread count was run on
    this machine yet.
    """

    checkpoint: LoadedCheckpoint
    dtype: str
    threads: int
    max_batch_size: int
    max_model_len: int
    plan: MemoryPlan
    is_exact: bool | None

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
            ("hidden / MLP size", f"{config.hidden_size:,} / {config.mlp_size:,}"),
            (
                "attention",
                f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of "
                f"{config.head_dim}",
            ),
            ("vocabulary", f"{config.vocab_size:,}, {_embeddings(config)}"),
            ("context", f"{config.max_position:,} tokens"),
            ("rotary embedding", rope_line(config.rope)),
            ("further", _extras(config) or "-"),
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
            f"Memory for {self.max_batch_size} request(s) at once of up to "
            f"{self.max_model_len:,} tokens"
        )
        return table(("what", "", "size"), rows, title=title, numbers_from=2)

    def _exactness_table(self) -> Table:
        level, meaning = EXACTNESS[self.is_exact]
        machine = (
            f"{self.dtype}, {self.threads} threads, {processor_name()}, torch {torch.__version__}"
        )
        rows = [("level", level), ("means", meaning), ("on", machine)]
        return table(("", ""), rows, title="Exactness", numbers_from=2)


def inspect(model: str, engine: EngineConfig) -> Inspection:
    """Read a model's facts.

    Raises:
        UnknownModelError: no such model; one that is only known by name is not fetched.
        CheckpointError: the files are broken or not a supported model.
        ParameterError: a setting does not fit the model.
    """
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    checkpoint = load(resolve(model))
    dtype = resolve_dtype(engine.dtype)
    max_model_len = resolve_max_model_len(checkpoint.config, engine)
    plan = plan_memory(
        checkpoint.config,
        dtype=dtype,
        max_batch_size=engine.max_batch_size,
        max_model_len=max_model_len,
        max_draft_tokens=SpeculationConfig().num_draft_tokens,
        prefill_chunk=engine.prefill_chunk,
    )
    return Inspection(
        checkpoint=checkpoint,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        max_batch_size=engine.max_batch_size,
        max_model_len=max_model_len,
        plan=plan,
        is_exact=remembered_exactness(
            checkpoint.config, dtype, checkpoint.weights_hash, ResultCache(cache_root())
        ),
    )


def rope_line(rope: RopeConfig) -> str:
    """The rotary embedding in one line, with the fields its kind uses."""
    fields = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
        "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position", "attention_factor"),
    }[rope.kind]
    values = [f"{name} {getattr(rope, name)}" for name in fields]
    return ", ".join([f"{rope.kind}, theta {rope.theta:,.0f}", *values])


def _embeddings(config: DecoderConfig) -> str:
    return "tied embeddings" if config.tied_embeddings else "untied embeddings"


def _extras(config: DecoderConfig) -> str:
    """The options that this model uses beyond the plain Llama layer."""
    options = {
        "attention bias": config.attention_bias,
        "attention output bias": config.attention_out_bias,
        "MLP bias": config.mlp_bias,
        "per-head query and key norms": config.qk_norm,
        f"{len(config.no_rope_layers)} layers without rotation": bool(config.no_rope_layers),
        f"sliding window of {config.sliding_window} in {len(config.sliding_layers)} layers": bool(
            config.sliding_layers
        ),
    }
    return ", ".join(name for name, used in options.items() if used)
