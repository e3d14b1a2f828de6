"""Lightning callbacks: seeds and flags, hooks for the master only, periodic averaging, and what was sent."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from lightning_distopt.algorithms import Algorithm
from lightning_distopt.algorithms.base import check_bool, check_int, optimizer_parameters
from lightning_distopt.collectives import DistributedRuntimeException, Group, Traffic, forbid_collectives
from lightning_distopt.distributed import seed_generators, set_cuda_flags, sync_model

__all__ = ["CommMonitor", "InitTorch", "MasterOnlyCallback", "PeriodicModelSync"]

C = TypeVar("C", bound=Callback)


# -- seeds and flags -----------------------------------------------------------------------------------------


class InitTorch(Callback):
    """Seeds all generators and sets CUDA's flags for what a Trainer runs. Never starts CUDA.

    Flags are set when the callback is built, so that even the first use of CUDA sees them. The earlier values
    come back at teardown or after an error. What ``Trainer(deterministic=..., benchmark=...)`` was told wins,
    with a warning: build the callback before the Trainer, or in its call.

    Seeding takes place in ``setup``, with the same seed on every rank: layers made in ``configure_model``
    start equal on all ranks, and dropout and augmentation are equal, too. For noise that differs between
    ranks, seed once more in your LightningModule:

    >>> class Model(pl.LightningModule):
    ...     def on_fit_start(self):
    ...         torch.manual_seed(1234 + self.global_rank)

    Layers made before, in the constructor of the LightningModule, get rank 0's values from the strategy.
    """

    def __init__(
        self, seed: int | None = None, cuda_optimize_for_speed: bool = False, cuda_reproducible: bool = False
    ) -> None:
        """Set the flags.

        Args:
            seed: for ``random``, NumPy and torch; None leaves them alone.
            cuda_optimize_for_speed: cuDNN measures its kernels and takes the fastest, and float32 matrix
                products may use TF32.
            cuda_reproducible: deterministic algorithms only, here and in cuDNN and cuBLAS.

        Raises:
            RuntimeError: both flags are set.
            TypeError: a value of the wrong type.
            ValueError: a negative seed.
        """
        self.seed = None if seed is None else check_int("seed", seed, 0)
        self.cuda_optimize_for_speed = check_bool("cuda_optimize_for_speed", cuda_optimize_for_speed)
        self.cuda_reproducible = check_bool("cuda_reproducible", cuda_reproducible)
        self._told_trainer: dict[str, bool | str] | None = None
        self._restore = self._set_flags()
        self._asked = self._trainer_flags()

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if self._told_trainer is None:
            # The Trainer keeps no record of these arguments. It sets torch's flags only if it was told to, so
            # a flag that has changed since it was set here shows it.
            now = self._trainer_flags()
            self._told_trainer = {name: value for name, value in now.items() if value != self._asked[name]}
            for name, value in self._told_trainer.items():
                rank_zero_warn(
                    f"InitTorch leaves {name}={value}, as Trainer(deterministic=..., benchmark=...) was "
                    f"told, though {self._wish} asks for {self._asked[name]}"
                )
        if self._restore is None:
            self._restore = self._set_flags()
            self._set_as_told()
        if self.seed is not None:
            seed_generators(self.seed)

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._put_back()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._put_back()  # Lightning calls no teardown after an error

    @property
    def _wish(self) -> str:
        return "cuda_reproducible=True" if self.cuda_reproducible else "cuda_optimize_for_speed=True"

    def _set_flags(self) -> Callable[[], None] | None:
        return set_cuda_flags(self.cuda_optimize_for_speed, self.cuda_reproducible)

    def _put_back(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None
            self._set_as_told()

    def _trainer_flags(self) -> dict[str, bool | str]:
        """Return those flags, of the ones set here, that arguments of the Trainer set, too."""
        flags: dict[str, bool | str] = {}
        if self.cuda_optimize_for_speed or self.cuda_reproducible:
            flags["benchmark"] = torch.backends.cudnn.benchmark
        if self.cuda_reproducible:
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            flags["deterministic"] = "warn" if warn_only else torch.are_deterministic_algorithms_enabled()
        return flags

    def _set_as_told(self) -> None:
        for name, value in (self._told_trainer or {}).items():
            if name == "benchmark":
                torch.backends.cudnn.benchmark = bool(value)
            else:
                torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn")

    def __getstate__(self) -> dict[str, Any]:
        # Flags belong to a process: another one sets its own.
        return {**self.__dict__, "_restore": None}


# -- hooks for the master only -------------------------------------------------------------------------------

_MASTER_HOOKS = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
_MASTER_HOOKS.remove("on_load_checkpoint")


class MasterOnlyCallback(Callback):
    """A callback whose hooks run on the job's master, rank 0, only.

    Subclass it and write hooks as usual, or guard an existing callback with :meth:`wrap`:

    >>> callback = MasterOnlyCallback.wrap(pl.callbacks.LearningRateMonitor())

    These run on every
    rank, since ranks must stay paired in them: the constructor, ``state_dict``, ``load_state_dict``,
    ``state_key`` and ``on_load_checkpoint``. All others do not: ``setup``, ``teardown`` and every other
    ``on_...`` hook.

    Inside such a hook, a collective of this package or of its strategies raises
    :class:`~lightning_distopt.DistributedRuntimeException` at once, with the name of the hook, since the
    other ranks would never join: ``trainer.strategy.reduce``, ``barrier``, ``broadcast``, ``all_gather``,
    ``sync_model``, ``self.log(..., sync_dist=True)``, and so ``trainer.save_checkpoint`` and
    ``trainer.log_dir``. It does so in a job of one process, too.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _MASTER_HOOKS:
            hook = getattr(cls, name)
            if hook is not getattr(Callback, name):
                setattr(cls, name, _on_master(hook))

    @staticmethod
    def wrap(callback: C) -> C:
        """Let the hooks of an existing callback run on the master only.

        Args:
            callback: is changed in place. It stays an instance of its class, and its state keeps its key in
                checkpoints.

        Returns:
            The same object.
        """
        if isinstance(callback, MasterOnlyCallback):
            return callback
        for name in _MASTER_HOOKS:
            if name in vars(callback):  # so does LambdaCallback
                guarded = _on_master(_without_self(vars(callback)[name]))
                setattr(callback, name, functools.partial(guarded, callback))
        # A wrapper around it would hide its class, by which Lightning knows progress bars, timers and others.
        callback.__class__ = _guarded_class(type(callback))
        return callback


