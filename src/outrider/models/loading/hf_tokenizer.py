"""A tokenizer from a Hugging Face folder: ``tokenizer.json`` and what stands beside it.

Follows what transformers does with ``tokenizer_config.json``, ``special_tokens_map.json`` and the
files of chat templates; never runs a tokenizer class that a checkpoint brings along. What is put
around a text is the post-processor of ``tokenizer.json`` alone: transformers 5 no longer looks at
``add_bos_token`` where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.loading.fields import Fields, read_json, read_text
from outrider.models.loading.tokenizer import TokenizerParts

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def from_folder(
    folder: Path, config: Mapping[str, Any], num_rows: int
) -> tuple[Tokenizer, TokenizerParts]:
    """Build the tokenizer of ``folder``; ``config`` is its parsed ``config.json``.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModelError: there is only a ``tokenizer.model``.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "tekken.json") if (folder / name).is_file()]
        if others:
            raise UnsupportedModelError(
                f"{folder}: only {others[0]}; save the tokenizer as tokenizer.json first"
            )
        raise CheckpointError(f"{path}: cannot be read: no such file")
    backend = _read_backend(path)
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    named = _named_tokens(folder, settings)
    _add_tokens(backend, settings, list(named.values()), settings_path)
    bos = named.get("bos_token")
    return backend, TokenizerParts(
        eos_ids=_eos_ids(folder, config, backend, named.get("eos_token")),
        bos_id=backend.token_to_id(bos) if bos else None,
        template=_template(folder, settings),
        variables=named,
        num_rows=num_rows,
    )


def _read_backend(path: Path) -> Tokenizer:
    text = read_text(path)
    try:
        backend = Tokenizer.from_str(text)
    except BaseException as error:
        # A panic of the Rust library is no Exception; nothing else but an interrupt may pass.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: not a sound tokenizer: {reason}") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


def _named_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Control tokens by their role (``bos_token`` and so on); older exports list them apart."""
    legacy_path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and legacy_path.is_file():
        settings = {**settings, **read_json(legacy_path)}
    return {
        key: spelling
        for key, value in settings.items()
        if key.endswith("_token") and (spelling := _spelling(value))
    }


def _add_tokens(
    backend: Tokenizer, settings: Mapping[str, Any], named: list[str], path: Path
) -> None:
    """Add what tokenizer_config.json declares; named and extra tokens are control tokens."""
    declared = Fields(path, settings).sub("added_tokens_decoder").values()
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, Mapping):
        extra = list(extra.values())
    try:
        tokens = [
            AddedToken(
                value["content"],
                special=bool(value.get("special", False)),
                **{flag: bool(value[flag]) for flag in _FLAGS if flag in value},
            )
            for _, value in sorted(declared.items(), key=lambda item: int(item[0]))
        ]
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([token for token in tokens if known.get(token.content) != token])
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        for spelling in [*named, *filter(None, map(_spelling, extra))]:
            token = known.get(spelling) or AddedToken(spelling, normalized=False)
            if not token.special:
                token.special = True
                backend.add_special_tokens([token])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: a special token is not declared as one") from None


def _spelling(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _eos_ids(
    folder: Path, config: Mapping[str, Any], backend: Tokenizer, eos: str | None
) -> frozenset[int]:
    """The ids that end a text: generation_config.json's and config.json's, else the tokenizer's."""
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    ids: set[int] = set()
    for path, source in ((generation_path, generation), (folder / "config.json", config)):
        value = source.get("eos_token_id")
        for one in value if isinstance(value, list) else [value]:
            ids.add(Fields(path, {"eos_token_id": one}).whole("eos_token_id", 0, 2**31 - 1, -1))
    ids.discard(-1)
    if not ids and eos and (token_id := backend.token_to_id(eos)) is not None:
        ids.add(token_id)
    return frozenset(ids)


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The default chat template; a file of its own comes before the configuration's."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template is not a string")
    return template
