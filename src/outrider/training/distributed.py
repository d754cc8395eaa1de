"""Several processes, one per GPU, that train one recipe together; one process is the usual case.

Owns all that knows of ``torch.distributed``. ``torchrun`` starts the same command several times;
each process takes its share of an optimiser step's batches, and the recipe's weights, gradients and
optimiser states are cut into a part per process (FSDP2: ``fully_shard``). The loop
(:mod:`outrider.training.loop`) asks here for its batches, for sums over all processes and for whole
tensors, and is the same program with one process, where each of these is what it was given::

    batches of a step     0  1 | 2  3        two processes, four batches per step
    process 0             0      2
    process 1                1      3        as many as the others, if need be one that counts 0

What is logged and saved does not tell how many processes there were: a checkpoint of two is
continued by one, and the other way round, as long as a step is made of as many batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.errors import ParameterError
from outrider.training.packing import Batch
from outrider.training.recipes import Recipe, StepResults

# The others wait while the first answers prompts, captures features and measures: that takes days.
PATIENCE = timedelta(days=30)
_LAUNCH = "start it with: torchrun --nproc-per-node N --no-python outrider train ..."

_FIELDS = tuple(field.name for field in fields(StepResults))

Item = TypeVar("Item")


def world_size() -> int:
    """How many processes were started together, by torchrun's environment; 1 without it.

    Raises:
        ParameterError: the environment is not one that torchrun makes.
    """
    return _environment("WORLD_SIZE", default=1, least=1)


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those that train together."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one answers, measures, logs and saves."""
        return self.rank == 0

    def wait(self) -> None:
        """Go on when all have come here; without keeping a GPU busy, however long it takes."""
        if self.count > 1:
            dist.all_reduce(torch.zeros(1))

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the block, then the others do and find its work done."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def divide(self, items: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
        """This process' share, of the same number for all; False marks one that is to count 0.

        All processes must compute equally often, since each holds a part of the others' weights.
        """
        for start in range(0, len(items), self.count):
            place = start + self.rank
            is_own = place < len(items)
            yield items[place if is_own else start], is_own

    def sum(self, results: StepResults) -> StepResults:
        """Results over all processes, the same for each; detached, on the CPU."""
        if self.count == 1:
            return results
        parts = {name: getattr(results, name).detach() for name in _FIELDS}
        # One message. Counts are below 2**53, so float64 holds them exactly.
        flat = torch.cat([part.reshape(-1).to("cpu", torch.float64) for part in parts.values()])
        dist.all_reduce(flat)
        summed = flat.split([part.numel() for part in parts.values()])
        pairs = zip(parts.items(), summed, strict=True)
        return StepResults(
            **{name: new.to(old.dtype).reshape(old.shape) for (name, old), new in pairs}
        )

    def is_same(self, value: int) -> bool:
        """Whether all processes have the same value."""
        if self.count == 1:
            return True
        ends = torch.tensor([value, -value])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        return int(ends[0]) == -int(ends[1])

    def share(self, recipe: Recipe) -> TrainedRecipe:
        """The recipe as these processes train it; before an optimiser gets its parameters."""
        return WholeRecipe(recipe) if self.count == 1 else ShardedRecipe(recipe, self.count)


