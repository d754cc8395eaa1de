"""The flags that several verbs share, as groups, and their translation into settings.

Owns the flags' names, help and defaults (taken from :mod:`outrider.config`, so that there is one
source); the settings check their own ranges. Used by :mod:`outrider.cli` only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token

from outrider.config import (
    Accept,
    EngineConfig,
    Method,
    SamplingParams,
    SpeculationConfig,
)
from outrider.models.loading.hub import DEFAULT_MODEL

_SAMPLING = SamplingParams()
_SPECULATION = SpeculationConfig()
_METHODS = "|".join(Method)


def whole_number(type_: Any, tokens: Sequence[Token]) -> int:  # noqa: ARG001 - cyclopts' signature
    """An integer in decimal digits; int() of a fraction would silently round a seed or a count."""
    text = tokens[0].value
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def flag(text: str, *, name: str | None = None, **settings: Any) -> Parameter:
    """A flag with its help, as all groups of options declare theirs."""
    return Parameter(name=name, help=text, **settings)


def whole(text: str) -> Parameter:
    """A flag whose value is a whole number."""
    return flag(text, converter=whole_number)


@Parameter(name="*", group=Group("Sampling", sort_key=3))
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the target picks each token, and when it stops."""

    temperature: Annotated[float, flag("0 is greedy.")] = _SAMPLING.temperature
    top_k: Annotated[int, whole("Keep the k likeliest tokens; 0 keeps all.")] = _SAMPLING.top_k
    top_p: Annotated[float, flag("Keep the smallest likeliest set with this probability.")] = (
        _SAMPLING.top_p
    )
    min_p: Annotated[
        float, flag("Keep tokens at least this fraction as likely as the likeliest.")
    ] = _SAMPLING.min_p
    repetition_penalty: Annotated[
        float, flag("Divide the positive logits of tokens seen so far; 1 is off.")
    ] = _SAMPLING.repetition_penalty
    presence_penalty: Annotated[
        float, flag("Subtract once from the logit of a token already written.")
    ] = _SAMPLING.presence_penalty
    frequency_penalty: Annotated[float, flag("Subtract for every time a token was written.")] = (
        _SAMPLING.frequency_penalty
    )
    seed: Annotated[
        int | None, whole("Makes a sampled answer repeatable. Without it: fresh each time.")
    ] = _SAMPLING.seed
    max_tokens: Annotated[int, whole("Most tokens to write.")] = _SAMPLING.max_tokens
    min_tokens: Annotated[int, whole("No end of the answer before this many tokens.")] = (
        _SAMPLING.min_tokens
    )
    stop: Annotated[
        list[str],
        flag(
            "Text that ends the answer, itself left out; may be repeated.",
            negative="",
            allow_leading_hyphen=True,
            show_default=False,
        ),
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, flag("Go on past the model's own end token.", negative="")] = (
        _SAMPLING.ignore_eos
    )
    accept: Annotated[
        str,
        flag(
            f"Rule by which sampled drafts are accepted: {'|'.join(Accept)}. Both keep the "
            "target's law; only with coupled is a seeded text the same whatever drafts."
        ),
    ] = _SAMPLING.accept

    def params(self) -> SamplingParams:
        """The checked settings.

        Raises:
            ParameterError: a value is out of range.
        """
        values = {name: getattr(self, name) for name in self.__slots__}
        return SamplingParams(**{**values, "stop": tuple(self.stop)})


@Parameter(name="*", group=Group("Speculation", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """What drafts, and how much; None everywhere leaves the choice to the engine."""

    method: Annotated[
        str | None, flag(f"Who drafts: {_METHODS}. Without it: the best one there is.")
    ] = None
    head: Annotated[
        str | None,
        flag(
            "Folder or file of the draft head; for --method draft, the draft model. Without it: "
            "the one that ships for the model."
        ),
    ] = None
    tree: Annotated[bool | None, flag("Draft a tree instead of a chain.", negative="--no-tree")] = (
        None
    )
    max_draft_len: Annotated[
        int | None, whole(f"Deepest draft, in tokens (usually {_SPECULATION.max_draft_len}).")
    ] = None
    dynamic_tree_max_topk: Annotated[int | None, whole("Most children of a tree node.")] = None
    max_total_draft_tokens: Annotated[int | None, whole("Most draft tokens per step.")] = None
    with_ngram: Annotated[
        bool | None, flag("Let n-gram add its guesses to the head's.", negative="")
    ] = None

    def config(self) -> SpeculationConfig | None:
        """The checked settings, or None when no flag was given.

        Raises:
            ParameterError: a value is out of range, or the method cannot use what was given.
        """
        fields = {
            "method": self.method,
            "head": self.head,
            "with_ngram": self.with_ngram,
            "use_dynamic_tree": self.tree,
            "max_draft_len": self.max_draft_len,
            "dynamic_tree_max_topK": self.dynamic_tree_max_topk,
            "max_total_draft_tokens": self.max_total_draft_tokens,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return SpeculationConfig(**given) if given else None


@Parameter(name="*", group=Group("Model and machine", sort_key=1))
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model runs, on what, in which precision."""

    model: Annotated[
        str, flag("Name, Hugging Face id, folder or file (see: outrider models list).")
    ] = DEFAULT_MODEL
    device: Annotated[str, flag("Where the model runs.")] = "cpu"
    dtype: Annotated[
        str, flag("auto|bfloat16|float32; auto takes what this processor does well.")
    ] = "auto"
    threads: Annotated[int | None, whole("Compute threads.")] = None
    max_model_len: Annotated[int | None, whole("Most tokens of prompt and answer together.")] = None

    def config(self, **more: Any) -> EngineConfig:
        """The checked settings; ``more`` sets further fields of the engine.

        Raises:
            ParameterError: a value is out of range.
        """
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            max_model_len=self.max_model_len,
            **more,
        )
