"""ByteGrad: the mean gradient in 8 bits."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_distopt.algorithms.base import GradientExchange, require_dense_real, ring_bytes
from lightning_distopt.collectives import Group
from lightning_distopt.quantize import MinMaxUInt8

__all__ = ["ByteGrad"]


class ByteGrad(GradientExchange):
    """Every rank uses the mean gradient, quantised to one byte per element on its two ways over the network.

    With Q the 8-bit quantiser :class:`~lightning_distopt.quantize.MinMaxUInt8`, and chunk k of every bucket owned by
    rank k, all ranks use for chunk k: ``g = Q(1/W (g_k + sum_{r != k} Q(g_r)))``. Each Q is off by at most half a
    level, (max - min) / 510 of a block of 4096 values.

    Sends 2 (W - 1) / W * N bytes per rank and update, and 8 for every 4096 of them: a quarter of a float32 all-reduce.
    Replicas stay equal bit for bit, since all ranks decode the same bytes. Gradients that are not finite arrive as not
    finite on every rank, so a GradScaler sees them. A single rank quantises nothing. No state.

    Source: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021, arXiv:2107.01499,
    section 3 (centralized low-precision synchronous).
    Differs from Bagua: ranges are those of blocks, not of a whole chunk, in which one layer's large gradients would
    round another's small ones to nothing; a chunk's owner takes its own values as they are.

    Args:
        hierarchical: average exactly inside the node first, then quantised between nodes; "auto" when there are
            several nodes with several ranks each.
        average: use the mean over ranks; else the sum.
    """

    name = "bytegrad"
    bucket_cap_mb = 4

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        require_dense_real(module, self)
        super().setup(module, optimizers, group)

    def expected_bytes(self, numel: int, size: int) -> float:
        return ring_bytes(MinMaxUInt8().encoded_bytes(numel, torch.float32), size)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return self.exchange(bucket, MinMaxUInt8())
