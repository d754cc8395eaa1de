"""llama.cpp as a peer: its server's engine on a GGUF file, in its own environment's Python.

Bound through ``xllamacpp``, whose wheels hold llama.cpp compiled for common processors, and asked
without HTTP in between. The file's weights stay as they are stored (4 bits in the embedded
model's), so this arm computes with other numbers than ours and reads about a third of the bytes.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer import Answer, AnswerFunction, Launch, PeerError, serve

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

    def answer(prompt: list[int], max_tokens: int) -> Answer:
        request = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            # The one way to be told token ids; after sampling there is one candidate to list.
            "logprobs": 1,
            "post_sampling_probs": True,
        }
        started_s = time.perf_counter()
        result = server.handle_completions(request)
        total_s = time.perf_counter() - started_s
        if "choices" not in result:
            raise PeerError(f"llama.cpp refused a prompt of {len(prompt)} tokens: {result}")
        tokens = tuple(entry["id"] for entry in result["choices"][0]["logprobs"]["content"])
        # The first token falls out of the prompt's pass; llama.cpp times the later ones itself.
        return Answer(tokens, total_s, result["timings"]["predicted_ms"] / 1000, num_first=1)

    return f"llama.cpp (xllamacpp {version('xllamacpp')})", answer


if __name__ == "__main__":
    serve(load)
