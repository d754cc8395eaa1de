"""The command line as it was typed, fit to be published with what came of it.

Owns what is left out: where things lie on this machine. Used by
:mod:`outrider.commands.train_options` for the manifest of a head.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def published_command(words: Sequence[str]) -> str:
    """The command, quoted for a shell; paths outside the working folder by their last name only.

    ``words`` follow the program's name. Absolute paths inside the working folder become relative.
    """
    return shlex.join(["outrider", *map(_published, words)])


def _published(word: str) -> str:
    """One argument, which may be ``--flag=value``."""
    flag, separator, value = word.partition("=")
    if word.startswith("-") and separator:
        return f"{flag}={_without_place(value)}"
    return _without_place(word)


def _without_place(word: str) -> str:
    """A path without the part that is this machine's alone; any other word as it is."""
    path = Path(word)
    if word.startswith("~"):  # in quotes, else the shell has put the home folder in its place
        return path.name
    if not path.is_absolute() and ".." not in path.parts:
        return word
    whole, here = path.resolve(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else whole.name or word
