"""Measure what an exchange costs: ``python -m lightning_distopt.bench``.

Every figure of one run is measured side by side on the same machine: compare ratios, not milliseconds. Under torchrun
the ranks that it started are measured, so also a link between two machines; else ranks are started here.
"""

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_distopt.advise import (
    LARGE_BYTES,
    Cost,
    DryGroup,
    Prediction,
    Update,
    background,
    mb_per_update,
    recommend,
    replay,
    work_and_transfer,
)
from lightning_distopt.algorithms import (
    ALGORITHMS,
    Algorithm,
    GradientAllReduce,
    QAdamOptimizer,
    WeightExchange,
    make_algorithm,
)
from lightning_distopt.algorithms.base import BucketHook
from lightning_distopt.collectives import Group, Pending, local_world_size
from lightning_distopt.quantize import BlockInt4, BlockInt8, Codec, Float16, MinMaxUInt8, NoCompression

__all__ = ["bench_quantize", "main"]

CODECS: tuple[Codec, ...] = (MinMaxUInt8(), BlockInt8(), BlockInt4(), Float16(), NoCompression())

WIDTH = 1024
# Enough that no second moment is small by chance, which would cost QAdam extra work.
QADAM_WARMUP = 8
BASELINES = ("compute", "ddp", "ddp_fp16", "ddp_adam")


@dataclass
class Measurement:
    """One algorithm on one rank.

    Attributes:
        name: what was measured, as written in ``--algorithms``.
        step_ms: mean milliseconds per update.
        sent_mb: MB sent per update, as counted; None for the baselines.
        interface_mb: MB per update that left the rank's network interface; None where that is not known.
        buffers_mb: MB of memory that the algorithm holds besides weights, gradients and DDP's buckets.
    """

    name: str
    step_ms: float
    sent_mb: float | None
    interface_mb: float | None
    buffers_mb: float | None


@dataclass
class Workload:
    """What is trained.

    Attributes:
        module: its forward takes no arguments and returns the loss.
        optimizer: over its parameters.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer


class SquareLayers(nn.Module):
    """Square layers on one batch, with about ``num_params`` parameters (12.6 M: twelve of 1024 x 1024; few: one)."""

    def __init__(self, num_params: float, batch: int, rank: int) -> None:
        """Give every rank the same weights, and a batch and a factor of the loss of its own."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        width = min(WIDTH, max(1, round(num_params**0.5)))
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, round(num_params / WIDTH**2)))))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / width**0.5
        self.batch = torch.randn(batch, width, generator=torch.Generator().manual_seed(rank))
        self.factor = 1 + rank

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.factor * self.layers(self.batch).square().mean()
        return loss


def make_workload(args: argparse.Namespace) -> Workload:
    """Make the model that ``--params`` and ``--batch`` ask for."""
    module = SquareLayers(args.params, args.batch, args.rank)
    return Workload(module, torch.optim.SGD(module.parameters(), lr=1e-4))


