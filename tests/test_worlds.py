"""The worlds that all other tests stand on."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Regression, loader, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import WorldError, launch, make_trainer, run_ranks

# -- threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_threads_have_real_groups(size):
    """Reductions, gathers, point-to-point messages and subgroups work between threads."""

    def exchange(rank, process_group):
        total = torch.full((3,), 1.0 + rank)
        dist.all_reduce(total, group=process_group)
        ranks = [None] * size
        dist.all_gather_object(ranks, dist.get_rank())
        received = torch.tensor(-1)
        if size > 1:
            to_right = dist.P2POp(dist.isend, torch.tensor(rank), (rank + 1) % size)
            from_left = dist.P2POp(dist.irecv, received, (rank - 1) % size)
            for work in dist.batch_isend_irecv([to_right, from_left]):
                work.wait()
        evens = dist.new_group(list(range(0, size, 2)))
        count = torch.ones(1)
        if rank % 2 == 0:
            dist.all_reduce(count, group=evens)
        return total[0].item(), ranks, received.item(), count.item()

    results = run_ranks(exchange, size)

    for rank, (total, ranks, received, count) in enumerate(results):
        assert total == size * (size + 1) / 2
        assert ranks == list(range(size))
        assert received == ((rank - 1) % size if size > 1 else -1)
        assert count == ((size + 1) // 2 if rank % 2 == 0 else 1)


def test_threads_run_ddp_with_a_python_hook():
    """DDP with a communication hook averages gradients between threads."""

    def train(rank, process_group):
        def hook(state, bucket):
            work = dist.all_reduce(bucket.buffer(), group=process_group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0] / 2)

        model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=process_group)
        model.register_comm_hook(None, hook)
        (model(torch.ones(1, 1)) * (1 + rank)).sum().backward()
        return model.module.weight.grad.item()

    assert run_ranks(train, 2) == [1.5, 1.5]


def test_threads_raise_the_first_error_of_a_rank():
    """One raising rank ends the others, which wait for it, in a moment; its error arrives, with its rank."""

    def fail(rank, process_group):
        if rank == 1:
            raise ZeroDivisionError("no good")
        dist.barrier(group=process_group)

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="no good") as caught:
        run_ranks(fail, 3)

    assert time.monotonic() - start < 10
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]


def test_threads_never_hang():
    """A rank that does not come to an end is named, with the line where it waits."""
    released = threading.Event()

    def hang(rank, process_group):
        if rank == 1:
            released.wait()

    with pytest.raises(WorldError, match=r"(?s)ranks \[1\] of 2 had not ended after 1 s.*released\.wait\(\)"):
        run_ranks(hang, 2, timeout=1)
    released.set()


def test_threads_leave_the_process_as_it_was():
    """After a world of threads there is no default group, and errors are printed as before."""
    excepthook = sys.excepthook
    run_ranks(lambda rank, process_group: None, 2)

    assert not dist.is_initialized()
    assert sys.excepthook is excepthook


# -- processes -----------------------------------------------------------------------------------------------


def show_world(rank, tensor):
    """Return what a rank sees."""
    total = tensor.clone()
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return total, [int(os.environ[name]) for name in names], torch.get_num_threads(), os.getpid()


def test_processes_have_a_group_and_the_environment_of_torchrun():
    """Each rank is a process of its own with the default group, torchrun's variables and one thread."""
    results = launch(show_world, 4, torch.tensor([1.0, 2.0]), local_size=2)

    for rank, (total, numbers, num_threads, _) in enumerate(results):
        assert total.tolist() == [4.0, 8.0]
        assert numbers == [rank, rank % 2, rank // 2, 4, 2]
        assert num_threads == 1
    assert len({os.getpid(), *(pid for *_, pid in results)}) == 5


def see_group(rank):
    """Return whether the default group exists, and one variable of the parent."""
    return dist.is_initialized(), os.environ.get("DISTOPT_TEST")


def test_processes_can_start_without_a_group(monkeypatch):
    """init_group=False leaves the group to the function; the environment is that of the call."""
    launch(see_group, 1)
    monkeypatch.setenv("DISTOPT_TEST", "now")

    assert launch(see_group, 2, init_group=False) == [(False, "now"), (False, "now")]


def warn(rank):
    """Warn."""
    warnings.warn("mind the gap", UserWarning, stacklevel=1)


def test_warnings_are_errors_in_processes():
    """The warning filters of the test hold in its ranks."""
    with pytest.raises(UserWarning, match="mind the gap"):
        launch(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        assert launch(warn, 1) == [None]


def fail_on_rank_1(rank, how):
    """End rank 1 in the given way, while rank 0 waits for it."""
    print(f"rank {rank} was here")
    if rank == 1:
        how()
    dist.barrier()


def raise_error():
    """Raise an error."""
    raise ZeroDivisionError("no good")


class UnpicklableError(Exception):
    """Cannot be pickled: its constructor wants two arguments."""

    def __init__(self, first, second) -> None:
        super().__init__(f"{first} {second}")


def raise_unpicklable():
    """Raise an error that cannot be sent."""
    raise UnpicklableError("cannot", "travel")


def kill_self():
    """End this process as the kernel would when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_7():
    """End this process with an exit code."""
    sys.exit(7)


def exit_at_once():
    """End this process in good order, but without a result."""
    os._exit(0)


def test_processes_raise_the_first_error_with_its_traceback():
    """The error of the rank that failed first arrives as itself, caused by the text of its traceback."""
    with pytest.raises(ZeroDivisionError, match="no good") as caught:
        launch(fail_on_rank_1, 2, raise_error)

    cause = str(caught.value.__cause__)
    assert cause.startswith("of 2 ranks, rank 1 raised an error\nTraceback")
    assert 'in raise_error\n    raise ZeroDivisionError("no good")' in cause
    assert "rank 1 was here" in cause


@pytest.mark.parametrize(("how", "text"), [
    (kill_self, "rank 1 was ended by SIGKILL"),
    (exit_7, "rank 1 raised an error(?s:.*)SystemExit: 7"),
    (exit_at_once, "rank 1 ended with exit code 0 without a result"),
    (raise_unpicklable, "rank 1 raised an error(?s:.*)UnpicklableError: cannot travel"),
])  # fmt: skip
def test_deaths_without_an_error_to_raise_are_told(how, text):
    """A rank that dies, exits, or raises what cannot be sent is named, with its signal or exit code."""
    with pytest.raises(WorldError, match=text):
        launch(fail_on_rank_1, 2, how)


def hang_on_rank_1(rank, pid_file):
    """Start a grandchild and wait for ever."""
    if rank == 1:
        child = subprocess.Popen(["sleep", "1000"])
        pid_file.write_text(str(child.pid))
        print("soon asleep")
        time.sleep(1000)


def test_processes_never_hang(tmp_path):
    """A rank that hangs is killed with all that it started, and shown with its output and where it waits."""
    pid_file = tmp_path / "pid"
    start = time.monotonic()
    with pytest.raises(WorldError, match=r"ranks \[1\] of 2 had not ended after 3 s") as caught:
        launch(hang_on_rank_1, 2, pid_file, timeout=3)

    assert time.monotonic() - start < 8
    assert "soon asleep" in str(caught.value)
    assert "in hang_on_rank_1" in str(caught.value)
    assert ends(int(pid_file.read_text()))


def ends(pid):
    """Whether a process ends within seconds; a zombie has."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_outcomes_instead_of_errors():
    """allow_failure lets every rank come to its own end and tells how."""
    waiting, failing = launch(fail_on_rank_1, 2, raise_error, allow_failure=True)

    assert isinstance(failing.error, ZeroDivisionError)
    assert "raise_error" in failing.traceback
    assert (failing.exitcode, failing.killed, failing.ok) == (1, False, False)
    assert "rank 1 was here" in failing.output
    assert isinstance(waiting.error, RuntimeError)
    assert not waiting.ok

    _, killed = launch(fail_on_rank_1, 2, kill_self, allow_failure=True)
    assert (killed.error, killed.traceback, killed.exitcode) == (None, "", -signal.SIGKILL)

    _, left = launch(fail_on_rank_1, 2, exit_7, allow_failure=True)
    assert left.exitcode == 7

    sleeping = launch(time.sleep, 2, allow_failure=True, timeout=0.5)
    assert [(outcome.ok, outcome.killed) for outcome in sleeping] == [(True, False), (False, True)]


def fit(rank):
    """Fit with Lightning's own ddp."""
    model = Regression()
    trainer = make_trainer(strategy="ddp", max_steps=4)
    trainer.fit(model, loader())
    return trainer.world_size, trainer.global_rank, trainer.is_global_zero, weights(model)


def test_a_trainer_uses_the_processes_as_its_ranks():
    """make_trainer gives a Trainer that finds its ranks, and lets ddp keep them equal."""
    results = launch(fit, 2)

    assert [result[:3] for result in results] == [(2, 0, True), (2, 1, False)]
    assert torch.equal(results[0][3], results[1][3])
