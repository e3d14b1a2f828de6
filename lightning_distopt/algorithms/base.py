"""The one base class: what an algorithm may do, and when it is called."""

import inspect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_distopt.collectives import CompressedMean, FlatLayout, Group, Hierarchy, Mean, NodeMean
from lightning_distopt.quantize import Codec
from lightning_distopt.replicas import replicas_agree

__all__ = [
    "Algorithm",
    "BucketHook",
    "GradientExchange",
    "WeightExchange",
    "check_bool",
    "check_hierarchical",
    "check_int",
    "check_number",
    "optimizer_parameters",
    "require_dense_real",
    "ring_bytes",
]


class Algorithm:
    """How replicas exchange. Subclass it, override what differs, and pass an instance to a strategy.

    The constructor is the configuration: it checks its arguments and stores each under its own name, opens nothing, and
    the object pickles and copies as its configuration. A driver (a strategy, or the hooks of a plain loop) then calls,
    on every rank in the same order::

        setup
        every optimizer update:  reduce(bucket) ...   ("gradients" only, during backward)
                                 before_step()        gradients final, update not yet applied
                                 after_step()         update applied, or skipped by a GradScaler
        finish                                        afterwards the replicas agree
        teardown                                      also after an error; never waits for a peer

    An algorithm that exchanges weights gets one instance per optimizer, so it counts that optimizer's updates and
    exchanges that optimizer's parameters. One that exchanges gradients sees all parameters through DDP's buckets.

    Attributes:
        name: what users write, for instance "bytegrad".
        strategy_prefix: its strategy is registered as this and its name.
        exchanges: "gradients" (through a DDP hook) or "weights" (without DDP).
        replicas_equal: whether all ranks hold the same weights after every update.
        bucket_cap_mb: MiB per DDP bucket; None for DDP's default.
        loss_scaling: whether gradients may arrive multiplied by a GradScaler's factor.
        uneven_updates: whether ranks may do different numbers of updates.
    """

    name: ClassVar[str]
    strategy_prefix: ClassVar[str] = "distopt_bagua_"
    exchanges: ClassVar[Literal["gradients", "weights"]] = "gradients"
    replicas_equal: ClassVar[bool] = True
    bucket_cap_mb: ClassVar[float | None] = None
    loss_scaling: ClassVar[bool] = True
    uneven_updates: ClassVar[bool] = False

    module: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    group: Group

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        """Start a fit. Collective. All ranks hold the same weights, on their final device.

        Args:
            module: the user's module, unwrapped.
            optimizers: the optimizers whose updates this instance sees.
            group: the ranks that exchange.
        """
        self.module = module
        self.optimizers = optimizers
        self.group = group

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Exchange one bucket of gradients. Buckets come in the same order on every rank; the sum is undivided.

        Args:
            bucket: its ``buffer()`` is 1-D with the same numel on every rank, and may be changed in place.

        Returns:
            A future of the 1-D tensor that becomes the gradient. All futures must be complete when the hook of the
            bucket with ``is_last()`` returns.
        """
        raise TypeError(f"{type(self).__name__} exchanges {self.exchanges}, it has no gradient hook")

    def before_step(self) -> None:
        """Gradients are final, the update is not yet applied."""

    def after_step(self) -> None:
        """The update was applied, or skipped by a GradScaler."""

    def finish(self) -> None:
        """Make the replicas agree, at the end of fit. Collective."""

    def teardown(self) -> None:
        """Let go of everything. Local, never waits for a peer, safe after an error and when called twice."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors and plain numbers, keyed by parameter name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave on this rank. Called after :meth:`setup`."""

    def expected_bytes(self, numel: int, size: int) -> float | None:
        """Return the bytes that a rank sends per update, after any warm-up and on average; None where nobody knows.

        Args:
            numel: trainable elements, in float32.
            size: ranks, all on nodes of their own.
        """
        return None

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments and their values."""
        parameters = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in parameters}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.config().items())})"

    def __getstate__(self) -> dict[str, Any]:
        # Groups and buffers of a fit belong to this process; what travels is the configuration.
        return self.config()


class GradientExchange(Algorithm):
    """Base of the algorithms that replace every bucket of gradients by its mean over ranks.

    A bucket is exchanged in two stages (all-to-all and all-gather of :class:`CompressedMean`). In bucket i's hook
    bucket i - 2 completes, bucket i's first stage starts, and the second one of bucket i - 1: so encoding, both stages
    and backward overlap without a thread. Collectives match on all ranks, since all are issued in bucket order from
    the thread that runs backward. A link sends what was started first, so hooks take turns in what they do first, and
    something is always on its way while they encode::

        under way          first stage of i - 1, second of i - 2       second stage of i - 2, first of i - 1
        hook i             second of i - 1, complete i - 2, first of i  complete i - 2, first of i, second of i - 1
        then under way     second of i - 1, first of i                 first of i, second of i - 1

    Attributes:
        hierarchical: average inside the node first, then between nodes.
        average: use the mean over ranks; else the sum.
    """

    exchanges = "gradients"

    def __init__(self, hierarchical: bool | Literal["auto"] = "auto", average: bool = True) -> None:
        self.hierarchical = check_hierarchical(hierarchical)
        self.average = check_bool("average", average)

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        super().setup(module, optimizers, group)
        self._hierarchy = Hierarchy.of(group, self.hierarchical)

    def exchange(self, bucket: dist.GradBucket, codec: Codec | None) -> Future[Tensor]:
        """Start replacing the bucket's buffer by its mean over ranks.

        Args:
            bucket: the bucket of this hook.
            codec: how values travel; None for full precision.
        """

        def between(flat: Tensor, group: Group) -> Mean | CompressedMean:
            return (
                Mean(flat, group, self.average) if codec is None else CompressedMean(flat, group, codec, self.average)
            )

        if bucket.index() == 0:
            self._under_way: deque[tuple[Mean | CompressedMean | NodeMean, Future[Tensor]]] = deque()
        flat = bucket.buffer()
        mean: Mean | CompressedMean | NodeMean
        if self._hierarchy is None or flat.is_sparse:
            mean = between(flat, self.group)
        else:
            mean = NodeMean(flat, self._hierarchy, between, self.average)
        future: Future[Tensor] = Future(devices=[flat.device] if flat.device.type == "cuda" else None)
        second_stage_first = bucket.index() % 2 == 1
        previous = self._under_way[-1][0] if self._under_way else None
        if previous is not None and second_stage_first:
            previous.gather()
        if len(self._under_way) > 1:
            self._complete_oldest()  # before the next starts, so that two buckets at most are held in encoded form
        mean.scatter()
        self._under_way.append((mean, future))
        if previous is not None and not second_stage_first:
            previous.gather()
        if bucket.is_last():
            if not second_stage_first:
                mean.gather()  # while the one before travels
            while len(self._under_way) > 1:
                self._complete_oldest()
            if second_stage_first:
                mean.gather()
            self._complete_oldest()
        return future

    def _complete_oldest(self) -> None:
        mean, future = self._under_way.popleft()
        future.set_result(mean.finish())


class WeightExchange(Algorithm):
    """Base of the algorithms that exchange weights instead of gradients.

    Keeps the parameters of its optimizers as a flat layout. When that set changes in mid-run (layers added or
    unfrozen, on every rank at the same update), new parameters get rank 0's values, those that leave get their mean,
    and :meth:`restart` is called.

    Attributes:
        layout: the exchanged parameters.
        step: optimizer updates since the fit began.
    """

    exchanges = "weights"
    replicas_equal = False

    layout: FlatLayout
    step: int

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        super().setup(module, optimizers, group)
        self.step = 0
        self._parameters = optimizer_parameters(optimizers)
        self._check_same()
        self._announce()

    def before_step(self) -> None:
        self._follow_parameters()
        self.before_update()

    def after_step(self) -> None:
        self.step += 1
        self.after_update()

    def before_update(self) -> None:
        """Gradients are final, the update is not yet applied; ``step`` updates came before."""

    def after_update(self) -> None:
        """The update is applied; ``step`` counts it."""

    def restart(self) -> None:
        """Allocate what depends on ``layout``. Called in setup and whenever the set of parameters has changed."""

    def flush(self) -> None:
        """Complete an exchange that is under way, so that ``layout`` may be replaced. Collective."""

    def finish(self) -> None:
        """Complete what is under way, then give every rank the mean weights, unless an exchange just did."""
        self.flush()
        if not replicas_agree(self.layout.tensors, self.group):
            self.average_weights_()

    def average_weights_(self, layout: FlatLayout | None = None) -> None:
        """Replace the parameters, or those of another layout, by their mean over ranks. Collective."""
        layout = self.layout if layout is None else layout
        buffers = layout.pack_(layout.empty())
        for buffer in buffers:
            self.group.all_reduce_(buffer.div_(self.group.size)).wait()
        layout.unpack_(buffers)

    @property
    def names(self) -> list[str]:
        """Names of the exchanged parameters, in the order of ``layout.tensors``."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        return [names.get(id(p), f"parameter {i} of the optimizer") for i, p in enumerate(self._parameters)]

    def _follow_parameters(self) -> None:
        """Notice parameters that were added, unfrozen or frozen since the last update. Collective if there are any."""
        parameters = optimizer_parameters(self.optimizers)
        if len(parameters) == len(self._parameters) and all(map(_is, parameters, self._parameters)):
            return
        self.flush()
        known, kept = set(map(id, self._parameters)), set(map(id, parameters))
        # What leaves is not exchanged any more, in finish neither.
        self.average_weights_(FlatLayout(p for p in self._parameters if id(p) not in kept))
        fresh = FlatLayout(p for p in parameters if id(p) not in known)
        self._parameters = parameters
        self._check_same()
        buffers = fresh.pack_(fresh.empty())
        for buffer in buffers:
            self.group.broadcast_(buffer).wait()
        fresh.unpack_(buffers)
        self._announce()

    def average_gradients_(self) -> None:
        """Replace every gradient by its mean over ranks; a rank that has none contributes zeros."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = FlatLayout(p.grad for p in self._parameters if p.grad is not None)
        buffers = gradients.pack_(gradients.empty())
        for buffer in buffers:
            self.group.all_reduce_(buffer.div_(self.group.size)).wait()
        gradients.unpack_(buffers)

    def _announce(self) -> None:
        self.layout = FlatLayout(self._parameters)
        self.restart()

    def _check_same(self) -> None:
        lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in zip(self.names, self._parameters, strict=True)]
        self.group.check_same(lines, "the optimizer's parameters")


def _is(left: object, right: object) -> bool:
    return left is right


def optimizer_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
    """Return the trainable parameters of the optimizers in their order, each once."""
    unique = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    return list(unique.values())


def require_dense_real(module: torch.nn.Module, algorithm: Algorithm) -> None:
    """Refuse parameters whose gradients cannot be quantised.

    Raises:
        ValueError: naming the parameter, for complex parameters and for embeddings with sparse gradients.
    """
    sparse = {id(m.weight) for m in module.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
    for name, parameter in module.named_parameters():
        kind = "is complex" if parameter.is_complex() else "has sparse gradients" if id(parameter) in sparse else None
        if kind is not None and parameter.requires_grad:
            raise ValueError(
                f"{algorithm.name} cannot quantise the gradient of {name!r}, which {kind}. "
                "Use gradient_allreduce, or make the parameter real and dense."
            )


def ring_bytes(num_bytes: float, size: int) -> float:
    """Return what a rank sends so that ``num_bytes`` on each of ``size`` ranks become their sum."""
    return 2 * (size - 1) / size * num_bytes


def check_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool, else raise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_int(name: str, value: object, minimum: int) -> int:
    """Return ``value`` if it is an int of at least ``minimum``, else raise TypeError or ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value