ALONE = Processes()


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Be one of the processes that torchrun started, with a GPU of its own where there are any.

    Args:
        device: ``cpu`` or ``cuda``.

    Raises:
        ParameterError: the environment is not torchrun's, there are fewer GPUs than processes, or
            this torch has no ``torch.distributed``.
    """
    count = world_size()
    if count == 1:
        yield ALONE
        return
    if not dist.is_available():
        raise ParameterError(f"{count} processes: this torch is built without torch.distributed")
    rank, local = _environment("RANK"), _environment("LOCAL_RANK")
    _environment("MASTER_PORT")
    if device != "cpu":
        if device != "cuda":
            raise ParameterError(
                f"device: {device!r} names one GPU, but {count} processes train; give cuda, and "
                "each takes its own"
            )
        if local >= torch.cuda.device_count():
            raise ParameterError(
                f"process {local + 1} on this machine has no GPU: there are "
                f"{torch.cuda.device_count()}; start as many processes as there are GPUs"
            )
        torch.cuda.set_device(local)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=PATIENCE)
    yield Processes(rank, count)
    # Not after an error: the others may wait for this process, and learn of it when it is gone.
    dist.destroy_process_group()


class TrainedRecipe(Protocol):
    """A recipe in training, whole or in parts."""

    def losses(self, batch: Batch, *, counts: bool) -> StepResults:
        """One batch's results; all 0, with a graph of zeros, where it is not to count."""
        ...

    def clip_gradient(self, max_norm: float) -> Tensor:
        """Scale the gradient down to a norm; the norm that it had, over all processes."""
        ...

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and optimiser state with whole tensors; all processes must ask."""
        ...

    def load(
        self,
        weights: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
    ) -> None:
        """Take over what :meth:`state` returned, with however many processes it was."""
        ...

    def make_whole(self) -> None:
        """Give the recipe its parameters back, whole, on every process; ends the training."""
        ...


class WholeRecipe:
    """A recipe that one process trains alone."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def losses(self, batch: Batch, *, counts: bool) -> StepResults:
        """See :class:`TrainedRecipe`."""
        assert counts, "alone, every batch is this process' own"
        return self._recipe.losses(batch)

    def clip_gradient(self, max_norm: float) -> Tensor:
        """See :class:`TrainedRecipe`."""
        return nn.utils.clip_grad_norm_(self._recipe.parameters(), max_norm)

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See :class:`TrainedRecipe`."""
        return self._recipe.state_dict(), optimizer.state_dict()

    def load(
        self,
        weights: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
    ) -> None:
        """See :class:`TrainedRecipe`."""
        self._recipe.load_state_dict(weights)
        optimizer.load_state_dict(optimizer_state)

    def make_whole(self) -> None:
        """See :class:`TrainedRecipe`."""


class ShardedRecipe:
    """A recipe of which every process holds a part (``torch.distributed.fsdp.fully_shard``).

    The parts come together for a batch's forward and again for its backward pass. All of a recipe
    is gathered at once: a head is one layer, and a draft model few.
    """

    def __init__(self, recipe: Recipe, count: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device = next(recipe.parameters()).device
        self._recipe = recipe
        self._step = _BatchLosses(recipe)
        mesh = init_device_mesh(device.type, (count,))
        # Parted after every forward pass, so that outside of one the parameters always are parts.
        fully_shard(self._step, mesh=mesh, reshard_after_forward=True)

    def losses(self, batch: Batch, *, counts: bool) -> StepResults:
        """See :class:`TrainedRecipe`."""
        parts = zip(_FIELDS, self._step(batch), strict=True)
        return StepResults(**{name: part if counts else part * 0 for name, part in parts})

    def clip_gradient(self, max_norm: float) -> Tensor:
        """See :class:`TrainedRecipe`."""
        return _whole(nn.utils.clip_grad_norm_(self._recipe.parameters(), max_norm))

    def state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See :class:`TrainedRecipe`."""

        def gather(tensor: Tensor) -> Tensor:
            return _whole(tensor).cpu()

        weights = {name: gather(tensor) for name, tensor in self._recipe.state_dict().items()}
        return weights, _map_tensors(optimizer.state_dict(), gather)

    def load(
        self,
        weights: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
    ) -> None:
        """See :class:`TrainedRecipe`."""
        like = self._recipe.state_dict()
        self._recipe.load_state_dict(
            {name: _part_of(tensor, like[name]) for name, tensor in weights.items()}
        )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = {
            index: {name: _part_of(value, parameters[index]) for name, value in entry.items()}
            for index, entry in optimizer_state["state"].items()
        }
        optimizer.load_state_dict({**optimizer_state, "state": moments})

    def make_whole(self) -> None:
        """See :class:`TrainedRecipe`."""
        for name, parameter in list(self._recipe.named_parameters()):
            module, _, leaf = name.rpartition(".")
            whole = nn.Parameter(_whole(parameter.detach()))
            setattr(self._recipe.get_submodule(module), leaf, whole)


class _BatchLosses(nn.Module):
    """A recipe's ``losses`` as a forward pass that takes and gives what FSDP2 can look into."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """``_FIELDS`` of its results."""
        results = self.recipe.losses(batch)
        # Every process must have a gradient of every parameter to add up, also where its batch has
        # no row for some head, or for any.
        total = results.total + 0.0 * sum(p.sum() for p in self.recipe.parameters())
        return tuple(total if name == "total" else getattr(results, name) for name in _FIELDS)


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that the processes hold in parts."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part_of(whole: Any, like: Tensor) -> Any:
    """This process' part of a tensor, cut as ``like`` is; all else as it was."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(whole, Tensor) or whole.shape != like.shape or not isinstance(like, DTensor):
        return whole
    whole = whole.to(like.device)
    # Every process read the same file, so none has to send the others their part.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [_map_tensors(part, change) for part in value]
    return value


def _environment(name: str, *, default: int | None = None, least: int = 0) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdecimal() or int(text) < least:
        found = "is not set" if text is None else f"is {text!r}"
        raise ParameterError(f"the environment variable {name} {found}; {_LAUNCH}")
    return int(text)
