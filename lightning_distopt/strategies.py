"""Lightning strategies: the only place where Lightning meets an algorithm."""

import copy
import inspect
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_distopt.algorithms import ALGORITHMS, Algorithm
from lightning_distopt.algorithms.base import BucketHook, check_int
from lightning_distopt.checkpoints import KEY, agree, load_part, new_id, remove_parts, save_part
from lightning_distopt.collectives import (
    DistributedRuntimeException,
    FlatLayout,
    Group,
    Traffic,
    check_collective_allowed,
)
from lightning_distopt.distributed import mean_of_replicas_, sync_model
from lightning_distopt.options import BaguaDistributedOption, DDPOption, DistributedBaseOption, TorchOption, start_alike
from lightning_distopt.replicas import check_replicas, load_replica_, replica_of, replicas_agree

__all__ = ["DistOptBaguaStrategy", "DistOptDDPStrategy", "DistOptStrategy", "register_strategies"]

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

PYTORCH_LIGHTNING = (
    "pytorch_lightning is imported, whose Trainer and LightningModule do not work with lightning_distopt: write "
    "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, everywhere."
)


class DistOptStrategy(DDPStrategy):
    """Data-parallel training in which an :class:`~lightning_distopt.algorithms.Algorithm` exchanges between ranks.

    Launching, devices, samplers, precision and logging are those of Lightning's own ``ddp``.

    An algorithm that exchanges gradients runs inside DistributedDataParallel. One that exchanges weights needs no DDP:
    rank 0's parameters and buffers are broadcast once, then it acts around every optimizer update. Where replicas
    differ, validation and checkpoints see their mean.
    """

    def __init__(
        self,
        option: DistributedBaseOption | Algorithm | str | None = None,
        algorithm: str | Algorithm | None = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: StartMethod | None = None,
        check_replicas_every_n_steps: int = 0,
        **options: Any,
    ) -> None:
        """Configure; opens nothing.

        Args:
            option: an option object, which plain training loops take, too. Its address, port, file and backend, where
                it has them, win over the cluster environment's. Or what ``algorithm`` takes.
            algorithm: an instance, or a name; by default "gradient_allreduce".
            accelerator: set by the Trainer.
            parallel_devices: set by the Trainer.
            cluster_environment: how processes find each other; by default Lightning detects it.
            checkpoint_io: how checkpoint files are written.
            precision_plugin: set by the Trainer.
            process_group_backend: "nccl" or "gloo"; by default the option's, or by device.
            timeout: after which a lost peer is an error, for every group; by default the option's, or half an hour.
            start_method: how ranks are started; by default "popen", and "fork" in a notebook.
            check_replicas_every_n_steps: compare the weights of all ranks after every so many updates, by a checksum of
                8 bytes, and raise where they differ; 0 never does. For algorithms that keep replicas equal.
            **options: of :class:`~lightning_distopt.BaguaDistributedOption`, where no option object is given: among
                them the arguments of the algorithm and, if it exchanges gradients, of DistributedDataParallel.

        Raises:
            ValueError: unknown algorithm or option, with the valid ones listed.
            TypeError: a value of the wrong type.
        """
        if "pytorch_lightning" in sys.modules:
            rank_zero_warn(PYTORCH_LIGHTNING)
        if isinstance(option, str | Algorithm):
            if algorithm is not None:
                raise TypeError(f"two algorithms were given: {option!r} and {algorithm!r}")
            option, algorithm = None, option
        if option is None:
            # dict(): from plain **options the Lightning CLI would infer arguments of this class, and always give them.
            option = BaguaDistributedOption(algorithm or "gradient_allreduce", **dict(options))
        elif algorithm is not None or options:
            names = [*([] if algorithm is None else ["algorithm"]), *options]
            raise ValueError(f"{', '.join(names)} beside an option object: give them to that object")
        if not isinstance(option, TorchOption):
            raise TypeError(
                "a strategy takes an algorithm's name, an instance such as DiLoCo(period=50), a DDPOption or a "
                f"BaguaDistributedOption, got {option!r}"
            )
        if getattr(option, "engine", "auto") == "bagua":
            raise ValueError(
                "engine='bagua' runs in plain loops only, by convert2distributed_model: the original Bagua predates "
                "every torch that this Lightning runs on. Use engine='torch'."
            )
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
        if option.init_with_env_file():
            option.init_method()  # raises without a file
        given = {
            "process_group_backend": process_group_backend,
            "timeout": timeout,
            "start_method": start_method,
            "check_replicas_every_n_steps": check_replicas_every_n_steps,
        }
        self._given = {name: value for name, value in given.items() if value}
        self.option = option
        self.algorithm = algorithm if isinstance(algorithm, Algorithm) else option.new_algorithm()
        self.check_replicas_every_n_steps = check_int("check_replicas_every_n_steps", check_replicas_every_n_steps, 0)
        if check_replicas_every_n_steps and not self.algorithm.replicas_equal:
            raise ValueError(
                f"check_replicas_every_n_steps={check_replicas_every_n_steps} has no meaning with "
                f"{self.algorithm.name}, whose replicas differ between exchanges. Leave it at 0."
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend or option.backend,
            timeout=timeout or option.timeout,
            # Lightning decides by the same sign what is a notebook.
            start_method=start_method or ("fork" if hasattr(sys, "ps1") else "popen"),
            **option.ddp_arguments(),
        )
        self._traffic = Traffic(label=self.algorithm.name)
        self._group: Group | None = None
        self._world: dist.ProcessGroup | None = None
        self._bound: list[tuple[Optimizer, Algorithm]] = []
        self._hook: BucketHook | None = None
        self._backward_seen = False
        self._weights_only = True
        self._replicas_differ = False
        self._restore_replica: Callable[[], None] | None = None
        self._before_callbacks = _BeforeCallbacks(self)
        self._num_updates = 0
        self._num_gradients: Counter[int] = Counter()
        self._gradient_hooks: list[RemovableHandle] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._trainable: list[torch.nn.Parameter] = []
        self._checkpoint_path: str | Path = ""
        self._finished = False
        self._failed = False

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

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._given.items())
        return f"{type(self).__name__}({self.algorithm!r}, option={self.option!r}{given})"

    # -- start and end of a fit --------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        assert self.cluster_environment is not None
        assert self._timeout is not None
        self.set_world_ranks()
        # Where another program has the port Lightning's own way names neither port nor host, and waits without end.
        if self.option.says_where_to_meet or (self.world_size > 1 and not dist.is_initialized()):
            where = self.option.init_method(self.cluster_environment.main_address, self.cluster_environment.main_port)
            backend = self.process_group_backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
            index = self.root_device.index
            self.option.join(backend, where, self.world_size, self.global_rank, index, timeout=self._timeout)
        # Keeps a group that exists.
        super().setup_distributed()

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        if self.option.adapts_optimizers:
            self.optimizers = [self.option.adapt_optimizer(optimizer) for optimizer in self.optimizers]

    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._backward_seen = False
        _stop_on_sigterm_alone(trainer)
        if fitting:
            self._group = self._algorithm_group()
            self._failed = False
            if self._before_callbacks not in _callbacks_of(trainer):
                _callbacks_of(trainer).insert(0, self._before_callbacks)
        super().setup(trainer)
        if fitting:
            self._bind_algorithms()
            self._note_parameters()
            self._say_what_is_to_come()

    def _say_what_is_to_come(self) -> None:
        numel = sum(p.numel() for p in self._trainable)
        expected = self.algorithm.expected_bytes(numel, self.world_size)
        amount = "an amount that depends on the run" if expected is None else f"about {_readable(expected)}"
        ranks = f"{self.world_size} ranks; each sends {amount} per update" if self.world_size > 1 else "1 rank, alone"
        rank_zero_info(f"{self.algorithm!r} on {ranks}")

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
            assert self._group is not None
            start_alike(self.model, self._group)

    def _register_ddp_hooks(self) -> None:
        # DDPStrategy's own registers on CUDA only, and drops the hook silently on CPU.
        assert isinstance(self.model, DistributedDataParallel)
        self._hook = BucketHook(self.model, self.algorithm)

    def finish(self) -> None:
        """Complete what is under way, and make the replicas agree. Collective; when repeated it does nothing.

        Called at the end of fit before any callback's hook: one that then puts other weights in place, such as a moving
        average, would see them mixed with an exchange that ends later.
        """
        if self._finished:
            return
        self._finished = True
        if not self.algorithm.uneven_updates:
            self._check_number_of_updates()
        for algorithm in self.algorithms:
            algorithm.finish()
        assert self.lightning_module is not None
        if any(True for _ in self.lightning_module.buffers()):
            # Optimizers know nothing of buffers. DDP broadcasts rank 0's, but only before a forward pass.
            self._sync_module(sync_parameters=False, reduce_buffers=not self.algorithm.replicas_equal)

    def _check_number_of_updates(self) -> None:
        """Refuse to end where other ranks train on: they wait for a gradient that never comes.

        Raises:
            DistributedRuntimeException: on every rank.
        """
        if self.world_size == 1:
            return
        told = (
            f"rank {self.global_rank} has come to the end of training after {self._num_updates} updates, {{}}. Every "
            "rank needs the same number of batches: leave use_distributed_sampler=True, give loaders of equal length, "
            "or use strategy='distopt_bagua_async', which needs none of that."
        )
        try:
            # Not on the algorithm's own group, where the others may be in an exchange.
            counts = Group(self._world, traffic=self._traffic).gather_objects(self._num_updates)
        except RuntimeError as error:
            raise DistributedRuntimeException(told.format("and another rank has not")) from error
        if len(set(counts)) > 1:
            raise DistributedRuntimeException(told.format(f"and not all have made as many: {counts}"))

    def on_train_start(self) -> None:
        super().on_train_start()
        # A learning-rate finder runs a whole fit of its own before this one begins.
        self._finished = False
        self._num_updates = 0
        self._replicas_differ = not self.algorithm.replicas_equal

    def on_train_end(self) -> None:
        self.finish()
        assert self.lightning_module is not None
        assert self._group is not None
        if self._replicas_differ and not replicas_agree(replica_of(self.lightning_module).values(), self._group):
            # What a callback has put in place is an average of this rank's own weights; or no optimizer has them.
            self._sync_module()
        self._replicas_differ = False
        super().on_train_end()

    def teardown(self) -> None:
        for algorithm in self.algorithms:
            algorithm.teardown()
        self._bound = []
        self._hook = None
        self._parameters, self._trainable = [], []
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = []
        self._replicas_differ = False
        self._restore_replica = None
        if self._group is not None:
            self._group.release_buffers()
        super().teardown()

    # -- one update --------------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._hook is not None:
            self._check_known()
            self._hook.complete = False
            if not self._backward_seen:
                self._watch_gradients()
        self._backward_seen = True

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._hook is None or not isinstance(self.model, DistributedDataParallel):
            return
        self._check_gradients()
        if self._hook.complete:
            return
        if self.model.require_backward_grad_sync and not self.model.static_graph:
            # DDP itself notices in the next forward. By then this rank may hang in the reduction of a logged value,
            # and the others in that of the missing gradient.
            assert self.lightning_module is not None
            unused = [n for n, p in self.lightning_module.named_parameters() if p.requires_grad and p.grad is None]
            which = f" ({', '.join(unused[:5])}{', ...' * (len(unused) > 5)})" if unused else ""
            raise RuntimeError(
                f"Some parameters{which} were not used in producing this loss on rank {self.global_rank}, so their "
                "gradients cannot be exchanged. If this is intended, pass `find_unused_parameters=True` to the "
                f"strategy, for instance `Trainer(strategy={type(self).__name__}(..., find_unused_parameters=True))`; "
                "or let them "
                "take part in the loss."
            )

    def _check_known(self) -> None:
        """Refuse a gradient that DDP would leave to this rank alone."""
        assert self.lightning_module is not None
        known = set(map(id, self._trainable))
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise RuntimeError(
                    f"{name!r} was added or unfrozen inside training_step, too late for this backward pass to exchange "
                    "its gradient. Do it in on_train_epoch_start or on_train_batch_start."
                )

    def _watch_gradients(self) -> None:
        """Count how often each parameter gets a gradient in the first backward pass."""

        def count(parameter: torch.Tensor) -> None:
            self._num_gradients[id(parameter)] += 1

        self._num_gradients.clear()
        self._gradient_hooks = [
            p.register_post_accumulate_grad_hook(count)
            for p in self._trainable
            if p.requires_grad  # not toggled off
        ]

    def _check_gradients(self) -> None:
        """Refuse a gradient that comes in pieces: DDP exchanges the first, and each rank keeps its own others."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = []
        if not self._num_gradients:
            return
        assert isinstance(self.model, DistributedDataParallel)
        assert self.lightning_module is not None
        for name, parameter in self.lightning_module.named_parameters():
            if self._num_gradients[id(parameter)] > 1 and not self.model.static_graph:
                raise RuntimeError(
                    f"{name!r} got its gradient in several pieces in one backward pass, of which only the first would "
                    "be exchanged: it is used in several reentrant activation checkpoints. Use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or pass static_graph=True to the "
                    "strategy."
                )
        self._num_gradients.clear()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | torch.nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        if self._finished:
            # Stochastic weight averaging ends with an epoch whose steps have no gradients, and no exchange.
            return super().optimizer_step(optimizer, closure, model, **kwargs)
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
        self._num_updates += 1
        if self.check_replicas_every_n_steps and self._num_updates % self.check_replicas_every_n_steps == 0:
            assert self._group is not None
            check_replicas(self.lightning_module, self._group, self._num_updates)
        return output

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._follow_parameters()
        if self._finished and batch_idx == 0 and not self.algorithm.replicas_equal:
            # Stochastic weight averaging: what it has put in place is an average of this rank's own weights.
            self._sync_module()

    def _note_parameters(self) -> None:
        assert self.lightning_module is not None
        self._parameters = list(self.lightning_module.parameters())
        self._trainable = [p for p in self._parameters if p.requires_grad]

    def _finds_unused(self) -> bool:
        return isinstance(self.model, DistributedDataParallel) and self.model.find_unused_parameters

    def _follow_parameters(self) -> None:
        """Notice layers that were added, replaced, unfrozen or frozen since the last batch, on every rank alike."""
        known, trainable = self._parameters, self._trainable
        self._note_parameters()
        if _same(known, self._parameters) and (
            _same(trainable, self._trainable)
            # A part that is frozen between two batches, as a discriminator is, need not leave DDP for it.
            or (self._finds_unused() and set(map(id, self._trainable)) <= set(map(id, trainable)))
        ):
            self._trainable = trainable
            return
        assert self._group is not None
        if isinstance(self.model, DistributedDataParallel):
            # DDP knows only what needed a gradient when it was made. The new one starts from rank 0's values.
            state = self.algorithm.state_dict()
            self.model = self.lightning_module
            self.configure_ddp()
            self._bind_algorithms()
            self.algorithm.load_state_dict(state)
        else:
            old = set(map(id, known))
            new = FlatLayout(p for p in self._parameters if id(p) not in old)
            for buffer in (buffers := new.pack_(new.empty())):
                self._group.broadcast_(buffer).wait()
            new.unpack_(buffers)

    # -- where replicas are looked at --------------------------------------------------------------------------------

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.show_replica()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        shown = self._restore_replica is not None
        self.show_mean()
        state = super().lightning_module_state_dict()
        if self._restore_replica is not None:
            # References to the weights, which will change back.
            state = {k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in state.items()}
        if not shown:
            self.show_replica()
        return state

    def show_mean(self) -> None:
        """Put the mean of the replicas in place of this rank's, where they differ. Collective."""
        if self._replicas_differ and self._restore_replica is None and not self._failed:
            assert self.lightning_module is not None
            assert self._group is not None
            with self._group.counted_as_evaluation():
                self._restore_replica = mean_of_replicas_(self.lightning_module, self._group)
                for average in _running_averages(self.lightning_module.trainer):
                    # The mean over ranks of their moving averages is the moving average of the mean: no loss.
                    sync_model(average, group=self._group)

    def show_replica(self) -> None:
        """Take :meth:`show_mean` back, bit for bit."""
        if self._restore_replica is not None:
            self._restore_replica()
            self._restore_replica = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        full = "optimizer_states" in checkpoint and not self._failed
        states = [algorithm.state_dict() for _, algorithm in self._bound if full]
        if not full or not (any(states) or self._replicas_differ):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self._group is not None
        # A name with an unsynced metric in it differs between ranks. Parts belong to the file, which rank 0 writes.
        path, part_id = self.broadcast((os.fspath(filepath), new_id()))
        shown = self._restore_replica is not None
        self.show_replica()
        part = {"algorithms": states, "precision": self.precision_plugin.state_dict()}
        if not self.algorithm.replicas_equal:
            assert self.lightning_module is not None
            part["replica"] = replica_of(self.lightning_module)
        if not self.is_global_zero:
            part["optimizer_states"] = checkpoint["optimizer_states"]  # rank 0's are in the checkpoint
        # First the parts, then the file they belong to: a file that exists has all its parts.
        error = _attempt(lambda: save_part(part, path, part_id, self.global_rank, self.world_size))
        failed = f"The checkpoint {path} was not saved; earlier ones are as they were"
        undo = partial(remove_parts, path, self.global_rank, self.world_size, only=part_id)
        agree(error, failed, self._group, undo)
        checkpoint[KEY] = {"id": part_id, "algorithm": self.algorithm.name, "world_size": self.world_size}
        error = _attempt(lambda: super(DistOptStrategy, self).save_checkpoint(checkpoint, path, storage_options))
        agree(error, failed, self._group, undo)
        remove_parts(path, self.global_rank, self.world_size, keep=part_id)
        if shown:
            self.show_mean()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        remove_parts(filepath, self.global_rank, self.world_size)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._checkpoint_path = checkpoint_path
        # Releases of Lightning before 2.6 have no such argument.
        self._weights_only = kwargs.get("weights_only", args[0] if args else None) is not False
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # The last that Lightning restores: the module has the mean of the replicas, the algorithms are set up.
        saved = checkpoint.get(KEY)
        if saved is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        if (saved["algorithm"], saved["world_size"]) != (self.algorithm.name, self.world_size):
            rank_zero_warn(
                f"{self._checkpoint_path} was saved by {saved['algorithm']} on {saved['world_size']} ranks, and is "
                f"loaded by {self.algorithm.name} on {self.world_size}: every rank goes on from the mean of the "
                "replicas and rank 0's optimizer state. Dropped are every rank's own replica, the optimizer states of "
                f"the other ranks, and the state of {saved['algorithm']}."
            )
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self._group is not None
        assert self.lightning_module is not None
        part: dict[str, Any] = {}
        error = _attempt(
            lambda: part.update(
                load_part(self._checkpoint_path, saved["id"], self.global_rank, self.world_size, self._weights_only)
            )
        )
        agree(
            error,
            f"Training cannot go on exactly from {self._checkpoint_path}. Use an earlier checkpoint, or start anew "
            "from the mean of the replicas, which this one holds, with load_from_checkpoint",
            self._group,
        )
        super().load_optimizer_state_dict({**checkpoint, **part})
        if part["precision"]:
            self.precision_plugin.load_state_dict(part["precision"])
        load_replica_(self.lightning_module, part.get("replica", {}))
        for (_, algorithm), state in zip(self._bound, part["algorithms"], strict=True):
            algorithm.load_state_dict(state)

    def stop_exchanging(self) -> None:
        """After an error other ranks may be anywhere: what is saved now is this rank's own, without waiting for any."""
        self._failed = True
        self.show_replica()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM  # else the process would end as if training were complete
        if self.world_size > 1 and hasattr(exception, "add_note"):  # from Python 3.11 on
            exception.add_note(f"raised on rank {self.global_rank} at step {self._traffic.step}")
        elsewhere = isinstance(exception, RuntimeError) and not isinstance(exception, DistributedRuntimeException)
        if elsewhere and self._group is not None and "gloo/transport/" in str(exception):
            # A collective of Lightning's or DDP's. The traceback shows which.
            exception.args = self._group.lost_peer("run", exception).args

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
            if not self.optimizers:
                self.algorithm.setup(self.lightning_module, [], self._group)
        else:
            if not self.optimizers:
                raise ValueError(
                    f"{self.algorithm.name} exchanges the weights of optimizers, and configure_optimizers returned none"
                )
            self._check_shared()
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
        self._finished = False

    def _check_shared(self) -> None:
        """Refuse a parameter in two optimizers: one's exchange would undo the other's update."""
        seen: set[int] = set()
        for optimizer in self.optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if seen & own:
                raise ValueError(
                    f"{self.algorithm.name} cannot exchange a parameter that two optimizers update. Give each "
                    "parameter to one optimizer, or use gradient_allreduce or bytegrad."
                )
            seen |= own

    def _sync_module(self, **what: bool) -> None:
        assert self.lightning_module is not None
        sync_model(self.lightning_module, group=self._group, **what)

    def _algorithm_of(self, optimizer: Optimizer) -> Algorithm:
        for bound, algorithm in self._bound:
            if bound is optimizer:
                return algorithm
        return self.algorithm

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Groups and running algorithms belong to this process.
        state.update(_group=None, _world=None, _bound=[], _hook=None, _replicas_differ=False, _restore_replica=None)
        state.update(_parameters=[], _trainable=[], _gradient_hooks=[])
        return state


