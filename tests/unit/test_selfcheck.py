"""A head with its states mixed up costs speed and says nothing: the self-check must say it.

The heads here are trained in seconds, by the reference of the parity tests, to know a few random
texts of a random target by heart: nearly always right as they are, and lost with other states.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

from outrider import LLM, EngineConfig, SamplingParams
from outrider.config import Method, SpeculationConfig
from outrider.drafters import Drafter, DraftSource, create_drafter
from outrider.models.decoder import Decoder
from outrider.models.exactness import random_tokens
from outrider.models.heads.config import Eagle3Config
from outrider.models.layers import Segment
from outrider.selfcheck import MIN_AGREEMENT, SelfCheck, check_agreement
from tests.draft_modules import random_drafter, random_source
from tests.models import random_decoder, random_weights
from tests.parity.reference_heads import Drafted, ReferenceEagle3
from tests.tiny import TinyModel, write_hf_checkpoint
from tests.tiny_heads import write_eagle3_head

VOCAB, LENGTH = 64, 48
LAYERS = (1, 2, 4)


@dataclass(frozen=True)
class Trained:
    """A target, a head that knows the texts, and the texts."""

    target: Decoder
    config: Eagle3Config
    weights: dict[str, torch.Tensor]
    texts: list[list[int]]

    def check(
        self, layers: tuple[int, ...] = LAYERS, changed: dict[str, torch.Tensor] | None = None
    ) -> SelfCheck:
        """The check with other captured layers or weights."""
        source = DraftSource(
            replace(self.config, capture_layers=layers), self.weights | (changed or {})
        )
        speculation = SpeculationConfig(method=Method.EAGLE3, head="-")
        drafter = create_drafter(
            speculation, source=source, target=self.target, max_model_len=LENGTH
        )
        assert drafter is not None
        found = check_agreement(drafter, self.target, self.texts)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def trained() -> Trained:
    target = random_decoder(vocab_size=VOCAB, num_layers=4)
    ends = random_weights(target.config)
    source = random_source(Method.EAGLE3, target)
    assert isinstance(source.config, Eagle3Config)
    config = replace(source.config, capture_layers=LAYERS, draft_vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.ones(shape).double().requires_grad_()
        if "norm" in name
        else (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).double().requires_grad_()
        for name, shape in config.weight_shapes().items()
    }
    texts = [random_tokens(VOCAB, LENGTH, seed=1000 * i) for i in range(8)]
    lessons = [_lesson(target, tokens) for tokens in texts]
    optimiser = torch.optim.Adam(weights.values(), lr=3e-3)
    with torch.enable_grad():
        for step in range(100):
            head = ReferenceEagle3(
                config, weights, embedding=ends["embed.weight"], output=ends["lm_head.weight"]
            )
            loss = torch.zeros((), dtype=torch.float64)
            for tokens, states, picks in lessons[step % 2 :: 2]:
                rows = head.run(tokens[1:], states, Drafted())
                loss = loss + torch.nn.functional.cross_entropy(rows.logits_RW, picks)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    learnt = {name: tensor.detach().float() for name, tensor in weights.items()}
    return Trained(target, config, learnt, texts)


def _lesson(target: Decoder, tokens: list[int]):
    """A text, the target's states along it, and its picks."""
    cache = target.new_cache(max_batch_size=1, num_slots=len(tokens))
    segment = Segment(cache.allocate(), tokens, range(len(tokens)))
    output = target.forward([segment], cache, capture=LAYERS)
    assert output.hidden_RC is not None
    states = [state[:-1].clone().double() for state in output.hidden_RC.chunk(len(LAYERS), dim=1)]
    return tokens, states, output.logits_RV.argmax(1)[1:].clone()


def test_a_good_head_gives_no_warning(trained: Trained) -> None:
    found = trained.check()

    assert found.agreement > 0.8
    assert [] == found.warnings()


def test_layers_counted_in_another_convention_are_seen_and_the_right_ones_named(
    trained: Trained,
) -> None:
    found = trained.check(layers=(0, 1, 3))

    assert LAYERS == found.better_layers
    assert found.better_agreement > 0.9 > found.agreement
    assert "[1, 2, 4] in place of [0, 1, 3]" in found.warnings()[0]


def test_swapped_layers_are_seen_and_the_right_order_named(trained: Trained) -> None:
    """The head was trained on states in another order than the one its file says."""
    low, middle, high = trained.weights["fc.weight"].chunk(3, dim=1)
    found = trained.check(changed={"fc.weight": torch.cat([high, low, middle], dim=1)})

    assert (4, 1, 2) == found.better_layers
    assert found.better_agreement > 0.9 > found.agreement


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.MTP, Method.MEDUSA])
def test_a_head_that_was_not_trained_is_told(trained: Trained, method: Method) -> None:
    speculation = SpeculationConfig(method=method, head="-")
    drafter: Drafter = random_drafter(method, trained.target, speculation, max_batch_size=1)
    found = check_agreement(drafter, trained.target, trained.texts)

    assert found is not None
    assert found.better_layers is None
    assert found.agreement < MIN_AGREEMENT + 0.05
    assert "hardly trained" in replace(found, agreement=0.01).warnings()[0]


def test_a_draft_model_has_nothing_to_check(trained: Trained) -> None:
    speculation = SpeculationConfig(method=Method.DRAFT, head="-")
    drafter = random_drafter(Method.DRAFT, trained.target, speculation, max_batch_size=1)

    assert check_agreement(drafter, trained.target, trained.texts) is None


def test_an_acceptance_length_below_the_recorded_one_is_told() -> None:
    found = SelfCheck(100, 0.5, acceptance=1.2, recorded=2.4)

    assert "acceptance length 1.20 against 2.40 as recorded" in found.warnings()[0]
    assert [] == replace(found, acceptance=2.0).warnings()
    assert found == SelfCheck.from_json(asdict(found))


def test_a_loaded_model_checks_its_head_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint: the recorded figure is measured against, the result remembered."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    target = write_hf_checkpoint(tmp_path / "model", max_position=1024)
    recorded = {"outrider": {"capture_layers": [0, 1, 2], "recorded_acceptance": 3.0}}
    head = write_eagle3_head(
        tmp_path / "head",
        TinyModel(),
        capture_layers=(0, 1, 2),
        layout="speculators",
        extra=recorded,
    )
    speculation = SpeculationConfig(method=Method.EAGLE3, head=str(head))
    llm = LLM(target, speculation=speculation, engine=EngineConfig(dtype="float32"))
    stages: list[str] = []
    again = LLM(
        target,
        speculation=speculation,
        engine=EngineConfig(dtype="float32"),
        on_progress=lambda stage, _: stages.append(stage),
    )
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    params = SamplingParams(max_tokens=12)

    assert "against 3.00 as recorded" in llm.warnings[-1]
    assert llm.warnings == again.warnings
    assert not [stage for stage in stages if "self-check" in stage]
    assert () == plain.warnings
    assert llm.generate("The ford", params)[0].text == plain.generate("The ford", params)[0].text
