"""What a fault does: with every algorithm both ranks end soon, and say what went wrong where.

``FAULTS_TABLE=faults.md pytest tests/test_faults.py`` also writes what was seen as a table.
"""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Regression, loader, some_quick, weights
from worlds import launch, make_trainer

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import ALGORITHMS, QAdamOptimizer, make_algorithm

PATIENCE = 30  # seconds within which both ranks have ended
TIMEOUT = timedelta(seconds=10)
BATCH = 4
OPTIONS = {"local_sgd": {"period": 2}, "diloco": {"period": 2}, "async": {"sync_interval_ms": 0}}
QADAM = {"make_optimizer": lambda parameters: QAdamOptimizer(parameters, warmup_steps=2)}


class Faulty(Regression):
    """Calls ``fault`` in the fifth batch of some ranks, and leaves a file at that moment."""

    def __init__(self, fault, ranks, directory, **options) -> None:
        super().__init__(**options)
        self.fault, self.ranks, self.directory = fault, ranks, directory

    def happens(self) -> None:
        Path(self.directory, f"fault-{self.global_rank}").touch()

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        if batch_idx != BATCH or self.global_rank not in self.ranks:
            return self.loss(batch)
        self.happens()
        return self.fault(self.loss(batch))


def raises(loss):
    raise ArithmeticError("the user's mistake")


def gets_sigkill(loss):
    os.kill(os.getpid(), signal.SIGKILL)


def gets_sigint(loss):
    os.kill(os.getpid(), signal.SIGINT)
    return loss


def gets_sigterm(loss):
    os.kill(os.getpid(), signal.SIGTERM)
    return loss


def returns_none(loss):
    return None


def returns_a_detached_zero(loss):
    return torch.zeros(())


# Exit code of the rank, and what its traceback says.
STEP_FAULTS = {
    raises: (1, r"in raises[\s\S]*ArithmeticError: the user's mistake"),
    gets_sigkill: (-signal.SIGKILL, ""),
    gets_sigint: (1, "KeyboardInterrupt"),
    gets_sigterm: (128 + signal.SIGTERM, "SIGTERMException"),
    returns_none: (1, "returning None in distributed training is not supported"),
    returns_a_detached_zero: (1, "does not require grad"),
}


def fit(rank, name, fault, ranks, directory, **options):
    """Fit 20 batches, in the fifth of which the fault happens."""
    strategy = DistOptStrategy(make_algorithm(name, **OPTIONS.get(name, {})), timeout=TIMEOUT)
    trainer = make_trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False, **options)
    trainer.fit(Faulty(fault, ranks, directory, **(QADAM if name == "qadam" else {})), loader(40))


SECONDS = re.compile(r", ([\d.]+) s$")


@pytest.fixture(scope="session")
def table():
    """Collect what happens; write it as Markdown where FAULTS_TABLE says."""
    rows = {}  # fault -> algorithm -> (what happens, what the user reads)
    yield rows
    path = os.environ.get("FAULTS_TABLE")
    if path is not None:
        Path(path).write_text(markdown(rows))


def markdown(rows):
    """Lay out faults; what happens alike, on either rank and with every algorithm, stands once."""
    merged = {}  # what happens by algorithm -> fault without its rank -> faults
    for fault, row in rows.items():
        outcomes = tuple((name, SECONDS.sub("", what)) for name, (what, _) in sorted(row.items()))
        merged.setdefault((re.sub(r"rank \d", "one rank", fault), outcomes), []).append(fault)
    lines = ["| fault | what happens | what one reads, here with bytegrad |", "|---|---|---|"]
    for (label, outcomes), faults in merged.items():
        by_outcome = {}
        for name, outcome in outcomes:
            by_outcome.setdefault(outcome, []).append(name)
        first, *others = sorted(by_outcome, key=lambda outcome: -len(by_outcome[outcome]))
        seconds = [
            float(end[1]) for fault in faults for what, _ in rows[fault].values() if (end := SECONDS.search(what))
        ]
        within = f", after at most {max(seconds):.1f} s" if seconds else ""
        cell = first + within * first.startswith("both end")
        cell += "".join(f"; {', '.join(by_outcome[outcome])}: {outcome}" for outcome in others)
        ends = {name: text for name, (what, text) in rows[faults[0]].items() if not what.startswith("goes on")}
        said = ends.get("bytegrad", next(iter(ends.values()), ""))
        lines.append(f"| {label if len(faults) > 1 else faults[0]} | {cell} | {said} |")
    return "\n".join([*lines, ""])


