"""The process group, ranks, seeding, and one model on every rank. The names are those of ENOT.

Ranks are right before the group exists, too: they come from the variables that torchrun, SLURM or Lightning's
own launcher sets, so code in a constructor or in a data module may ask for them.
"""

import functools
import inspect
import ipaddress
import os
import random
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_distopt.collectives import (
    DEFAULT_TIMEOUT,
    DistributedRuntimeException,
    Group,
    Traffic,
    check_collective_allowed,
    forbid_collectives,
    local_world_size,
)

if TYPE_CHECKING:
    from lightning_distopt.options import (
        BaguaDistributedOption,
        DDPOption,
        DistributedBaseOption,
        get_default_distributed_option,
    )

__all__ = [
    "BaguaDistributedOption",
    "DDPOption",
    "DistributedBaseOption",
    "DistributedRuntimeException",
    "get_default_distributed_option",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "init_torch",
    "is_dist",
    "is_local_master",
    "is_master",
    "master_only",
    "sync_model",
]

BUCKET_BYTES = 64 * 1024 * 1024
ROLL_CALL_SECONDS = 3

P = ParamSpec("P")
T = TypeVar("T")


def __getattr__(name: str) -> Any:
    # The options stand on this module: they are passed on when somebody asks, not imported at the start.
    if name in __all__:
        from lightning_distopt import options

        return getattr(options, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# -- ranks ---------------------------------------------------------------------------------------------------


def get_world_size() -> int:
    """Return the number of processes of the job.

    Before the group exists and without WORLD_SIZE or SLURM_NTASKS, that is the least number that this rank
    allows: 1 in a plain process.
    """
    if dist.is_initialized():
        return int(dist.get_world_size())
    told = _launched_world_size()
    if told is not None:
        return told
    rank = _launched_rank()
    return 1 + (_node_rank() + (_variable("LOCAL_RANK") or 0) if rank is None else rank)


def get_rank() -> int:
    """Return this process's place in the job, 0 to world size - 1.

    Raises:
        DistributedRuntimeException: before the group exists, on a further node of a job that Lightning
            launches, where ranks depend on the number of processes per node and no variable tells it.
    """
    if dist.is_initialized():
        return int(dist.get_rank())
    rank = _launched_rank()
    if rank is None:
        raise DistributedRuntimeException(
            f"the rank of this process on the node with NODE_RANK={_node_rank()} depends on the number of "
            "processes per node: set LOCAL_WORLD_SIZE to it, set RANK, or ask once the process group exists"
        )
    return rank


def get_local_rank() -> int:
    """Return this process's place on its node. Without a variable that tells it, all ranks share one node."""
    local_rank = _variable("LOCAL_RANK")
    if local_rank is None and _under_srun():
        local_rank = _variable("SLURM_LOCALID")
    if local_rank is not None:
        return local_rank
    if not dist.is_initialized() and _variable("RANK") is None and _node_rank() > 0:
        return 0  # Lightning's main process of a further node, before it has launched the others
    return get_rank() % local_world_size(get_world_size())


def is_dist() -> bool:
    """Return whether the job has several processes."""
    return get_world_size() > 1


def is_master() -> bool:
    """Return whether this is the job's one master, rank 0."""
    # An unknown rank is one on a further node.
    return (dist.get_rank() if dist.is_initialized() else _launched_rank()) == 0


def is_local_master() -> bool:
    """Return whether this is the first process of its node."""
    return get_local_rank() == 0


def _variable(name: str, minimum: int = 0) -> int | None:
    """Return a whole number from the environment; None if the variable is missing or empty."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < minimum:
        raise DistributedRuntimeException(
            f"the environment variable {name} must be a whole number of at least {minimum}, got {text!r}"
        )
    return int(text)


def _under_srun() -> bool:
    """Whether srun made this process as one of the job's ranks."""
    # Lightning's rule: a shell inside an allocation has SLURM's variables, too.
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return False
    world_size = _variable("SLURM_NTASKS", 1)
    if world_size is None or _variable("SLURM_PROCID") is None:
        return False
    # Another launcher inside one task passes that task's variables on to all the ranks that it makes.
    same_local_rank = _variable("LOCAL_RANK") in (None, _variable("SLURM_LOCALID"))
    return same_local_rank and _variable("WORLD_SIZE", 1) in (None, world_size)


def _launched_world_size() -> int | None:
    """Return the number of processes that the launcher tells, or None."""
    world_size = _variable("WORLD_SIZE", 1)
    return _variable("SLURM_NTASKS", 1) if world_size is None and _under_srun() else world_size


def _launched_rank() -> int | None:
    """Return the rank that the launcher's variables give; None where they leave it open.

    torchrun sets RANK, srun SLURM_PROCID. Lightning's launchers set neither: a main process knows at most its
    NODE_RANK, which the user sets; the processes it starts have NODE_RANK, LOCAL_RANK and WORLD_SIZE, or as
    forks LOCAL_RANK only.
    """
    rank = _variable("RANK")
    if rank is not None:
        return rank
    if _under_srun():
        return _variable("SLURM_PROCID")
    node, local_rank, lightnings = _node_rank(), _variable("LOCAL_RANK"), _lightning_rank()
    if node == 0:
        return lightnings if local_rank is None else local_rank
    local_rank = local_rank or 0
    possible = [node * per_node + local_rank for per_node in _possible_ranks_per_node(node, local_rank)]
    if len(possible) == 1:
        return possible[0]
    # Until a Trainer is built, Lightning takes LOCAL_RANK for the rank, which it never is on a further node.
    known = lightnings in possible if possible else lightnings > local_rank
    return lightnings if known else None


def _possible_ranks_per_node(node: int, local_rank: int) -> list[int]:
    """Return the numbers of processes per node that the variables allow; none if they say nothing."""
    told = _variable("LOCAL_WORLD_SIZE", 1)
    if told is not None:
        return [told]
    world_size = _variable("WORLD_SIZE", 1) or 0
    divisors = [n for n in range(local_rank + 1, world_size + 1) if world_size % n == 0]
    return [n for n in divisors if world_size // n > node]


def _node_rank() -> int:
    # Lightning's rule: NODE_RANK before torchrun's GROUP_RANK.
    node_rank = _variable("NODE_RANK")
    return (_variable("GROUP_RANK") or 0) if node_rank is None else node_rank


def _lightning_rank() -> int:
    """Return the rank that Lightning has found, if it is loaded: it knows clusters that are unknown here."""
    lightning = sys.modules.get("lightning_utilities.core.rank_zero")
    return getattr(getattr(lightning, "rank_zero_only", None), "rank", None) or 0


# -- the process group ---------------------------------------------------------------------------------------


def init_process_group(
    backend: str = "nccl", init_method: str = "env://", timeout: timedelta = DEFAULT_TIMEOUT
) -> None:
    """Make the default process group of a job with several processes. Collective.

    Does nothing in a job of one process, and when the group exists. With nccl, the GPU with the number of the
    local rank becomes the default device, and CUDA starts.

    Args:
        backend: "nccl" for GPUs, "gloo" for CPUs, or what else torch knows.
        init_method: where ranks meet: "env://" at MASTER_ADDR and MASTER_PORT, "tcp://host:port", or
            "file:///path" on a file system that all ranks see.
        timeout: how long to wait for the other ranks, here and in every collective of the group.

    Raises:
        DistributedRuntimeException: names the variable or address that is wrong or could not be reached.
    """
    if dist.is_initialized():
        return
    world_size = _launched_world_size()
    if world_size is None or world_size == 1:
        return
    told = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
    if not _under_srun() and all(_variable(name) is None for name in told):
        raise DistributedRuntimeException(
            f"WORLD_SIZE is {world_size}, but neither RANK nor LOCAL_RANK is set: every process needs its own"
        )
    local_rank, per_node = get_local_rank(), _variable("LOCAL_WORLD_SIZE", 1)
    if per_node is not None and local_rank >= per_node:
        raise DistributedRuntimeException(
            f"LOCAL_RANK is {local_rank}, but LOCAL_WORLD_SIZE is {per_node}: there is no such place"
        )
    join_process_group(backend, init_method, world_size, get_rank(), timeout=timeout, device_index=local_rank)


def join_process_group(
    backend: str,
    init_method: str,
    world_size: int,
    rank: int,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    device_index: int | None = None,
) -> None:
    """Make the default process group from explicit numbers. Collective. An existing group is kept.

    Args:
        backend: as in :func:`init_process_group`.
        init_method: as in :func:`init_process_group`.
        world_size: number of processes, the same on every rank.
        rank: of this process, 0 to ``world_size - 1``.
        timeout: how long to wait for the other ranks, here and in every collective of the group.
        device_index: with nccl, this process's GPU; None to leave the default device as it is.

    Raises:
        DistributedRuntimeException: names what is wrong, or the address that could not be reached.
        TypeError: ``timeout`` is not a timedelta.
    """
    if dist.is_initialized():
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    if timeout <= timedelta(0):
        raise DistributedRuntimeException(f"timeout must be positive, got {timeout.total_seconds():g} s")
    if not 0 <= rank < world_size:
        raise DistributedRuntimeException(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks go from 0 to {world_size - 1}"
        )
    device = _usable_device(backend, device_index)
    me = _Member(rank, world_size, timeout)
    # torch gives this prefix to the stores that it makes itself: ranks of Lightning's ddp may be among the others.
    found = _meet(init_method, me)
    _call_roll(found, init_method, me, backend)
    store = dist.PrefixStore("default_pg", found)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = _first_line(error)
        if "Unable to find address" in reason and (interface := os.environ.get("GLOO_SOCKET_IFNAME")):
            reason += f" (GLOO_SOCKET_IFNAME={interface} must name a network interface)"
        raise DistributedRuntimeException(
            f"{me} has met the others at {init_method}, but could not connect to all of them with {backend} "
            f"within {me.patience}: {reason}"
        ) from error


def _usable_device(backend: str, index: int | None) -> torch.device | None:
    """Check the backend; with nccl, make the GPU the default one, start CUDA and return the GPU."""
    names = [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]
    if "nccl" in names and not torch.cuda.is_available():
        raise DistributedRuntimeException(
            f"backend={backend!r} needs a CUDA device, and torch finds none: use backend='gloo'"
        )
    for name in names:
        if not dist.is_backend_available(name):
            known = [known for known in ("gloo", "nccl", "xccl", "ucc", "mpi") if dist.is_backend_available(known)]
            raise DistributedRuntimeException(
                f"backend={backend!r} is not available in this build of torch: use one of {', '.join(known)}"
            )
    if "nccl" not in names or index is None:
        return None
    count = torch.cuda.device_count()
    if index >= count:
        raise DistributedRuntimeException(
            f"LOCAL_RANK is {index}, but torch finds {count} GPUs on this node (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}): start at most {count} processes per node"
        )
    try:
        torch.cuda.set_device(index)
        torch.cuda.init()
    except RuntimeError as error:
        raise DistributedRuntimeException(f"CUDA does not start on GPU {index}: {_first_line(error)}") from error
    return torch.device("cuda", index)


class _Member(NamedTuple):
    """A rank that looks for the others."""

    rank: int
    world_size: int
    timeout: timedelta

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    @property
    def patience(self) -> str:
        return f"{self.timeout.total_seconds():g} s"


def _meet(init_method: str, me: _Member) -> dist.Store:
    """Find the other ranks, and return the store through which all tell their addresses."""
    scheme, _, rest = init_method.partition("://")
    if init_method == "env://":
        host, port = os.environ.get("MASTER_ADDR", "").strip(), _variable("MASTER_PORT", 1)
        if not host or port is None:
            raise DistributedRuntimeException(
                f"the environment variable {'MASTER_PORT' if host else 'MASTER_ADDR'} is not set: env:// "
                "needs MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
            )
        return _tcp_store(f"MASTER_ADDR={host}, MASTER_PORT={port}", host, port, me)
    if scheme == "tcp" and rest:
        address: tuple[str | None, int | None] = (None, None)
        with suppress(ValueError):  # the port is no number from 0 to 65535
            address = urlsplit(init_method).hostname, urlsplit(init_method).port
        if address[0] and address[1]:
            return _tcp_store(init_method, address[0], address[1], me)
    if scheme == "file" and os.path.isabs(rest):
        return _file_store(Path(rest), me)
    raise DistributedRuntimeException(f"init_method={init_method!r} must be env://, tcp://host:port or file:///path")


def _tcp_store(where: str, host: str, port: int, me: _Member) -> dist.Store:
    """Meet at an address: rank 0 serves there, unless torchrun does."""
    try:
        if not 0 < port < 2**16:
            raise OSError("ports go from 1 to 65535")
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise DistributedRuntimeException(f"{me} cannot use {where}: {error}") from error
    torchruns = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (host, str(port))
    agents = torchruns and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = me.rank == 0 and not agents
    try:
        store: dist.Store = _within(
            # A little more, so that TCPStore can say what it saw, and its thread does not come back while the process
            # ends, which aborts it.
            me.timeout.total_seconds() + 2,
            lambda: dist.TCPStore(host, port, me.world_size, serve, me.timeout, multi_tenant=serve),
        )
    except (RuntimeError, FutureTimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise DistributedRuntimeException(
                f"{me} cannot listen at {where}: the port is in use, by another job or by a second process "
                "that takes itself for rank 0"
            ) from error
        others = "the other ranks" if serve else "rank 0"
        raise DistributedRuntimeException(
            f"{me} waited {me.patience} at {where} for {others}: {_first_line(error) or 'no answer'}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if agents and attempt != "0":
        # torchrun's store outlives a restart, with the addresses of processes that are dead.
        store = dist.PrefixStore(f"attempt {attempt}", store)
    own = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.compare_set(_came(me.rank), "", own).decode()  # the same process may come again
    if holder != own:
        raise DistributedRuntimeException(
            f"{me} came to {where}, where {holder} already is rank {me.rank}: end what an earlier run has left, "
            "give every run its own port, and start as many processes on every node"
        )
    return store


def _file_store(path: Path, me: _Member) -> dist.Store:
    """Meet through a file: rank 0 writes there where it serves, and removes the file when all have come.

    Differs from torch's own ``file://``, which keeps its state in the file, so that a new run may join what a
    dead one has left. Here a file that leads to nobody is refused at once, and a meeting leaves none behind.
    """
    if not path.parent.is_dir():
        raise DistributedRuntimeException(f"{me} cannot use file://{path}: create the directory {path.parent} first")
    deadline = time.monotonic() + me.timeout.total_seconds()
    try:
        if me.rank == 0:
            return _serve_at_file(path, me, deadline)
        while not (note := _note_in(path)):
            if _is_over(deadline):
                raise DistributedRuntimeException(f"{me} waited {me.patience} for rank 0 to write {path}")
        return _follow_file(path, note, me)
    except (OSError, dist.DistError) as error:
        raise DistributedRuntimeException(f"{me} cannot use file://{path}: {_first_line(error)}") from error


def _serve_at_file(path: Path, me: _Member, deadline: float) -> dist.Store:
    if _note_in(path):
        raise _stale(path)
    store = dist.TCPStore("localhost", 0, None, True, me.timeout, wait_for_workers=False)
    token = uuid.uuid4().hex
    store.set(token, "")
    note = f"distopt {token} {_own_address()} {store.port}"
    draft = path.with_name(f"{path.name}.{token}")
    draft.write_text(note)
    draft.replace(path)  # nobody reads half of it
    others = [_came(rank) for rank in range(1, me.world_size)]
    try:
        while others and not store.check(others):
            if _note_in(path) != note:
                raise DistributedRuntimeException(
                    f"{path} was removed, or another run meets there now: give every run its own path"
                )
            if _is_over(deadline):
                missing = [rank for rank in range(1, me.world_size) if not store.check([_came(rank)])]
                raise DistributedRuntimeException(f"{me} waited {me.patience} at {path}: ranks {missing} did not come")
    finally:
        if _note_in(path) == note:
            path.unlink()
    return store


def _follow_file(path: Path, note: str, me: _Member) -> dist.Store:
    seconds = min(me.timeout.total_seconds(), 10)  # rank 0 already serves, if it lives
    try:
        _, token, host, port = note.split()
        # A port that nobody listens at is refused at once; TCPStore would try again until the timeout.
        socket.create_connection((host, int(port)), timeout=seconds).close()
        store = _within(
            seconds, lambda: dist.TCPStore(host, int(port), None, False, me.timeout, wait_for_workers=False)
        )
        if not store.check([token]):
            raise _stale(path)  # somebody else has got the port
    except (ValueError, OSError, dist.DistError, FutureTimeoutError) as error:
        raise _stale(path) from error
    if store.add(_came(me.rank), 1) > 1:
        raise DistributedRuntimeException(
            f"{me} came to {path} where rank {me.rank} had already come: give every run its own path"
        )
    return store


def _call_roll(store: dist.Store, where: str, me: _Member, backend: str) -> None:
    """Refuse machines that do not fit together: torch makes a wait of it, for several timeouts.

    All ranks see the same notes. A rank that torch itself brings leaves none, and is waited for in vain, but not long.
    """
    try:
        problem = _problem_among_ranks(store, me, backend)
    except dist.DistError as error:
        raise DistributedRuntimeException(f"{me} lost rank 0 at {where}: {_first_line(error)}") from error
    if problem is not None:
        if me.rank == 0:
            time.sleep(0.5)  # others read the same in the store, which may end with this process
        raise DistributedRuntimeException(f"{me} came to {where}, but {problem}")


def _problem_among_ranks(store: dist.Store, me: _Member, backend: str) -> str | None:
    host = socket.gethostname()
    loopback = _gloo_at_loopback() if "gloo" in backend else None
    if loopback is not None:
        store.compare_set("gloo at loopback", "", f"{host}, whose own name stands for {loopback} there")
    if store.compare_set("host", "", host).decode() != host:
        store.set("several hosts", "yes")
    size = store.compare_set("world size", "", str(me.world_size)).decode()
    if size != str(me.world_size):
        store.compare_set("world sizes", "", f"{size} and {me.world_size}")
    store.set(f"rank {me.rank} has told", "")
    deadline, pause = time.monotonic() + min(ROLL_CALL_SECONDS, me.timeout.total_seconds()), 0.01
    over = False
    while not over:
        over = time.monotonic() > deadline or store.check([f"rank {rank} has told" for rank in range(me.world_size)])
        if store.check(["world sizes"]):
            return (
                f"ranks count themselves differently there, {store.get('world sizes').decode()}: start the same number "
                "of processes on every node (devices, --nproc-per-node, --ntasks-per-node)"
            )
        if store.check(["several hosts", "gloo at loopback"]):
            return (
                f"no other machine can reach {store.get('gloo at loopback').decode()}: set GLOO_SOCKET_IFNAME to the "
                "network interface between the machines, as `ip -brief address` names it"
            )
        time.sleep(0 if over else pause)
        pause = min(2 * pause, 0.2)
    return None


def _gloo_at_loopback() -> str | None:
    """Return the address at which gloo will listen, if no other machine can reach it."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    host = socket.gethostname()
    with suppress(OSError):  # an unknown name: gloo falls back on loopback
        # Gloo's rule: the first address of the host's name at which it can listen.
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0]) if ipaddress.ip_address(address[0]).is_loopback else None
    return "127.0.0.1"


def _within(seconds: float, connect: Callable[[], T]) -> T:
    """Return what ``connect`` returns, or raise TimeoutError after that long.

    TCPStore has a timeout of its own, but waits forever for a server that takes the connection and says
    nothing, and nothing can interrupt it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(connect())
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    threading.Thread(target=run, name="connect", daemon=True).start()
    return future.result(seconds)


def _came(rank: int) -> str:
    return f"rank {rank} came"


def _note_in(path: Path) -> str:
    """Return what the file says; nothing if it is missing or empty, as temporary files begin."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _stale(path: Path) -> DistributedRuntimeException:
    return DistributedRuntimeException(
        f"the file {path} was left by a run that ended before its ranks had met, or another run meets there "
        "now: delete it, or choose another path"
    )


def _is_over(deadline: float) -> bool:
    """Rest a little, and return whether time is up."""
    time.sleep(0.02)
    return time.monotonic() > deadline


def _own_address() -> str:
    """Return an address at which other machines may find this one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: chooses the interface that leads out of here
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


# -- the master ----------------------------------------------------------------------------------------------


def master_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Let a function or method run on the job's master only, and return None on the other ranks.

    Inside it, every collective of this package raises :class:`DistributedRuntimeException` at once, with the
    name of the function: the other ranks would never join. That holds in a job of one process, too.

    >>> @master_only
    ... def announce(loss):
    ...     print(f"loss {loss}")
    >>> announce(0.5)
    loss 0.5

    Args:
        fn: a function or method; under ``@classmethod`` or ``@staticmethod``, this decorator goes below.

    Raises:
        TypeError: ``fn`` is a generator or a coroutine, whose body runs after the call, or not a function.
    """
    late = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if not callable(fn) or any(is_late(fn) for is_late in late):
        raise TypeError(f"master_only needs a plain function or method, got {fn!r}")
    name = getattr(fn, "__qualname__", repr(fn))

    @functools.wraps(fn)
    def run_on_master(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if not is_master():
            return None
        with forbid_collectives(name):
            return fn(*args, **kwargs)

    return run_on_master


# -- seeds and flags -----------------------------------------------------------------------------------------


def init_torch(
    seed: int | None = None,
    cuda_optimize_for_speed: bool = False,
    cuda_reproducible: bool = False,
    backend: str = "nccl",
    init_method: str = "env://",
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Seed all generators, set CUDA's flags, then call :func:`init_process_group`. Collective.

    All ranks get the same seed: models built afterwards start equal, and so do dropout and augmentation. For
    noise that differs between ranks, call ``torch.manual_seed(seed + get_rank())`` once the model is built.

    Args:
        seed: for ``random``, NumPy (if installed) and torch; None leaves them alone.
        cuda_optimize_for_speed: cuDNN measures its kernels and takes the fastest, and float32 matrix products
            may use TF32.
        cuda_reproducible: deterministic algorithms only, here and in cuDNN and cuBLAS.
        backend: as in :func:`init_process_group`.
        init_method: as in :func:`init_process_group`.
        timeout: as in :func:`init_process_group`.

    Raises:
        RuntimeError: both flags are set.
        DistributedRuntimeException: the group could not be made.
    """
    set_cuda_flags(cuda_optimize_for_speed, cuda_reproducible)
    if seed is not None:
        seed_generators(seed)
    init_process_group(backend, init_method, timeout)


def seed_generators(seed: int) -> None:
    """Seed ``random``, NumPy (if installed) and torch on all devices. CUDA does not start for it.

    Args:
        seed: 0 to 2**32 - 1, which is what NumPy takes.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: it is out of range.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    random.seed(seed)
    with suppress(ImportError):
        import numpy as np

        np.random.seed(seed)
    torch.manual_seed(seed)


def set_cuda_flags(optimize_for_speed: bool = False, reproducible: bool = False) -> Callable[[], None]:
    """Set torch's global flags, without starting CUDA. What is not asked for stays as it is.

    Args:
        optimize_for_speed: as ``cuda_optimize_for_speed`` in :func:`init_torch`.
        reproducible: as ``cuda_reproducible`` in :func:`init_torch`.

    Returns:
        A function that puts the earlier values back.

    Raises:
        RuntimeError: both are asked for.
    """
    if optimize_for_speed and reproducible:
        raise RuntimeError("cuda_optimize_for_speed and cuda_reproducible exclude each other: set one of them only")
    undo: list[Callable[[], Any]] = []
    if optimize_for_speed:
        _set(torch.backends.cudnn, "benchmark", True, undo)
        _allow_tf32(undo)
    if reproducible:
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        undo.append(lambda: torch.use_deterministic_algorithms(enabled, warn_only=warn_only))
        torch.use_deterministic_algorithms(True)
        _set(torch.backends.cudnn, "deterministic", True, undo)
        _set(torch.backends.cudnn, "benchmark", False, undo)
        _reserve_cublas_workspace(undo)

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _set(owner: Any, name: str, value: object, undo: list[Callable[[], Any]]) -> None:
    undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _allow_tf32(undo: list[Callable[[], Any]]) -> None:
    matmul = torch.backends.cuda.matmul
    try:
        if matmul.allow_tf32:
            return
    except RuntimeError:
        # Somebody has set the newer flag of torch 2.9, and now the older one cannot be read.
        _set(matmul, "fp32_precision", "tf32", undo)
        return
    if hasattr(matmul, "fp32_precision"):
        # The older flag sets the newer one, too, but turning it off leaves "ieee" where "none" was.
        undo.append(functools.partial(setattr, matmul, "fp32_precision", matmul.fp32_precision))
    _set(matmul, "allow_tf32", True, undo)


def _reserve_cublas_workspace(undo: list[Callable[[], Any]]) -> None:
    # cuBLAS reads it when CUDA starts, and with any other value its sums depend on the timing of streams.
    name, earlier = "CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if earlier in (":4096:8", ":16:8"):
        return
    if torch.cuda.is_initialized():
        warnings.warn(
            f"CUDA has already started without {name}=:4096:8, so matrix products may not be reproducible: "
            "ask for cuda_reproducible before the first use of CUDA",
            stacklevel=4,
        )
    undo.append(lambda: os.environ.pop(name, None) if earlier is None else os.environ.update({name: earlier}))
    os.environ[name] = ":4096:8"


# -- one model on every rank ---------------------------------------------------------------------------------


def sync_model(
    model: nn.Module,
    sync_parameters: bool = True,
    sync_buffers: bool = True,
    reduce_parameters: bool = True,
    reduce_buffers: bool = True,
    *,
    group: Group | None = None,
) -> None:
    """Give every rank the same model, in place: the mean of the replicas, or the master's. Collective.

    Costs one short exchange that compares names, shapes and dtypes, and one exchange per 64 MiB of what
    travels as float32, as float64, and as bytes. Means are computed in float32, those of float64 in float64.
    Integers and bools are never averaged: every rank gets the master's. Optimizer state stays as it is.

    torchmetrics objects in the model are left alone: they hold what one rank has seen, and sync themselves.

    Args:
        model: the same structure on every rank; strides may differ. Tied tensors travel once.
        sync_parameters: whether parameters are made equal.
        sync_buffers: whether buffers are, also those that no checkpoint holds.
        reduce_parameters: average parameters; else every rank gets the master's.
        reduce_buffers: average buffers; else every rank gets the master's.
        group: the ranks that take part; by default all. Its first rank is the master.

    Raises:
        DistributedRuntimeException: on every rank, with the first difference, if models or arguments differ;
            on a rank that lost a peer; and in a job of several processes before the group exists.
    """
    check_collective_allowed("sync_model")
    if group is None:
        group = _world()
    if group.size == 1:
        return
    chosen = [found for found in _named_tensors(model) if (sync_buffers if found[2] else sync_parameters)]
    lines = [f"{sync_parameters=}, {sync_buffers=}, {reduce_parameters=}, {reduce_buffers=}"]
    for name, tensor, is_buffer in chosen:
        lines.append(f"the {'buffer' if is_buffer else 'parameter'} {name} {_describe(tensor)}")
    group.check_same(lines, "the calls of sync_model")

    means: dict[torch.dtype, list[Tensor]] = {torch.float32: [], torch.float64: []}
    copies: list[Tensor] = []
    for name, tensor, is_buffer in chosen:
        if (problem := _problem(tensor)) is not None:
            raise DistributedRuntimeException(f"sync_model cannot send {name}, which {problem}")
        reduce = reduce_buffers if is_buffer else reduce_parameters
        dtype = _mean_dtype(tensor.dtype) if reduce else None
        (copies if dtype is None else means[dtype.to_real()]).append(tensor)

    for real, tensors in means.items():
        for flat in _buckets(tensors, group.device, lambda tensor: _mean_dtype(tensor.dtype) or tensor.dtype):
            _average_(flat.view(real), group)
    for flat in _buckets(copies, group.device, lambda tensor: tensor.dtype):
        group.broadcast_(flat).wait()


def mean_of_replicas_(module: nn.Module, group: Group) -> Callable[[], None]:
    """Put the mean of all replicas in place of this rank's, as :func:`sync_model` does. Collective.

    Args:
        module: the same structure on every rank.
        group: the ranks that take part.

    Returns:
        A function that puts this rank's own values back, bit for bit. Until then they are held as a second
        copy of the model. Local; a second call does nothing.

    Raises:
        DistributedRuntimeException: as :func:`sync_model`; the module then has its own values.
    """
    check_collective_allowed("mean_of_replicas_")
    own: list[tuple[Tensor, Tensor]] = []

    def restore() -> None:
        with torch.inference_mode():
            while own:
                tensor, copy = own.pop()
                _memory_of(tensor).copy_(copy)

    if group.size > 1:
        with torch.inference_mode():
            own += [(t, _memory_of(t).clone()) for _, t, _ in _named_tensors(module) if _problem(t) is None]
        try:
            sync_model(module, group=group)
        except BaseException:
            restore()
            raise
    return restore


def _world() -> Group:
    """Return all ranks of the job."""
    if dist.is_initialized():
        return Group(dist.group.WORLD, traffic=Traffic(label="sync_model"))
    if (world_size := get_world_size()) > 1:
        raise DistributedRuntimeException(
            f"sync_model needs the process group, which this job of {world_size} processes has not made yet: "
            "call init_process_group() or init_torch() first, on every rank, or wait for the start of fit"
        )
    return Group()


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name, tensor and whether it is a buffer, each tensor once, without what torchmetrics holds."""
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, here = waiting.pop()
        if id(here) in seen or "torchmetrics" in {c.__module__.partition(".")[0] for c in type(here).__mro__}:
            continue
        seen.add(id(here))
        named: list[tuple[str, Tensor, bool]] = [
            *((name, tensor, False) for name, tensor in here.named_parameters(recurse=False)),
            *((name, tensor, True) for name, tensor in here.named_buffers(recurse=False)),
        ]
        for name, tensor, is_buffer in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield prefix + name, tensor, is_buffer
        waiting += reversed([(f"{prefix}{name}.", child) for name, child in here.named_children()])


def _problem(tensor: Tensor) -> str | None:
    """Say why a tensor cannot be copied element by element, if so."""
    if is_lazy(tensor):
        return "has no shape yet: run one batch through the model first"
    if tensor.layout != torch.strided:
        return "is sparse: make it dense, or not a buffer"
    if tensor.is_quantized:
        return "is quantized: keep its integers and scales as plain buffers"
    return "is on the meta device: give it memory first" if tensor.is_meta else None


def _describe(tensor: Tensor) -> str:
    """Return what must be the same on every rank: not the strides, but which elements share memory."""
    if (problem := _problem(tensor)) is not None:
        return problem
    memory = tuple(_memory_of(tensor).shape)
    shared = "" if memory == tuple(tensor.shape) else f" expanded from {memory}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{shared}"


def _memory_of(tensor: Tensor) -> Tensor:
    """Return a view without the repetitions of ``expand``, which nobody may write to."""
    view = tensor.detach()
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            view = view.narrow(axis, 0, 1)
    return view


def _mean_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which means of ``dtype`` are computed; None if there are no means of it."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return None


def _buckets(
    tensors: Iterable[Tensor], device: torch.device, dtype_of: Callable[[Tensor], torch.dtype]
) -> Iterator[Tensor]:
    """Copy tensors into flat buffers and, when the caller has exchanged a buffer, back into the tensors.

    Elements travel by index, so strides do not matter. One buffer serves for all.

    Args:
        tensors: of any dtype, device and strides; the same shapes on every rank.
        device: where buffers lie.
        dtype_of: the dtype in which a tensor travels.

    Yields:
        1-D uint8 buffers of at most ``BUCKET_BYTES``.
    """
    places: list[list[tuple[Tensor, torch.dtype, int, int]]] = [[]]
    end = largest = 0
    for tensor in tensors:
        dtype = dtype_of(tensor)
        for piece in _pieces(_memory_of(tensor), BUCKET_BYTES // dtype.itemsize):
            num_bytes = piece.numel() * dtype.itemsize
            if end + num_bytes > BUCKET_BYTES:
                places.append([])
                end = 0
            places[-1].append((piece, dtype, end, end + num_bytes))
            largest = max(largest, end + num_bytes)
            end += -(-num_bytes // 16) * 16  # where a view of any dtype may begin
    buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
    for bucket in filter(None, places):
        views = [(piece, buffer[i:j].view(dtype).view(piece.shape)) for piece, dtype, i, j in bucket]
        for piece, view in views:
            view.copy_(piece)
        last = bucket[-1][3]
        if last > 0:
            yield buffer[:last]
        # Tensors that were made in inference mode may be written to nowhere else, and others there, too.
        with torch.inference_mode():
            for piece, view in views:
                piece.copy_(view)


def _pieces(tensor: Tensor, limit: int) -> list[Tensor]:
    """Cut a tensor along its first axes into pieces of at most ``limit`` elements, whatever its strides."""
    if tensor.numel() <= limit:
        return [tensor]
    rows = limit // (tensor.numel() // tensor.shape[0])
    if rows == 0:
        return [piece for row in tensor for piece in _pieces(row, limit)]
    return list(tensor.split(rows))


def _average_(flat: Tensor, group: Group) -> None:
    """Replace a flat tensor by its mean over ranks."""
    # Sums of masks full of the lowest float would become infinite, and so they would after rounding W-ths of it: a
    # power of two is divided out before the sum, exactly, and the rest after it.
    power = 1 << (group.size - 1).bit_length()
    group.all_reduce_(flat.mul_(1 / power)).wait()
    flat.div_(group.size / power)