def check_number(name: str, value: object, minimum: float, below: float = math.inf) -> float:
    """Return ``value`` if it is a number with ``minimum <= value < below``, else raise TypeError or ValueError."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not minimum <= value < below:
        limit = "" if below == math.inf else f" and below {below}"
        raise ValueError(f"{name} must be at least {minimum}{limit}, got {value}")
    return float(value)


def check_hierarchical(value: object) -> bool | Literal["auto"]:
    """Return ``value`` if it is True, False or "auto", else raise ValueError."""
    if value is True or value is False or value == "auto":
        return value
    raise ValueError(f"hierarchical must be True, False or 'auto', got {value!r}")


class BucketHook:
    """Lets ``algorithm.reduce`` take the place of DDP's all-reduce, on CPU and on CUDA.

    On CUDA the exchange is issued on a side stream, which first waits for the gradients; DDP waits for the future at
    the end of backward, so backward goes on meanwhile and the host never blocks.

    Attributes:
        complete: whether the last bucket has come since this was last set to False. A backward pass that leaves it
            False did not reach some parameter, and other ranks wait for that gradient.
    """

    def __init__(self, ddp: DistributedDataParallel, algorithm: Algorithm) -> None:
        """Register with DDP; once per DDP object, before its first backward."""
        self.complete = True
        self._settling = False
        stream = torch.cuda.Stream(ddp.device) if ddp.device.type == "cuda" else None

        def hook(state: BucketHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if state._settling:
                untouched = bucket.buffer()
                future: Future[Tensor] = Future(devices=None if stream is None else [untouched.device])
                future.set_result(untouched)
                return future
            state.complete = bucket.is_last()
            if stream is None:
                return algorithm.reduce(bucket)
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                bucket.buffer().record_stream(stream)
                return algorithm.reduce(bucket)

        # DDP reads the hook's annotations: they must be these very classes, not strings.
        ddp.register_comm_hook(self, hook)
        self._settle_buckets(ddp)

    def _settle_buckets(self, ddp: DistributedDataParallel) -> None:
        """Let DDP lay out its buckets for good, by a backward pass of zeros that exchanges nothing.

        DDP lays them out anew after its first backward pass, in the order in which gradients came. The layout
        decides about the last bits of a mean that is quantised, or summed over three ranks or more: a resumed
        run, whose first update has the first layout again, would differ from one that never stopped.
        """
        sparse = any(getattr(module, "sparse", False) for module in ddp.modules())
        if ddp.find_unused_parameters or ddp.static_graph or sparse:
            # DDP keeps its first layout; must see no other graph than the model's; expects a sparse gradient.
            return
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        self._settling = True
        try:
            ddp.reducer.prepare_for_backward([])
            total = torch.zeros((), device=ddp.device)
            for p in parameters:  # the last used is the first to get its gradient, as in the usual model
                total = total + p.flatten()[:1].sum().real.to(ddp.device, torch.float32)
            torch.autograd.backward(0 * total)
        finally:
            self._settling = False
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
