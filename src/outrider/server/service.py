"""What all routes share: the model, the desk of its engine, the settings, and the worker threads.

Owns the way of a request through the server up to the engine: read and validate, prepare off the
event loop, submit. The routes give it meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from outrider.llm import LLM
from outrider.server.answers import Answers
from outrider.server.compute_thread import ComputeThread
from outrider.server.engine_desk import EngineDesk
from outrider.server.errors import ApiError, invalid, overloaded
from outrider.server.logprobs import TokenWriter
from outrider.server.schemas import Strict
from outrider.server.settings import ServerSettings
from outrider.server.translate import Prepared

Body = TypeVar("Body", bound=Strict)
Result = TypeVar("Result")

MAX_PREPARING = 64  # requests that are being read and tokenised; each holds a body
# Two threads tokenise and compile; more would only take the processor from the engine.
NUM_WORKERS = 2


class Service:
    """One model behind HTTP.

    Attributes:
        llm: the model.
        desk: where its engine takes requests.
        settings: names, keys, limits.
        writer: writes tokens for clients.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, computing: ComputeThread) -> None:
        self.llm = llm
        self.settings = settings
        self.desk = EngineDesk(
            llm,
            computing,
            model_name=settings.model_name,
            max_buffered_bytes=settings.max_buffered_bytes,
        )
        self.writer = TokenWriter(llm.tokenizer)
        self._workers = CapacityLimiter(NUM_WORKERS)
        self._num_preparing = 0

    async def work(self, job: Callable[..., Result], *args: Any) -> Result:
        """Run what takes time on a worker thread."""
        return await anyio.to_thread.run_sync(partial(job, *args), limiter=self._workers)

    async def read(self, request: HttpRequest, kind: type[Body]) -> Body:
        """The request's body, valid.

        Raises:
            ApiError: not JSON, not this shape, or a model that is not served here.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            # A browser may send other types across sites without asking anybody.
            raise ApiError(
                415,
                f"content-type: {content_type[:80]!r}; send 'Content-Type: application/json'",
                param="content-type",
                code="unsupported_media_type",
            )
        data = await request.body()
        try:
            body = await self.work(kind.model_validate_json, data)
        except ValidationError as problem:
            raise invalid(problem) from None
        self.check_model(getattr(body, "model", None))
        return body

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"model: {name!r} is not served here; use {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def submit(
        self, prepare: Callable[..., Prepared], *args: Any, streams: bool
    ) -> tuple[Prepared, Answers]:
        """Prepare a request and hand it to the engine; refused first where nothing fits anyway.

        Raises:
            ApiError, OutriderError: as :meth:`EngineDesk.submit` and ``prepare``.
        """
        self.desk.check_room()
        if self._num_preparing >= MAX_PREPARING:
            raise overloaded(f"{MAX_PREPARING} prompts are being read already; try again later")
        self._num_preparing += 1
        try:
            prepared = await self.work(prepare, self.llm, *args)
        finally:
            self._num_preparing -= 1
        return prepared, self.desk.submit(prepared.requests, streams=streams)

    def stop_ids(self, prepared: Prepared) -> frozenset[int]:
        """The ids that end these answers and are no part of their text."""
        params = prepared.requests[0].params
        ends = frozenset() if params.ignore_eos else self.llm.tokenizer.eos_ids
        return ends | frozenset(params.stop_token_ids)


def salt_of(request: HttpRequest) -> str:
    """What separates the caches of this request's key from those of others."""
    return request.scope["state"]["salt"]
