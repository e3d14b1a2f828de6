"""Compressed gradient all-reduces: what torch ships as DDP communication hooks, on CPU and CUDA, counted, resumable."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_distopt.algorithms.base import (
    GradientExchange,
    check_hierarchical,
    check_int,
    require_dense_real,
    ring_bytes,
)
from lightning_distopt.collectives import Group
from lightning_distopt.quantize import BFloat16, Float16

__all__ = ["HalfAllReduce", "PowerSGD"]


class HalfAllReduce(GradientExchange):
    """Gradients travel as 16-bit numbers: half the bytes of a float32 all-reduce. Replicas stay equal.

    Differs from torch's ``fp16_compress_hook`` and ``bf16_compress_hook``: the sum over ranks is computed in the
    gradient's own precision, and bfloat16 works with gloo, too.

    Args:
        dtype: "fp16" (11 significant bits, infinite beyond 65504) or "bf16" (8 bits, the range of float32).
        hierarchical: average exactly inside the node first, then in 16 bits between nodes; "auto" when there are
            several nodes with several ranks each.
        average: use the mean over ranks; else the sum.
    """

    name = "half_allreduce"

    def __init__(
        self,
        dtype: Literal["fp16", "bf16"] = "fp16",
        hierarchical: bool | Literal["auto"] = "auto",
        average: bool = True,
    ) -> None:
        """Configure; opens nothing."""
        super().__init__(check_hierarchical(hierarchical), average)
        if dtype not in ("fp16", "bf16"):
            raise ValueError(f"dtype must be 'fp16' or 'bf16', got {dtype!r}")
        self.dtype = dtype

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        require_dense_real(module, self)
        super().setup(module, optimizers, group)

    def expected_bytes(self, numel: int, size: int) -> float:
        return ring_bytes(2 * numel, size)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return self.exchange(bucket, Float16() if self.dtype == "fp16" else BFloat16())


class PowerSGD(GradientExchange):
    """Gradients of matrices travel as two thin matrices of rank r, with error feedback.

    A gradient with n rows (its first axis) and m columns (all others) is M. With e_r what rank r could not send so far,
    and Q from the last update::

        M_r = g_r + e_r
        P = orthonormal columns of mean_r(M_r Q)         [n, r]
        Q = mean_r(M_r^T P)                              [m, r]
        g = P Q^T,  e_r = M_r - g

    Sends 2 (W - 1) / W * 4 (n + m) r bytes per matrix. Vectors, and matrices where that saves less than half, travel at
    full precision, and so does everything in the first updates. Replicas stay equal.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019, arXiv:1905.13727, Algorithm 2. The arguments are those of torch's ``PowerSGDState``.
    Differs from torch: state is kept per parameter by name, so it is saved, resumed and survives DDP's new layout of
    buckets. P and Q travel in float32 for 16-bit gradients, too.

    Args:
        matrix_approximation_rank: r; 1 to 4 are usual.
        start_powerSGD_iter: updates at full precision before compression begins; early gradients compress badly.
    """

    name = "powersgd"
    loss_scaling = False
    # Of what travels at full precision.
    hierarchical: bool | Literal["auto"] = "auto"
    average = True

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,  # noqa: N803 - torch's name
    ) -> None:
        """Configure; opens nothing."""
        super().__init__(self.hierarchical, self.average)
        self.matrix_approximation_rank = check_int("matrix_approximation_rank", matrix_approximation_rank, 1)
        self.start_powerSGD_iter = check_int("start_powerSGD_iter", start_powerSGD_iter, 0)

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        require_dense_real(module, self)
        super().setup(module, optimizers, group)
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._seeds = {name: seed for seed, name in enumerate(self._names.values())}
        self._num_exchanges = 0
        self._errors: dict[str, Tensor] = {}
        self._rights: dict[str, Tensor] = {}

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        compress = self._num_exchanges >= self.start_powerSGD_iter and self.group.size > 1
        self._num_exchanges += bucket.is_last()
        if not compress:
            return self.exchange(bucket, codec=None)
        self._average_(bucket)
        future: Future[Tensor] = Future(devices=[flat.device] if flat.device.type == "cuda" else None)
        future.set_result(flat)
        return future

    def _average_(self, bucket: dist.GradBucket) -> None:
        gradients: dict[str, Tensor] = {}
        vectors: list[Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._is_worthwhile(gradient):
                gradients[self._names[id(parameter)]] = gradient.view(gradient.shape[0], -1)
            else:
                vectors.append(gradient)
        # Under way while the matrices are worked on.
        rest = self._flatten(vectors)
        pending = self.group.all_reduce_(rest.mul_(1 / self.group.size)) if vectors else None

        matrices = {name: self._with_error(name, gradient) for name, gradient in gradients.items()}
        lefts = self._mean([matrix @ self._right(name, matrix) for name, matrix in matrices.items()])
        lefts = [torch.linalg.qr(left)[0] for left in lefts]
        rights = self._mean([m.T @ left for m, left in zip(matrices.values(), lefts, strict=True)])
        for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            approximation = left @ right.T
            gradients[name].copy_(approximation)
            self._errors[name] = matrix.sub_(approximation)
            self._rights[name] = right
        if pending is not None:
            pending.wait()
            self._unflatten_(rest, vectors)

    def _is_worthwhile(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        n, m = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return 2 * (n + m) * self.matrix_approximation_rank < n * m

    def _with_error(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32, copy=True)
        error = self._errors.get(name)
        return matrix if error is None else matrix.add_(error)

    def _right(self, name: str, matrix: Tensor) -> Tensor:
        if name not in self._rights:
            # The same numbers on every rank, and in a resumed run.
            generator = torch.Generator().manual_seed(self._seeds[name])
            start = torch.randn(matrix.shape[1], self.matrix_approximation_rank, generator=generator)
            self._rights[name] = start.to(matrix)
        return self._rights[name]

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the means over ranks of small tensors of one dtype, which are exchanged together."""
        if not tensors:
            return []
        flat = self._flatten(tensors).mul_(1 / self.group.size)
        self.group.all_reduce_(flat).wait()
        pieces = flat.split([t.numel() for t in tensors])
        return [piece.view(t.shape).clone() for piece, t in zip(pieces, tensors, strict=True)]

    @staticmethod
    def _flatten(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.empty(0)

    @staticmethod
    def _unflatten_(flat: Tensor, tensors: list[Tensor]) -> None:
        for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def teardown(self) -> None:
        """Free the memory of the errors."""
        self._errors, self._rights = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the updates so far, and per matrix what was not sent yet and the last Q."""
        return {"num_exchanges": self._num_exchanges, "errors": dict(self._errors), "rights": dict(self._rights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_exchanges = state["num_exchanges"]
        shapes = dict(self.module.named_parameters())
        self._errors, self._rights = (
            {name: tensor.to(shapes[name].device) for name, tensor in state[part].items()}
            for part in ("errors", "rights")
        )
