"""Lightning strategies: the only place where Lightning meets an algorithm."""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_distopt.algorithms import ALGORITHMS, Algorithm, make_algorithm
from lightning_distopt.algorithms.base import BucketHook
from lightning_distopt.collectives import DEFAULT_TIMEOUT, Group, Traffic, check_collective_allowed
from lightning_distopt.distributed import mean_of_replicas_, sync_model

__all__ = ["DistOptBaguaStrategy", "DistOptDDPStrategy", "DistOptStrategy", "register_strategies"]

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

_DDP_ARGUMENTS = [
    name
    for name in inspect.signature(DistributedDataParallel).parameters
    if name not in ("module", "device_ids", "output_device", "dim", "process_group", "check_reduction", "device_mesh")
]


class DistOptStrategy(DDPStrategy):
    """Data-parallel training in which an :class:`~lightning_distopt.algorithms.Algorithm` exchanges between ranks.

    Launching, devices, samplers, precision and logging are those of Lightning's own ``ddp``.

    An algorithm that exchanges gradients runs inside DistributedDataParallel. One that exchanges weights needs no DDP:
    rank 0's parameters and buffers are broadcast once, then it acts around every optimizer update. Where replicas
    differ, validation and checkpoints see their mean.
    """

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: StartMethod | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        """Configure; opens nothing.

        Args:
            algorithm: an instance, or a name with that algorithm's defaults.
            accelerator: set by the Trainer.
            parallel_devices: set by the Trainer.
            cluster_environment: how processes find each other; by default Lightning detects it.
            checkpoint_io: how checkpoint files are written.
            precision_plugin: set by the Trainer.
            process_group_backend: "nccl" or "gloo"; by default by device.
            timeout: after which a lost peer is an error, for every group.
            start_method: how ranks are started; by default "popen", and "fork" in a notebook.
            **ddp_kwargs: arguments of DistributedDataParallel, for algorithms that exchange gradients.

        Raises:
            ValueError: unknown algorithm or option, with the valid ones listed.
            TypeError: a value of the wrong type.
        """
        self.algorithm = make_algorithm(algorithm)
        for name in ddp_kwargs:
            if name not in _DDP_ARGUMENTS:
                raise TypeError(f"unknown argument {name!r} of {type(self).__name__}; valid are those of its signature "
                                f"and of DistributedDataParallel: {', '.join(_DDP_ARGUMENTS)}")  # fmt: skip
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
        if ddp_kwargs and self.algorithm.exchanges == "weights":
            raise ValueError(
                f"{', '.join(ddp_kwargs)} would have no effect: {self.algorithm.name} exchanges weights, without "
                "DistributedDataParallel. Remove it."
            )
        if self.algorithm.bucket_cap_mb is not None:
            ddp_kwargs.setdefault("bucket_cap_mb", self.algorithm.bucket_cap_mb)
        # Gradients that live in DDP's buckets save one copy of all gradients per update.
        ddp_kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            # Lightning decides by the same sign what is a notebook.
            start_method=start_method or ("fork" if hasattr(sys, "ps1") else "popen"),
            **ddp_kwargs,
        )
        self._traffic = Traffic(label=self.algorithm.name)
        self._group: Group | None = None
        self._world: dist.ProcessGroup | None = None
        self._bound: list[tuple[Optimizer, Algorithm]] = []
        self._hook: BucketHook | None = None
        self._backward_seen = False
        self._replicas_differ = False
        self._restore_replica: Callable[[], None] | None = None

    # -- what has been sent ------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and waited for since the strategy was made."""
        return self._traffic

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for the algorithm since the strategy was made."""
        return self._traffic.bytes_sent

    @property
    def group(self) -> Group | None:
        """The ranks that exchange; None before the first fit."""
        return self._group

    @property
    def algorithms(self) -> list[Algorithm]:
        """The running algorithms: one, or one per optimizer where weights are exchanged."""
        return [algorithm for _, algorithm in self._bound] or [self.algorithm]

    # -- start and end of a fit --------------------------------------------------------------------------------------

    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._backward_seen = False
        if fitting:
            self._group = self._algorithm_group()
        super().setup(trainer)
        if fitting:
            self._bind_algorithms()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        # The extension point of DDPStrategy for how the module is wrapped. The algorithm's own group also carries DDP's
        # buffer broadcasts: they never run beside an exchange, and metrics on the default group never meet either.
        if self._group is not None and self._group.process_group is not None:
            self._ddp_kwargs["process_group"] = self._group.process_group
        try:
            return super()._setup_model(model)
        finally:
            self._ddp_kwargs.pop("process_group", None)

    def configure_ddp(self) -> None:
        if self.algorithm.exchanges == "gradients":
            super().configure_ddp()
        else:
            assert self.model is not None
            sync_model(self.model, reduce_parameters=False, reduce_buffers=False, group=self._group)

    def _register_ddp_hooks(self) -> None:
        # DDPStrategy's own registers on CUDA only, and drops the hook silently on CPU.
        assert isinstance(self.model, DistributedDataParallel)
        self._hook = BucketHook(self.model, self.algorithm)

    def on_train_end(self) -> None:
        for algorithm in self.algorithms:
            algorithm.finish()
        if not self.algorithm.replicas_equal and self.lightning_module is not None:
            # Optimizers know nothing of buffers, nor of parameters that no optimizer holds.
            sync_model(self.lightning_module, sync_parameters=False, group=self._group)
        self._replicas_differ = False
        super().on_train_end()

    def teardown(self) -> None:
        for algorithm in self.algorithms:
            algorithm.teardown()
        self._bound = []
        self._hook = None
        self._replicas_differ = False
        self._restore_replica = None
        if self._group is not None:
            self._group.release_buffers()
        super().teardown()

    # -- one update --------------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        self._backward_seen = True
        if self._hook is not None:
            self._hook.complete = False

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._hook is None or self._hook.complete or not isinstance(self.model, DistributedDataParallel):
            return
        if self.model.require_backward_grad_sync and not self.model.static_graph:
            # DDP itself notices in the next forward. By then this rank may hang in the reduction of a logged value,
            # and the others in that of the missing gradient.
            raise RuntimeError(
                "Some parameters were not used in producing the loss that training_step returned, so their gradients "
                "cannot be exchanged. If this is intended, pass `find_unused_parameters=True` to the strategy, for "
                f"instance `Trainer(strategy={type(self).__name__}(..., find_unused_parameters=True))`; or let them "
                "take part in the loss."
            )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | torch.nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        algorithm = self._algorithm_of(optimizer)
        assert self.lightning_module is not None
        if self._hook is not None and not self._backward_seen and not self.lightning_module.automatic_optimization:
            raise RuntimeError(
                "optimizer.step() before any self.manual_backward(loss): a plain loss.backward() leaves every rank "
                "with its own gradients. Call self.manual_backward(loss) in training_step."
            )

        def closure_and_exchange() -> Any:
            # In automatic optimization the closure runs forward and backward inside optimizer.step: an optimizer's
            # step-pre-hook would fire before them.
            result = closure()
            algorithm.before_step()
            return result

        output = super().optimizer_step(optimizer, closure_and_exchange, model, **kwargs)
        algorithm.after_step()
        self._traffic.step += 1
        return output

    # -- where replicas are looked at --------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self._show_mean()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._show_replica()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._show_mean()
        state = super().lightning_module_state_dict()
        if self._restore_replica is not None:
            # References to the weights, which are about to change back.
            state = {k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in state.items()}
        self._show_replica()
        return state

    def _show_mean(self) -> None:
        if self._replicas_differ and self._restore_replica is None:
            assert self.lightning_module is not None
            assert self._group is not None
            self._restore_replica = mean_of_replicas_(self.lightning_module, self._group)

    def _show_replica(self) -> None:
        if self._restore_replica is not None:
            self._restore_replica()
            self._restore_replica = None

    # -- collectives of the strategy, refused where only the master runs ---------------------------------------------

    def reduce(
        self, tensor: torch.Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> torch.Tensor:
        check_collective_allowed("strategy.reduce")
        return super().reduce(tensor, group, reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        check_collective_allowed("strategy.barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        check_collective_allowed("strategy.broadcast")
        return super().broadcast(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        check_collective_allowed("strategy.all_gather")
        return super().all_gather(tensor, group, sync_grads)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _algorithm_group(self) -> Group:
        if self.world_size == 1:
            return Group(traffic=self._traffic)
        world = dist.distributed_c10d._get_default_group()
        if self._group is None or self._world is not world:
            assert self._timeout is not None
            self._world = world
            self._group = Group(
                dist.new_group(timeout=self._timeout, backend=self.process_group_backend),
                local_size=self.num_processes,
                timeout=self._timeout,
                traffic=self._traffic,
            )
        return self._group

    def _bind_algorithms(self) -> None:
        assert self._group is not None
        assert self.lightning_module is not None
        if not self.algorithm.loss_scaling and getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{self.algorithm.name} keeps moments of the gradients, which a loss scaler multiplies by a changing "
                "factor. Use precision='bf16-mixed' instead of '16-mixed'."
            )
        if self.algorithm.exchanges == "gradients":
            self._bound = [(optimizer, self.algorithm) for optimizer in self.optimizers[:1]]
        else:
            for optimizer in self.optimizers:
                if isinstance(optimizer, LBFGS):
                    raise ValueError(
                        f"LBFGS computes several gradients per update, which {self.algorithm.name} cannot follow. "
                        "Use gradient_allreduce, or another optimizer."
                    )
            first, *others = self.optimizers
            self._bound = [
                (first, self.algorithm),
                *((optimizer, copy.deepcopy(self.algorithm)) for optimizer in others),
            ]
        for optimizer, algorithm in self._bound:
            own = self.optimizers if algorithm.exchanges == "gradients" else [optimizer]
            algorithm.setup(self.lightning_module, own, self._group)
        self._replicas_differ = not self.algorithm.replicas_equal

    def _algorithm_of(self, optimizer: Optimizer) -> Algorithm:
        for bound, algorithm in self._bound:
            if bound is optimizer:
                return algorithm
        return self.algorithm

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Groups and running algorithms belong to this process.
        state.update(_group=None, _world=None, _bound=[], _hook=None, _replicas_differ=False, _restore_replica=None)
        return state


class DistOptDDPStrategy(DistOptStrategy):
    """Lightning's ``ddp`` with its traffic counted: a gradient all-reduce at full precision."""

    def __init__(self, **kwargs: Any) -> None:
        """Configure; opens nothing.

        Args:
            **kwargs: what :class:`DistOptStrategy` and DistributedDataParallel take.
        """
        super().__init__("gradient_allreduce", **kwargs)