def seconds_since_the_fault(directory):
    """Seconds from the first fault until now."""
    return time.time() - min(path.stat().st_mtime for path in directory.glob("fault-*"))


def last_line(outcome):
    """What the rank's traceback ends with, without the module's name and the library's own reason."""
    lines = [line for line in outcome.traceback.splitlines() if re.match(r"[A-Za-z_.]+(:|$)", line)]
    text = re.sub(r"^[a-z_.]+\.(?=[A-Z])", "", lines[-1]) if lines else "nothing"
    text = re.sub(r"/\S+/checkpoints/", "checkpoints/", re.sub(r": \[/.*", "", text))
    return text.removeprefix("DistributedRuntimeException: ").replace("|", "/")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", some_quick(ALGORITHMS, quick=("bytegrad", "local_sgd")))
@pytest.mark.parametrize("fault", [
    raises, gets_sigterm, *(pytest.param(fault, marks=pytest.mark.slow) for fault in STEP_FAULTS if fault not in (raises, gets_sigterm))
], ids=lambda fault: fault.__name__)  # fmt: skip
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_fails(rank, fault, name, tmp_path, table):
    """The rank ends with its own traceback; the other one says whom it lost, in which exchange, at which step."""
    outcomes = launch(fit, 2, name, fault, [rank], tmp_path, init_group=False, allow_failure=True, timeout=2 * PATIENCE)
    seconds = seconds_since_the_fault(tmp_path)
    failed, other = outcomes[rank], outcomes[1 - rank]
    code, own_words = STEP_FAULTS[fault]
    lost = rf"rank {1 - rank} lost rank {rank} in {name}'s [a-z -]+ at step \d+:"
    label = f"rank {rank} {fault.__name__.replace('_', ' ')}"
    table.setdefault(label, {})[name] = (f"both end, {seconds:.1f} s", f"{last_line(failed)}; {last_line(other)}")

    assert seconds < PATIENCE
    assert failed.exitcode == code
    assert re.search(own_words, failed.traceback)
    assert other.exitcode == 1
    assert re.search(lost, other.traceback)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("fault", [raises, gets_sigint, gets_sigterm], ids=lambda fault: fault.__name__)
def test_both_ranks_fail(fault, name, tmp_path, table):
    """As by Ctrl-C, a scheduler that stops the job, or a mistake that all ranks meet: nobody waits for anybody."""
    outcomes = launch(fit, 2, name, fault, [0, 1], tmp_path, init_group=False, allow_failure=True, timeout=2 * PATIENCE)
    seconds = seconds_since_the_fault(tmp_path)
    label = f"each rank {fault.__name__.replace('_', ' ')}"
    table.setdefault(label, {})[name] = (f"both end, {seconds:.1f} s", last_line(outcomes[0]))

    assert seconds < PATIENCE
    assert all(outcome.exitcode not in (0, -signal.SIGKILL) for outcome in outcomes)
    assert any(re.search(STEP_FAULTS[fault][1], outcome.traceback) for outcome in outcomes)


