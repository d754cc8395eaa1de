"""Says in the log which of a process' servers a line is about.

Owns the name that stands for a server in its tasks and in its engine's turns, and the handler that
writes it in front. A process with one server needs no names.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

SERVER_NAME: ContextVar[str] = ContextVar("server_name", default="")


def log_to_stderr() -> None:
    """Warnings and worse to stderr, each with the name of its server, where it has one."""
    handler = logging.StreamHandler()
    handler.addFilter(_add_name)
    logging.basicConfig(
        format="%(server)s%(name)s: %(message)s", level=logging.WARNING, handlers=[handler]
    )


def _add_name(record: logging.LogRecord) -> bool:
    name = SERVER_NAME.get()
    record.server = f"[{name}] " if name else ""
    return True
