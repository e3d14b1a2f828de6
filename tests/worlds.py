"""The two ways to make ranks for a test.

:func:`run_ranks` makes threads, for the mathematics. :func:`launch` makes processes, for everything that
Lightning or the operating system keeps once per process: a Trainer, environment variables, signals, exit
codes. Both give real gloo groups, return what each rank returned, raise the first error, and never hang.
"""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only

# Both of these are private to torch. Should they vanish, run_ranks can call launch instead.
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld


class WorldError(RuntimeError):
    """A world of ranks ended without an exception of its own to raise: a rank hung, or died."""


def _init_group(store, rank, size, timeout):
    """Make the default group."""
    group_timeout = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=group_timeout)
    # A rank that has nothing to do could end while others still connect to it.
    dist.barrier()


# -- threads -------------------------------------------------------------------------------------------------


def run_ranks(fn, size, *, timeout=30):
    """Run ``fn(rank, process_group)`` on ``size`` ranks, each a thread of this process.

    Inside ``fn`` the default group exists and ``dist.new_group`` works. The ranks share the process: use no
    global random generator, no Trainer, no collectives from a further thread.

    Args:
        fn: any callable; closures are fine.
        size: number of ranks.
        timeout: seconds after which the world is given up; also the timeout of the groups.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        WorldError: a rank had not ended in time. The thread cannot be ended and stays behind.
        BaseException: the first error that any rank raised, with a note that names the rank.
    """
    store = dist.HashStore()
    results = [None] * size
    errors = []  # (rank, error), in the order of time

    def rank_main(rank):
        try:
            _init_group(store, rank, size, timeout)
            results[rank] = fn(rank, dist.group.WORLD)
        except BaseException as error:
            errors.append((rank, error))
            _clear_frames(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if errors:
            gc.collect()

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank} of {size}", daemon=True)
        for rank in range(size)
    ]
    with _one_world_per_thread():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout + 1  # a collective that waits for too long may raise first
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    first = errors[0][1] if errors else None
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if hung:
        frames = sys._current_frames()
        stacks = [
            f"{thread.name} waits in:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
            for thread in threads
            if thread.ident in frames
        ]
        message = f"ranks {hung} of {size} had not ended after {timeout} s"
        raise WorldError("\n".join([message, *stacks])) from first
    if first is not None:
        # What BaseException.add_note does from Python 3.11 on.
        first.__notes__ = [*getattr(first, "__notes__", ()), f"raised on rank {errors[0][0]} of {size}"]
        raise first
    return results


def _clear_frames(error):
    """Drop the local variables of all frames that an error went through.

    A gloo group closes its connections when the last reference goes, not before. Until then, peers that wait
    for this rank do not see that it is gone.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _one_world_per_thread():
    """Let every thread have its own default group and its own names of groups."""
    c10d = dist.distributed_c10d
    world, excepthook = c10d._world, sys.excepthook
    c10d._world = ThreadLocalWorld()
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        c10d._world = world
        sys.excepthook = excepthook  # init_process_group replaces it


# -- processes -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How one rank of :func:`launch` ended.

    Attributes:
        rank: which one.
        result: what the function returned.
        error: what it raised; None also if that cannot be pickled.
        traceback: the text of the error's traceback; empty without an error.
        exitcode: of the process; the negative number of the signal that ended it.
        killed: whether launch killed it, because time was up.
        output: all that the process printed.
    """

    rank: int
    result: object = None
    error: BaseException | None = None
    traceback: str = field(default="", repr=False)
    exitcode: int | None = None
    killed: bool = False
    output: str = field(default="", repr=False)
    # None: the function neither returned nor raised.
    _ended_at: float | None = field(default=None, repr=False)

    @property
    def ok(self):
        """Whether the function returned and the process ended with exit code 0."""
        return self._ended_at is not None and not self.traceback and self.exitcode == 0

    def describe(self):
        """Say in one sentence how the rank ended, then what it said."""
        if self.killed:
            how = "had not ended when time was up"
        elif self.traceback:
            how = "raised an error"
        elif self.exitcode is not None and self.exitcode < 0:
            how = f"was ended by {signal.Signals(-self.exitcode).name}"
        else:
            how = f"ended with exit code {self.exitcode}"
            how += " without a result" if self._ended_at is None else " after it had returned"
        details = [self.traceback, self.output[-4000:] and f"it printed:\n{self.output[-4000:]}"]
        return "\n".join([f"rank {self.rank} {how}", *filter(None, details)])