def _guarded_class(kind: type[C]) -> type[C]:
    def reduce(self: C, protocol: Any) -> tuple[Callable[[C], C], tuple[C]]:
        # Nobody can import this class: what is pickled or copied is an object of the plain one.
        plain = kind.__new__(kind)
        plain.__dict__.update(self.__dict__)
        return MasterOnlyCallback.wrap, (plain,)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (MasterOnlyCallback, kind), {**names, "__reduce_ex__": reduce})


def _without_self(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(self: Callback, *args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    return run


def _on_master(hook: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(hook, "__qualname__", repr(hook))

    @functools.wraps(hook)
    def run(self: Callback, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            with forbid_collectives(name), _refuse_synced_logs(name, self, pl_module):
                hook(self, trainer, pl_module, *args, **kwargs)

    return run


@contextmanager
def _refuse_synced_logs(hook_name: str, callback: Callback, pl_module: "pl.LightningModule | None") -> Iterator[None]:
    """Let ``log(sync_dist=True)`` raise, also for values that are reduced at the end of the epoch only."""
    if pl_module is None:
        yield
        return
    plain = pl_module.log
    signature = inspect.signature(plain)

    def log(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("sync_dist") and not given.get("rank_zero_only"):
            raise DistributedRuntimeException(
                f"self.log({given['name']!r}, sync_dist=True) was called inside {hook_name}, which runs on "
                "the master rank only: the other ranks would never join the reduction. Leave out sync_dist, or "
                "log on every rank."
            )
        plain(*args, **kwargs)

    # Lightning hands the module's log to every callback as an attribute.
    earlier = [(owner, vars(owner).get("log")) for owner in (pl_module, callback)]
    for owner, _ in earlier:
        owner.__dict__["log"] = log
    try:
        yield
    finally:
        for owner, value in earlier:
            if value is None:
                del owner.__dict__["log"]
            else:
                owner.__dict__["log"] = value


# -- periodic averaging --------------------------------------------------------------------------------------


class _Updates:
    """Counts optimizer updates from ``on_before_optimizer_step``.

    That hook runs also before an update that a GradScaler skips, and so equally often on every rank.
    """

    def __init__(self) -> None:
        self.by_optimizer: Counter[int] = Counter()

    def count(self, trainer: "pl.Trainer", optimizer: Optimizer) -> None:
        self.by_optimizer[next((i for i, o in enumerate(trainer.optimizers) if o is optimizer), -1)] += 1

    @property
    def most(self) -> int:
        """Updates of the optimizer that made most: two optimizers do not count twice."""
        return max(self.by_optimizer.values(), default=0)


class PeriodicModelSync(Callback):
    """Calls :func:`~lightning_distopt.sync_model` on a schedule, before checkpoints, and at the end of fit.

    Updates are those of the optimizer that made most, skipped ones included; batches that only accumulate
    gradients do not count. Syncs follow updates k, 2k, 3k and so on, at the end of the batch with that update,
    and keep this rhythm after a resume. No sync follows another without an update between them.

    Parameters and buffers are synced. Optimizer state, such as momentum, stays local to its rank.

    Under this package's strategies the ranks are those of the strategy's own group, and the bytes count in
    its ``traffic``. Under a strategy that keeps replicas equal anyway, a warning says so once. Lightning tells
    callbacks nothing of checkpoints that hold weights only (``save_weights_only=True``): those hold what the
    strategy saves, which is the mean under this package's strategies and rank 0's replica under others.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        sync_parameters: bool = True,
        sync_buffers: bool = True,
        reduce_parameters: bool = True,
        reduce_buffers: bool = True,
    ) -> None:
        """Configure.

        Args:
            every_n_steps: optimizer updates between two syncs.
            every_n_epochs: epochs between two syncs. Both periods may be given. Without any, syncs take place
                before checkpoints and at the end only.
            sync_parameters: whether parameters are made equal.
            sync_buffers: whether buffers are.
            reduce_parameters: average parameters; else every rank gets the master's.
            reduce_buffers: average buffers; else every rank gets the master's.

        Raises:
            ValueError: a period below 1, or nothing to sync.
            TypeError: a value of the wrong type.
        """
        self.every_n_steps = None if every_n_steps is None else check_int("every_n_steps", every_n_steps, 1)
        self.every_n_epochs = None if every_n_epochs is None else check_int("every_n_epochs", every_n_epochs, 1)
        self.what = {
            "sync_parameters": check_bool("sync_parameters", sync_parameters),
            "sync_buffers": check_bool("sync_buffers", sync_buffers),
            "reduce_parameters": check_bool("reduce_parameters", reduce_parameters),
            "reduce_buffers": check_bool("reduce_buffers", reduce_buffers),
        }
        if not (sync_parameters or sync_buffers):
            raise ValueError("sync_parameters=False and sync_buffers=False leave nothing to sync")
        self._updates = _Updates()
        self._seen = 0  # updates at the last look at the schedule
        self._synced: int | None = None  # updates at the last sync
        self._said = False

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            every_n_steps=self.every_n_steps, every_n_epochs=self.every_n_epochs, **self.what
        )

    def state_dict(self) -> dict[str, Any]:
        return {"updates": dict(self._updates.by_optimizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates.by_optimizer = Counter(state_dict["updates"])
        self._seen = self._updates.most

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy):
            raise TypeError(
                "PeriodicModelSync needs the whole model on every rank, but "
                f"{type(trainer.strategy).__name__} splits it"
            )
        if stage == "fit":
            self._synced = None
            if trainer.global_step == 0:
                self._updates, self._seen = _Updates(), 0

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise ValueError(
                "LBFGS computes several gradients per update, as many as each rank's loss demands, so ranks would "
                "not agree on when to sync. Use PeriodicModelSync with another optimizer."
            )
        if trainer.world_size > 1 and not self._said and _keeps_replicas_equal(trainer):
            self._said = True
            rank_zero_warn(
                f"PeriodicModelSync is of little use here: {_describe(trainer)} keeps the parameters of all "
                "ranks equal after every update, so it costs time and makes only buffers equal"
            )

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        self._updates.count(trainer, optimizer)

    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        updates, before = self._updates.most, self._seen
        self._seen = updates
        if self.every_n_steps is not None and updates // self.every_n_steps > before // self.every_n_steps:
            self._sync(trainer, pl_module)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._sync(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        self._sync(trainer, pl_module)
        if trainer.validating:
            # The strategy may be showing the mean, and put this rank's own values back afterwards.
            self._synced = None
        # Lightning took the weights before it called this hook. WeightAveraging may have moved them since.
        saved = checkpoint.get("current_model_state", checkpoint["state_dict"])
        # Another callback may have left out what need not be saved.
        saved.update({name: value for name, value in pl_module.state_dict().items() if name in saved})

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._sync(trainer, pl_module)

    def _sync(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._synced == self._updates.most:
            return
        group = getattr(trainer.strategy, "group", None)
        sync_model(pl_module, **self.what, group=group if isinstance(group, Group) else None)
        self._synced = self._updates.most


def _keeps_replicas_equal(trainer: "pl.Trainer") -> bool:
    algorithm = getattr(trainer.strategy, "algorithm", None)
    if isinstance(algorithm, Algorithm):
        return algorithm.replicas_equal
    return isinstance(trainer.model, DistributedDataParallel)


def _describe(trainer: "pl.Trainer") -> str:
    algorithm = getattr(trainer.strategy, "algorithm", None)
    return algorithm.name if isinstance(algorithm, Algorithm) else type(trainer.strategy).__name__


# -- what was sent -------------------------------------------------------------------------------------------


class CommMonitor(Callback):
    """Logs what this package's strategies send, to the Trainer's logger and progress bar.

    Every ``Trainer(log_every_n_steps=...)`` steps, as seen by rank 0, whose values Lightning logs:

    - ``comm/mb_per_step``: MB (10^6 bytes) sent per optimizer update since the last of these lines.
    - ``comm/mb_total``: MB sent since the strategy was made, the first broadcast of the model included.
    - ``comm/wait_ms_per_step``: ms per update in which this rank's host thread stood still for exchanges.
    - ``comm/saving``: share of bytes saved since fit began against an all-reduce at full precision, which
      sends 2 (W - 1) / W * 4 N bytes per update, for W ranks and the N parameters of the optimizer. 0.75
      means a quarter of the bytes.

    On the steps between it counts updates and nothing else. Under a strategy that does not count what it
    sends, nothing is logged, and a warning says so once.
    """

    def __init__(self) -> None:
        self._said = False
        self._traffic: Traffic | None = None

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        traffic = getattr(trainer.strategy, "traffic", None)
        self._traffic = traffic if isinstance(traffic, Traffic) else None
        if self._traffic is None:
            if not self._said:
                self._said = True
                rank_zero_warn(
                    f"CommMonitor logs nothing: {type(trainer.strategy).__name__} does not count what it "
                    "sends. The strategies of lightning_distopt do, for instance strategy='distopt_ddp'"
                )
            return
        self._updates = _Updates()
        self._bytes_at_start = self._traffic.bytes_sent
        self._reference_bytes = 0.0
        self._remember(trainer, self._traffic)

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        if self._traffic is not None:
            self._updates.count(trainer, optimizer)

    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        traffic = self._traffic
        period = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set from outside its class
        if traffic is None or period == 0 or trainer.global_step // period == self._last_step // period:
            return
        updates = self._updates.by_optimizer - self._last_updates
        per_parameter = 2 * (trainer.world_size - 1) / trainer.world_size * 4
        for index, optimizer in enumerate(trainer.optimizers):
            num_parameters = sum(p.numel() for p in optimizer_parameters([optimizer]))
            self._reference_bytes += per_parameter * num_parameters * updates[index]
        sent = traffic.bytes_sent - self._bytes_at_start
        num_updates = max(updates.values(), default=1)
        values = {
            "comm/mb_per_step": (traffic.bytes_sent - self._last_bytes) / num_updates / 1e6,
            "comm/mb_total": traffic.bytes_sent / 1e6,
            "comm/wait_ms_per_step": (traffic.seconds_waited - self._last_seconds) / num_updates * 1e3,
            "comm/saving": 1 - sent / self._reference_bytes if self._reference_bytes else 0.0,
        }
        for name, value in values.items():
            pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar=True)
        self._remember(trainer, traffic)

    def _remember(self, trainer: "pl.Trainer", traffic: Traffic) -> None:
        self._last_step = trainer.global_step
        self._last_updates = self._updates.by_optimizer.copy()
        self._last_bytes = traffic.bytes_sent
        self._last_seconds = traffic.seconds_waited