class _BeforeCallbacks(Callback):
    """The first callback of a fit: Lightning calls a strategy after all callbacks, where this is too late."""

    def __init__(self, strategy: DistOptStrategy) -> None:
        self._strategy = strategy
        self._warned = False

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        averaging = [c for c in _callbacks_of(trainer) if isinstance(c, StochasticWeightAveraging)]
        if any(trainer.current_epoch > callback.swa_end for callback in averaging):
            # An epoch without updates, after training. The averaged weights come into the module now.
            self._strategy.finish()

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._strategy.show_mean()

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._compare_monitored(trainer)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._compare_monitored(trainer)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._strategy.finish()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._strategy.stop_exchanging()

    def _compare_monitored(self, trainer: "pl.Trainer") -> None:
        """Warn once where ranks would decide differently."""
        group = self._strategy.group
        users = [
            *_callbacks_of(trainer),
            *(config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau),
        ]
        names = sorted({name for user in users if isinstance(name := getattr(user, "monitor", None), str)})
        if group is None or group.size == 1 or self._warned or trainer.sanity_checking or not names:
            return
        mine = torch.tensor([float(trainer.callback_metrics.get(name, math.nan)) for name in names])
        mine = mine.to(group.device, torch.float64)
        every = mine.new_empty(group.size * len(names))
        group.all_gather(every, mine).wait()
        by_rank = every.view(group.size, -1)
        equal = torch.isclose(by_rank, by_rank[0], rtol=0, atol=0, equal_nan=True).all(0)
        differ = [name for name, same in zip(names, equal.tolist(), strict=True) if not same]
        if differ:
            self._warned = True
            rank_zero_warn(
                f"The monitored {', '.join(differ)} differs between ranks: early stopping, schedulers and the choice "
                "of the best checkpoint may decide differently on each. Log it with self.log(..., sync_dist=True)."
            )


