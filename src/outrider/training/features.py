"""What the target's states are along every prompt and answer: the trainers' input.

Owns the feature shards of a data folder and the pass that fills them. Behind
:mod:`~outrider.training.responses`, before packing and the recipes; the states come from the
target's own forward pass, so they are bit for bit what the engine's drafters will see.

One shard is one atomic folder (:mod:`~outrider.training.store`) of some ten thousand tokens, the
sequences end to end::

    token [T] int32   is_response [T] uint8   length [B] int32
    states [T, C] bfloat16    the captured layers side by side, ascending (absent if none)
    final [T, D] bfloat16     the state behind the final norm, which the output head reads

Its manifest names the target, the layers and every sequence with a digest of its tokens, so a
changed answer, a damaged shard or another target is noticed, and nothing sound is computed twice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outrider.errors import CheckpointError, ParameterError
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.loading.safetensors_file import StoredTensor, open_tensors, write_tensors
from outrider.training.answers import Response
from outrider.training.identity import TargetIdentity
from outrider.training.packing import TrainingSequence
from outrider.training.states import check_captures, states_of, target_states
from outrider.training.store import TENSORS, Manifest, sole_writer, verify_folder, write_folder
from outrider.types import ProgressCallback

TOKENS_PER_SHARD = 32768
MAX_SHARD_BYTES = 2**30  # wide targets get shorter shards: one is held in memory as a whole
_SHARDS = "shard-*"


class FeatureSource(Protocol):
    """Sequences with the target's states, read from shards or computed when asked for."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sequence, prompt and response."""
        ...

    def __len__(self) -> int: ...

    def sequence(self, index: int) -> TrainingSequence:
        """One sequence; its tensors are the caller's to keep."""
        ...


class FeaturePart:
    """Some of a source's sequences."""

    def __init__(self, source: FeatureSource, indices: range) -> None:
        self._source = source
        self._indices = indices
        self.lengths = [source.lengths[index] for index in indices]

    def __len__(self) -> int:
        return len(self._indices)

    def sequence(self, index: int) -> TrainingSequence:
        """One of them."""
        return self._source.sequence(self._indices[index])


class LiveFeatures:
    """Features recomputed by the target whenever a sequence is asked for: no disk, more time.

    Args:
        target: the model.
        responses: the sequences.
        captures: layer indices, as in ``Decoder.forward``.
    """

    def __init__(
        self, target: Decoder, responses: Sequence[Response], captures: Sequence[int]
    ) -> None:
        check_captures(captures, target.config.num_layers)
        self._target = target
        self._responses = responses
        self._captures = tuple(captures)
        self.lengths = [_length(response) for response in responses]

    def __len__(self) -> int:
        return len(self._responses)

    def sequence(self, index: int) -> TrainingSequence:
        """One sequence, by a pass of the target."""
        response = self._responses[index]
        token_ids = response.prompt_ids + response.response_ids
        hidden_TC = states_of(self._target, token_ids, (*self._captures, FINAL_STATE))
        width = len(self._captures) * self._target.config.hidden_size
        return TrainingSequence(
            token_ids=token_ids,
            prompt_len=len(response.prompt_ids),
            states_TC=hidden_TC[:, :width].bfloat16().contiguous() if self._captures else None,
            final_TD=hidden_TC[:, width:].bfloat16().contiguous(),
        )


@dataclass(frozen=True, slots=True)
class _Shard:
    """An open shard: small tensors in memory, wide ones mapped."""

    layers: tuple[int, ...]
    ids: tuple[str, ...]
    lengths: list[int]
    token_T: Tensor
    is_response_T: Tensor
    final: StoredTensor
    states: StoredTensor | None


