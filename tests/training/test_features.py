"""Features: the target's own states, bit for bit, kept, found damaged, resumed and refused."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.errors import CheckpointError, ParameterError
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.exactness import random_tokens
from outrider.models.layers import Segment
from outrider.models.loading import load
from outrider.training.answers import Response
from outrider.training.features import FeatureStore, LiveFeatures, capture_features
from outrider.training.identity import TargetIdentity
from outrider.training.states import target_states
from outrider.training.store import TENSORS, verify_folder
from tests.models import random_decoder, random_weights, tiny_config
from tests.tiny import write_hf_checkpoint

# Alone in a pass, several in one, one in several chunks; single tokens at either end.
LENGTHS = [(1, 1), (40, 25), (3, 60), (150, 100), (200, 150), (500, 203), (30, 1), (64, 64)]
IDENTITY = TargetIdentity("aa", "bb", "float32", 2, 72, 331)
HIDDEN = 72


def response(number: int, prompt_len: int, response_len: int) -> Response:
    tokens = random_tokens(331, prompt_len + response_len, seed=1000 * number)
    return Response(
        id=f"book/{number}",
        category="qa",
        prompt_ids=tuple(tokens[:prompt_len]),
        response_ids=tuple(tokens[prompt_len:]),
        temperature=0.0,
        seed=number,
        finish_reason="stop",
    )


RESPONSES = [response(number, *lengths) for number, lengths in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder()


@pytest.fixture(scope="module")
def direct(target) -> dict[int, list[Tensor]]:
    """Each sequence in one pass of its own: layers 0, 1, 2 and the final state."""
    states: dict[int, list[Tensor]] = {layer: [] for layer in (0, 1, 2, FINAL_STATE)}
    for item in RESPONSES:
        tokens = item.prompt_ids + item.response_ids
        cache = target.new_cache(max_batch_size=1, num_slots=len(tokens))
        segment = Segment(cache.allocate(), tokens, range(len(tokens)))
        hidden_TC = target.forward([segment], cache, capture=(0, 1, 2, FINAL_STATE)).hidden_RC
        for layer, state_TD in zip(states, hidden_TC.split(HIDDEN, dim=1), strict=True):
            states[layer].append(state_TD)
    return states


def capture(target, folder, captures=(0, 2), responses=RESPONSES, **options) -> FeatureStore:
    options = {"tokens_per_shard": 300, "identity": IDENTITY, **options}
    return capture_features(target, responses, captures, folder, **options)


def hashes(folder: Path) -> dict[str, tuple[int, str]]:
    return {path.name: verify_folder(path).files[TENSORS] for path in folder.glob("shard-*")}


@pytest.mark.parametrize("max_rows", [1, 64, 256, 5000])
def test_passes_of_any_width_give_the_states_of_one_pass(target, direct, max_rows):
    sequences = [item.prompt_ids + item.response_ids for item in RESPONSES]
    sequences, states = sequences[:5], direct[FINAL_STATE][:5]
    found: dict[int, list[Tensor]] = {}
    for i, start, hidden_RC in target_states(target, sequences, [FINAL_STATE], max_rows):
        assert start == sum(map(len, found.get(i, [])))
        found.setdefault(i, []).append(hidden_RC)

    assert {0, 1, 2, 3, 4} == set(found)
    for i, expected_TD in enumerate(states):
        assert torch.equal(expected_TD, torch.cat(found[i]))


@pytest.mark.parametrize("source", ["store", "reopened", "live"])
@pytest.mark.parametrize("captures", [(0, 2), (2, 0, 1), (1,), ()], ids=str)
def test_features_are_the_targets_states(tmp_path, target, direct, captures, source):
    if source == "live":
        features = LiveFeatures(target, RESPONSES, captures)
    else:
        features = capture(target, tmp_path, (0, 1, 2) if source == "reopened" else captures)
    if source == "reopened":
        features = FeatureStore(tmp_path, captures)

    assert [sum(lengths) for lengths in LENGTHS] == list(features.lengths)
    assert len(LENGTHS) == len(features)
    for i, item in enumerate(RESPONSES):
        sequence = features.sequence(i)

        assert item.prompt_ids + item.response_ids == tuple(sequence.token_ids)
        assert len(item.prompt_ids) == sequence.prompt_len
        assert torch.equal(direct[FINAL_STATE][i].bfloat16(), sequence.final_TD)
        assert sequence.final_TD.is_contiguous()
        assert not sequence.final_TD.is_inference()
        if not captures:
            assert sequence.states_TC is None
            continue
        expected_TC = torch.cat([direct[layer][i] for layer in captures], dim=1).bfloat16()

        assert torch.equal(expected_TC, sequence.states_TC)


def test_several_shards_are_written_and_any_choice_of_sequences_read(tmp_path, target, direct):
    capture(target, tmp_path)
    chosen = ["book/6", "book/1", "book/5"]
    features = FeatureStore(tmp_path, (2,), chosen)

    assert len(hashes(tmp_path)) >= 4
    assert [31, 65, 703] == features.lengths
    for i, id_ in enumerate(chosen):
        expected_TD = direct[2][int(id_[-1])].bfloat16()

        assert torch.equal(expected_TD, features.sequence(i).states_TC)
    with pytest.raises(CheckpointError, match="no features of 1 sequences, the first is book/77"):
        FeatureStore(tmp_path, (2,), ["book/1", "book/77"])


def computed(messages: list[tuple[str, float | None]]) -> int:
    """Tokens whose states were computed, by the last message of a capture."""
    counts = [what for what, fraction in messages if fraction is not None]
    return int(counts[-1].split(":")[1].split()[0].replace(",", "")) if counts else 0


@pytest.mark.parametrize("dies_at", [1, 70, 200, 500, 1200, 1400])
def test_a_killed_capture_goes_on_and_gives_the_same_shards(tmp_path, target, dies_at):
    total = sum(sum(lengths) for lengths in LENGTHS)
    capture(target, tmp_path / "whole")
    child = os.fork()
    if child == 0:

        def die(what: str, fraction: float | None) -> None:
            if fraction is not None and computed([(what, fraction)]) >= dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            capture(target, tmp_path / "killed", on_progress=die)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)

    assert signal.SIGKILL == os.WTERMSIG(status)
    done = sum(
        FeatureStore(tmp_path / "killed", ()).lengths,
    )
    messages: list[tuple[str, float | None]] = []
    capture(target, tmp_path / "killed", on_progress=lambda *told: messages.append(told))

    assert total - done == computed(messages)
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "killed")
    assert [] == list((tmp_path / "killed").glob(".*.partial"))


def test_nothing_is_computed_twice(tmp_path, target):
    capture(target, tmp_path, responses=RESPONSES[:5])
    messages: list[tuple[str, float | None]] = []
    features = capture(target, tmp_path, on_progress=lambda *told: messages.append(told))

    assert sum(map(sum, LENGTHS[5:])) == computed(messages)
    assert [sum(lengths) for lengths in LENGTHS] == features.lengths
    messages.clear()
    capture(target, tmp_path, on_progress=lambda *told: messages.append(told))
    assert computed(messages) == 0


@pytest.mark.parametrize("file", [TENSORS, "manifest.json"])
def test_a_flipped_bit_in_a_shard_is_named_and_its_sequences_computed_again(tmp_path, target, file):
    capture(target, tmp_path)
    before = hashes(tmp_path)
    path = tmp_path / "shard-00001" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)

    with pytest.raises(CheckpointError, match=f"shard-00001/{file}: damaged"):
        FeatureStore(tmp_path, (0, 2))
    with pytest.raises(CheckpointError, match=f"shard-00001/{file}: damaged"):
        capture(target, tmp_path, repairs=False)
    messages: list[tuple[str, float | None]] = []
    capture(target, tmp_path, on_progress=lambda *told: messages.append(told))

    assert any(f"shard-00001/{file}: damaged" in what for what, _ in messages)
    assert 0 < computed(messages) < sum(map(sum, LENGTHS)) // 2
    assert before == hashes(tmp_path)


def test_an_answer_that_changed_is_noticed(tmp_path, target, direct):
    capture(target, tmp_path)
    changed = list(RESPONSES)
    changed[3] = replace(changed[3], response_ids=(*changed[3].response_ids[:-1], 7))
    messages: list[tuple[str, float | None]] = []
    features = capture(
        target, tmp_path, responses=changed, on_progress=lambda *told: messages.append(told)
    )

    assert any("the answer book/3 has changed" in what for what, _ in messages)
    assert features.sequence(3).token_ids[-1] == 7
    assert not torch.equal(direct[2][3].bfloat16()[-1], features.sequence(3).states_TC[-1, HIDDEN:])
    assert torch.equal(direct[2][4].bfloat16(), features.sequence(4).states_TC[:, HIDDEN:])


def test_a_layer_that_is_not_there_is_captured_and_the_others_stay_served(tmp_path, target, direct):
    capture(target, tmp_path, (0,))
    with pytest.raises(ParameterError, match=r"holds the states of layers \[0\], not \[1\]"):
        FeatureStore(tmp_path, (1,))
    capture(target, tmp_path, (1,))
    features = FeatureStore(tmp_path, (0, 1))

    expected_TC = torch.cat([direct[0][4], direct[1][4]], dim=1).bfloat16()
    assert torch.equal(expected_TC, features.sequence(4).states_TC)


@pytest.mark.parametrize(
    "change",
    [{"weights_hash": "ax"}, {"tokenizer": "other"}, {"dtype": "bfloat16"}, {"num_layers": 3}],
    ids=lambda change: next(iter(change)),
)
def test_another_target_is_refused_by_name(tmp_path, target, change):
    capture(target, tmp_path)
    other = replace(IDENTITY, **change)
    (name, new), old = next(iter(change.items())), asdict(IDENTITY)

    with pytest.raises(CheckpointError, match=f"{name} was {old[name]}, is {new};"):
        capture(target, tmp_path, identity=other)
    # Not even where the record went missing: every shard names its target.
    (tmp_path / "target.json").unlink()
    with pytest.raises(CheckpointError, match=rf"shard-00000: .*{name} was {old[name]}, is {new};"):
        capture(target, tmp_path, identity=other)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "it is not JSON"),
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "a JSON list where an object is kept"),
        ('"aa"', "a JSON str where"),
        ("null", "a JSON NoneType where"),
    ],
)
def test_a_damaged_record_of_the_target_is_refused(tmp_path, content, named):
    IDENTITY.claim(tmp_path)
    IDENTITY.claim(tmp_path)
    (tmp_path / "target.json").write_text(content)

    with pytest.raises(CheckpointError, match=rf"target\.json: damaged: {named}"):
        IDENTITY.claim(tmp_path)


def test_weights_and_tokenizer_make_the_identity(tmp_path):
    folder = write_hf_checkpoint(tmp_path / "a")
    first = TargetIdentity.of(load(folder), torch.float32)
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    retokenized = TargetIdentity.of(load(folder), torch.float32)
    reweighted = TargetIdentity.of(load(write_hf_checkpoint(tmp_path / "b", seed=9)), torch.float32)

    assert replace(first, tokenizer=retokenized.tokenizer) == retokenized
    assert first != retokenized
    assert replace(first, weights_hash=reweighted.weights_hash) == reweighted
    assert first != reweighted


@pytest.mark.parametrize("captures", [(3,), (-2,), (1, 1)])
def test_captures_that_cannot_be_are_refused(tmp_path, target, captures):
    with pytest.raises(ParameterError, match=r"each must be one of 0 \.\. 2, once"):
        capture(target, tmp_path, captures)
    with pytest.raises(ParameterError, match=r"each must be one of 0 \.\. 2, once"):
        LiveFeatures(target, RESPONSES, captures)


def test_states_that_are_not_finite_are_refused(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["layers.1.down.weight"][0, 0] = torch.inf
    broken = Decoder(config, weights, dtype=torch.float32, policies=None)

    with pytest.raises(CheckpointError, match="not finite"):
        capture(broken, tmp_path)
    assert [] == list(tmp_path.glob("shard-*"))
