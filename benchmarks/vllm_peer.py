"""vLLM on the processor as a peer: what it is started with, and its side of a worker.

``peers.py`` imports the settings; vLLM's own Python runs this file. ``server_peers.py`` starts
vLLM's server with the same environment. vLLM keeps a core for itself unless it is told which cores
to bind its threads to, so it is told.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peer import AnswerFunction, Launch, Stopwatch, serve

NAME = "vLLM"
# Its processes poll each other for a second after the last token before they sleep.
SETTLE_S = 1.2
# Drafts of as many tokens as our own chain has at most; two words in a row are a match.
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
# Debian's place for it, and Fedora's.
_ALLOCATORS = tuple(
    Path(folder) / "libtcmalloc_minimal.so.4"
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")
)


def launches(
    python: Path, model: Path, head: Path | None, threads: int, context: int
) -> list[Launch]:
    """Plain, with n-gram, and with the EAGLE-3 head in the folder ``head`` if there is one.

    ``model`` is a Hugging Face folder.
    """
    ways: dict[str, dict[str, Any] | None] = {"plain": None, "n-gram": NGRAM}
    if head is not None:
        # Three tokens, what vLLM's own examples take for such heads; it drafts chains only.
        ways["EAGLE-3"] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    return [
        Launch(
            name=f"{NAME} {way}",
            engine=NAME,
            weights="bfloat16",
            python=python,
            script=Path(__file__),
            model=model,
            threads=threads,
            context=context,
            speculation=speculation,
            environment=environment(python, threads),
            settle_s=SETTLE_S,
        )
        for way, speculation in ways.items()
    ]


def environment(executable: Path, threads: int) -> dict[str, str]:
    """What vLLM is to find in its environment to compute with exactly ``threads`` cores.

    ``executable`` is in the ``bin`` of vLLM's own environment.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    # What its guide wants loaded first; it warns of "significant performance loss" otherwise.
    libraries = (executable.parent.parent / "lib" / "libiomp5.so", *_ALLOCATORS)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; 16 requests of this model's context need a third
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(str(path) for path in libraries if path.is_file()),
    }


def load(settings: dict[str, Any]) -> tuple[str, AnswerFunction]:
    """The engine, ready, one request at a time."""
    import vllm  # pyright: ignore[reportMissingImports]

    llm = vllm.LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=settings["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=settings["speculation"],
    )
    engine = llm.llm_engine

    def answer(prompt: list[int], max_tokens: int) -> Any:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        watch = Stopwatch()
        engine.add_request("only", {"prompt_token_ids": prompt}, params)
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                watch.saw(len(tokens))
        return watch.answer(tokens)

    return f"vLLM {vllm.__version__}", answer


if __name__ == "__main__":
    serve(load)
