"""How a job trains together, as one object. The names are those of PERSIA.

An option is inert: building one opens nothing and reads no device, and it pickles. ``convert2distributed_model`` puts
it into a plain training loop; a strategy takes the same object into Lightning. It can be used any number of times.
"""

import atexit
import copy
import difflib
import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.scatter_gather import scatter_kwargs
from torch.optim import LBFGS, Optimizer

from lightning_distopt import bagua
from lightning_distopt.algorithms import ALGORITHMS, Algorithm, QAdam, QAdamOptimizer, make_algorithm
from lightning_distopt.algorithms.base import BucketHook, check_bool, check_int, check_number
from lightning_distopt.algorithms.comm_hook import HalfAllReduce, PowerSGD
from lightning_distopt.collectives import (
    DEFAULT_TIMEOUT,
    DistributedRuntimeException,
    Group,
    Traffic,
    local_world_size,
)
from lightning_distopt.distributed import join_process_group, sync_model
from lightning_distopt.replicas import replica_of, replicas_agree

__all__ = [
    "BaguaDistributedOption",
    "DDPOption",
    "DistributedBaseOption",
    "TorchOption",
    "get_default_distributed_option",
]

BACKENDS = ("nccl", "gloo")
METHODS = ("tcp", "file")
COMM_HOOKS = ("fp16", "bf16", "powersgd")
ENGINES = ("auto", "torch", "bagua")

# What every option takes besides the arguments of its algorithm.
RENDEZVOUS = ("initialization_method", "init_method", "backend", "master_port", "master_addr", "sync_file", "timeout")
DDP_ARGUMENTS = tuple(
    name
    for name in inspect.signature(DistributedDataParallel).parameters
    if name not in ("module", "device_ids", "output_device", "dim", "process_group", "check_reduction", "device_mesh")
)
POWERSGD_OPTIONS = tuple(inspect.signature(PowerSGD).parameters)
QADAM_OPTIONS = tuple(name for name in inspect.signature(QAdamOptimizer).parameters if name != "params")


# -- the options -----------------------------------------------------------------------------------------------------


class DistributedBaseOption(ABC):
    """How a model becomes a distributed one. Abstract.

    Attributes:
        master_port: TCP port of rank 0.
        master_addr: host name or address of rank 0; None if it comes later.
    """

    def __init__(self, master_port: int, master_addr: str | None = None) -> None:
        """Configure; opens nothing.

        Args:
            master_port: TCP port of rank 0, 1 to 65535.
            master_addr: host name or address of rank 0.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: a value out of range.
        """
        if check_int("master_port", master_port, 1) > 65535:
            raise ValueError(f"master_port must be at most 65535, got {master_port}")
        if master_addr is not None and not isinstance(master_addr, str):
            raise TypeError(f"master_addr must be a host name or address, got {master_addr!r}")
        self.master_port = master_port
        self.master_addr = master_addr

    @abstractmethod
    def convert2distributed_model(
        self,
        model: nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: Optimizer | None = None,
    ) -> tuple[nn.Module, Optimizer | None]:
        """Make a model train together with those of the other ranks. Collective.

        Args:
            model: the same on every rank.
            world_size: number of processes.
            rank_id: of this process, 0 to ``world_size - 1``.
            device_id: GPU of this process; None to train on the CPU.
            master_addr: of rank 0, where the option has none.
            optimizer: of the model.

        Returns:
            The model and the optimizer for the training loop to use from now on.
        """

    @abstractmethod
    def init_with_env_file(self) -> bool:
        """Return whether ranks meet through a file."""


