"""The flags of ``outrider serve``: where it listens, who may ask, how much may run and wait.

Owns their names, help and defaults, and the reading of keys. Used by :mod:`outrider.cli`; imports
neither torch nor the web framework, so that a wrong flag is refused at once.
"""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from outrider.bench.methods import ArmName
from outrider.commands.options import whole_number
from outrider.config import METHODS_WITH_HEAD, AdmissionLimits, Method, SpeculationConfig
from outrider.errors import ParameterError, UsageError

KEY_VARIABLE = "OUTRIDER_API_KEY"
_MAX_KEY_FILE = 1 << 20


def _flag(text: str, **settings: Any) -> Parameter:
    return Parameter(help=text, **settings)


def _whole(text: str) -> Parameter:
    return _flag(text, converter=whole_number)


@dataclass(frozen=True, slots=True)
class Other:
    """One more server on the same weights: where it listens, and what drafts for it.

    ``name`` is the method as in ``--also``.
    """

    port: int
    name: str
    speculation: SpeculationConfig

    @classmethod
    def parse(cls, text: str) -> Other:
        """What ``PORT=METHOD`` or ``PORT=METHOD=HEAD`` says.

        Raises:
            ParameterError: it says neither.
        """
        port, _, rest = text.partition("=")
        name, has_head, head = rest.partition("=")
        if not (port.isascii() and port.isdigit() and name) or (has_head and not head):
            raise ParameterError(
                f"--also: {text!r} is not PORT=METHOD, such as 8001=off, or PORT=METHOD=HEAD"
            )
        if int(port) > 65535:
            raise ParameterError(f"--also: {text!r}: port {port} is outside 0 .. 65535")
        if name == Method.OFF and not head:
            return cls(int(port), name, SpeculationConfig(method=Method.OFF))
        method = ArmName.parse(name, flag="--also")
        if has_head and method.method not in METHODS_WITH_HEAD:
            raise ParameterError(f"--also: {text!r}: {name} takes no head; leave out ={head}")
        return cls(int(port), name, method.speculation(head or None))


@Parameter(name="*", group=Group("Serving", sort_key=0))
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How one server listens, and its limits."""

    host: Annotated[str, _flag("Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1"
    port: Annotated[int, _whole("Port to listen on; 0 takes any free one.")] = 8000
    api_key: Annotated[
        list[str],
        _flag(
            f"Key that clients must send; may be repeated. Better in {KEY_VARIABLE} or a file: "
            "other users of this machine can read a command line.",
            negative="",
            show_default=False,
        ),
    ] = field(default_factory=list)
    api_key_file: Annotated[Path | None, _flag("File with one key per line.")] = None
    served_model_name: Annotated[
        str | None, _flag("What clients write into `model`. Without it: the model's own name.")
    ] = None
    max_batch_size: Annotated[int, _whole("Requests decoded together.")] = 16
    max_slots: Annotated[
        int | None,
        _whole("Tokens of all running requests together; beyond it the youngest waits again."),
    ] = None
    max_waiting: Annotated[int, _whole("Requests that may wait; further ones get 429.")] = 64
    max_waiting_tokens: Annotated[int, _whole("Prompt tokens that may wait.")] = 65536
    prefix_cache: Annotated[
        bool,
        _flag("Reuse the beginnings of earlier requests of the same key."),
    ] = True
    also: Annotated[
        list[str],
        _flag(
            "PORT=METHOD or PORT=METHOD=HEAD: the same weights once more, on another port, "
            "drafting by a method as bench names them (off, ngram, eagle3-tree+ngram ...); may be "
            "repeated. For comparing: one process, one copy of the weights, a cache each.",
            negative="",
            show_default=False,
        ),
    ] = field(default_factory=list)
    drain_timeout: Annotated[
        float, _flag("Seconds that running requests get to end after SIGTERM.")
    ] = 30.0
    stream_interval: Annotated[
        int,
        _whole(
            "Milliseconds between two events of a stream, whatever a step wrote; hides how much "
            "was guessed right. 0 sends at once."
        ),
    ] = 0

    def check(self) -> None:
        """Refuse what is out of range, before anything is loaded.

        Raises:
            ParameterError: names the flag and what is allowed.
        """
        if not 0 <= self.port <= 65535:
            raise ParameterError(f"--port: {self.port} is outside 0 .. 65535")
        if not 0 <= self.stream_interval <= 10_000:
            raise ParameterError(f"--stream-interval: {self.stream_interval} is outside 0 .. 10000")
        if not (math.isfinite(self.drain_timeout) and 0 <= self.drain_timeout <= 86_400):
            raise ParameterError(f"--drain-timeout: {self.drain_timeout:g} is outside 0 .. 86400")
        if self.served_model_name is not None and not 0 < len(self.served_model_name) <= 256:
            raise ParameterError("--served-model-name: give 1 to 256 characters")
        self.engine_fields()
        self.others()

    def others(self) -> list[Other]:
        """What ``--also`` asks for.

        Raises:
            ParameterError: a text of another form, an unknown method, or a port that is taken
                twice.
        """
        others = [Other.parse(text) for text in self.also]
        ports = [port for port in (self.port, *(other.port for other in others)) if port]
        twice = next((port for port in ports if ports.count(port) > 1), None)
        if twice is not None:
            raise ParameterError(
                f"--also: port {twice} is there twice; give each server one of its own"
            )
        return others

    def engine_fields(self) -> dict[str, Any]:
        """The fields of the engine's settings that these flags set.

        Raises:
            ParameterError: a limit is out of range.
        """
        limits = AdmissionLimits(
            max_waiting=self.max_waiting, max_waiting_tokens=self.max_waiting_tokens
        )
        return {
            "max_batch_size": self.max_batch_size,
            "max_slots": self.max_slots,
            "prefix_cache": self.prefix_cache,
            "admission": limits,
        }

    def keys(self) -> tuple[str, ...]:
        """All keys, from the flags, the file and the environment.

        Raises:
            UsageError: the file cannot be read or holds no key.
        """
        keys = [*self.api_key]
        if self.api_key_file is not None:
            keys += _read_keys(self.api_key_file)
        if os.environ.get(KEY_VARIABLE):
            keys.append(os.environ[KEY_VARIABLE])
        return tuple(dict.fromkeys(keys))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _read_keys(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_KEY_FILE).decode("ascii")
    except OSError as problem:
        raise UsageError(f"--api-key-file {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise UsageError(
            f"--api-key-file {path}: a key has characters beyond ASCII; write one key per line"
        ) from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise UsageError(f"--api-key-file {path}: holds no key; write one per line")
    return keys