class TellsItsEnd(pl.Callback):
    """Leaves a file when a rank's batches are over."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        pl_module.happens()


def fit_unevenly(rank, name, short_rank, directory):
    """One rank has 5 batches, the other one 20."""
    strategy = DistOptStrategy(make_algorithm(name, **OPTIONS.get(name, {})), timeout=TIMEOUT)
    trainer = make_trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False, callbacks=[TellsItsEnd()])
    model = Faulty(None, [], directory, **(QADAM if name == "qadam" else {}))
    trainer.fit(model, loader(10 if rank == short_rank else 40))
    return weights(model)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("short_rank", [0, 1])
def test_fewer_batches_on_one_rank(short_rank, name, tmp_path, table):
    """Where ranks must meet in every update, both end with an error; async goes on, to equal weights."""
    outcomes = launch(
        fit_unevenly, 2, name, short_rank, tmp_path, init_group=False, allow_failure=True, timeout=2 * PATIENCE
    )
    seconds = seconds_since_the_fault(tmp_path)
    goes_on = all(outcome.ok for outcome in outcomes)
    table.setdefault(f"rank {short_rank} has fewer batches", {})[name] = (
        "goes on, equal weights" if goes_on else f"both end, {seconds:.1f} s",
        "; ".join(map(last_line, outcomes)),
    )

    assert seconds < PATIENCE
    if name == "async":
        assert goes_on
        assert torch.equal(outcomes[0].result, outcomes[1].result)
    else:
        assert [outcome.exitcode for outcome in outcomes] == [1, 1]


class FullDisk:
    """While this is entered, files of this process stay below 2000 bytes."""

    def __enter__(self):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, self.limits[1]))

    def __exit__(self, *error):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


def fit_on_a_full_disk(rank, name, full_rank, directory):
    """Save a checkpoint in the fifth batch, while one rank's disk is full."""
    saving = ModelCheckpoint(directory / "checkpoints", every_n_train_steps=BATCH + 1, filename="{step}")
    with FullDisk() if rank == full_rank else nullcontext():
        fit(rank, name, lambda loss: loss, [0, 1], directory, callbacks=[saving], enable_checkpointing=True)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("full_rank", [0, 1])
def test_disk_full_while_saving(full_rank, name, tmp_path, table):
    """Both ranks end, and the rank's own error is named; a rank that writes nothing needs no disk."""
    outcomes = launch(
        fit_on_a_full_disk, 2, name, full_rank, tmp_path, init_group=False, allow_failure=True, timeout=2 * PATIENCE
    )
    seconds = seconds_since_the_fault(tmp_path)
    writes = full_rank == 0 or not ALGORITHMS[name].replicas_equal
    left = [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".ckpt", ".pt")]
    table.setdefault(f"disk of rank {full_rank} is full", {})[name] = (
        f"both end, {seconds:.1f} s" if writes else "goes on: writes nothing",
        "; ".join(map(last_line, outcomes)),
    )

    assert seconds < PATIENCE
    if writes:
        assert [outcome.exitcode for outcome in outcomes] == [1, 1]
        assert "File too large" in outcomes[full_rank].traceback
        assert not [path for path in left if path.suffix != ".ckpt" or path.stat().st_size]
    else:
        assert all(outcome.ok for outcome in outcomes)


def fit_at_port(rank, name, port, directory):
    """Meet at a given port."""
    os.environ["MASTER_PORT"] = str(port)
    Path(directory, f"fault-{rank}").touch()
    fit(rank, name, None, [], directory)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_port_in_use(name, tmp_path, table):
    """Rank 0 cannot serve where another program listens, and rank 1 gets no answer there: both say where."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcomes = launch(
            fit_at_port, 2, name, port, tmp_path, init_group=False, allow_failure=True, timeout=2 * PATIENCE
        )
    seconds = seconds_since_the_fault(tmp_path)
    said = "; ".join(map(last_line, outcomes)).replace(str(port), "29500")
    table.setdefault("another program has the port", {})[name] = (f"both end, {seconds:.1f} s", said)

    assert seconds < PATIENCE
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert re.search(rf"rank 0 of 2 cannot listen at .*{port}: the port is in use", outcomes[0].traceback)
    assert re.search(rf"rank 1 of 2 waited 10 s at .*{port}", outcomes[1].traceback)


def wait_for(path, loss):
    """Wait until a file exists."""
    while not path.exists():
        time.sleep(0.05)
    return loss


def fit_beside_a_stale_process(place, name, port, directory):
    """Places 0 and 1 are the ranks of a run; place 2 is a process that an earlier run has left, and comes first."""
    rank = min(place, 1)
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    if place == 1:
        wait_for(directory / "fault-0", None)
    try:
        fit(rank, name, partial(wait_for, directory / "over"), [0], directory)
    finally:
        if place == 1:
            (directory / "over").touch()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_stale_process(name, tmp_path, table):
    """Where a process of an earlier run has taken rank 1's place, rank 1 ends at once, and names that process.

    Its launcher then ends the job.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcomes = launch(
        fit_beside_a_stale_process, 3, name, port, tmp_path, init_group=False, allow_failure=True, timeout=2 * PATIENCE
    )
    said = re.sub(r"process \d+ on \S+", "process 1234 on node7", last_line(outcomes[1])).replace(str(port), "29500")
    table.setdefault("a stale rank 1 comes first", {})[name] = ("rank 1 ends at once", said)

    assert outcomes[1].exitcode == 1
    assert re.search(rf"rank 1 of 2 came to .*{port}, where process \d+ on .* already is rank 1", outcomes[1].traceback)
    assert not any(outcome.killed for outcome in outcomes)


