"""Every error that Outrider raises on purpose, in one tree.

::

    OutriderError
    ├── UsageError (also a ValueError)      the caller can fix it: exit status 2
    │   ├── ParameterError                  a sampling, speculation or engine setting out of range
    │   ├── PromptError                     an empty, undecodable or too long prompt
    │   └── UnknownModelError               no such name, folder or file
    └── FailureError                        the work could not be done: exit status 1
        ├── CheckpointError                 files that are broken, incomplete or not a model
        │   ├── UnsafeFileError             a pickle or code where only data is read
        │   └── UnsupportedModelError       a sound checkpoint of an architecture we do not have
        ├── DownloadError                   a pull that did not finish or did not match its hash
        ├── CapacityError                   memory or disk is too small
        ├── OverloadedError                 the queue is full; the same request may fit later
        ├── EndpointError                   a server under test that cannot be measured
        ├── RecordError                     a run folder that is missing, torn or of another schema
        └── TrainingError                   a loss that is no number any more, or too little data

User mistakes raise one of these and say the value, what is allowed and what to do.
Broken invariants of our own are plain ``assert``.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "DownloadError",
    "EndpointError",
    "FailureError",
    "OutriderError",
    "OverloadedError",
    "ParameterError",
    "PromptError",
    "RecordError",
    "TrainingError",
    "UnknownModelError",
    "UnsafeFileError",
    "UnsupportedModelError",
    "UsageError",
]


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose; ``exit_status`` is the command's."""

    exit_status = 1


class UsageError(OutriderError, ValueError):
    """What was asked for cannot be right; nothing was started."""

    exit_status = 2


class ParameterError(UsageError):
    """A setting is out of range, of the wrong type, or in conflict with another."""


class PromptError(UsageError):
    """A prompt is empty, is not text, or does not fit the context."""


class UnknownModelError(UsageError):
    """No model of that name, and no such folder or file."""


class FailureError(OutriderError):
    """The request was sound, but the work could not be done."""


class CheckpointError(FailureError):
    """A model's files are broken, incomplete, or not a model at all."""


class UnsafeFileError(CheckpointError):
    """A file that would have to be executed to be read (pickle, code); never opened."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but its architecture or format is not one of ours."""


class DownloadError(FailureError):
    """A model could not be fetched, or what came does not match its hash."""


class CapacityError(FailureError):
    """What was asked for does not fit in memory."""


class OverloadedError(FailureError):
    """Too many requests wait already; nothing is wrong with this one, and it may fit later."""


class EndpointError(FailureError):
    """A server is down, silent, speaks no OpenAI API, or serves another model than asked."""


class RecordError(FailureError):
    """A run folder is missing, incomplete, or written by another version of the records."""


class TrainingError(FailureError):
    """A training run cannot go on: its loss is no longer a number, or there is too little data."""
