"""``/health``, ``/ready``, ``/metrics``, the status page and the OpenAPI document.

Owns what an operator or a load balancer asks. None of it waits for the engine: everything is read
from the counts after its last step.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import outrider
from outrider.server.engine_desk import State
from outrider.server.errors import unavailable
from outrider.server.openapi import document
from outrider.server.service import Service
from outrider.server.status_page import PAGE

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
}
_DRAFTING_OFF = (
    "the drafter failed repeatedly and is off: texts are the same, but nothing is drafted; "
    "see the log, and restart the server to draft again"
)


class StatusRoutes:
    """The routes about the server itself."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_s = time.monotonic()
        self._document = document(service.settings.model_name)

    def routes(self) -> list[Route]:
        """For the router."""
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/status.json", self.status, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def health(self, request: HttpRequest) -> Response:  # noqa: ARG002 - a route's signature
        """Whether the process is worth keeping."""
        desk, stall_s = self._service.desk, self._service.settings.stall_s
        if desk.state is State.DEAD:
            raise unavailable("the engine has failed", code="engine_dead")
        if desk.stalled_s() > stall_s:
            raise unavailable(
                f"a step has been running for more than {stall_s:g} seconds", code="engine_stalled"
            )
        return JSONResponse({"status": "ok"})

    async def ready(self, request: HttpRequest) -> Response:
        """Whether new requests are taken."""
        state = self._service.desk.state
        if state in (State.DRAINING, State.STOPPED):
            raise unavailable("the server is shutting down", code="shutdown")
        await self.health(request)
        warning = {"warning": _DRAFTING_OFF} if self._service.desk.stats.drafting_off else {}
        return JSONResponse({"status": "ready", **warning})

    async def metrics(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """For Prometheus."""
        page = self._service.desk.metrics.page()
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def page(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """For people."""
        return HTMLResponse(PAGE, headers=_PAGE_HEADERS)

    async def openapi(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """For programs."""
        return JSONResponse(self._document)

    async def status(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """What the status page shows."""
        return JSONResponse(self._status(), headers={"Cache-Control": "no-store"})

    def _status(self) -> dict[str, Any]:
        service, stats = self._service, self._service.desk.stats
        counts = stats.speculation
        return {
            "schema_version": 1,
            "version": outrider.__version__,
            "state": service.desk.state.value,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "model": service.settings.model_name,
            "fingerprint": service.llm.fingerprint.text,
            "method": service.llm.speculation.method.value,
            "max_model_len": service.llm.max_model_len,
            "max_batch_size": service.llm.engine_config.max_batch_size,
            "waiting": stats.waiting,
            "waiting_tokens": stats.waiting_tokens,
            "prefilling": stats.prefilling,
            "running": stats.running,
            "slots_used": stats.slots_used,
            "slots_total": stats.slots_total,
            "kept_tokens": stats.kept_tokens,
            "finished": stats.finished,
            "aborted": stats.aborted,
            "failed": stats.failed,
            "refused": service.desk.metrics.num_refused(),
            "preemptions": stats.preemptions,
            "faults": stats.faults,
            "draft_faults": stats.draft_faults,
            "drafting_off": stats.drafting_off,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "emitted_tokens": stats.emitted_tokens,
            "steps": stats.steps,
            "step_s": {
                "prefill": round(stats.prefill_s, 3),
                "draft": round(stats.draft_s, 3),
                "verify": round(stats.verify_s, 3),
                "rest": round(stats.rest_s, 3),
            },
            "speculation": {
                "steps": counts.verify_steps,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "accepted_at": list(counts.accepted_at),
                "acceptance_length": round(counts.acceptance_length, 3),
                "acceptance_rate": round(counts.acceptance_rate, 3),
            },
        }
