"""Gradient all-reduce: what DistributedDataParallel does, as an algorithm like any other."""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_distopt.algorithms.base import GradientExchange, ring_bytes

__all__ = ["GradientAllReduce"]


class GradientAllReduce(GradientExchange):
    """Every rank uses the mean gradient, g = 1/W sum_r g_r, at full precision.

    Sends 2 (W - 1) / W * 4N bytes per rank and update (float32, N trainable elements). Replicas stay equal. The
    reference for all others, and the right choice where the network does not limit training.

    Args:
        hierarchical: average inside the node first, then between nodes; "auto" when there are several nodes with
            several ranks each.
        average: use the mean over ranks; else the sum.
    """

    name = "gradient_allreduce"

    def expected_bytes(self, numel: int, size: int) -> float:
        return ring_bytes(4 * numel, size)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return self.exchange(bucket, codec=None)