class DistOptBaguaStrategy(DistOptStrategy):
    """One of Bagua's algorithms by name, with its options."""

    def __init__(
        self, algorithm: str | Algorithm = "gradient_allreduce", options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Configure; opens nothing.

        Args:
            algorithm: a name in :data:`lightning_distopt.algorithms.ALGORITHMS`, or an instance.
            options: arguments of the algorithm. They may also be given directly as keywords.
            **kwargs: arguments of the algorithm, of :class:`DistOptStrategy` and of DistributedDataParallel.

        Raises:
            ValueError: unknown algorithm or option, with the valid ones listed.
            TypeError: a value of the wrong type.
        """
        chosen = dict(options or {})
        known = ALGORITHMS[algorithm] if isinstance(algorithm, str) and algorithm in ALGORITHMS else None
        if known is not None:
            chosen.update((name, kwargs.pop(name)) for name in inspect.signature(known).parameters if name in kwargs)
        super().__init__(make_algorithm(algorithm, **chosen), **kwargs)


def register_strategies() -> None:
    """Put the strategy names into Lightning's registry. Harmless when repeated."""
    names = {cls.strategy_prefix + name: name for name, cls in ALGORITHMS.items()}
    for registered, algorithm in {"distopt_bagua": "gradient_allreduce", **names}.items():
        StrategyRegistry.register(
            registered, DistOptBaguaStrategy, description=ALGORITHMS[algorithm].__name__, override=True,
            algorithm=algorithm,
        )  # fmt: skip
    StrategyRegistry.register("distopt_ddp", DistOptDDPStrategy, description="DDP, traffic counted", override=True)