def make_entry(entry: str) -> Algorithm | None:
    """Build what one entry of ``--algorithms`` asks for.

    Args:
        entry: a name, or a name with options, as "diloco:period=20,compression=int8"; the dotted path of a class of the
            user's stands for a name, too. Or one of ``BASELINES``.

    Returns:
        The algorithm, or None for a baseline.

    Raises:
        ValueError: unknown name or option, or a value out of range.
        TypeError: a value of the wrong type.
    """
    name, _, rest = entry.partition(":")
    options: dict[str, bool | int | float | str] = {}
    for option in filter(None, rest.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{option!r} in {entry!r} must read option=value")
        if key in options:
            raise ValueError(f"{entry!r} sets {key} twice: leave one out")
        options[key] = parse_value(value)
    if name in BASELINES:
        if options:
            raise ValueError(f"{name} has no options, got {rest!r}")
        return None
    if "." in name:
        made: Algorithm = import_class(name, Algorithm)(**options)
        return made
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; valid are: {', '.join((*BASELINES, *ALGORITHMS))}")
    return make_algorithm(name, **options)


def parse_value(text: str) -> bool | int | float | str:
    """Read a value from the command line: true or false, a whole number, a number, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def whole_periods(updates: int, algorithm: Algorithm | None) -> int:
    """Round a number of updates up to whole periods of the algorithm."""
    period = getattr(algorithm, "period", 1)
    return math.ceil(updates / period) * int(period)


def prepare(
    entry: str, workload: Workload, algorithm: Algorithm | None, group: Group, ddp_group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Set an algorithm up on a workload. Collective.

    Args:
        entry: of ``--algorithms``.
        workload: gets another optimizer, where the algorithm or baseline has one of its own.
        algorithm: to be set up; None for a baseline.
        group: for the algorithm.
        ddp_group: for DDP.

    Returns:
        A function that makes one update.
    """
    name = entry.partition(":")[0]
    module: nn.Module = workload.module
    trainable = [p for p in module.parameters() if p.requires_grad]
    if name == "ddp_adam":
        workload.optimizer = torch.optim.Adam(trainable, lr=1e-4)
    elif name == "qadam":
        workload.optimizer = QAdamOptimizer(trainable, lr=1e-4, warmup_steps=QADAM_WARMUP)
    optimizer = workload.optimizer
    if algorithm is not None and algorithm.exchanges == "gradients":
        module = DistributedDataParallel(
            module, process_group=ddp_group, bucket_cap_mb=algorithm.bucket_cap_mb, gradient_as_bucket_view=True
        )
        BucketHook(module, algorithm)
    elif algorithm is None and name != "compute":
        module = DistributedDataParallel(module, process_group=ddp_group, gradient_as_bucket_view=True)
        if name == "ddp_fp16":
            module.register_comm_hook(None, fp16_compress_hook)
    if algorithm is not None:
        algorithm.setup(workload.module, [optimizer], group)

    def update() -> None:
        optimizer.zero_grad()
        module().backward()
        if algorithm is not None:
            algorithm.before_step()
        optimizer.step()
        if algorithm is not None:
            algorithm.after_step()

    return update


def measure(entry: str, args: argparse.Namespace, workload: Workload) -> Measurement:
    """Train with one algorithm and time its updates. Collective.

    Bytes are counted from before the warm-up to after the end of the last exchange: with nothing under way at either
    end, both counters see the same exchanges. Time is taken in between, where exchanges overlap with updates.
    """
    algorithm = make_entry(entry)
    warmup, steps = args.warmup, args.steps
    if args.verify or "period=" in entry:
        warmup, steps = (whole_periods(updates, algorithm) for updates in (warmup, steps))
    group = Group(dist.new_group(timeout=timedelta(seconds=args.timeout)))
    update = prepare(entry, workload, algorithm, group, group.process_group)
    for _ in range(QADAM_WARMUP if entry.partition(":")[0] == "qadam" else 0):
        update()
    dist.barrier()
    sent_before = group.traffic.bytes_sent
    seen_before = interface_bytes(args.interface)
    for _ in range(warmup):
        update()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        update()
    step_ms = 1000 * (time.perf_counter() - start) / steps
    buffers = live_bytes() - plain_bytes(workload)
    if isinstance(algorithm, WeightExchange):
        algorithm.flush()
    dist.barrier()
    seen_after = interface_bytes(args.interface)
    sent = group.traffic.bytes_sent - sent_before
    if algorithm is not None:
        algorithm.teardown()
    mb_per_update = 1e-6 / (warmup + steps)
    ranks_seen = args.nproc if args.interface == "lo" else 1
    return Measurement(
        entry,
        step_ms,
        None if algorithm is None else sent * mb_per_update,
        None if seen_before is None or seen_after is None else (seen_after - seen_before) * mb_per_update / ranks_seen,
        None if algorithm is None else buffers / 1e6,
    )


def live_bytes() -> int:
    """Return the memory of all tensors that Python can reach, each storage once."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def plain_bytes(workload: Workload) -> int:
    """Return the memory of weights, gradients, batch and optimizer state."""
    tensors = [t for p in workload.module.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for t in vars(workload.module).values() if isinstance(t, torch.Tensor)]
    states = workload.optimizer.state.values()
    tensors += [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def interface_bytes(interface: str) -> int | None:
    """Return the bytes that a network interface has sent since it came up, or None where the system does not say."""
    try:
        return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
    except OSError:
        return None


def measure_rounds(args: argparse.Namespace, group: Group, workload: Workload | None = None) -> list[dict[str, Any]]:
    """Measure all algorithms in turn, several times, and put rounds and ranks together. Collective."""
    results = []
    for round_ in range(args.rounds):
        for entry in args.algorithms:
            show(args, f"round {round_ + 1}/{args.rounds}: {entry}")
            fresh = make_workload(args) if workload is None else replace(workload)
            results.append(asdict(measure(entry, args, fresh)))
            gc.collect()  # an old DDP's hooks go with it
    show(args, "")
    return summarise(group.gather_objects(results))


def show(args: argparse.Namespace, text: str) -> None:
    """Say what is under way, on one line."""
    if args.rank == 0:
        print(f"\r{text:<70}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)


def work(args: argparse.Namespace) -> dict[str, Any]:
    """Be one rank: join the others, and return what all of them have measured."""
    init_method = "env://" if args.address is None else f"tcp://{args.address}:{args.port}"
    dist.init_process_group(
        "gloo", init_method=init_method, rank=args.rank, world_size=args.nproc, timeout=timedelta(seconds=args.timeout)
    )
    group = Group(dist.group.WORLD, timeout=timedelta(seconds=args.timeout))
    try:
        if not args.advise:
            torch.set_num_threads(1)
            return {"rows": measure_rounds(args, group)}
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size(args.nproc)))
        if args.model is None:
            return advise(args, group, make_workload(args))
        return with_model(args, partial(advise, args, group))
    finally:
        dist.destroy_process_group()


# -- advice ------------------------------------------------------------------------------------------------------------


def advise(args: argparse.Namespace, group: Group, workload: Workload) -> dict[str, Any]:
    """Measure compute and link, predict every algorithm, and recommend one. Collective; the same on every rank."""
    alone = [dist.new_group([rank]) for rank in range(group.size)][group.rank]
    times: list[tuple[float, float]] = []
    show(args, "compute")
    measure_compute(workload, times)
    freeze_unused(workload.module)
    tries: dict[str, list[Prediction]] = {entry: [] for entry in args.algorithms}
    measured_ms: dict[str, list[float]] = {entry: [] for entry in args.algorithms}
    # A machine's speed changes in a minute: each measurement stands beside a prediction of its own.
    for _ in range(args.rounds if args.verify else 1):
        costs = measure_link(args, group)
        for entry in args.algorithms:
            show(args, f"predicting {entry}")
            if args.verify:
                times.clear()
            compute = measure_compute(workload, times)
            predicted = predict(entry, replace(workload), compute, costs, group.size, alone)
            gc.collect()  # an old DDP's hooks go with it
            tries[entry].append(max(group.gather_objects(predicted), key=lambda prediction: prediction.step_ms))
            if args.verify:
                measured_ms[entry].append(verify(entry, args, group, workload, compute))
    predictions, rows = [], []
    for entry in args.algorithms:
        chosen = sorted(tries[entry], key=lambda prediction: prediction.step_ms)[len(tries[entry]) // 2]
        predictions.append(chosen)
        rows.append({"name": entry, "predicted_ms": chosen.step_ms, "sent_mb": chosen.sent_mb})
        if args.verify:
            errors = [one.step_ms / ms - 1 for one, ms in zip(tries[entry], measured_ms[entry], strict=True)]
            rows[-1] |= {"measured_ms": statistics.median(measured_ms[entry]), "error": statistics.median(errors)}
    show(args, "")
    add_ratios(rows, "predicted_ms")
    reduce = costs["all-reduce"]
    return {
        "ranks": group.size,
        "num_params": sum(p.numel() for p in workload.module.parameters() if p.requires_grad),
        "forward_backward_ms": 1000 * compute.forward_backward,
        "optimizer_ms": 1000 * compute.optimizer,
        "latency_ms": 1000 * reduce.latency,
        "mbit_per_second": 8e-6 / reduce.seconds_per_byte,
        "costs": {kind: asdict(cost) for kind, cost in costs.items()},
        "rows": rows,
        "recommendation": recommend([p for p in predictions if p.name not in BASELINES]),
    }


def freeze_unused(module: nn.Module) -> None:
    """Freeze what got no gradient: it is not trained, and DDP would wait for it.

    Raises:
        SystemExit: nothing is left.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.grad is not None)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SystemExit("no parameter of the model got a gradient, so there is nothing to exchange: check its loss")


