"""Measure what an exchange costs: ``python -m lightning_distopt.bench``.

Every figure of one run is measured side by side on the same machine: compare ratios, not milliseconds.
"""

import argparse
import contextlib
import gc
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_distopt.algorithms import ALGORITHMS, Algorithm, QAdamOptimizer, WeightExchange, make_algorithm
from lightning_distopt.algorithms.base import BucketHook
from lightning_distopt.collectives import Group
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


def make_model(num_params: int) -> nn.Sequential:
    """Build square layers with about ``num_params`` parameters (12.6 M: twelve of 1024 x 1024)."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(num_params / WIDTH**2)))))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return layers


def make_entry(entry: str) -> Algorithm | None:
    """Build what one entry of ``--algorithms`` asks for.

    Args:
        entry: a name, or a name with options, as "diloco:period=20,compression=int8"; or one of ``BASELINES``.

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
        options[key] = parse_value(value)
    if name in BASELINES:
        if options:
            raise ValueError(f"{name} has no options, got {rest!r}")
        return None
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


def whole_periods(updates: int, entry: str, algorithm: Algorithm | None) -> int:
    """Round a number of updates up to whole periods, where the entry of ``--algorithms`` says the period."""
    period = getattr(algorithm, "period", 1) if "period=" in entry else 1
    return -(-updates // period) * int(period)


def measure(entry: str, rank: int, args: argparse.Namespace) -> Measurement:
    """Train with one algorithm and time its updates. Collective.

    Bytes are counted from before the warm-up to after the end of the last exchange: with nothing under way at either
    end, both counters see the same exchanges. Time is taken in between, where exchanges overlap with updates.
    """
    name = entry.partition(":")[0]
    module = make_model(args.params)
    model: nn.Module = module
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    group = None
    if name == "ddp_adam":
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    if name == "qadam":
        optimizer = QAdamOptimizer(module.parameters(), lr=1e-4, warmup_steps=QADAM_WARMUP)
    algorithm = make_entry(entry)
    warmup, steps = (whole_periods(updates, entry, algorithm) for updates in (args.warmup, args.steps))
    if algorithm is not None:
        group = Group(dist.new_group(timeout=timedelta(seconds=args.timeout)))
        if algorithm.exchanges == "gradients":
            model = DistributedDataParallel(
                module, process_group=group.process_group, bucket_cap_mb=algorithm.bucket_cap_mb,
                gradient_as_bucket_view=True,
            )  # fmt: skip
            BucketHook(model, algorithm)
        algorithm.setup(module, [optimizer], group)
    elif name != "compute":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if name == "ddp_fp16":
            model.register_comm_hook(None, fp16_compress_hook)
    batch = torch.randn(args.batch, WIDTH, generator=torch.Generator().manual_seed(rank))

    def update() -> None:
        optimizer.zero_grad()
        ((1 + rank) * model(batch).square().mean()).backward()
        if algorithm is not None:
            algorithm.before_step()
        optimizer.step()
        if algorithm is not None:
            algorithm.after_step()

    for _ in range(QADAM_WARMUP if name == "qadam" else 0):
        update()
    dist.barrier()
    sent_before = group.traffic.bytes_sent if group else 0
    seen_before = interface_bytes(args.interface)
    for _ in range(warmup):
        update()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        update()
    step_ms = 1000 * (time.perf_counter() - start) / steps
    buffers = live_bytes() - plain_bytes(module, optimizer) - batch.numel() * batch.element_size()
    if isinstance(algorithm, WeightExchange):
        algorithm.flush()
    dist.barrier()
    seen_after = interface_bytes(args.interface)
    sent = group.traffic.bytes_sent - sent_before if group else None
    if algorithm is not None:
        algorithm.teardown()
    mb_per_update = 1e-6 / (warmup + steps)
    ranks_seen = 1 if args.rate else args.nproc
    return Measurement(
        entry,
        step_ms,
        None if sent is None else sent * mb_per_update,
        None if seen_before is None or seen_after is None else (seen_after - seen_before) * mb_per_update / ranks_seen,
        buffers / 1e6 if algorithm is not None else None,
    )


def live_bytes() -> int:
    """Return the memory of all tensors that Python can reach, each storage once."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def plain_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the memory of weights, gradients and optimizer state."""
    tensors = [t for p in module.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def interface_bytes(interface: str) -> int | None:
    """Return the bytes that a network interface has sent since it came up, or None where the system does not say."""
    try:
        return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
    except OSError:
        return None


def worker(args: argparse.Namespace) -> None:
    """Be one rank: measure everything, and leave the results in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{args.address}:{args.port}", rank=args.rank, world_size=args.nproc,
        timeout=timedelta(seconds=args.timeout),
    )  # fmt: skip
    results = []
    for round_ in range(args.rounds):
        for entry in args.algorithms:
            if args.rank == 0:
                print(f"\rround {round_ + 1}/{args.rounds}: {entry:<50}", end="", file=sys.stderr, flush=True)
            results.append(asdict(measure(entry, args.rank, args)))
    if args.rank == 0:
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr, flush=True)
    Path(args.results).write_text(json.dumps(results))
    dist.destroy_process_group()


@contextlib.contextmanager
def shaped_network(nproc: int, rate: str) -> Iterator[list[list[str]]]:
    """Give every rank a network namespace on one bridge, each sending at most at ``rate``.

    Args:
        nproc: number of ranks.
        rate: as ``tc`` writes it, for instance "200mbit".

    Yields:
        For every rank the command that runs a program inside its namespace.

    Raises:
        SystemExit: not root, or ``ip`` and ``tc`` (iproute2) are missing.
    """
    if os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("ip"):
        raise SystemExit("--rate needs root and the programs ip and tc (Debian: apt install iproute2)")
    tag = f"lb{os.getpid() % 100000}"

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True)

    names = [f"{tag}n{rank}" for rank in range(nproc)]
    try:
        run(f"ip link add {tag} type bridge")
        run(f"ip link set {tag} up")
        for rank, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip link add {tag}v{rank} type veth peer name eth0 netns {name}")
            run(f"ip link set {tag}v{rank} master {tag} up")
            run(f"ip -n {name} addr add 10.123.0.{rank + 1}/24 dev eth0")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} link set eth0 up")
            run(f"tc -n {name} qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 200ms")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", tag], check=False, capture_output=True)


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_workers(args: argparse.Namespace, argv: Sequence[str]) -> list[list[dict[str, object]]]:
    """Start one process per rank, here or on a shaped network, and return what each measured."""
    here: contextlib.AbstractContextManager[list[list[str]]] = contextlib.nullcontext([[]] * args.nproc)
    network = shaped_network(args.nproc, args.rate) if args.rate else here
    address, interface = ("10.123.0.1", "eth0") if args.rate else ("127.0.0.1", "lo")
    with network as prefixes, tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, f"{rank}.json") for rank in range(args.nproc)]
        port = str(free_port())
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, "-m", "lightning_distopt.bench", *argv, "--rank", str(rank), "--address",
                 address, "--port", port, "--interface", interface, "--results", str(file)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": interface},
            )
            for rank, (prefix, file) in enumerate(zip(prefixes, files, strict=True))
        ]  # fmt: skip
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"benchmark ranks ended with exit codes {codes}")
        return [json.loads(file.read_text()) for file in files]


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
    step_ms = {row["name"]: row["step_ms"] for row in rows}
    for row in rows:
        # QAdam brings its own optimizer, so it is compared with DDP under Adam; all others run SGD.
        adam = row["name"].partition(":")[0] in ("qadam", "ddp_adam")
        reference = step_ms.get("ddp_adam" if adam else "ddp")
        row["times_ddp"] = None if reference is None else row["step_ms"] / reference
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per algorithm."""
    columns = {
        "ms per step": "step_ms", "MB sent": "sent_mb", "MB on the interface": "interface_mb",
        "MB of buffers": "buffers_mb", "ratio to DDP": "times_ddp",
    }  # fmt: skip
    width = max(28, *(len(row["name"]) + 1 for row in rows))
    print(f"{'':<{width}}" + "".join(f"{title:>21}" for title in columns))
    for row in rows:
        cells = ["-" if row[key] is None else f"{row[key]:.2f}" for key in columns.values()]
        print(f"{row['name']:<{width}}" + "".join(f"{cell:>21}" for cell in cells))
    print("MB are per rank and step; one step is one optimizer update. qadam is compared with DDP under Adam.")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m lightning_distopt.bench", description=__doc__)
    parser.add_argument("--quantize", action="store_true", help="time the quantisers against tensor.clone() instead")
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks on this machine")
    parser.add_argument("--params", type=float, default=12.6e6, help="parameters of the model")
    parser.add_argument("--batch", type=int, default=64, help="rows per rank and step: sets the compute time")
    parser.add_argument("--algorithms", nargs="+", default=[*BASELINES, *ALGORITHMS], metavar="NAME[:OPTION=VALUE,...]",
                        help=f"out of {', '.join((*BASELINES, *ALGORITHMS))}; with options of the algorithm as in "
                        "diloco:period=20,compression=int8, where a period rounds --warmup and --steps up to whole "
                        "periods")  # fmt: skip
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
    for entry in args.algorithms:
        try:
            make_entry(entry)
        except (TypeError, ValueError) as error:
            parser.error(str(error))
    for name in ("nproc", "batch", "steps", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.quantize:
        bench_quantize(rounds=args.rounds)
    elif args.rank is not None:
        worker(args)
    else:
        rows = summarise(run_workers(args, argv))
        print_table(rows)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
