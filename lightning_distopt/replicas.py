"""One rank's copy of the model: seen as tensors by name, put back, and compared with the other ranks'."""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_distopt.collectives import DistributedRuntimeException, Group, checksum

__all__ = ["check_replicas", "load_replica_", "replica_of", "replicas_agree"]


def replica_of(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, those that no checkpoint holds included. Nothing is copied."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: tensor.detach() for name, tensor in named if not is_lazy(tensor)}


def load_replica_(module: nn.Module, replica: dict[str, Tensor]) -> None:
    """Copy a replica into a module that has the same parameters and buffers."""
    with torch.no_grad():
        for name, tensor in replica_of(module).items():
            # Those made by expand cannot be written to, and are constants.
            if name in replica and not torch.equal(tensor, replica[name].to(tensor.device)):
                tensor.copy_(replica[name])


def replicas_agree(tensors: Iterable[Tensor], group: Group) -> bool:
    """Return whether every rank has the same bits. Collective, 8 bytes per rank.

    Args:
        tensors: of the same number and shapes on every rank.
        group: all ranks.
    """
    return _agree([checksum(tensor) for tensor in tensors], group)


def _agree(sums: Sequence[Tensor], group: Group) -> bool:
    if group.size == 1 or not sums:
        return True
    mine = checksum(torch.stack([value.to(group.device) for value in sums])).view(1)
    every = mine.new_empty(group.size)
    group.all_gather(every, mine).wait()
    return bool((every == every[0]).all())


def check_replicas(module: nn.Module, group: Group, step: int) -> None:
    """Make sure that all ranks hold the same parameters, bit for bit. Collective, 8 bytes per rank.

    Args:
        module: the same structure on every rank.
        group: all ranks.
        step: for the message.

    Raises:
        DistributedRuntimeException: on every rank, with the step and the first parameter that differs.
    """
    named = list(module.named_parameters())
    sums = [checksum(parameter) for _, parameter in named]
    if _agree(sums, group):
        return
    by_rank = group.gather_objects([int(value) for value in sums])
    first = next(i for i, values in enumerate(zip(*by_rank, strict=True)) if len(set(values)) > 1)
    raise DistributedRuntimeException(
        f"The replicas differ after update {step}: the first parameter that is not the same on every rank is "
        f"{named[first][0]!r}. It was changed in a way that the strategy cannot see: look for random numbers, a plain "
        "loss.backward(), or code that runs on one rank only."
    )
