"""The ASGI application: gates in front, routes behind, one envelope for every error.

Owns the order of the gates, and that its engine is stepped as long as it lives::

    response counter > keys > body > router > handlers
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.server.auth import KeyGate
from outrider.server.errors import ApiError, failed, translate
from outrider.server.limits import BodyGate
from outrider.server.metrics import Metrics
from outrider.server.routes_openai import OpenAIRoutes
from outrider.server.routes_status import StatusRoutes
from outrider.server.routes_tokens import TokenRoutes
from outrider.server.service import Service

_log = logging.getLogger("outrider.server")


def create_app(service: Service) -> ASGIApp:
    """The application of one service; in its lifespan its engine has its turns."""
    settings = service.settings
    routes = [
        *OpenAIRoutes(service).routes(),
        *TokenRoutes(service).routes(),
        *StatusRoutes(service).routes(),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001 - its signature
        service.desk.start()
        yield
        await service.desk.stop()

    router = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            ApiError: _on_api_error,
            OutriderError: _on_our_error,
            HTTPException: _on_http_error,
        },
    )
    router.router.redirect_slashes = False
    gated = BodyGate(
        _Guard(router),
        max_body_bytes=settings.max_body_bytes,
        read_timeout_s=settings.read_timeout_s,
    )
    known = frozenset(route.path for route in routes)
    return _ResponseCounter(
        KeyGate(gated, settings.api_keys, settings.allowed_hosts), service.desk.metrics, known
    )


async def _on_api_error(request: HttpRequest, problem: Exception) -> Response:  # noqa: ARG001
    assert isinstance(problem, ApiError)
    return problem.response()


async def _on_our_error(request: HttpRequest, problem: Exception) -> Response:  # noqa: ARG001
    assert isinstance(problem, OutriderError)
    return translate(problem).response()


async def _on_http_error(request: HttpRequest, problem: Exception) -> Response:
    """The router's own: no such path, or not with this method."""
    assert isinstance(problem, HTTPException)
    path = request.url.path[:200]
    message = {
        404: f"there is no {path!r} here",
        405: f"{path!r} does not take {request.method[:20]}",
    }.get(problem.status_code, problem.detail)
    error = ApiError(
        problem.status_code,
        message,
        code={404: "not_found", 405: "method_not_allowed"}.get(problem.status_code),
        headers=problem.headers,
    )
    return error.response()


class _Guard:
    """Answers a fault of ours with the envelope; the traceback goes to the log alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            _log.exception("a route has failed")
            if scope["type"] != "http" or has_started:
                raise
            await failed("the server has failed; its log says why").response()(scope, receive, send)


class _ResponseCounter:
    """Counts every response by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, known: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A path that a client made up must not become a label: there would be no end of them.
        route = scope["path"] if scope["path"] in self._known else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted)