def script_environ():
    """Return the environment of a script that imports from the tests."""
    tests = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}", "OMP_NUM_THREADS": "1"}


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Regression, loader, weights
from test_faults import OPTIONS
from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import make_algorithm

name, directory, killed = sys.argv[1:]

class Killed(Regression):
    def on_train_start(self):
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        Path(directory, f"started-{attempt}").write_text(str(self.trainer.global_step))

    def training_step(self, batch, batch_idx):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if killed == "killed" and first and self.global_rank == 1 and (self.current_epoch, batch_idx) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

torch.set_num_threads(1)
model = Killed()
trainer = pl.Trainer(
    strategy=DistOptStrategy(make_algorithm(name, **OPTIONS.get(name, {}))), accelerator="cpu", devices=2,
    max_epochs=4, limit_train_batches=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(directory, save_last=True)],
)
trainer.fit(model, loader(), ckpt_path="last")
torch.save(weights(model), f"{directory}/weights-{trainer.global_rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["bytegrad", "low_precision_decentralized", "diloco"])
def test_torchrun_restarts_a_killed_rank(name, tmp_path):
    """With --max-restarts=1 and ckpt_path="last" the job goes on by itself, and ends with an undisturbed run's weights."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}", str(script), name]
    final = {}
    for how in ("killed", "undisturbed"):
        directory = tmp_path / how
        directory.mkdir()
        done = subprocess.run(
            [*torchrun, str(directory), how],
            check=False,
            env=script_environ(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        final[how] = [torch.load(directory / f"weights-{rank}.pt") for rank in (0, 1)]

    assert (tmp_path / "killed" / "started-0").read_text() == "0"
    assert (tmp_path / "killed" / "started-1").read_text() == "6"
    assert not (tmp_path / "undisturbed" / "started-1").exists()
    assert all(map(torch.equal, final["killed"], final["undisturbed"]))
    assert torch.equal(*final["killed"])


LAUNCHED = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch
import lightning.pytorch as pl
from models import loader
from test_faults import OPTIONS, Faulty, gets_sigkill, gets_sigterm, raises
from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import make_algorithm

name, fault, rank, directory = sys.argv[1:]
Path(directory, f"pid-{os.getpid()}").touch()
torch.set_num_threads(1)
trainer = pl.Trainer(
    strategy=DistOptStrategy(make_algorithm(name, **OPTIONS.get(name, {})), timeout=timedelta(seconds=20)),
    accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Faulty(globals()[fault], [int(rank)], directory), loader(80))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["bytegrad", "diloco"])
@pytest.mark.parametrize("fault", [raises, gets_sigkill, gets_sigterm], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("rank", [0, 1])
def test_under_lightnings_launcher(rank, fault, name, tmp_path):
    """The command ends with an error, the user's traceback is in its output, and none of its processes is left."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    command = [sys.executable, str(script), name, fault.__name__, str(rank), str(tmp_path)]
    done = subprocess.run(
        command, check=False, env=script_environ(), cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    seconds = seconds_since_the_fault(tmp_path)
    processes = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    while seconds_since_the_fault(tmp_path) < PATIENCE and any(map(is_alive, processes)):
        time.sleep(0.1)  # a rank that the first process has left to itself ends by losing it

    assert seconds < PATIENCE
    assert done.returncode != 0
    assert len(processes) == 2
    assert not any(map(is_alive, processes))
    if fault is raises:
        assert "ArithmeticError: the user's mistake" in done.stderr


def is_alive(pid):
    """Whether a process still runs; one that has ended, and nobody has asked for its exit code, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
