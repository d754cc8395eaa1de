"""Our own arms of ``peers.py``: plain, and any ways to draft by name; one set of weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from peer import Answer, AnswerFunction, Arm

import outrider
from outrider import LLM, EngineConfig, Method, SamplingParams, SpeculationConfig
from outrider.bench.methods import ArmName
from outrider.types import ProgressCallback

NAME = "outrider"
PLAIN = f"{NAME} plain"


def load(
    path: Path, methods: Sequence[str], engine: EngineConfig, on_progress: ProgressCallback
) -> tuple[LLM, list[Arm]]:
    """The plain engine, and the arms that share its weights: plain, then ``methods`` in order.

    Raises:
        OutriderError: the model cannot be loaded, there is no such method, or no head for it.
    """
    names = [ArmName.parse(method) for method in methods]
    plain = LLM(
        path,
        speculation=SpeculationConfig(method=Method.OFF),
        engine=engine,
        on_progress=on_progress,
    )
    engines = {PLAIN: plain} | {
        f"{NAME} {name}": plain.with_speculation(name.speculation(None)) for name in names
    }
    weights, version = plain.fingerprint.dtype, f"outrider {outrider.__version__}"
    return plain, [
        Arm(name, NAME, weights, name == PLAIN, answering(llm), version)
        for name, llm in engines.items()
    ]


def answering(llm: LLM) -> AnswerFunction:
    """Answer with ``llm``, greedily, to the full length."""

    def answer(prompt: list[int], max_tokens: int) -> Answer:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        completion = llm.generate([prompt], params)[0]
        total_s = time.perf_counter() - started
        return Answer(
            completion.token_ids, total_s, completion.timing.decode_s, completion.timing.num_first
        )

    return answer
