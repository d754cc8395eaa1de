"""Every answer that is not a success: one exception, one JSON envelope.

Owns the translation of our own errors and of validation errors into HTTP. The envelope is OpenAI's,
always with all four keys::

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Used by all of :mod:`outrider.server`; knows no route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from outrider.errors import OutriderError, PromptError, UsageError

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED = "overloaded_error"

_MAX_MESSAGE = 600  # characters: a message may quote what was sent, which may be long


class ApiError(Exception):
    """What a client is told instead of a result.

    ``param`` names the field at fault, ``code`` is a word for programs, ``retry_after_s`` becomes
    the ``Retry-After`` header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def envelope(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.envelope(), status_code=self.status, headers=self.headers)


def refused(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request cannot be right."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str) -> ApiError:
    """A 429: sound, but there is no room for it now."""
    return ApiError(429, message, kind=OVERLOADED, code="overloaded", retry_after_s=1)


def unavailable(message: str, *, code: str) -> ApiError:
    """A 503: this server does not take requests, or no longer."""
    return ApiError(503, message, kind=OVERLOADED, code=code, retry_after_s=5)


def failed(message: str, *, code: str | None = None) -> ApiError:
    """A 500: our own fault."""
    return ApiError(500, message, kind=SERVER, code=code)


def translate(problem: OutriderError) -> ApiError:
    """One of our own errors as the client sees it; usage errors start with the setting's name."""
    message = str(problem)
    if not isinstance(problem, UsageError):
        return failed(message)
    if isinstance(problem, PromptError):
        return refused(message, param="prompt")
    name, colon, _ = message.partition(":")
    param = name.partition("[")[0].partition(" ")[0] if colon and len(name) < 40 else None
    return refused(message, param=param)


def invalid(problem: ValidationError) -> ApiError:
    """The first mistake that pydantic found; the path to the field becomes ``param``."""
    found = problem.errors(include_url=False, include_context=False)
    # A field that does not exist says more than the types that a union tried in vain.
    first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    path = _field(first["loc"])
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return refused(f"the body is not JSON: {said}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return refused(
            f"{path}: this field is not supported and would be ignored; leave it out",
            param=path,
            code="unknown_field",
        )
    if not path:  # a rule about several fields, which names the first itself
        return refused(said, param=said.partition(":")[0] if ":" in said else None)
    forms = dict.fromkeys(item["msg"] for item in found if _field(item["loc"]) == path)
    return refused(f"{path}: {'; or: '.join(forms)}".replace("Value error, ", ""), param=path)


def _field(loc: tuple[int | str, ...]) -> str:
    """The path to a field, without the names that pydantic gives to the types of a union."""
    parts = [str(part) for part in loc if isinstance(part, int) or part.isidentifier()]
    return ".".join(part for part in parts if part not in ("str", "list"))
