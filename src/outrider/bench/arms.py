"""The arms of a comparison as they were asked for: an address, a command, or our own engine.

Owns what a flag's text stands for and the command line of our own server. Every arm ends as an
OpenAI-compatible address: :mod:`outrider.bench.servers` starts those that have a command,
:mod:`outrider.bench.probe` asks each who it is. Exactly one arm is the baseline: a server that was
*started without* speculation (one that has it switched off may still pay for it).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from outrider.bench.methods import ArmName
from outrider.config import METHODS_WITH_HEAD, Method
from outrider.errors import ParameterError

_SECRET = re.compile(r"(?i)(api[-_]?key|[-_]token|password|secret)$")
_HIDDEN = "***"
PORT = "{port}"  # in a command: where the port belongs that the server is to listen on


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One arm before it is there: either ``url``, or ``command`` with ``{port}`` in it."""

    name: str
    method: str
    is_baseline: bool = False
    url: str | None = None
    command: tuple[str, ...] | None = None
    speculation: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What makes the arm what it is; a started server's port and its keys do not."""
        command = None if self.command is None else without_secrets(self.command)
        return {**asdict(self), "command": command}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Flags of our own server that all its arms share; None leaves its default."""

    model: str
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    max_model_len: int | None = None
    heads: Mapping[str, str] = field(default_factory=dict)

    def command(self, method: str, max_batch_size: int) -> tuple[str, ...]:
        """The command that serves the model with this method (``off``, ``eagle3-tree``, ...)."""
        words = [sys.executable, "-m", "outrider.cli", "serve", "--port", PORT]
        words += ["--model", self.model, "--max-batch-size", str(max_batch_size)]
        # Blocks ask the same questions again; a cache of their beginnings would hide the prefill.
        words += ["--no-prefix-cache"]
        for flag in ("dtype", "device", "threads", "max_model_len"):
            value = getattr(self, flag)
            if value is not None:
                words += [f"--{flag.replace('_', '-')}", str(value)]
        return (*words, *self._speculation_flags(method))

    def _speculation_flags(self, method: str) -> list[str]:
        if method == Method.OFF:
            return ["--method", Method.OFF.value]
        name = ArmName.parse(method)
        config = name.speculation(self.heads.get(name.method))
        words = ["--method", name.method.value]
        if name.method in METHODS_WITH_HEAD:
            words += ["--max-draft-len", str(config.max_draft_len)]
        if config.head is not None:
            words += ["--head", config.head]
        if config.use_dynamic_tree:
            words += ["--tree", "--dynamic-tree-max-topk", str(config.dynamic_tree_max_topK)]
            words += ["--max-total-draft-tokens", str(config.max_total_draft_tokens)]
        if config.with_ngram:
            words += ["--with-ngram"]
        return words


def engine_arms(methods: Sequence[str], flags: EngineFlags, max_batch_size: int) -> list[ArmSpec]:
    """An arm of our own engine per method; ``off`` is the baseline and always among them.

    Raises:
        ParameterError: an unknown method, one twice, none beside ``off``, or a head unused.
    """
    speculative = [method for method in methods if method != Method.OFF]
    if not speculative:
        raise ParameterError(
            f"--methods: {','.join(methods)!r} leaves nothing to compare with plain decoding; "
            "name a method, such as ngram"
        )
    names = [ArmName.parse(method) for method in speculative]
    for method, head in flags.heads.items():
        if method not in {name.method for name in names}:
            raise ParameterError(f"--head: {method}={head} is used by none of --methods")
    arms = [Method.OFF.value, *speculative]
    return checked(
        [
            ArmSpec(
                name=method,
                method=method,
                is_baseline=method == Method.OFF,
                command=flags.command(method, max_batch_size),
                speculation={}
                if method == Method.OFF
                else asdict(ArmName.parse(method).speculation(flags.heads.get(method))),
            )
            for method in arms
        ]
    )


def given_arms(
    targets: Sequence[str], commands: Sequence[str], baseline: str = Method.OFF.value
) -> list[ArmSpec]:
    """Arms from ``NAME=URL`` and ``NAME=COMMAND`` texts; the one named ``baseline`` comes first.

    Raises:
        ParameterError: a text of another form, an address that is none, a command without
            ``{port}``, or as :func:`checked`.
    """
    specs = []
    for text in targets:
        name, url = _named("--target", text, "off=http://127.0.0.1:8000")
        specs.append(
            ArmSpec(name=name, method=name, is_baseline=name == baseline, url=_url(text, url))
        )
    for text in commands:
        name, line = _named("--serve", text, f"off='vllm serve MODEL --port {PORT}'")
        try:
            command = tuple(shlex.split(line))
        except ValueError as problem:
            raise ParameterError(f"--serve: {line!r} is no command line: {problem}") from None
        if not any(PORT in word for word in command):
            raise ParameterError(
                f"--serve: {line!r} has no {PORT}; write it where the server's port belongs"
            )
        specs.append(ArmSpec(name=name, method=name, is_baseline=name == baseline, command=command))
    return checked(sorted(specs, key=lambda spec: not spec.is_baseline))


def checked(specs: Sequence[ArmSpec]) -> list[ArmSpec]:
    """The arms, if they are a comparison.

    Raises:
        ParameterError: a name twice, no baseline, or a baseline alone.
    """
    names = [spec.name for spec in specs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ParameterError(f"arm {min(twice)!r} is there twice; name each arm once")
    if not any(spec.is_baseline for spec in specs):
        raise ParameterError(
            f"no baseline among {', '.join(names) or 'no arms'}: name the server that was started "
            "without speculation off, or say which it is with --baseline NAME"
        )
    if len(specs) < 2:
        raise ParameterError(
            f"arm {names[0]!r} is alone: a speed-up needs a server with speculation beside it"
        )
    addresses = [spec.url for spec in specs if spec.url is not None]
    shared = {url for url in addresses if addresses.count(url) > 1}
    if shared:
        raise ParameterError(
            f"{min(shared)} is given for two arms: one server cannot be compared with itself; "
            "start the baseline as a server of its own, without speculation"
        )
    return list(specs)


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """The command as it may be kept and shown: values of keys, tokens and passwords are hidden."""
    shown: list[str] = []
    is_secret = False
    for word in command:
        name, separator, _ = word.partition("=")
        if is_secret:
            shown.append(_HIDDEN)
            is_secret = False
        elif _SECRET.search(name):
            shown.append(f"{name}={_HIDDEN}" if separator else word)
            is_secret = not separator and word.startswith("-")
        else:
            shown.append(word)
    return tuple(shown)


def _named(flag: str, text: str, example: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value or "/" in name or " " in name:
        raise ParameterError(f"{flag}: {text!r} is not NAME=..., such as {example}")
    return name, value


def _url(text: str, url: str) -> str:
    """The address without ``/v1``, which the client adds."""
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises where it is no number
    except ValueError:
        is_sound = False
    if not is_sound:
        raise ParameterError(
            f"--target: {text!r}: {url!r} is no http address, such as http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1")
