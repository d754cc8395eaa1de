"""What the benchmarks share: prompts as token ids, and the memory that a process took."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

from outrider.bench.prompts import Prompt
from outrider.models.loading.tokenizer import encode_prompt

if TYPE_CHECKING:
    from outrider import LLM


def peak_memory() -> int:
    """The most bytes of memory this process ever held at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes everywhere but on macOS


def prompt_ids(llm: LLM, prompt: Prompt) -> list[int]:
    """The prompt's first turn as the model expects it: in its chat template, where it has one."""
    return encode_prompt(llm.tokenizer, prompt.turns[0])