class FeatureStore:
    """The shards of a folder as one list of sequences; reads only what is asked for.

    Args:
        folder: what :func:`capture_features` filled.
        captures: layer indices, in any order; the shards may hold more.
        ids: which sequences, in which order; None for all as they lie.
        is_verified: the caller has just checked the shards' hashes.

    Raises:
        CheckpointError: a shard is damaged, or a sequence is in none of them.
        ParameterError: the shards do not hold a layer that is asked for.
    """

    def __init__(
        self,
        folder: Path,
        captures: Sequence[int],
        ids: Sequence[str] | None = None,
        *,
        is_verified: bool = False,
    ) -> None:
        self._captures = tuple(captures)
        self._opened = ExitStack()
        self._place: dict[str, tuple[_Shard, int, int]] = {}
        try:
            for path in sorted(folder.glob(_SHARDS)):
                manifest = verify_folder(path, hashes=not is_verified)
                shard = _open_shard(path, manifest, self._opened)
                missing = sorted(set(captures) - set(shard.layers))
                if missing:
                    raise ParameterError(
                        f"{path} holds the states of layers {list(shard.layers)}, not {missing}; "
                        "capture the features again"
                    )
                start = 0
                for id_, length in zip(shard.ids, shard.lengths, strict=True):
                    self._place.setdefault(id_, (shard, start, start + length))
                    start += length
            self._ids = list(self._place) if ids is None else list(ids)
            absent = [id_ for id_ in self._ids if id_ not in self._place]
            if absent:
                raise CheckpointError(
                    f"{folder}: no features of {len(absent)} sequences, the first is {absent[0]}; "
                    "capture the features again"
                )
        except BaseException:
            self.close()
            raise
        places = [self._place[id_] for id_ in self._ids]
        self.lengths = [stop - start for _, start, stop in places]

    def __len__(self) -> int:
        return len(self._ids)

    def sequence(self, index: int) -> TrainingSequence:
        """One sequence, read from its shard."""
        shard, start, stop = self._place[self._ids[index]]
        is_response_T = shard.is_response_T[start:stop]
        return TrainingSequence(
            token_ids=shard.token_T[start:stop].tolist(),
            prompt_len=int((is_response_T == 0).sum()),
            states_TC=self._states(shard, start, stop),
            final_TD=shard.final.read_rows(start, stop).clone(),
        )

    def close(self) -> None:
        """Let go of the files; nothing can be read any more."""
        self._place.clear()
        self._opened.close()

    def _states(self, shard: _Shard, start: int, stop: int) -> Tensor | None:
        """The columns of the layers asked for, in their order."""
        if not self._captures or shard.states is None:
            return None
        if self._captures == shard.layers:
            return shard.states.read_rows(start, stop).clone()
        width = shard.states.shape[1] // len(shard.layers)
        at = [shard.layers.index(layer) * width for layer in self._captures]
        columns = [slice(first, first + width) for first in at]
        return torch.cat([shard.states.read_rows(start, stop, part) for part in columns], dim=1)


def capture_features(
    target: Decoder,
    responses: Sequence[Response],
    captures: Sequence[int],
    folder: Path,
    identity: TargetIdentity,
    *,
    repairs: bool = True,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    on_progress: ProgressCallback | None = None,
) -> FeatureStore:
    """Bring the shards of a folder up to date with the responses, and open them.

    Sequences in sound shards are left alone, so an interrupted run goes on where it stopped.
    Shards that are damaged, or hold an answer that has changed since, or lack a layer that is asked
    for, are named and their sequences computed again.

    Args:
        target: the model.
        responses: the sequences, ids distinct.
        captures: layer indices, as in ``Decoder.forward``; the final state always is captured.
        folder: of the shards; made if need be.
        identity: the target's; recorded, or compared with the one recorded.
        repairs: False refuses a damaged shard instead.
        tokens_per_shard: about how many tokens one shard holds.
        on_progress: told what is done, and shards that are computed again.

    Raises:
        CheckpointError: another target's data, a damaged shard that is not to be repaired, states
            that are not finite.
        ParameterError: no such layer, or another process captures into the folder.
        CapacityError: the disk is full; the shards before stay.
    """
    check_captures(captures, target.config.num_layers)
    report = on_progress or (lambda _what, _fraction: None)
    with sole_writer(folder):
        identity.claim(folder)
        covered, layers = _sound_shards(
            folder, responses, captures, identity, repairs=repairs, report=report
        )
        pending = [response for response in responses if response.id not in covered]
        writer = _ShardWriter(target, sorted(layers), identity, pending, report)
        free = (path for n in count() if not (path := folder / f"shard-{n:05d}").exists())
        for part in _split(pending, min(tokens_per_shard, writer.most_tokens)):
            writer.write(next(free), part)
    ids = [response.id for response in responses]
    return FeatureStore(folder, captures, ids, is_verified=True)