class DistOptDDPStrategy(DistOptStrategy):
    """Lightning's ``ddp`` with its traffic counted: a gradient all-reduce, on request compressed."""

    def __init__(
        self, initialization_method: Literal["tcp", "file"] = "tcp", backend: str | None = None, **kwargs: Any
    ) -> None:
        """Configure; opens nothing.

        Args:
            initialization_method: how ranks meet: "tcp", where address and port come from the cluster environment
                unless they are given, or through a "file".
            backend: "nccl" or "gloo"; by default by device.
            **kwargs: what :class:`~lightning_distopt.DDPOption` and :class:`DistOptStrategy` take.

        Raises:
            ValueError: unknown option, with the valid ones listed.
            TypeError: a value of the wrong type.
        """
        own, options = _split(kwargs)
        super().__init__(DDPOption(initialization_method, backend, **options), **own)


class DistOptBaguaStrategy(DistOptStrategy):
    """One of Bagua's algorithms by name, with its options.

    >>> DistOptBaguaStrategy("bytegrad", hierarchical=False)
    DistOptBaguaStrategy(ByteGrad(hierarchical=False, average=True), option=BaguaDistributedOption('bytegrad', ...))
    """

    def __init__(
        self, algorithm: str | Algorithm = "gradient_allreduce", options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Configure; opens nothing.

        Args:
            algorithm: a name in :data:`lightning_distopt.algorithms.ALGORITHMS`, or an instance.
            options: what :class:`~lightning_distopt.BaguaDistributedOption` takes, among it the arguments of the
                algorithm. They may also be given directly as keywords.
            **kwargs: the same, and arguments of :class:`DistOptStrategy`.

        Raises:
            ValueError: unknown algorithm or option, with the valid ones listed.
            TypeError: a value of the wrong type.
        """
        super().__init__(None, algorithm, **{**(options or {}), **kwargs})


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _callbacks_of(trainer: Any) -> list[Callback]:
    # The Trainer has them, but does not declare them.
    callbacks: list[Callback] = trainer.callbacks
    return callbacks


def _running_averages(trainer: "pl.Trainer") -> list[torch.nn.Module]:
    """Return the models in which Lightning's WeightAveraging and StochasticWeightAveraging collect."""
    # Private in both, and they have no other way to it.
    averages = [getattr(callback, "_average_model", None) for callback in _callbacks_of(trainer)]
    return [average for average in averages if isinstance(average, torch.nn.Module)]


def _readable(num_bytes: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of :class:`DistOptStrategy` itself, and the others."""
    names = inspect.signature(DistOptStrategy).parameters
    own = {name: value for name, value in kwargs.items() if name in names}
    return own, {name: value for name, value in kwargs.items() if name not in names}


def _stop_on_sigterm_alone(trainer: "pl.Trainer") -> None:
    """Let a SIGTERM end this rank after its batch, without the broadcasts by which Lightning 2.6 tells the others.

    Its signal handler broadcasts in the middle of whatever the ranks exchange, and all wait until the group's timeout::

        rank 0: SIGTERM, broadcast ... timeout      rank 1: all-to-all ... timeout

    And before every batch rank 0 broadcasts, so that a rank that does more batches than the others waits there.
    Launchers send the signal to every rank anyway; a rank that gets none loses this one, and ends.
    """

    def note_sigterm(signum: int, frame: object) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(signum)  # passes it on to the processes that Lightning itself has started
        connector.received_sigterm = True

    def stop_on_sigterm() -> None:
        if trainer.received_sigterm:
            raise SIGTERMException

    # Private, and unknown to older releases; Lightning has no public way to leave them out.
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop.__dict__["_broadcast_sigterm_tensor"] = stop_on_sigterm
        connector.__dict__["_sigterm_notifier_fn"] = note_sigterm


def register_strategies() -> None:
    """Put the strategy names into Lightning's registry. Harmless when repeated."""
    names = {cls.strategy_prefix + name: name for name, cls in ALGORITHMS.items()}
    for registered, algorithm in {"distopt_bagua": "gradient_allreduce", **names}.items():
        StrategyRegistry.register(
            registered, DistOptBaguaStrategy, description=ALGORITHMS[algorithm].__name__, override=True,
            algorithm=algorithm,
        )  # fmt: skip
    StrategyRegistry.register("distopt_ddp", DistOptDDPStrategy, description="DDP, traffic counted", override=True)
    for registered in ("distopt_bagua", "distopt_ddp", *names):
        # Fabric's strategies are of another kind; it would call the name unknown.
        FABRIC_REGISTRY.register(
            registered, _refuse_fabric, description="for the Trainer only", override=True, registered=registered
        )

    if _PytorchLightning not in sys.meta_path:
        sys.meta_path.insert(0, _PytorchLightning)
    _PytorchLightning.find_spec("")


class _PytorchLightning:
    """Puts refusals of our names into pytorch_lightning's registry, which would call them unknown.

    It may be imported before this package, or after it. An importer sees the latter; this one never finds anything.
    """

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        registry = getattr(sys.modules.get("pytorch_lightning.strategies"), "StrategyRegistry", None)
        if registry is None or "distopt_ddp" in registry:
            return
        for registered in StrategyRegistry:
            if registered.startswith("distopt_"):
                registry.register(registered, _refuse_pytorch_lightning, description="for lightning.pytorch only")


def _refuse_pytorch_lightning() -> NoReturn:
    raise TypeError(PYTORCH_LIGHTNING)


def _refuse_fabric(registered: str) -> NoReturn:
    raise TypeError(
        f"{registered!r} is a strategy of lightning.pytorch.Trainer, and Fabric cannot run it: use that, or in a "
        "training loop of your own, without Fabric, convert2distributed_model of lightning_distopt's "
        "BaguaDistributedOption or DDPOption."
    )
