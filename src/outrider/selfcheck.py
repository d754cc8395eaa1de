"""A head's self-check at start-up: does it guess as well beside this target as it should?

Owns the check and its words. A layer id that is off by one, swapped states or the head of another
target cost acceptance and nothing else: no error, no wrong text, just no speed. Two things are
looked at, on bundled prompts, in a few seconds, once per pair and machine:

- *agreement*: over every position of the prompts, how often the head's first guess is the target's
  own pick, given the target's true states; and for a head that reads several states, whether
  another arrangement of them would do clearly better;
- *acceptance length*, where the head's maker recorded it: greedy chains of ``RECORDED_CHAIN``.

Used by :mod:`outrider.llm`, which remembers the result; the engine knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from outrider.bench.prompts import load_prompts
from outrider.config import EngineConfig, Method, SamplingParams, SpeculationConfig
from outrider.drafters import Drafter
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.medusa import MedusaDrafter
from outrider.engine import Engine
from outrider.models.decoder import Decoder
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.layers import Segment
from outrider.models.loading.tokenizer import Tokenizer, encode_prompt
from outrider.sampling import argmax_rows
from outrider.types import ProgressCallback, SpeculationStats

RECORDED_CHAIN = 5  # the chain, drafted greedily, that a recorded acceptance length belongs to
NUM_SKIPPED, MAX_TEXT = 10, 96  # every tenth bundled prompt, so many tokens of each
MIN_AGREEMENT = 0.05  # below this a head is of no use
MIN_SHARE = 0.6  # of the recorded accepted tokens per step
_ANSWER = 48  # tokens per text, for the acceptance length
_CLEAR = 3.0  # standard errors by which another arrangement must do better ...
_GAIN = 0.03  # ... and by how much, in agreement


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was found: agreement as loaded, the best other arrangement, the acceptance length.

    ``better_layers`` is None unless another arrangement does clearly better; ``acceptance`` is None
    where nothing was recorded to compare it with.
    """

    num_positions: int
    agreement: float
    layers: tuple[int, ...] = ()
    better_layers: tuple[int, ...] | None = None
    better_agreement: float = 0.0
    acceptance: float | None = None
    recorded: float | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SelfCheck:
        """Read back what ``dataclasses.asdict`` wrote."""
        better = data["better_layers"]
        fields = {name: data[name] for name in cls.__slots__}
        fields["layers"] = tuple(data["layers"])
        fields["better_layers"] = None if better is None else tuple(better)
        return cls(**fields)

    def warnings(self) -> list[str]:
        """What the user should know; empty for a head that does what it should."""
        found = []
        if self.better_layers is not None:
            found.append(
                f"the head agrees with the target on {self.agreement:.0%} of {self.num_positions} "
                f"positions, but on {self.better_agreement:.0%} with the states of layers "
                f"{list(self.better_layers)} in place of {list(self.layers)}: its captured layers "
                "look swapped or counted in another convention; check them in its config.json"
            )
        elif self.agreement < MIN_AGREEMENT:
            found.append(
                f"the head agrees with the target on {self.agreement:.0%} of {self.num_positions} "
                "positions: it was hardly trained, or made for another model; the text stays "
                "right, but it will not come faster"
            )
        if self.acceptance is not None and self.recorded is not None:
            share = (self.acceptance - 1) / max(1e-9, self.recorded - 1)
            if share < MIN_SHARE:
                found.append(
                    f"acceptance length {self.acceptance:.2f} against {self.recorded:.2f} as "
                    "recorded with the head: is it the target, and the precision, it was made for?"
                )
        return found


def check_head(
    drafter: Drafter,
    target: Decoder,
    tokenizer: Tokenizer,
    *,
    recorded: float | None,
    on_progress: ProgressCallback | None = None,
) -> SelfCheck | None:
    """The whole check on bundled prompts; None for a drafter without a head."""
    if not drafter.captures:
        return None
    if on_progress is not None:
        on_progress("self-check: the draft head", None)
    drafter = drafter.head if isinstance(drafter, CombinedDrafter) else drafter
    prompts = load_prompts()[::NUM_SKIPPED]
    texts = [encode_prompt(tokenizer, prompt.turns[0])[:MAX_TEXT] for prompt in prompts]
    found = check_agreement(drafter, target, texts)
    if found is None or recorded is None:
        return found
    acceptance = measure_acceptance(drafter, target, tokenizer, texts[:4])
    return replace(found, acceptance=acceptance, recorded=recorded)


def check_agreement(
    drafter: Drafter, target: Decoder, texts: Sequence[Sequence[int]]
) -> SelfCheck | None:
    """Compare the head's first guesses with the target's picks over these texts.

    None for a drafter without a head.
    """
    if not drafter.captures:
        return None
    guesses = _Guesses(drafter, target)
    arrangements = list(_arrangements(drafter, target))
    pieces: dict[tuple[int, ...], list[Tensor]] = {layers: [] for layers in arrangements}
    for tokens in texts:
        for layers, hits_T in guesses.hits(tokens, arrangements):
            pieces[layers].append(hits_T)
    hits = {layers: torch.cat(parts) for layers, parts in pieces.items()}
    as_loaded = hits.pop(arrangements[0])
    found = SelfCheck(len(as_loaded), as_loaded.double().mean().item(), arrangements[0])
    better = max(hits, key=lambda layers: int(hits[layers].sum()), default=None)
    if better is None or not _is_clearly_better(hits[better], as_loaded):
        return found
    agreement = hits[better].double().mean().item()
    return replace(found, better_layers=better, better_agreement=agreement)