def verify(entry: str, args: argparse.Namespace, group: Group, workload: Workload, compute: "Compute") -> float:
    """Return the milliseconds per update of one algorithm, measured over whole periods, or over 2 s of rounds."""
    algorithm = make_entry(entry)
    steps = args.steps
    if algorithm is not None and algorithm.uneven_updates:
        steps = max(steps, *group.gather_objects(math.ceil(2 / compute.seconds)))
    one = argparse.Namespace(**{**vars(args), "algorithms": [entry], "steps": steps, "rounds": 1})
    (measured,) = measure_rounds(one, group, None if args.model is None else workload)
    return float(measured["step_ms"])


@dataclass
class Compute:
    """Seconds of an update on one rank alone, while the others compute, too."""

    forward_backward: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Of the whole update."""
        return self.forward_backward + self.optimizer


def measure_compute(workload: Workload, times: list[tuple[float, float]], rounds: int = 5) -> Compute:
    """Time updates without any exchange. Collective.

    Args:
        workload: is trained by a few updates.
        times: of earlier calls, which count, too: so that what is measured in turn with compute can be compared with
            it. Those of this call are added.
        rounds: how many updates are timed, after two to warm up.
    """
    dist.barrier()
    for step in range(2 + rounds):
        start = time.perf_counter()
        workload.optimizer.zero_grad()
        workload.module().backward()
        middle = time.perf_counter()
        workload.optimizer.step()
        if step >= 2:
            times.append((middle - start, time.perf_counter() - middle))
    return Compute(*(statistics.median(column) for column in zip(*times, strict=True)))


# Sent by a rank where the bandwidth of one exchange alone is measured, besides ``LARGE_BYTES``.
LARGEST_BYTES = 2**23


def exchanges(group: Group, num_bytes: int) -> dict[str, Callable[[], Pending]]:
    """Make a function for every kind of exchange that starts one in which a rank sends ``num_bytes``."""
    size, rank = group.size, group.rank
    flat = torch.zeros(max(1, num_bytes * size // (2 * (size - 1)) // 4))
    piece = max(1, num_bytes // (size - 1))
    sent, received = torch.zeros(2, size * piece, dtype=torch.uint8)
    to = [(rank - 1) % size, (rank + 1) % size][: size - 1]
    come = [(rank + 1) % size, (rank - 1) % size][: size - 1]
    messages = torch.zeros(4, max(1, num_bytes // len(to)), dtype=torch.uint8)
    return {
        "all-reduce": lambda: group.all_reduce_(flat),
        "all-to-all": lambda: group.all_to_all(received, sent),
        "all-gather": lambda: group.all_gather(received, sent[:piece]),
        "broadcast": lambda: group.broadcast_(sent[:piece]),
        "exchange with its peers": lambda: group.swap(
            list(zip(to, messages[:2], strict=False)), list(zip(come, messages[2:], strict=False))
        ),
    }


def measure_link(args: argparse.Namespace, group: Group) -> dict[str, Cost]:
    """Measure latency, bandwidth, and what an exchange takes from the host, for every kind. Collective."""

    def slowest(seconds: float) -> float:
        return float(max(group.gather_objects(seconds)))

    def seconds(exchange: Callable[[], Pending], rounds: int, under_way: int = 1) -> tuple[float, float]:
        """Return the seconds that one exchange takes, and how many of them a processor works."""
        times, processor = [], time.process_time()
        for _ in range(rounds):
            start = time.perf_counter()
            for pending in [exchange() for _ in range(under_way)]:
                pending.wait()
            times.append((time.perf_counter() - start) / under_way)
        processor = (time.process_time() - processor) / rounds / under_way
        return slowest(statistics.median(times)), slowest(processor)

    # An exchange takes processor time from the host's work, unless a core is left for it.
    num_local = local_world_size(group.size)
    spare = (os.cpu_count() or 1) / num_local - torch.get_num_threads()
    shared = min(1.0, max(0.0, 1 - spare))
    small, large, largest = (exchanges(group, num_bytes) for num_bytes in (8, LARGE_BYTES, LARGEST_BYTES))
    costs = {}
    for kind, exchange in large.items():
        show(args, f"link: {kind}")
        seconds(small[kind], 3)
        latency, _ = seconds(small[kind], 30)
        once, _ = seconds(exchange, 1)
        rounds = max(3, min(51, int(0.2 / once)))
        alone, _ = seconds(exchange, rounds)
        longest, _ = seconds(largest[kind], rounds)
        busy, processor = seconds(exchange, rounds, under_way=8)
        alone_per_byte = max(1e-12, (alone - latency) / LARGE_BYTES)
        costs[kind] = Cost(
            latency,
            alone_per_byte,
            seconds_per_byte=min(alone_per_byte, busy / LARGE_BYTES),
            slowdown=min(1.0, shared * processor / busy),
            alone_beyond=max(1e-12, (longest - alone) / (LARGEST_BYTES - LARGE_BYTES)),
        )
    return costs


def predict(
    entry: str,
    workload: Workload,
    compute: Compute,
    costs: Mapping[str, Cost],
    size: int,
    ddp_group: dist.ProcessGroup,
) -> Prediction:
    """Predict one algorithm, from a few updates in which it sends nothing. All ranks do it at the same time.

    Gradients must come from real backward passes, since exchanges begin in them. Where weights are exchanged, compute
    is known, and is not done again.

    Args:
        entry: of ``--algorithms``.
        workload: is trained by a few updates.
        compute: of the workload.
        costs: of the link.
        size: number of ranks.
        ddp_group: a group of this rank alone.
    """
    name = entry.partition(":")[0]
    if name == "compute":
        return Prediction(entry, 1000 * compute.seconds, 0.0, False, False, True)
    algorithm = make_entry(entry) or GradientAllReduce()
    interval = getattr(algorithm, "sync_interval_ms", 0) / 1000
    if interval:
        algorithm = type(algorithm)(**{**algorithm.config(), "sync_interval_ms": 0})
    period = getattr(algorithm, "period", getattr(algorithm, "communication_interval", 1))
    counted = math.ceil(6 / period) * period
    warmup = math.ceil(2 / period) * period + getattr(algorithm, "warmup_steps", 0)
    warmup += QADAM_WARMUP if name == "qadam" else 0
    group = DryGroup(size)
    update = prepare(entry, workload, algorithm, group, ddp_group)
    for step in range(warmup + counted):
        if step == warmup:
            tail = len(group.trace)
        if algorithm.exchanges == "gradients":
            update()
        else:
            if not algorithm.uneven_updates:
                group.add_work(compute.forward_backward)
            algorithm.before_step()
            if not algorithm.uneven_updates:
                group.add_work(compute.optimizer)
            algorithm.after_step()
        group.note(Update())
    algorithm.teardown()
    sent_mb = mb_per_update(group.trace[tail:])
    if algorithm.uneven_updates:
        host, transfer, slowing = (total / counted for total in work_and_transfer(group.trace[tail:], costs))
        step_seconds, updates = background(compute.seconds, host, transfer, slowing, interval)
        sent_mb /= updates
    else:
        ends = replay(group.trace, costs)
        step_seconds = (ends[-1] - ends[warmup - 1]) / counted
    return Prediction(
        entry,
        1000 * step_seconds,
        sent_mb,
        exact=isinstance(algorithm, GradientAllReduce),
        replicas_equal=algorithm.replicas_equal,
        any_optimizer=name not in ("qadam", "ddp_adam"),
    )


class TrainingStep(nn.Module):
    """A LightningModule on one batch."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        """Keep both."""
        super().__init__()
        self.model = model
        # Lightning lets training_step leave out the index of the batch.
        self.arguments = (batch, 0)[: len(inspect.signature(model.training_step).parameters)]  # type: ignore[arg-type]

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        output: Any = self.model.training_step(*self.arguments)  # type: ignore[operator]
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise SystemExit(
                f"training_step of {type(self.model).__name__} must return a loss with a gradient, got {loss!r}: "
                "check that it returns one for the first batch, and that some parameter needs a gradient"
            )
        return loss


def with_model(args: argparse.Namespace, use: Callable[[Workload], dict[str, Any]]) -> dict[str, Any]:
    """Run a function on the user's own module, inside a Trainer's first training batch.

    Raises:
        SystemExit: the module optimizes by hand, or has no training batch.
    """
    import lightning.pytorch as pl  # takes a second, and is needed here only

    reports = []

    class InFirstBatch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, _: int) -> None:
            if not module.automatic_optimization:
                raise SystemExit("--advise measures automatic optimization only: give --params instead of --model")
            reports.append(use(Workload(TrainingStep(module, batch), trainer.optimizers[0])))

    model = import_object(args.model)()
    data = None if args.data is None else import_object(args.data)()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=1, limit_val_batches=0, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[InFirstBatch()],
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    if not reports:
        raise SystemExit(f"{args.data or args.model} gave no training batch")
    return reports[0]


def import_object(path: str) -> Any:
    """Return what a dotted path names, as "my_package.MyModel".

    Raises:
        ValueError: there is no such thing.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {path!r}: {error}") from error