class TorchOption(DistributedBaseOption):
    """What :class:`DDPOption` and :class:`BaguaDistributedOption` share: rendezvous, algorithm, plain-loop driver.

    Attributes:
        initialization_method: "tcp" or "file".
        backend: "nccl" or "gloo"; None to choose by the device.
        options: what else was given.
        sync_file: through which ranks meet.
        timeout: for ranks to meet, and for every exchange.
        algorithm: name of the algorithm, or the instance that was given.
    """

    algorithm: str | Algorithm

    def __init__(self, initialization_method: str, backend: str | None, options: dict[str, Any]) -> None:
        """Take what every option takes. PERSIA's guide writes ``init_method`` for ``initialization_method``."""
        super().__init__(options.get("master_port", 23456), options.get("master_addr"))
        self._port_is_given = "master_port" in options
        method = options.get("init_method", initialization_method)
        self.initialization_method = _one_of("initialization_method", method, METHODS)
        self.backend = None if backend is None else _one_of("backend", backend, BACKENDS)
        self.sync_file = options.get("sync_file")
        if self.sync_file is not None and not isinstance(self.sync_file, str | os.PathLike):
            raise TypeError(f"sync_file must be a path, got {self.sync_file!r}")
        self.timeout = options.get("timeout", DEFAULT_TIMEOUT)
        if not isinstance(self.timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {self.timeout!r}")
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {self.timeout!r}")
        self.options = {name: value for name, value in options.items() if name not in ("master_port", "master_addr")}

    @abstractmethod
    def new_algorithm(self) -> Algorithm:
        """Build the algorithm, anew at every call."""

    def ddp_arguments(self) -> dict[str, Any]:
        """Return what DistributedDataParallel is to be called with."""
        arguments = {name: self.options[name] for name in DDP_ARGUMENTS if name in self.options}
        bucket_cap_mb = self.new_algorithm().bucket_cap_mb
        if bucket_cap_mb is not None:
            arguments.setdefault("bucket_cap_mb", bucket_cap_mb)
        # Gradients that live in DDP's buckets save one copy of all gradients per update.
        arguments.setdefault("gradient_as_bucket_view", True)
        return arguments

    def adapt_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that the algorithm needs in place of this one; most take any."""
        return optimizer

    @property
    def adapts_optimizers(self) -> bool:
        """Whether the option has settings for the optimizer."""
        return False

    def init_with_env_file(self) -> bool:
        return bool(self.initialization_method == "file")

    def init_method(self, master_addr: str | None = None, master_port: int | None = None) -> str:
        """Return where ranks meet, as a URL.

        Args:
            master_addr: used if the option has no address.
            master_port: used if the option was given neither port nor address.

        Raises:
            ValueError: something is missing; says what.
        """
        if self.initialization_method == "file":
            if self.sync_file is None:
                raise ValueError(
                    f"initialization_method='file' needs a path that all ranks see: {type(self).__name__}(..., "
                    "sync_file=...)"
                )
            return f"file://{os.path.abspath(self.sync_file)}"
        address = self.master_addr or master_addr
        if not address:
            raise ValueError(
                "initialization_method='tcp' needs the address of rank 0: give master_addr to "
                f"{type(self).__name__}, or to convert2distributed_model"
            )
        if ":" in address and not address.startswith("["):
            address = f"[{address}]"
        explicit = self._port_is_given or self.master_addr is not None or master_port is None
        return f"tcp://{address}:{self.master_port if explicit else master_port}"

    @property
    def says_where_to_meet(self) -> bool:
        """Whether the option itself, not its defaults, decides about address, port, file or backend."""
        return any([self.master_addr, self._port_is_given, self.backend, self.init_with_env_file()])

    def join(
        self,
        backend: str,
        init_method: str,
        world_size: int,
        rank: int,
        device_index: int | None,
        timeout: timedelta | None = None,
    ) -> None:
        """Make the default process group, or check that the existing one fits. Collective.

        Args:
            backend: "nccl" or "gloo".
            init_method: what :meth:`init_method` returned.
            world_size: number of processes.
            rank: of this process.
            device_index: its GPU.
            timeout: in place of the option's.

        Raises:
            DistributedRuntimeException: names what is wrong, or the address that could not be reached.
        """
        if dist.is_initialized():
            if (dist.get_world_size(), dist.get_rank()) != (world_size, rank):
                raise DistributedRuntimeException(
                    f"world_size={world_size} and rank {rank} were given, but the process group that exists has "
                    f"{dist.get_world_size()} ranks and this is rank {dist.get_rank()}: use those, or destroy it first"
                )
            return
        join_process_group(
            backend, init_method, world_size, rank, timeout=timeout or self.timeout, device_index=device_index
        )
        if backend == "nccl":
            # It complains at exit about a group that was left open.
            atexit.register(_leave, dist.group.WORLD)

    def convert2distributed_model(
        self,
        model: nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: Optimizer | None = None,
    ) -> tuple[nn.Module, Optimizer | None]:
        """Make a model train together with those of the other ranks. Collective.

        The process group is made where none exists, and an existing one is kept. All ranks start from rank 0's weights.
        The training loop stays as it is: ``loss.backward(); optimizer.step()``. Accumulate under ``model.no_sync()``,
        and call ``model.finish()`` at the end, after which all ranks hold the same weights.

        The model that is returned has the given one as ``module``, the running ``algorithm``, and ``bytes_sent``.

        Algorithms that exchange weights must see every update on every rank: ``torch.amp.GradScaler``, which may skip
        one on one rank only, cannot be used with them; nor with qadam and powersgd, which keep moments or errors of the
        gradients from update to update. Train in bfloat16 instead.

        Args:
            model: the same on every rank.
            world_size: number of processes.
            rank_id: of this process, 0 to ``world_size - 1``.
            device_id: GPU of this process, to which the model is moved; None to leave it where it is.
            master_addr: of rank 0, where the option has none.
            optimizer: of the model. qadam replaces an Adam or AdamW, or makes one.

        Returns:
            The model and the optimizer for the training loop to use from now on.

        Raises:
            ValueError: an argument is missing or does not fit the algorithm.
            TypeError: the model is converted already, or the optimizer is of the wrong type.
            DistributedRuntimeException: the ranks could not meet; names the address, file or number that is wrong.
        """
        if isinstance(model, DistributedDataParallel | ReplicaModel):
            raise TypeError(f"the model is a {type(model).__name__} already: pass the module inside it")
        check_int("world_size", world_size, 1)
        check_int("rank_id", rank_id, 0)
        # All of this before the others are waited for.
        algorithm = self.new_algorithm()
        optimizer = self._optimizer_for(algorithm, model, optimizer)
        if device_id is None:
            device_id = next((p.device.index for p in model.parameters() if p.device.type == "cuda"), None)
        elif not torch.cuda.is_available():
            raise DistributedRuntimeException(
                f"device_id={device_id} needs a CUDA device, and torch finds none: leave it out, with backend='gloo'"
            )
        if not dist.is_initialized():
            backend = self.backend or ("gloo" if device_id is None else "nccl")
            self.join(backend, self.init_method(master_addr), world_size, rank_id, device_id)
        self.join("", "", world_size, rank_id, device_id)  # the group exists: only checks that it fits

        if device_id is not None:
            torch.cuda.set_device(device_id)
            model.to(torch.device("cuda", device_id))
        process_group = dist.new_group(timeout=self.timeout)
        group = Group(
            process_group if world_size > 1 else None,
            local_size=local_world_size(world_size),
            timeout=self.timeout,
            traffic=Traffic(label=algorithm.name),
        )
        distributed: DistributedModel | ReplicaModel
        if algorithm.exchanges == "gradients":
            distributed = DistributedModel(model, algorithm, group, device_id, process_group, **self.ddp_arguments())
        else:
            distributed = ReplicaModel(model, algorithm, group, device_id)
        algorithm.setup(model, [] if optimizer is None else [optimizer], group)
        if optimizer is not None:
            _drive(optimizer, algorithm, group)
        return distributed, optimizer

    def _optimizer_for(self, algorithm: Algorithm, model: nn.Module, optimizer: Optimizer | None) -> Optimizer | None:
        if optimizer is not None:
            optimizer = self.adapt_optimizer(optimizer)
        if algorithm.exchanges == "weights":
            if optimizer is None:
                raise ValueError(
                    f"{algorithm.name} exchanges weights after every update: pass optimizer= to "
                    "convert2distributed_model"
                )
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    f"LBFGS computes several gradients per update, which {algorithm.name} cannot follow. "
                    "Use gradient_allreduce, or another optimizer."
                )
        return optimizer

    def __repr__(self) -> str:
        return self._written(self.algorithm)

    def _written(self, *first: object) -> str:
        """Return a call that makes this option, given its first arguments."""
        rest = {"master_addr": self.master_addr, "master_port": self.master_port, **self.options}
        return f"{type(self).__name__}({', '.join([*map(repr, first), *(f'{k}={v!r}' for k, v in rest.items())])})"


class DDPOption(TorchOption):
    """A gradient all-reduce, at full precision or compressed as torch's communication hooks do it.

    Differs from PERSIA: a model with parameters that some rank does not use needs ``find_unused_parameters=True``, as
    in torch; PERSIA always set it, at the price of a walk through the graph in every step.
    """

    def __init__(self, initialization_method: str = "tcp", backend: str | None = "nccl", **options: Any) -> None:
        """Configure; opens nothing.

        Args:
            initialization_method: how ranks meet: "tcp" at ``master_addr`` and ``master_port``, or through a "file".
            backend: "nccl" for GPUs, "gloo" for CPUs; None to choose by the device.
            **options: ``master_port`` (23456), ``master_addr``, ``sync_file``, ``timeout`` (a timedelta), what
                DistributedDataParallel takes, and ``comm_hook``: "fp16", "bf16", or "powersgd" with
                ``matrix_approximation_rank`` (1) and ``start_powerSGD_iter`` (1000).

        Raises:
            ValueError: an unknown name or value, with the valid ones listed.
            TypeError: a value of the wrong type.
        """
        valid = (*RENDEZVOUS, "comm_hook", *POWERSGD_OPTIONS, *DDP_ARGUMENTS)
        _check_names(type(self).__name__, options, valid)
        super().__init__(initialization_method, backend, options)
        self.comm_hook = options.get("comm_hook")
        if self.comm_hook is not None:
            _one_of("comm_hook", self.comm_hook, COMM_HOOKS)
        without_effect = [name for name in POWERSGD_OPTIONS if name in options]
        if without_effect and self.comm_hook != "powersgd":
            raise ValueError(f"{', '.join(without_effect)} would have no effect without comm_hook='powersgd'")
        self.algorithm = self.new_algorithm().name

    def __repr__(self) -> str:
        return self._written(self.initialization_method, self.backend)

    def new_algorithm(self) -> Algorithm:
        if self.comm_hook is None:
            return make_algorithm("gradient_allreduce")
        if self.comm_hook == "powersgd":
            return PowerSGD(**{name: self.options[name] for name in POWERSGD_OPTIONS if name in self.options})
        return HalfAllReduce(self.comm_hook)


class BaguaDistributedOption(TorchOption):
    """One of Bagua's algorithms, or another one of this package.

    >>> BaguaDistributedOption("diloco", period=50, master_addr="10.0.0.1").init_method()
    'tcp://10.0.0.1:23456'

    Attributes:
        engine: "auto", "torch" or "bagua".
    """

    def __init__(self, algorithm: str | Algorithm, **options: Any) -> None:
        """Configure; opens nothing.

        Args:
            algorithm: a name in :data:`lightning_distopt.algorithms.ALGORITHMS`, or an instance.
            **options: arguments of the algorithm, for qadam also those of QAdamOptimizer (they win over the
                optimizer's own); ``initialization_method`` ("tcp"), ``backend`` (by the device), ``master_port``
                (23456), ``master_addr``, ``sync_file``, ``timeout`` (a timedelta); what DistributedDataParallel takes,
                if gradients are exchanged; PERSIA's settings of Bagua, see ``BAGUA_SETTINGS``; and ``engine``: "torch"
                runs on CPU and CUDA, "bagua" runs the installed original on CUDA and Linux, "auto" is "torch".

        Raises:
            ValueError: an unknown name or value, with the valid ones listed.
            TypeError: a value of the wrong type.

        Warns:
            UserWarning: a setting of Bagua has no meaning here; by name.
        """
        if isinstance(algorithm, str) and algorithm in ALGORITHMS:
            cls = ALGORITHMS[algorithm]
            own = tuple(inspect.signature(cls).parameters)
        else:
            cls = type(make_algorithm(algorithm))  # an instance; or raises
            own = ()
        label = cls.name
        self._takes_qadam = issubclass(cls, QAdam)
        for_optimizer = QADAM_OPTIONS if self._takes_qadam else ()
        valid = (*own, *for_optimizer, *RENDEZVOUS, "engine", *bagua.BAGUA_SETTINGS, *DDP_ARGUMENTS)
        _check_names(f"{type(self).__name__}({label!r})", options, valid)
        super().__init__(options.get("initialization_method", "tcp"), options.get("backend"), options)
        self.algorithm = algorithm
        self.engine: Literal["auto", "torch", "bagua"] = _one_of("engine", options.get("engine", "auto"), ENGINES)
        self._algorithm_options = {name: options[name] for name in own if name in options}
        self._optimizer_options = {name: options[name] for name in for_optimizer if name in options}
        self._settings = {name: options[name] for name in bagua.BAGUA_SETTINGS if name in options}
        self.new_algorithm()  # checks its arguments
        if for_optimizer:
            QAdamOptimizer([nn.Parameter(torch.zeros(1))], **self._optimizer_options)
        _check_settings(self._settings)
        self._check_engine(label, cls)

    def _check_engine(self, label: str, cls: type[Algorithm]) -> None:
        ddp = [name for name in DDP_ARGUMENTS if name in self.options]
        if self.engine == "bagua":
            if self.algorithm not in bagua.BAGUA_ALGORITHMS:
                raise ValueError(
                    f"engine='bagua' does not know {label!r}: it has {', '.join(bagua.BAGUA_ALGORITHMS)}. "
                    "Use engine='torch'."
                )
            if ddp:
                raise ValueError(f"{', '.join(ddp)} would have no effect: engine='bagua' does not use DDP. Remove it.")
            if self.backend == "gloo":
                raise ValueError("backend='gloo' does not fit engine='bagua', which runs on nccl: use engine='torch'")
            return
        if ddp and cls.exchanges == "weights":
            raise ValueError(
                f"{', '.join(ddp)} would have no effect: {label} exchanges weights and does not use "
                "DistributedDataParallel. Remove it."
            )
        for name in self._settings:
            if name != "default_bucket_size" or cls.exchanges == "weights":
                warnings.warn(
                    f"{name} has no meaning for {label} without engine='bagua', and is ignored",
                    stacklevel=3,
                )

    def new_algorithm(self) -> Algorithm:
        if isinstance(self.algorithm, Algorithm):
            return copy.deepcopy(self.algorithm)
        return make_algorithm(self.algorithm, **self._algorithm_options)

    def ddp_arguments(self) -> dict[str, Any]:
        arguments = super().ddp_arguments()
        if "default_bucket_size" in self._settings and "bucket_cap_mb" not in self.options:
            arguments["bucket_cap_mb"] = self._settings["default_bucket_size"] / 2**20
        return arguments

    @property
    def adapts_optimizers(self) -> bool:
        return bool(self._optimizer_options)

    def adapt_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if not self._takes_qadam:
            return optimizer
        if not isinstance(optimizer, QAdamOptimizer):
            optimizer = _qadam_from(optimizer, self._optimizer_options.get("warmup_steps", 100))
        for group in optimizer.param_groups:
            group.update(self._optimizer_options)
        return optimizer

    def _optimizer_for(self, algorithm: Algorithm, model: nn.Module, optimizer: Optimizer | None) -> Optimizer | None:
        if self._takes_qadam and optimizer is None:
            return QAdamOptimizer(model.parameters(), **self._optimizer_options)
        return super()._optimizer_for(algorithm, model, optimizer)

    def convert2distributed_model(
        self,
        model: nn.Module,
        world_size: int,
        rank_id: int,
        device_id: int | None = None,
        master_addr: str | None = None,
        optimizer: Optimizer | None = None,
    ) -> tuple[nn.Module, Optimizer | None]:
        if self.engine != "bagua":
            return super().convert2distributed_model(model, world_size, rank_id, device_id, master_addr, optimizer)
        api = bagua.require_bagua()
        if device_id is None:
            raise ValueError("engine='bagua' needs this process's GPU: pass device_id= to convert2distributed_model")
        if optimizer is None and self.algorithm != "qadam":
            raise ValueError("engine='bagua' needs the optimizer: pass optimizer= to convert2distributed_model")
        address = self.master_addr or master_addr or "127.0.0.1"
        where = "" if dist.is_initialized() else self.init_method(master_addr)
        self.join("nccl", where, world_size, rank_id, device_id)
        assert isinstance(self.algorithm, str)
        return bagua.convert(
            api, self.algorithm, model, optimizer, self._algorithm_options, self._optimizer_options, self._settings,
            address, self.master_port, device_id,
        )  # fmt: skip


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return a DDPOption with nccl for a process that has a GPU, with gloo for one that has none."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")


def _check_names(owner: str, options: Iterable[str], valid: Sequence[str]) -> None:
    for name in options:
        if name not in valid:
            close = difflib.get_close_matches(name, valid, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown option {name!r} of {owner}{hint}; valid are: {', '.join(valid)}")


def _one_of(name: str, value: Any, valid: Sequence[str]) -> Any:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
    return value


def _check_settings(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name in ("enable_bagua_net", "is_output_autotune_log"):
            check_bool(name, value)
        elif name in ("autotune_warmup_time", "autotune_sampling_confidence_time"):
            check_number(name, value, 0)
        else:
            check_int(name, value, 0 if name == "autotune_level" else 1)


def _leave(process_group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized() and dist.group.WORLD is process_group:
        dist.destroy_process_group()


# -- the driver of a plain loop --------------------------------------------------------------------------------------


class DistributedModel(DistributedDataParallel):
    """A model whose gradients are exchanged: DistributedDataParallel with an algorithm in place of its all-reduce.

    Attributes:
        algorithm: the running algorithm.
        group: the ranks that exchange.
    """

    def __init__(
        self,
        module: nn.Module,
        algorithm: Algorithm,
        group: Group,
        device_id: int | None,
        process_group: dist.ProcessGroup,
        **ddp_arguments: Any,
    ) -> None:
        """Wrap a module. Collective: rank 0's parameters and buffers are broadcast."""
        device_ids = None if device_id is None else [device_id]
        super().__init__(module, device_ids=device_ids, process_group=process_group, **ddp_arguments)
        self.algorithm = algorithm
        self.group = group
        BucketHook(self, algorithm)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for the algorithm."""
        return self.group.traffic.bytes_sent

    def finish(self) -> None:
        """End training: afterwards all ranks hold the same weights. Collective."""
        self.algorithm.finish()


def start_alike(module: nn.Module, group: Group) -> None:
    """Give every rank rank 0's parameters and buffers. Where all have seeded alike, as is usual, nothing is sent."""
    if not replicas_agree(replica_of(module).values(), group):
        sync_model(module, reduce_parameters=False, reduce_buffers=False, group=group)


class ReplicaModel(nn.Module):
    """A model whose weights are exchanged around its optimizer's updates.

    Attributes:
        module: the model inside.
        algorithm: the running algorithm.
        group: the ranks that exchange.
    """

    def __init__(self, module: nn.Module, algorithm: Algorithm, group: Group, device_id: int | None) -> None:
        """Wrap a module. Collective: rank 0's parameters and buffers are broadcast."""
        super().__init__()
        self.module = module
        self.algorithm = algorithm
        self.group = group
        self._device_id = device_id
        start_alike(module, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with tensors moved to its device, as DistributedDataParallel does."""
        if self._device_id is not None:
            (args, *_), (kwargs, *_) = scatter_kwargs(args, kwargs, [self._device_id])
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: backward exchanges nothing here. So loops that accumulate work unchanged."""
        yield

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for the algorithm."""
        return self.group.traffic.bytes_sent

    def finish(self) -> None:
        """End training: afterwards all ranks hold the same weights, the mean, and the mean buffers. Collective."""
        self.algorithm.finish()
        if not self.algorithm.replicas_equal:
            sync_model(self.module, sync_parameters=False, group=self.group)


def _drive(optimizer: Optimizer, algorithm: Algorithm, group: Group) -> None:
    """Let the optimizer's updates call the algorithm."""

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # args[0] is the optimizer.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            algorithm.before_step()
            return None

        def closure_and_exchange() -> Any:
            # The gradients are final only when the closure has run.
            result = closure()
            algorithm.before_step()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_and_exchange}
        return (args[0], closure_and_exchange, *args[2:]), kwargs

    def after(*_: Any) -> None:
        algorithm.after_step()
        group.traffic.step += 1

    for handle in vars(optimizer).pop("_distopt_hooks", ()):
        handle.remove()  # of an earlier conversion, whose group may be gone
    vars(optimizer)["_distopt_hooks"] = (
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    )


def _qadam_from(optimizer: Optimizer, warmup_steps: int) -> QAdamOptimizer:
    """Take over from an Adam or AdamW. A scheduler made for that one keeps working, also after a resume."""
    taken = QAdamOptimizer.from_adam(optimizer, warmup_steps)

    def share_groups(_: Optimizer) -> None:
        # Loading a state replaces the group dictionaries, in which the scheduler sets the rate.
        optimizer.param_groups = taken.param_groups

    def count_step(*_: Any) -> None:
        # The scheduler looks here whether its optimizer has stepped before it, and warns otherwise.
        vars(optimizer)["_opt_called"] = True

    taken.register_load_state_dict_post_hook(share_groups)
    taken.register_step_post_hook(count_step)
    return taken
