"""The arms of the demonstration: what a method's name stands for, and which ones a model has.

Owns the choice where none was asked for; the names are those of :mod:`outrider.bench.methods`.
:mod:`outrider.cli` parses and opens with it, before :mod:`outrider.commands.demo` measures.

A method has an arm where something can draft: a head that was given, the module inside
the model's own checkpoint, or a head that ships for the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.bench.methods import ArmName, all_names
from outrider.config import METHODS_WITH_HEAD, Method
from outrider.errors import ParameterError
from outrider.models.loading.heads import has_mtp, shipped_heads
from outrider.models.loading.hub import display_name

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.pairing import TargetFiles

Heads = Mapping[Method, str | None]  # where each head is; None: where the method looks by itself

# The shape in which each method does best.
_BEST = {
    Method.NGRAM: ArmName(Method.NGRAM),
    Method.DRAFT: ArmName(Method.DRAFT),
    Method.MEDUSA: ArmName(Method.MEDUSA, is_tree=True),
    Method.MTP: ArmName(Method.MTP, is_tree=True),
    Method.EAGLE3: ArmName(Method.EAGLE3, is_tree=True, with_ngram=True),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to decode, by its name in the tables."""

    name: str
    llm: LLM


def parse_methods(text: str | None) -> list[ArmName]:
    """The names of a comma-separated list; none where none was given.

    ``off`` may be among them and adds nothing: plain decoding is measured beside the others anyway.

    Raises:
        ParameterError: an unknown name, one twice, or nothing but ``off``.
    """
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    names = [ArmName.parse(word) for word in words if word != Method.OFF]
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise ParameterError(f"--methods: {twice[0]} is there twice; name each method once")
    if not names:
        raise ParameterError(
            f"--methods: {text!r} leaves nothing to compare with plain decoding; name a method, "
            "such as ngram"
        )
    return names


def parse_heads(items: Sequence[str]) -> dict[Method, str]:
    """Where heads lie, from ``METHOD=DIR`` each.

    Raises:
        ParameterError: another form, a method without a head, or one method twice.
    """
    found: dict[Method, str] = {}
    for item in items:
        word, _, where = item.partition("=")
        if word not in METHODS_WITH_HEAD or not where:
            raise ParameterError(
                f"--head: {item!r} is not METHOD=DIR with one of {', '.join(METHODS_WITH_HEAD)}"
            )
        if word in found:
            raise ParameterError(f"--head: {word} has two heads; measure one after the other")
        found[Method(word)] = where
    return found


def available_heads(files: TargetFiles, given: Mapping[Method, str]) -> Heads:
    """The methods whose head was given, is inside the model's checkpoint, or ships for it.

    Raises:
        CheckpointError: a head in the package, or the model's own files, are damaged.
    """
    heads: dict[Method, str | None] = dict(given)
    shipped = {
        head.method for head in shipped_heads(files.weights_hash, files.tokenizer.fingerprint)
    }
    if has_mtp(files.path):
        shipped.add(Method.MTP)
    return heads | {method: None for method in shipped if method not in given}


def choose_arms(asked: Sequence[ArmName], heads: Heads, model: str) -> list[ArmName]:
    """What was asked for, else n-gram and the best shape of every head there is.

    Raises:
        ParameterError: a method without a head, or a head that no method uses.
    """
    there = [method for method in Method if method is Method.NGRAM or method in heads]
    if not asked:
        return [_BEST[method] for method in there]
    for name in asked:
        if name.method not in there:
            names = ", ".join(str(one) for one in all_names(there))
            raise ParameterError(
                f"--methods: {name} has no head for {model}; there are: {names}; or give a head "
                f"with --head {name.method}=DIR"
            )
    used = {name.method for name in asked}
    for method, where in heads.items():
        if where is not None and method not in used:
            raise ParameterError(
                f"--head: {method}={where} is used by none of --methods "
                f"{','.join(map(str, asked))}; add {_BEST[method]}, or leave out the head"
            )
    return list(asked)


def open_arms(llm: LLM, asked: Sequence[ArmName], given: Mapping[Method, str]) -> list[Arm]:
    """The chosen ways to draft, on the weights of ``llm``.

    Raises:
        CapacityError: their caches and heads do not fit together.
        OutriderError: as :func:`choose_arms` and ``LLM.with_speculation``.
    """
    heads = available_heads(llm.files, given)
    names = choose_arms(asked, heads, display_name(llm.files.path))
    arms = [
        Arm(str(name), llm.with_speculation(name.speculation(heads.get(name.method))))
        for name in names
    ]
    # Each was checked alone, when the caches of those before it were not in use yet.
    first, *others = (arm.llm.memory_plan.without_weights() for arm in arms)
    first.plus(item for plan in others for item in plan.items).check()
    return arms