class _ShardWriter:
    """Computes shards and writes them, counting tokens for the progress callback."""

    def __init__(
        self,
        target: Decoder,
        layers: Sequence[int],
        identity: TargetIdentity,
        pending: Sequence[Response],
        report: ProgressCallback,
    ) -> None:
        self._target = target
        self._layers = layers
        self._identity = identity
        self._total = sum(map(_length, pending))
        self._done = 0
        self._report = report

    @property
    def most_tokens(self) -> int:
        """Tokens whose states fill a shard of the largest size."""
        hidden_size = self._target.config.hidden_size
        return max(1, MAX_SHARD_BYTES // (2 * (len(self._layers) + 1) * hidden_size))

    def write(self, path: Path, responses: Sequence[Response]) -> None:
        tensors = self._tensors(responses)
        meta = {
            "identity": asdict(self._identity),
            "layers": list(self._layers),
            "sequences": [[response.id, _digest(response)] for response in responses],
        }
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        files = {TENSORS: lambda file: write_tensors(file, tensors)}
        write_folder(path, files, meta, num_bytes=size)

    def _tensors(self, responses: Sequence[Response]) -> dict[str, Tensor]:
        sequences = [response.prompt_ids + response.response_ids for response in responses]
        marks = [[0] * len(r.prompt_ids) + [1] * len(r.response_ids) for r in responses]
        length_B = torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int32)
        offsets = (length_B.cumsum(0) - length_B).tolist()
        num_tokens, hidden_size = int(length_B.sum()), self._target.config.hidden_size
        width = len(self._layers) * hidden_size
        states_TC = torch.empty(num_tokens, width, dtype=torch.bfloat16)
        final_TD = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16)
        for i, start, hidden_RC in target_states(
            self._target, sequences, (*self._layers, FINAL_STATE)
        ):
            rows = slice(offsets[i] + start, offsets[i] + start + len(hidden_RC))
            states_TC[rows], final_TD[rows] = hidden_RC[:, :width], hidden_RC[:, width:]
            self._done += len(hidden_RC)
            what = f"capturing features: {self._done:,} of {self._total:,} tokens"
            self._report(what, self._done / self._total)
        tensors = {
            "token": torch.tensor([t for tokens in sequences for t in tokens], dtype=torch.int32),
            "is_response": torch.tensor([m for part in marks for m in part], dtype=torch.uint8),
            "length": length_B,
            "final": final_TD,
        }
        return tensors | ({"states": states_TC} if self._layers else {})


def _sound_shards(
    folder: Path,
    responses: Sequence[Response],
    captures: Sequence[int],
    identity: TargetIdentity,
    *,
    repairs: bool,
    report: ProgressCallback,
) -> tuple[set[str], set[int]]:
    """Name and remove the shards that cannot stay.

    Returns the sequences in the others, and the layers that are or were stored or are asked for:
    one set for all recipes that share the folder, whichever came first.
    """
    digests = {response.id: _digest(response) for response in responses}
    assert len(digests) == len(responses), "ids must be distinct"
    covered: set[str] = set()
    layers = set(captures)
    for path in sorted(folder.glob(_SHARDS)):
        report(f"checking {path.name}", None)
        try:
            manifest = verify_folder(path)
        except CheckpointError as error:
            if not repairs:
                raise
            reason = str(error)
        else:
            identity.require_same(manifest.meta["identity"], path)
            layers.update(manifest.meta["layers"])
            missing = sorted(set(captures) - set(manifest.meta["layers"]))
            stored = manifest.meta["sequences"]
            changed = [id_ for id_, digest in stored if digests.get(id_, digest) != digest]
            if not missing and not changed:
                covered.update(id_ for id_, _ in stored)
                continue
            reason = f"{path}: holds no states of layers {missing}"
            if changed:
                reason = f"{path}: the answer {changed[0]} has changed since"
        report(f"{reason}; computing its sequences again", None)
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {error.strerror}") from None
    return covered, layers


def _open_shard(path: Path, manifest: Manifest, opened: ExitStack) -> _Shard:
    tensors = open_tensors([path / TENSORS], opened)
    return _Shard(
        layers=tuple(manifest.meta["layers"]),
        ids=tuple(id_ for id_, _ in manifest.meta["sequences"]),
        lengths=tensors["length"].read().tolist(),
        token_T=tensors["token"].read().clone(),
        is_response_T=tensors["is_response"].read().clone(),
        final=tensors["final"],
        states=tensors.get("states"),
    )


def _split(responses: Sequence[Response], max_tokens: int) -> Iterator[list[Response]]:
    """Consecutive responses of at most ``max_tokens`` tokens together; a longer one alone."""
    part: list[Response] = []
    size = 0
    for response in responses:
        if part and size + _length(response) > max_tokens:
            yield part
            part, size = [], 0
        part.append(response)
        size += _length(response)
    if part:
        yield part


def _length(response: Response) -> int:
    return len(response.prompt_ids) + len(response.response_ids)


def _digest(response: Response) -> str:
    """Names a sequence's tokens and where its answer begins."""
    content = json.dumps([list(response.prompt_ids), list(response.response_ids)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
