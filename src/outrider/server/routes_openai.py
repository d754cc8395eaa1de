"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

Owns the order of work for one request: read, prepare, submit, then either wait for all completions
or turn chunks into events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.server.answers import Answers
from outrider.server.errors import ApiError
from outrider.server.replies import (
    ChatDeltas,
    Header,
    TextDeltas,
    Totals,
    chat_choice,
    text_choice,
    token_ids,
)
from outrider.server.schemas import ChatRequest, CompletionRequest, Sampling
from outrider.server.service import Service, salt_of
from outrider.server.streaming import EventStream, batches, watching
from outrider.server.translate import Prepared, prepare_chat, prepare_completion
from outrider.types import Completion, TextChunk, TokenLogprobs


class Deltas(Protocol):
    """One choice of a stream."""

    def feed(
        self,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        completion: Completion | None,
    ) -> dict[str, Any] | None:
        """The choice for new text; None while there is nothing to say yet."""
        ...


@dataclass(frozen=True, slots=True)
class Stream:
    """Everything that one stream's events are made from."""

    header: Header
    answers: Answers
    totals: Totals
    deltas: Sequence[Deltas]
    wants_usage: bool
    wants_running_usage: bool
    interval_s: float
    opening: Sequence[dict[str, Any]] = ()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The objects to send, in order.

        Raises:
            ApiError: an answer did not end well.
        """
        for choice in self.opening:
            yield self._event([choice], 0)
        num_tokens = 0
        open_choices = set(range(len(self.deltas)))
        async for batch in batches(self.answers, self.interval_s):
            news = merged(batch)
            # At a fixed cadence every open choice speaks each time, even if it has nothing to say.
            due = sorted(open_choices if self.interval_s > 0 else news)
            for index in due:
                chunk = news.get(index, _NOTHING)
                num_tokens += len(chunk.token_ids)
                if chunk.completion is not None:
                    open_choices.discard(index)
                    self.totals.add(index, chunk.completion)
                elif not (chunk.text or chunk.logprobs or self.interval_s > 0):
                    continue
                choice = self.deltas[index].feed(chunk.text, chunk.logprobs, chunk.completion)
                if choice is not None:
                    is_last = not open_choices and not self.wants_usage
                    yield self._event([choice], num_tokens, **self._closing(is_last))
        if self.wants_usage:
            event = self._event([], num_tokens, **self._closing(True))
            yield {**event, "usage": self.totals.usage()}

    def _closing(self, is_last: bool) -> dict[str, Any]:
        return {"speculative": self.totals.speculative()} if is_last else {}

    def _event(
        self, choices: Sequence[dict[str, Any]], num_tokens: int, **more: Any
    ) -> dict[str, Any]:
        """``num_tokens``: of all choices, those of this event included."""
        if self.wants_running_usage:
            more["usage"] = self.totals.running_usage(num_tokens)
        elif self.wants_usage:
            more["usage"] = None
        return self.header.reply(choices, **more)


_NOTHING = TextChunk("", ())


def merged(batch: Sequence[tuple[int, TextChunk]]) -> dict[int, TextChunk]:
    """What came for each choice, as one piece."""
    news: dict[int, TextChunk] = {}
    for index, chunk in batch:
        before = news.get(index, _NOTHING)
        logprobs = before.logprobs
        if chunk.logprobs is not None:
            logprobs = (*(logprobs or ()), *chunk.logprobs)
        news[index] = TextChunk(
            before.text + chunk.text,
            before.token_ids + chunk.token_ids,
            before.completion or chunk.completion,
            logprobs,
        )
    return news


class OpenAIRoutes:
    """The routes that OpenAI's clients call."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """For the router."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
        ]

    async def chat(self, request: HttpRequest) -> Response:
        """Answer a conversation."""
        service = self._service
        body = await service.read(request, ChatRequest)
        prepared, answers = await service.submit(
            prepare_chat, body, salt_of(request), streams=bool(body.stream)
        )
        stop_ids, plan = service.stop_ids(prepared), prepared.tool_plan
        if body.stream:
            header = self._header("chat.completion.chunk", "chatcmpl")
            deltas = [
                ChatDeltas(
                    index,
                    plan,
                    service.writer,
                    stop_ids,
                    wants_logprobs=bool(body.logprobs),
                    wants_ids=bool(body.return_token_ids),
                )
                for index in range(prepared.num_choices)
            ]
            stream = self._stream(body, prepared, answers, header=header, deltas=deltas)
            return self._respond(body, replace(stream, opening=[d.role() for d in deltas]))

        def choice(index: int, completion: Completion) -> dict[str, Any]:
            told = chat_choice(index, completion, plan, service.writer, stop_ids)
            return told | token_ids(completion, is_wanted=bool(body.return_token_ids))

        header = self._header("chat.completion", "chatcmpl")
        return await self._whole(request, prepared, answers, header, choice)

    async def complete(self, request: HttpRequest) -> Response:
        """Continue texts."""
        service = self._service
        body = await service.read(request, CompletionRequest)
        prepared, answers = await service.submit(
            prepare_completion,
            body,
            salt_of(request),
            service.settings.max_choices,
            streams=bool(body.stream),
        )
        stop_ids = service.stop_ids(prepared)
        echoed = [
            service.llm.tokenizer.decode(ids) if body.echo else ""
            for ids in prepared.prompts
            for _ in range(prepared.num_choices)
        ]
        header = self._header("text_completion", "cmpl")
        if body.stream:
            deltas = [
                TextDeltas(
                    index,
                    text,
                    service.writer,
                    stop_ids,
                    wants_logprobs=body.logprobs is not None,
                    wants_ids=bool(body.return_token_ids),
                )
                for index, text in enumerate(echoed)
            ]
            stream = self._stream(body, prepared, answers, header=header, deltas=deltas)
            return self._respond(body, stream)

        def choice(index: int, completion: Completion) -> dict[str, Any]:
            told = text_choice(index, completion, echoed[index], service.writer, stop_ids)
            return told | token_ids(completion, is_wanted=bool(body.return_token_ids))

        return await self._whole(request, prepared, answers, header, choice)

    async def models(self, request: HttpRequest) -> Response:  # noqa: ARG002 - a route's signature
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        """One model by name."""
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._service.settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            "max_model_len": self._service.llm.max_model_len,
        }

    def _header(self, kind: str, prefix: str) -> Header:
        service = self._service
        return Header.new(kind, prefix, service.settings.model_name, service.llm.fingerprint.text)

    def _stream(
        self,
        body: Sampling,
        prepared: Prepared,
        answers: Answers,
        *,
        header: Header,
        deltas: Sequence[Deltas],
    ) -> Stream:
        options = body.stream_options
        return Stream(
            header=header,
            answers=answers,
            totals=_totals(prepared),
            deltas=deltas,
            wants_usage=options is not None and bool(options.include_usage),
            wants_running_usage=options is not None and bool(options.continuous_usage_stats),
            interval_s=self._service.settings.stream_interval_s,
        )

    def _respond(self, body: Sampling, stream: Stream) -> Response:
        options = body.stream_options
        return EventStream(
            stream.events(),
            stream.answers,
            write_timeout_s=self._service.settings.write_timeout_s,
            pads=options is not None and bool(options.include_obfuscation),
        )

    async def _whole(
        self,
        request: HttpRequest,
        prepared: Prepared,
        answers: Answers,
        header: Header,
        choice: Callable[[int, Completion], dict[str, Any]],
    ) -> Response:
        totals = _totals(prepared)
        with watching(request.receive, answers):
            try:
                completions = await answers.completions()
            except ApiError:
                answers.abort("failed")
                raise
        for index, completion in enumerate(completions):
            totals.add(index, completion)
        choices = [choice(index, completion) for index, completion in enumerate(completions)]
        reply = header.reply(choices, usage=totals.usage(), speculative=totals.speculative())
        return JSONResponse(reply)


def _totals(prepared: Prepared) -> Totals:
    return Totals(list(map(len, prepared.prompts)), prepared.num_choices)