def _arrangements(drafter: Drafter, target: Decoder) -> Iterator[tuple[int, ...]]:
    """The captured layers as loaded, then others that a wrong convention would make of them."""
    layers = drafter.captures
    yield layers
    is_head = isinstance(drafter, AutoregressiveDrafter) and isinstance(drafter.module, Eagle3Head)
    if not is_head or len(layers) < 2:
        return
    seen: set[tuple[int, ...]] = {layers}
    shifted = [tuple(i + by for i in layers) for by in (-1, 1)]
    others: list[tuple[int, ...]] = [*shifted, *permutations(layers)]
    for other in others:
        is_there = min(other) >= 0 and max(other) <= target.config.num_layers
        if is_there and other not in seen:
            seen.add(other)
            yield other


def _is_clearly_better(other_T: Tensor, as_loaded_T: Tensor) -> bool:
    """Whether the other's hits exceed these by more than chance allows (McNemar's test)."""
    wins = int((other_T & ~as_loaded_T).sum())
    losses = int((as_loaded_T & ~other_T).sum())
    gain = (wins - losses) / max(1, len(other_T))
    return gain > _GAIN and wins - losses > _CLEAR * math.sqrt(max(1, wins + losses))


def measure_acceptance(
    drafter: Drafter, target: Decoder, tokenizer: Tokenizer, texts: Sequence[Sequence[int]]
) -> float:
    """Acceptance length of greedy chains of ``RECORDED_CHAIN`` behind these texts."""
    chain = SpeculationConfig(
        method=Method.MTP, max_draft_len=RECORDED_CHAIN, adaptive=False
    )  # any method with a head: only the shape counts
    max_model_len = max(map(len, texts)) + _ANSWER
    fresh: Drafter
    if isinstance(drafter, MedusaDrafter):
        fresh = MedusaDrafter(drafter.heads, chain)
    else:
        assert isinstance(drafter, AutoregressiveDrafter)
        fresh = AutoregressiveDrafter(
            drafter.module,
            chain,
            max_batch_size=1,
            max_model_len=max_model_len,
            vocabulary=drafter.vocabulary,
        )
    engine = Engine(
        target,
        decoder=tokenizer,
        eos_ids=tokenizer.eos_ids,
        config=EngineConfig(),
        max_model_len=max_model_len,
        drafter=fresh,
        max_draft_tokens=RECORDED_CHAIN,
        costs=None,
    )
    requests = [engine.new_request(text, SamplingParams(max_tokens=_ANSWER)) for text in texts]
    stats = SpeculationStats()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    for request in requests:
        stats.add(request.stats)
    return stats.acceptance_length


class _Guesses:
    """A head's first guesses along texts, for any arrangement of the target's states."""

    def __init__(self, drafter: Drafter, target: Decoder) -> None:
        self._drafter = drafter
        self._target = target

    def hits(
        self, tokens: Sequence[int], arrangements: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """For each arrangement, whether each guess ``[T]`` is the target's pick."""
        layers = sorted({layer for arrangement in arrangements for layer in arrangement})
        cache = self._target.new_cache(max_batch_size=1, num_slots=len(tokens))
        segment = Segment(cache.allocate(), tokens, range(len(tokens)))
        output = self._target.forward([segment], cache, capture=layers)
        assert output.hidden_RC is not None
        state_of = dict(zip(layers, output.hidden_RC.chunk(len(layers), dim=1), strict=True))
        # The state at t and token t + 1 predict token t + 2: the target's pick after t + 1.
        picks = torch.tensor(argmax_rows(output.logits_RV)[1:])
        for arrangement in arrangements:
            state_TC = torch.cat([state_of[layer][:-1] for layer in arrangement], dim=1)
            yield arrangement, self._guess(tokens[1:], state_TC) == picks

    def _guess(self, tokens: Sequence[int], state_TC: Tensor) -> Tensor:
        """The head's best token, in the target's ids, behind each of these."""
        drafter = self._drafter
        if isinstance(drafter, MedusaDrafter):
            (logits_TV,) = drafter.heads.forward(state_TC.contiguous(), 1)
            return logits_TV.argmax(1)
        assert isinstance(drafter, AutoregressiveDrafter)
        cache = drafter.module.new_cache(max_batch_size=1, num_slots=len(tokens))
        segment = Segment(cache.allocate(), tokens, range(len(tokens)))
        output = drafter.module.forward([segment], state_TC, cache, from_target=True)
        best_T = output.logits_RW.argmax(1)
        if drafter.vocabulary is None:
            return best_T
        return torch.tensor(drafter.vocabulary.ids_W)[best_T]
