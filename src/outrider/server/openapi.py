"""The OpenAPI document: request bodies from :mod:`.schemas`, answers and errors in outline.

Owns what tools that read such documents (clients, fuzzers) are told. The rules that a JSON schema
cannot say (two fields that exclude each other) are left to the error messages.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

import outrider
from outrider.server import schemas

_JSON = "application/json"
_REF = "#/components/schemas/{model}"

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_COMPLETION = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage", "speculative"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "choices": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["index", "finish_reason", "logprobs"],
                "properties": {
                    "index": {"type": "integer"},
                    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                },
            },
        },
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
        },
        "speculative": {
            "type": "object",
            "required": ["drafted", "accepted", "steps", "acceptance_length"],
        },
    },
}
_TOKENS = {
    "type": "object",
    "required": ["count", "max_model_len", "tokens"],
    "properties": {"tokens": {"type": "array", "items": {"type": "integer"}}},
}
_TEXT = {
    "type": "object",
    "required": ["prompt"],
    "properties": {"prompt": {"type": "string"}},
}
_MODEL = {"type": "object", "required": ["id", "object", "created", "owned_by"]}
_MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"data": {"type": "array", "items": _MODEL}},
}
_OBJECT = {"type": "object"}
_EVENTS = {"description": "With stream: one event per chunk, an object as JSON; then [DONE]."}

_POSTS = {
    "/v1/chat/completions": ("Answer a conversation.", schemas.ChatRequest, _COMPLETION),
    "/v1/completions": ("Continue texts.", schemas.CompletionRequest, _COMPLETION),
    "/tokenize": ("Token ids of a text.", schemas.TokenizeRequest, _TOKENS),
    "/detokenize": ("Text of token ids.", schemas.DetokenizeRequest, _TEXT),
}
_GETS = {
    "/v1/models": ("The model that is served.", _JSON, _MODELS),
    "/health": ("Whether the process is worth keeping.", _JSON, _OBJECT),
    "/ready": ("Whether new requests are taken.", _JSON, _OBJECT),
    "/metrics": ("Counters for Prometheus.", "text/plain", {"type": "string"}),
    "/status.json": ("What the status page shows.", _JSON, _OBJECT),
}
_POST_ERRORS = {
    "400": "The request cannot be right.",
    "401": "No valid API key.",
    "403": "The Host header names another machine.",
    "404": "The model is not served here.",
    "408": "The body came too slowly.",
    "413": "The body is too long.",
    "415": "The body is not sent as JSON.",
    "429": "The queue is full; see Retry-After.",
    "500": "The request failed.",
    "503": "The server is shutting down.",
}


def document(model_name: str) -> dict[str, Any]:
    """The whole document for a server of this model."""
    bodies = [(body, "validation") for _, body, _ in _POSTS.values()]
    _, made = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    components = made["$defs"]
    for _, body, _ in _POSTS.values():
        model = components[body.__name__]["properties"]["model"]
        model.clear()
        model.update({"type": "string", "enum": [model_name]})
    components["Error"] = _ERROR
    paths: dict[str, Any] = {
        path: {"post": _post(summary, body.__name__, answer)}
        for path, (summary, body, answer) in _POSTS.items()
    }
    for path, (summary, media_type, answer) in _GETS.items():
        paths[path] = {"get": _get(summary, media_type, answer)}
    paths["/v1/models/{name}"] = {
        "get": {
            **_get("One model.", _JSON, _MODEL),
            "parameters": [
                {
                    "name": "name",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "minLength": 1},
                }
            ],
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": outrider.__version__},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(summary: str, body: str, answer: dict[str, Any]) -> dict[str, Any]:
    contents: dict[str, Any] = {_JSON: {"schema": answer}}
    if answer is _COMPLETION:
        contents["text/event-stream"] = {"schema": _EVENTS}
    return {
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": {"$ref": _REF.format(model=body)}}},
        },
        "responses": {"200": {"description": "Done.", "content": contents}, **_errors()},
    }


def _get(summary: str, media_type: str, answer: dict[str, Any]) -> dict[str, Any]:
    done = {"description": "Done.", "content": {media_type: {"schema": answer}}}
    return {"summary": summary, "responses": {"200": done, **_errors()}}


def _errors() -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": _REF.format(model="Error")}}}
    return {
        status: {"description": text, "content": content} for status, text in _POST_ERRORS.items()
    }
