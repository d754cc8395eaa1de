"""``/tokenize`` and ``/detokenize``: what a text is to the model."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.server.errors import refused
from outrider.server.schemas import DetokenizeRequest, TokenizeRequest
from outrider.server.service import Service
from outrider.server.translate import template_messages


class TokenRoutes:
    """The routes about tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """For the router."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: HttpRequest) -> Response:
        """Token ids of a text, or of a conversation in the model's chat template."""
        body = await self._service.read(request, TokenizeRequest)
        ids = await self._service.work(self._encode, body)
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._service.llm.max_model_len,
                "tokens": ids,
            }
        )

    async def detokenize(self, request: HttpRequest) -> Response:
        """Text of token ids, control tokens spelled out."""
        body = await self._service.read(request, DetokenizeRequest)
        vocab_size = self._service.llm.config.vocab_size
        for token in body.tokens:
            if token >= vocab_size:
                raise refused(
                    f"tokens: {token} is outside the vocabulary; allowed: 0 .. {vocab_size - 1}",
                    param="tokens",
                )
        decode = self._service.llm.tokenizer.decode
        text = await self._service.work(lambda: decode(body.tokens, skip_special_tokens=False))
        return JSONResponse({"prompt": text})

    def _encode(self, body: TokenizeRequest) -> list[int]:
        tokenizer = self._service.llm.tokenizer
        if body.messages is not None:
            return tokenizer.encode_chat(template_messages(body.messages, None))
        return tokenizer.encode(
            body.prompt or "",
            add_special_tokens=body.add_special_tokens,
            allow_special=False,
        )
