"""Who may ask: API keys compared in constant time, and the salt that separates their caches.

Owns the reading of the ``Authorization`` and ``Host`` headers. A raw ASGI middleware in front of
the router, so no route can be forgotten: everything but ``/health`` and ``/ready`` needs a key,
unknown paths too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})


class KeyGate:
    """Refuses requests without a valid key; the others carry their key's salt.

    A browser cannot send a bearer token, so the key is also taken as the password of HTTP basic
    authentication, whatever the user's name.

    Args:
        app: who is asked next.
        keys: the valid ones; none leaves every route open.
        hosts: what the ``Host`` header may name; None is anything.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], hosts: frozenset[str] | None = None
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._digests = [_digest(key) for key in keys]
        self._secret = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one connection."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if self._hosts is not None and _host(headers) not in self._hosts:
                await _wrong_host(_host(headers)).response()(scope, receive, send)
                return
            key = _given_key(headers.get("authorization", ""))
            if self._digests and scope["path"] not in OPEN_PATHS and not self._is_known(key):
                await _refusal(key).response()(scope, receive, send)
                return
            scope.setdefault("state", {})["salt"] = self._salt(key)
        await self._app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        """Compares with every key, so that the time tells nothing about which one was close."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return bool(key) and any(matches)

    def _salt(self, key: str) -> str:
        """Requests of different keys share no cached prefix; nobody can guess another's salt."""
        if not self._digests:
            return ""
        return hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()


def _digest(key: str) -> bytes:
    """Of one length for all keys: a comparison would otherwise give the length away."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host(headers: Headers) -> str:
    """The host that a request names, without its port and in lower case."""
    host = headers.get("host", "").strip().lower()
    if host.startswith("["):  # an IPv6 address has colons of its own
        return host[: host.find("]") + 1]
    return host.partition(":")[0]


def _wrong_host(host: str) -> ApiError:
    return ApiError(
        403,
        f"host: {host[:80]!r} is not this server's name; without an API key, a server of this "
        "machine alone answers only to the machine's own names",
        kind="permission_error",
        param="host",
        code="wrong_host",
    )


def _given_key(header: str) -> str:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(value.strip(), validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
        return pair.partition(":")[2]
    return ""


def _refusal(key: str) -> ApiError:
    message = (
        "the API key is not one of this server's"
        if key
        else "this server needs an API key: send the header 'Authorization: Bearer KEY'"
    )
    return ApiError(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Basic realm="outrider", charset="UTF-8"'},
    )
