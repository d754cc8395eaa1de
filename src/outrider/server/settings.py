"""What a running server was told: names, keys and every limit, in one frozen object.

Owns defaults and their reasons. Made by :mod:`outrider.commands.serve`, read by all of
:mod:`outrider.server`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ParameterError

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and habits of one server.

    Attributes:
        model_name: what clients write into ``model``.
        api_keys: any of them opens every route; empty leaves the server open.
        allowed_hosts: what the ``Host`` header may name, ports aside; None is anything. A page of
            another site can have its name resolve to this machine, but not change that header.
        max_choices: answers that one HTTP request may ask for (prompts times ``n``).
        max_connections: open at once; further ones get 503 and are closed.
        max_body_bytes: largest request body; a prompt that fills a large context is far smaller.
        max_header_bytes: largest request head.
        read_timeout_s: a request's head and body must each have come after this time.
        write_timeout_s: a client that takes nothing for this long is cut off.
        max_buffered_bytes: text and log probabilities kept for a client that reads too slowly.
        stream_interval_s: above 0, streams send at this cadence, whatever a step emitted.
        drain_timeout_s: time for running requests to end after the first SIGTERM.
        stall_s: a step that takes longer makes ``/health`` fail.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    max_choices: int = 16
    max_connections: int = 1024
    max_body_bytes: int = MIB
    max_header_bytes: int = 64 * KIB
    read_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    max_buffered_bytes: int = MIB
    stream_interval_s: float = 0.0
    drain_timeout_s: float = 30.0
    stall_s: float = 120.0

    def __post_init__(self) -> None:
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ParameterError(
                "api_key: a key is empty or has characters that no HTTP header can carry; "
                "use printable ASCII"
            )
        for name in ("stream_interval_s", "drain_timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ParameterError(f"{name}: {getattr(self, name)} is below 0; allowed: 0 and up")
