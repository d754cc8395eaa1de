"""Which ways to draft a model has, and how long its prompts are, before anything of it runs.

Owns the choice where no ``--methods`` were given, and the early no to a method that has no head:
a server that finds out for itself takes half a minute. A method can draft where a head was given,
ships for the model, or is a module inside its checkpoint. Reads headers, hashes and the tokeniser
only. Used by :mod:`outrider.commands.survey`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from outrider.bench.methods import ArmName, all_names
from outrider.commands.survey import Prompt
from outrider.config import METHODS_WITH_HEAD, Method
from outrider.errors import ParameterError, PromptError
from outrider.models.loading import Tokenizer, load
from outrider.models.loading.heads import has_mtp, shipped_heads
from outrider.models.loading.hub import display_name, resolve
from outrider.types import ProgressCallback

# The shape in which each method does best.
_BEST = {
    Method.NGRAM: ArmName(Method.NGRAM),
    Method.DRAFT: ArmName(Method.DRAFT),
    Method.MEDUSA: ArmName(Method.MEDUSA, is_tree=True),
    Method.MTP: ArmName(Method.MTP, is_tree=True),
    Method.EAGLE3: ArmName(Method.EAGLE3, is_tree=True, with_ngram=True),
}


def chosen_methods(
    asked: Sequence[str],
    model: str,
    heads: Mapping[str, str],
    on_progress: ProgressCallback,
) -> list[str]:
    """What was asked for if it can draft; without any, plain decoding and each method's best shape.

    ``heads`` are those given, by method. The model is fetched if it is not there.

    Raises:
        ParameterError: an unknown method, or one without a head.
        OutriderError: the model cannot be had or opened.
    """
    names = [ArmName.parse(word) for word in asked if word != Method.OFF]
    if names and all(n.method not in METHODS_WITH_HEAD or n.method in heads for n in names):
        return list(asked)
    path = resolve(model, pull=True, on_progress=on_progress)
    there = (Method.NGRAM, *with_heads(path, heads))
    if not names:
        return [Method.OFF.value, *(str(_BEST[method]) for method in there)]
    for name in names:
        if name.method not in there:
            known = ", ".join(str(one) for one in all_names(there))
            raise ParameterError(
                f"--methods: {name} has no head for {display_name(path)}; there are: {known}; or "
                f"give a head with --head {name.method}=DIR"
            )
    return list(asked)


def prompt_room(
    model: str, prompts: Sequence[Prompt], on_progress: ProgressCallback
) -> tuple[int | None, int]:
    """Tokens of the longest of these prompts, as our server counts them, and of the context.

    The first is None where the model cannot take a prompt.

    Raises:
        OutriderError: the model cannot be had or opened.
    """
    checkpoint = load(resolve(model, pull=True, on_progress=on_progress))
    checkpoint.weights.close()
    try:
        longest = max(num_tokens(checkpoint.tokenizer, prompt) for prompt in prompts)
    except PromptError:
        longest = None
    return longest, checkpoint.config.max_position


def num_tokens(tokenizer: Tokenizer, prompt: Prompt) -> int:
    """Tokens of a text or of a conversation of (role, content) pairs.

    Raises:
        PromptError: the tokeniser or its chat template refuses it.
    """
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt, allow_special=False))
    messages = [{"role": role, "content": content} for role, content in prompt]
    return len(tokenizer.encode_chat(messages))


def with_heads(path: Path, given: Collection[str]) -> list[Method]:
    """The methods that a head is there for, in the methods' order.

    Raises:
        CheckpointError: the model's files, or a head in the package, are damaged.
    """
    checkpoint = load(path)
    shipped = shipped_heads(checkpoint.weights_hash, checkpoint.tokenizer.fingerprint)
    found = {*given, *(head.method for head in shipped)}
    if has_mtp(path):
        found.add(Method.MTP)
    return [method for method in METHODS_WITH_HEAD if method in found]