def launch(fn, size, *args, timeout=60, init_group=True, local_size=None, allow_failure=False):
    """Run ``fn(rank, *args)`` on ``size`` ranks, each a fresh process that has imported torch and Lightning.

    The processes see this process's environment variables, warning filters and ``sys.path`` as they are now,
    and besides what torchrun sets. Monkeypatches do not reach them. They run torch on one thread.

    Args:
        fn: a function of a module, or ``functools.partial`` of one.
        size: number of ranks.
        *args: picklable.
        timeout: seconds after which all ranks are killed; also the timeout of the default group.
        init_group: whether the default gloo group exists before ``fn`` is called.
        local_size: ranks per node, for LOCAL_RANK and LOCAL_WORLD_SIZE; by default all share one node.
        allow_failure: let all ranks end, and return a list of :class:`Outcome`, not results or an error.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        WorldError: a rank hung, or died without an exception; says which, and its exit code or signal.
        Exception: the first error that any rank raised, caused by the text of its traceback. The other ranks
            are killed.
    """
    context = _forkserver()
    with tempfile.TemporaryDirectory(prefix="world-") as directory:
        shared_environ = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(local_size or size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        # Pickled here: multiprocessing would send tensors as open files, from a thread of this process.
        task = pickle.dumps((fn, args, shared_environ, _warning_filters(), init_group))
        processes, outcomes = {}, {}
        try:
            for rank in range(size):
                process_args = (rank, size, directory, timeout, task)
                processes[rank] = context.Process(target=_process_main, args=process_args)
                processes[rank].start()
            for rank in _as_they_end(processes, timeout, stop_at_failure=not allow_failure):
                outcomes[rank] = _end(processes.pop(rank), rank, directory)
        finally:
            for rank, process in processes.items():
                outcomes[rank] = _end(process, rank, directory, killed=True)
    by_rank = [outcomes[rank] for rank in range(size)]
    if allow_failure:
        return by_rank
    for outcome in by_rank:
        sys.stdout.write(outcome.output)
    _raise_first_failure(by_rank, timeout)
    return [outcome.result for outcome in by_rank]


class WorkerEnvironment(TorchElasticEnvironment):
    """Tells Lightning that :func:`launch` has already made the ranks."""

    def validate_settings(self, num_devices, num_nodes):
        """Accept all: launch has set both."""


def make_trainer(**options):
    """Build a Trainer for a function under :func:`launch`: on the CPU, on all ranks, silent, writing nothing.

    Args:
        **options: of the Trainer; they win over the defaults.
    """
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    defaults = {
        "accelerator": "cpu",
        "devices": local_size,
        "num_nodes": int(os.environ["WORLD_SIZE"]) // local_size,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": os.environ["WORLD_DIR"],
    }
    plugins = options.pop("plugins", None) or []
    plugins = plugins if isinstance(plugins, list) else [plugins]
    return pl.Trainer(**{**defaults, **options}, plugins=[WorkerEnvironment(), *plugins])


_PRELOAD = [
    "torch",
    "torch._dynamo",  # DDP imports it when it is first constructed, which takes a second
    "torch.distributed",
    "lightning.pytorch",
    "lightning_distopt",
    "pytest",
]


def _forkserver():
    """Return the multiprocessing context. Its server lives from the first rank to the end of this process."""
    context = multiprocessing.get_context("forkserver")
    # A module that raises in the server would end it without a word: here the error is seen.
    for name in _PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    context.set_forkserver_preload(_PRELOAD)
    return context


def _free_port():
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _warning_filters():
    """Return the warning filters in force as arguments of ``warnings.filterwarnings``, weakest first."""

    def text(pattern):
        return getattr(pattern, "pattern", pattern) or ""

    return [
        (action, text(message), category, text(module), line)
        for action, message, category, module, line in reversed(warnings.filters)
    ]


def _process_main(rank, size, directory, timeout, task):
    """Run the task in a process of its own; leave the outcome in a file."""
    os.setsid()  # so that the parent can kill what this process starts
    output = os.open(Path(directory, f"output-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Outlives the parent by a little, should the parent be killed.
    faulthandler.dump_traceback_later(timeout + 10, exit=True)
    torch.set_num_threads(1)

    outcome = Outcome(rank)
    try:
        fn, args, shared_environ, filters, init_group = pickle.loads(task)
        local_size = int(shared_environ["LOCAL_WORLD_SIZE"])
        os.environ.clear()
        os.environ.update(
            shared_environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank % local_size),
            GROUP_RANK=str(rank // local_size),
            WORLD_DIR=directory,
        )
        # Lightning reads the rank when it is imported, which was in the server.
        rank_zero_only.rank = rank
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            warnings.filterwarnings(action, message, category, module, line)
        if init_group:
            _init_group(dist.FileStore(str(Path(directory, "store")), size), rank, size, timeout)
        outcome.result = fn(rank, *args)
        outcome._ended_at = time.monotonic()
        _write_outcome(outcome, directory)
    except BaseException as error:
        outcome = Outcome(rank, error=error, traceback=traceback.format_exc(), _ended_at=time.monotonic())
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            outcome.error = None
        _write_outcome(outcome, directory)
        if not isinstance(error, Exception):
            raise  # SystemExit and KeyboardInterrupt choose the exit code
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _write_outcome(outcome, directory):
    """Write the outcome, so that its file is there as a whole or not at all."""
    part = Path(directory, f"part-{outcome.rank}")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(Path(directory, f"outcome-{outcome.rank}"))


def _as_they_end(processes, timeout, stop_at_failure):
    """Yield the rank of every process that has ended, until one has failed or time is up."""
    deadline = time.monotonic() + timeout
    running = {process.sentinel: rank for rank, process in processes.items()}
    failed = False
    while running and (ended := wait_for_any(list(running), max(0.0, deadline - time.monotonic()))):
        for sentinel in ended:
            process = processes[running[sentinel]]
            process.join()
            if process.exitcode != 0 and stop_at_failure and not failed:
                # A peer's error may be seen before the death that caused it: give that a moment.
                failed, deadline = True, min(deadline, time.monotonic() + 0.2)
            yield running.pop(sentinel)
    if running and not failed:
        for rank in running.values():
            os.kill(processes[rank].pid, signal.SIGUSR1)  # prints where its threads are
        time.sleep(0.3)


def _end(process, rank, directory, killed=False):
    """End a process and all that it has started, and return how it ended."""
    if process.pid is None:
        return Outcome(rank, killed=killed)
    if killed:
        process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    saved, output = Path(directory, f"outcome-{rank}"), Path(directory, f"output-{rank}")
    outcome = pickle.loads(saved.read_bytes()) if saved.exists() else Outcome(rank)
    outcome.output = output.read_text(errors="replace") if output.exists() else ""
    outcome.exitcode, outcome.killed = process.exitcode, killed
    process.close()
    return outcome


def _raise_first_failure(outcomes, timeout):
    """Raise what went wrong first, if anything did."""
    failures = [outcome for outcome in outcomes if not outcome.ok]
    own = [outcome for outcome in failures if not outcome.killed]
    if failures and not own:
        hung = [outcome.rank for outcome in failures]
        texts = [outcome.describe() for outcome in failures]
        message = f"ranks {hung} of {len(outcomes)} had not ended after {timeout} s"
        raise WorldError("\n".join([message, *texts]))
    if own:
        # A death without an error is the cause of the errors of others.
        first = min(own, key=lambda outcome: outcome._ended_at if outcome.traceback else 0.0)
        text = f"of {len(outcomes)} ranks, {first.describe()}"
        if isinstance(first.error, Exception):
            raise first.error from WorldError(text)
        raise WorldError(text)
