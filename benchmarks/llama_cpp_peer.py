"""llama.cpp as a peer: its server's engine on a GGUF file, in its own environment's Python.

Bound through ``xllamacpp``, whose wheels hold llama.cpp compiled for common processors, and asked
without HTTP in between. The file's weights stay as they are stored (4 bits in the embedded
model's), so this arm computes with other numbers than ours and reads about a third of the bytes.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer import AnswerFunction, Launch, PeerError, Stopwatch, serve

NAME = "llama.cpp"


def launches(python: Path, gguf: Path, threads: int, context: int) -> list[Launch]:
    """llama.cpp plain."""
    return [
        Launch(
            name=f"{NAME} plain",
            engine=NAME,
            weights="the file's",
            python=python,
            script=Path(__file__),
            model=gguf,
            threads=threads,
            context=context,
        )
    ]


def load(settings: dict[str, Any]) -> tuple[str, AnswerFunction]:
    """The engine with one slot, ready."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_ctx = settings["context"]
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.hostnames, params.port = ["127.0.0.1"], 0
    server = xllamacpp.Server(params)

    def answer(prompt: list[int], max_tokens: int) -> Any:
        request = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        tokens: list[int] = []
        watch = Stopwatch()

        def take(message: Any) -> None:
            if "error" in message:
                raise PeerError(f"llama.cpp: {message['error']}")
            tokens.extend(message.get("tokens", ()))
            watch.saw(len(tokens))

        server.handle_completions(request, take)
        return watch.answer(tokens[:max_tokens])

    return f"llama.cpp (xllamacpp {version('xllamacpp')})", answer


if __name__ == "__main__":
    serve(load)