def import_class(path: str, base: type) -> type:
    """Return the class that a dotted path names.

    Raises:
        ValueError: there is no such thing.
        TypeError: it is not a subclass of ``base``.
    """
    cls = import_object(path)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise TypeError(f"{path} must be a class derived from {base.__module__}.{base.__qualname__}, got {cls!r}")
    return cls


def check_made_without_arguments(path: str, base_name: str) -> None:
    """Check that ``--model`` or ``--data`` names a class of Lightning's that needs no arguments.

    Args:
        path: of the class.
        base_name: what it must derive from, in ``lightning.pytorch``.

    Raises:
        ValueError: there is no such thing.
        TypeError: it is something else, or it needs arguments.
    """
    import lightning.pytorch as pl  # takes a second, and is needed here only

    cls = import_class(path, getattr(pl, base_name))
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        remedy = "name a subclass that gives them"
        raise TypeError(f"{path} is made without arguments, and needs some ({error}): {remedy}") from error


# -- starting ranks ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shaped_network(nproc: int, rate: str) -> Iterator[list[list[str]]]:
    """Give every rank a network namespace on one bridge, each sending at most at ``rate``.

    Args:
        nproc: number of ranks.
        rate: as ``tc`` writes it, for instance "200mbit".

    Yields:
        For every rank the command that runs a program inside its namespace.

    Raises:
        SystemExit: not root, or ``ip`` and ``tc`` (iproute2) are missing, or they refuse.
    """
    if os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("ip"):
        raise SystemExit("--rate needs root and the programs ip and tc (Debian: apt install iproute2)")
    tag = f"lb{os.getpid() % 100000}"

    def run(command: str) -> None:
        ended = subprocess.run(command.split(), check=False, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"--rate {rate}: {command!r} failed: {ended.stderr.strip()}")

    names = [f"{tag}n{rank}" for rank in range(nproc)]
    ports = [f"{tag}v{rank}" for rank in range(nproc)]
    try:
        run(f"ip link add {tag} type bridge")
        run(f"ip link set {tag} up")
        for rank, (name, port) in enumerate(zip(names, ports, strict=True)):
            run(f"ip netns add {name}")
            run(f"ip link add {port} type veth peer name eth0 netns {name}")
            run(f"ip link set {port} master {tag} up")
            run(f"ip -n {name} addr add 10.123.0.{rank + 1}/24 dev eth0")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} link set eth0 up")
            run(f"tc -n {name} qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 200ms")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name, port in zip(names, ports, strict=True):
            # A namespace lives on, and its end of the cable with it, until the last process in it has ended.
            subprocess.run(["ip", "link", "del", port], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", tag], check=False, capture_output=True)


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does: what was started is ended, and the network put back."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]], grace: float = 5) -> list[int | None]:
    """Wait until all ranks have ended, or ``grace`` seconds longer than the first one that failed.

    Returns:
        Their exit codes; None for those that still run.
    """
    deadline = math.inf
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or time.monotonic() > deadline:
            return codes
        if any(codes) and deadline == math.inf:
            deadline = time.monotonic() + grace
        time.sleep(0.05)


def run_workers(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Start one process per rank, here or on a shaped network, and return what they measured."""
    here: contextlib.AbstractContextManager[list[list[str]]] = contextlib.nullcontext([[]] * args.nproc)
    network = shaped_network(args.nproc, args.rate) if args.rate else here
    address, interface = ("10.123.0.1", "eth0") if args.rate else ("127.0.0.1", "lo")
    with ended_by_signals(), network as prefixes, tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.json")
        port = str(free_port())
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, "-m", "lightning_distopt.bench", *argv, "--rank", str(rank), "--address",
                 address, "--port", port, "--interface", interface, "--results", str(results)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": interface},
            )
            for rank, prefix in enumerate(prefixes)
        ]  # fmt: skip
        try:
            codes = wait_for_all(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"benchmark ranks ended with exit codes {codes}")
        report: dict[str, Any] = json.loads(results.read_text())
        return report


def interleaved_ms(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time functions in turns, after one turn to warm up.

    Args:
        candidates: functions of no arguments, by name.
        rounds: how often each one is timed.

    Returns:
        The median milliseconds of each candidate.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(1 + rounds):
        for name, function in candidates.items():
            start = time.perf_counter()
            function()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(measured[1:]) for name, measured in times.items()}


def bench_quantize(num_bytes: int = 100_000_000, rounds: int = 7) -> None:
    """Print what encoding and decoding cost beside ``clone()``, for one float32 tensor on one CPU thread.

    Args:
        num_bytes: size of the tensor.
        rounds: how often each operation is timed.
    """
    values = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty_like(values)
    candidates: dict[str, Callable[[], object]] = {"clone": values.clone}
    encoded_bytes = {}
    for codec in CODECS:
        name = type(codec).__name__
        encoded_bytes[name] = codec.encoded_bytes(values.numel(), values.dtype)
        codes = torch.empty(encoded_bytes[name], dtype=torch.uint8)
        candidates[f"encode {name}"] = partial(codec.encode, values, codes)
        candidates[f"decode {name}"] = partial(codec.decode, codes, decoded)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ms = interleaved_ms(candidates, rounds)
    finally:
        torch.set_num_threads(num_threads)

    clone = ms["clone"]
    print(f"{num_bytes / 1e6:g} MB of float32, one thread, median of {rounds} rounds. clone(): {clone:.1f} ms")
    print(f"{'codec':<15}{'bytes/value':>12}{'encode ms':>12}{'x clone':>9}{'decode ms':>12}{'x clone':>9}")
    for name, size in encoded_bytes.items():
        encode, decode = ms[f"encode {name}"], ms[f"decode {name}"]
        print(
            f"{name:<15}{size / values.numel():>12.3f}"
            f"{encode:>12.1f}{encode / clone:>9.2f}{decode:>12.1f}{decode / clone:>9.2f}"
        )


def summarise(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Put rounds and ranks together: times are the slowest rank's in the median round, bytes the mean."""
    rows = []
    for name in dict.fromkeys(entry["name"] for entry in ranks[0]):
        entries = [[entry for entry in rank if entry["name"] == name] for rank in ranks]
        times = [max(entry["step_ms"] for entry in round_) for round_ in zip(*entries, strict=True)]
        flat = [entry for rank in entries for entry in rank]
        row: dict[str, Any] = {"name": name, "step_ms": statistics.median(times)}
        for key in ("sent_mb", "interface_mb", "buffers_mb"):
            values = [entry[key] for entry in flat if entry[key] is not None]
            row[key] = statistics.mean(values) if values else None
        rows.append(row)
    add_ratios(rows, "step_ms")
    return rows


def add_ratios(rows: list[dict[str, Any]], key: str) -> None:
    """Compare each row with DDP's."""
    times = {row["name"]: row[key] for row in rows}
    for row in rows:
        # QAdam brings its own optimizer, so it is compared with DDP under Adam; all others run SGD.
        adam = row["name"].partition(":")[0] in ("qadam", "ddp_adam")
        reference = times.get("ddp_adam" if adam and "ddp_adam" in times else "ddp")
        row["times_ddp"] = None if reference is None else row[key] / reference


def print_table(rows: list[dict[str, Any]], columns: Mapping[str, str]) -> None:
    """Print one line per algorithm.

    Args:
        rows: each with the keys that ``columns`` names.
        columns: titles, and the key that stands below each.
    """
    width = max(28, *(len(row["name"]) + 1 for row in rows))
    print(f"{'':<{width}}" + "".join(f"{title:>21}" for title in columns))
    for row in rows:
        cells = ["-" if row[key] is None else f"{row[key]:.2f}" for key in columns.values()]
        print(f"{row['name']:<{width}}" + "".join(f"{cell:>21}" for cell in cells))


def print_report(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print what was measured or predicted, and write it where ``--json`` says."""
    columns = {
        "ms per step": "step_ms", "MB sent": "sent_mb", "MB on the interface": "interface_mb",
        "MB of buffers": "buffers_mb", "ratio to DDP": "times_ddp",
    }  # fmt: skip
    if args.advise:
        print(
            f"{report['num_params'] / 1e6:.3g} M parameters on {report['ranks']} ranks. "
            f"Compute: forward and backward {report['forward_backward_ms']:.1f} ms, "
            f"optimizer {report['optimizer_ms']:.1f} ms. "
            f"Link: latency {report['latency_ms']:.2f} ms, {report['mbit_per_second']:.0f} Mbit/s."
        )
        columns = {"MB sent": "sent_mb", "predicted ms": "predicted_ms", "ratio to DDP": "times_ddp"}
        if args.verify:
            columns |= {"measured ms": "measured_ms", "error": "error"}
    print_table(report["rows"], columns)
    print("MB are per rank and step; one step is one optimizer update. qadam is compared with DDP under Adam.")
    if args.advise:
        print(report["recommendation"])
    if args.json:
        args.json.write_text(json.dumps(report if args.advise else report["rows"], indent=1) + "\n")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m lightning_distopt.bench", description=__doc__)
    parser.add_argument("--quantize", action="store_true", help="time the quantisers against tensor.clone() instead")
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks on this machine")
    parser.add_argument("--params", type=float, default=12.6e6, help="parameters of the model")
    parser.add_argument("--batch", type=int, default=64, help="rows per rank and step: sets the compute time")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME[:OPTION=VALUE,...]",
                        help=f"out of {', '.join((*BASELINES, *ALGORITHMS))}, or a class of yours as "
                        "my_package.MyAlgorithm; with options of the algorithm as in "
                        "diloco:period=20,compression=int8, where a period rounds --warmup and --steps up to whole "
                        "periods")  # fmt: skip
    parser.add_argument("--advise", action="store_true", help="predict the time per update of every algorithm from the "
                        "measured link and compute time, and recommend one")  # fmt: skip
    parser.add_argument("--model", metavar="PACKAGE.CLASS", help="with --advise: a LightningModule of yours instead of "
                        "--params, made without arguments")  # fmt: skip
    parser.add_argument("--data", metavar="PACKAGE.CLASS", help="a LightningDataModule for --model, made without "
                        "arguments; by default the model's own train_dataloader")  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="with --advise: measure every algorithm, too")
    parser.add_argument("--rate", help="shape the network between ranks, for instance 200mbit; needs root and iproute2")
    parser.add_argument("--steps", type=int, default=10, help="timed updates per round")
    parser.add_argument("--warmup", type=int, default=3, help="updates before each timing")
    parser.add_argument("--rounds", type=int, default=3, help="how often all algorithms are measured in turn")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a lost rank is an error")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    for internal in ("--rank", "--port"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    for internal in ("--address", "--interface", "--results"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.algorithms is None:
        predictable = ("ddp",) if args.model else ("ddp", "ddp_adam")
        args.algorithms = [*(predictable if args.advise else BASELINES), *ALGORITHMS]
    if args.advise and "ddp_fp16" in args.algorithms:
        parser.error("ddp_fp16 can be measured only, not predicted: leave it out of --algorithms")
    if not args.advise and (args.model or args.data or args.verify):
        parser.error("--model, --data and --verify belong to --advise")
    if args.data and not args.model:
        parser.error("--data needs --model")
    try:
        for entry in args.algorithms:
            make_entry(entry)
        for path, base_name in ((args.model, "LightningModule"), (args.data, "LightningDataModule")):
            if path:
                check_made_without_arguments(path, base_name)
        check_values(args)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def check_values(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be meant, and a file that could not be written after minutes of measuring.

    Raises:
        ValueError: naming what is wrong.
    """
    for name, least in (("nproc", 1), ("batch", 1), ("steps", 1), ("rounds", 1), ("warmup", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    for name in ("params", "timeout"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} must be a number above 0, got {getattr(args, name)}")
    if args.advise and int(os.environ.get("WORLD_SIZE", args.nproc)) < 2:
        raise ValueError("--advise measures the link between ranks, and there is one rank only: use at least two")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {str(args.json.parent)!r}; make it first")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.quantize:
        bench_quantize(rounds=args.rounds)
    elif args.rank is not None:
        report = work(args)
        if args.rank == 0:
            Path(args.results).write_text(json.dumps(report))
    elif "WORLD_SIZE" in os.environ:
        args.rank, args.nproc = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if args.advise and args.nproc < 2:
            raise SystemExit("--advise needs a link, so at least two ranks, and WORLD_SIZE is 1")
        args.interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        report = work(args)
        if args.rank == 0:
            print_report(report, args)
    else:
        print_report(run_workers(args, argv), args)


if __name__ == "__main__":
    main()
