"""The arms of a comparison as they were asked for: an address, a command, or our own engine.

Owns what a flag's text stands for and the command line of our own server. Every arm ends as an
OpenAI-compatible address: :mod:`outrider.bench.servers` starts those that have a command,
:mod:`outrider.bench.probe` asks each who it is. Exactly one arm is the baseline: a server that was
*started without* speculation (one that has it switched off may still pay for it).

The arms of our own engine share one process, in which there is one copy of the target's weights
and one thread that computes: five processes take the memory of five targets. Each arm has an engine
and a cache of its own there, and the baseline's engine has no drafter.
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


def port_of(arm: str) -> str:
    """What stands for this arm's port in a command that serves several; the first's is ``PORT``."""
    return f"{{port:{arm}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One arm before it is there: either ``url``, or ``command`` with ``{port}`` in it.

    ``process`` names the arms that the command serves, where there are several; all of these have
    the same command.
    """

    name: str
    method: str
    is_baseline: bool = False
    url: str | None = None
    command: tuple[str, ...] | None = None
    process: tuple[str, ...] = ()
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served_with(self) -> tuple[str, ...]:
        """The arms that one process serves, this one among them."""
        return self.process or (self.name,)

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

    def command(self, methods: Sequence[str], max_batch_size: int) -> tuple[str, ...]:
        """The command that serves the model with these methods (``off``, ``eagle3-tree``, ...).

        The first one's port is ``PORT``, another one's ``port_of`` it.
        """
        first, *others = methods
        words = [sys.executable, "-m", "outrider.cli", "serve", "--port", PORT]
        words += ["--model", self.model, "--max-batch-size", str(max_batch_size)]
        # Blocks ask the same questions again; a cache of their beginnings would hide the prefill.
        words += ["--no-prefix-cache"]
        for flag in ("dtype", "device", "threads", "max_model_len"):
            value = getattr(self, flag)
            if value is not None:
                words += [f"--{flag.replace('_', '-')}", str(value)]
        words += self._speculation_flags(first)
        for other in others:
            head = None if other == Method.OFF else self.heads.get(ArmName.parse(other).method)
            words += ["--also", "=".join([port_of(other), other, *([head] if head else [])])]
        return tuple(words)

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


def engine_arms(
    methods: Sequence[str], flags: EngineFlags, max_batch_size: int, *, are_apart: bool = False
) -> list[ArmSpec]:
    """An arm of our own engine per method; ``off`` is the baseline and always among them.

    One process serves all, or, with ``are_apart``, each has one of its own.

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
    process = () if are_apart else tuple(arms)
    return checked(
        [
            ArmSpec(
                name=method,
                method=method,
                is_baseline=method == Method.OFF,
                command=flags.command(process or [method], max_batch_size),
                process=process,
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
