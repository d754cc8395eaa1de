"""OpenVINO GenAI as a peer: its pipeline on a GGUF file, in its own environment's Python.

The file's weights stay as they are stored (4 bits in the embedded model's), so this arm computes
with other numbers than ours and reads about a third of the bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peer import AnswerFunction, Launch, Stopwatch, serve

NAME = "OpenVINO GenAI"
LOOKUP = {"max_ngram_size": 3, "num_assistant_tokens": 5}  # the values of its documentation


def launches(python: Path, gguf: Path, threads: int, context: int) -> list[Launch]:
    """The pipeline plain and with prompt lookup."""
    return [
        Launch(
            name=f"{NAME} {way}",
            engine=NAME,
            weights="the file's",
            python=python,
            script=Path(__file__),
            model=gguf,
            threads=threads,
            context=context,
            speculation=lookup,
        )
        for way, lookup in (("plain", None), ("prompt lookup", LOOKUP))
    ]


def load(settings: dict[str, Any]) -> tuple[str, AnswerFunction]:
    """The pipeline, ready; ``speculation`` holds the settings of prompt lookup, or None."""
    import numpy as np
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai  # pyright: ignore[reportMissingImports]

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False
    lookup = settings["speculation"]
    options: dict[str, Any] = {} if lookup is None else {"prompt_lookup": True}
    pipeline = openvino_genai.LLMPipeline(
        settings["model"],
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=settings["threads"],
        **options,
    )

    class Counting(openvino_genai.StreamerBase):
        """Notes when the first tokens came."""

        def __init__(self, watch: Stopwatch) -> None:
            super().__init__()
            self._watch = watch

        def write(self, tokens: int | list[int]) -> Any:
            """One token, or those that one step accepted."""
            self._watch.saw(1 if isinstance(tokens, int) else len(tokens))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is left to do."""

    def answer(prompt: list[int], max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, ignore_eos=True, **(lookup or {})
        )
        watch = Stopwatch()
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        result = pipeline.generate(ids, config, Counting(watch))
        return watch.answer([int(token) for token in result.tokens[0]])

    return f"OpenVINO GenAI {openvino_genai.__version__}", answer


if __name__ == "__main__":
    serve(load)
