"""Two machines on Ethernet: ranks with addresses, host names and a cable of their own."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from models import Regression, loader, weights
from network import INTERFACE, two_machines, why_not
from torch import nn
from worlds import launch, make_trainer

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import ALGORITHMS, QAdamOptimizer, make_algorithm

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

OPTIONS = {"local_sgd": {"period": 2}, "diloco": {"period": 2}, "async": {"sync_interval_ms": 0}}
HIERARCHICAL = [name for name, cls in ALGORITHMS.items() if hasattr(cls(), "hierarchical")]
NUM_UPDATES = 10
TIMEOUT = 8  # seconds
PATIENCE = 40  # seconds, on a machine with other work


@pytest.fixture(scope="module")
def network():
    """Lay the cables once."""
    try:
        with two_machines() as machines:
            yield machines
    except OSError as error:
        if "not permitted" in str(error):
            pytest.skip(f"two machines need the right to make network namespaces: {error}")
        raise


@pytest.fixture
def machines(network):
    """Two machines with their cables in, that know each other by name."""
    hosts = [machine.hosts.read_text() for machine in network]
    yield network
    for machine, text in zip(network, hosts, strict=True):
        machine.plug_in()
        machine.hosts.write_text(text)


# -- ranks on the machines -----------------------------------------------------------------------------------


def take_place(place, machines, per_machine, interface=INTERFACE):
    """Become a rank on its machine.

    Args:
        place: the rank, or with several jobs at once the rank plus the number of ranks of the jobs before.
        machines: the two, or None for both nodes on this one.
        per_machine: ranks on each.
        interface: for gloo; None to leave the choice to it.

    Returns:
        The number of the job, the rank in it, and the machine.
    """
    job, rank = divmod(place, 2 * per_machine)
    node, local_rank = divmod(rank, per_machine)
    places = {"RANK": rank, "WORLD_SIZE": 2 * per_machine, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": per_machine}
    places |= {"GROUP_RANK": node, "MASTER_PORT": int(os.environ["MASTER_PORT"]) - job}
    os.environ.update({name: str(value) for name, value in places.items()})
    rank_zero_only.rank = rank
    if machines is None:
        return job, rank, None
    machine = machines[node]
    machine.enter()
    assert socket.gethostname() == machine.host
    os.environ["MASTER_ADDR"] = machines[0].address
    os.environ.pop("GLOO_SOCKET_IFNAME")
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    return job, rank, machine


class Wide(Regression):
    """Large enough that weights, not headers, are what travels."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1))


class Meter(pl.Callback):
    """Reads what is counted and what leaves the machine, between the first batch and the end of training.

    Attributes:
        counted: bytes that this rank has counted up to the last update, and by the end.
        seen: bytes that have left the machine; None without one.
    """

    def __init__(self, machine) -> None:
        self.machine = machine

    def read(self, trainer):
        dist.barrier()
        return trainer.strategy.bytes_sent, self.machine.bytes_sent() if self.machine else 0

    def on_train_start(self, trainer, pl_module) -> None:
        self.start = self.read(trainer)

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.last_update = self.read(trainer)

    def on_train_end(self, trainer, pl_module) -> None:
        end = self.read(trainer)
        self.counted = self.last_update[0] - self.start[0], end[0] - self.start[0]
        self.seen = end[1] - self.start[1]


def make_model(cls, name):
    """Build a model whose optimizer fits the algorithm."""
    options = {"make_optimizer": lambda parameters: QAdamOptimizer(parameters, warmup_steps=2)}
    return cls(**(options if name == "qadam" else {}))


def make_strategy(name, timeout=TIMEOUT):
    """Build a strategy whose exchanges come often."""
    return DistOptStrategy(make_algorithm(name, **OPTIONS.get(name, {})), timeout=timedelta(seconds=timeout))


def fit_each(place, machines, per_machine, names, interface=INTERFACE):
    """Train with one algorithm after another; return weights, counted and seen bytes by name."""
    _, _, machine = take_place(place, machines, per_machine, interface)
    results = {}
    for name in names:
        model, meter = make_model(Wide, name), Meter(machine)
        trainer = make_trainer(strategy=make_strategy(name), max_epochs=1, callbacks=[meter])
        trainer.fit(model, loader(NUM_UPDATES * 4 * per_machine))
        assert trainer.world_size == 2 * per_machine
        assert trainer.global_step == NUM_UPDATES
        results[name] = weights(model), meter.counted, meter.seen
    return results


def check_algorithms(machines, per_machine, names):
    """Two machines end with the weights of two nodes on one machine; the cable carries what it should, and no more."""
    size = 2 * per_machine
    ranks = launch(fit_each, size, machines, per_machine, names, init_group=False, timeout=100)
    reference = launch(fit_each, size, None, per_machine, names, init_group=False, timeout=100)
    for name in names:
        final = [rank[name][0] for rank in ranks]
        assert all(torch.equal(final[0], other) for other in final[1:]), name
        if name != "async":  # whose rounds depend on the time
            assert torch.equal(final[0], reference[0][name][0]), name
        for leader in range(0, size, per_machine):
            (_, counted, seen) = ranks[leader][name]
            if per_machine == 1:
                expected = counted[1]
            elif name in HIERARCHICAL:
                # Inside a node of two each rank sends half of an all-reduce, so all its bytes, and the leader as much
                # again to broadcast. After the last update all four average in one ring, of which one edge leaves.
                expected = counted[1] - 2 * ranks[leader + 1][name][1][0]
            else:
                continue
            assert seen == pytest.approx(expected, rel=0.05), (name, leader)


def test_leaders_alone_use_the_cable(machines):
    """With two ranks per machine "auto" is hierarchical: what leaves a machine is what its first rank sends."""
    check_algorithms(machines, 2, ["bytegrad"])


@pytest.mark.slow
@pytest.mark.parametrize("per_machine", [1, 2])
def test_every_algorithm_on_two_machines(per_machine, machines):
    """Trainer(num_nodes=2): the weights are those of one machine, bit for bit, and counted bytes are seen ones."""
    check_algorithms(machines, per_machine, list(ALGORITHMS))


# -- a cable that is cut, a machine that is lost -------------------------------------------------------------


class CutInMidTraining(Regression):
    """Before its fifth batch rank 0 says that it is there, and waits for the cut."""

    def __init__(self, directory=None, **options) -> None:
        super().__init__(**options)
        self.directory = directory

    def training_step(self, batch, batch_idx):
        if self.directory is not None and batch_idx == 4 and self.global_rank == 0:
            Path(self.directory, f"ready-{self.trainer.strategy.algorithm.name}").touch()
            wait_for(Path(self.directory, "cut"))
        return super().training_step(batch, batch_idx)


def wait_for(*paths, patience=PATIENCE):
    """Wait until files exist."""
    deadline = time.monotonic() + patience
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"none of {paths} has come"
        time.sleep(0.01)


def fit_across_a_cut(place, machines, per_machine, names, directory):
    """Train with one algorithm; return the weights, and the time at which training had ended."""
    job, _, _ = take_place(place, machines, per_machine)
    model = make_model(CutInMidTraining, names[job])
    model.directory = directory
    trainer = make_trainer(strategy=make_strategy(names[job]), max_epochs=1)
    trainer.fit(model, loader(NUM_UPDATES * 4 * per_machine))
    return weights(model), time.time()


def fit_undisturbed(place, per_machine, names):
    """Train with one algorithm after another on one machine."""
    take_place(place, None, per_machine)
    results = []
    for name in names:
        results.append(make_model(CutInMidTraining, name))
        trainer = make_trainer(strategy=make_strategy(name), max_epochs=1)
        trainer.fit(results[-1], loader(NUM_UPDATES * 4 * per_machine))
    return [weights(model) for model in results]


@functools.cache
def undisturbed(per_machine):
    """Return the final weights of every algorithm, trained by two nodes on one machine."""
    return launch(fit_undisturbed, 2 * per_machine, per_machine, list(ALGORITHMS), init_group=False, timeout=100)[0]


class Cut(threading.Thread):
    """Takes out the cable of a machine when all jobs are in mid-training.

    Attributes:
        at: when that was, by ``time.time()``.
        over_at: when it was put back.
    """

    def __init__(self, machine, names, directory, seconds=None) -> None:
        super().__init__()
        self.machine, self.names, self.directory, self.seconds = machine, names, directory, seconds

    def run(self) -> None:
        wait_for(*(self.directory / f"ready-{name}" for name in self.names))
        self.machine.unplug()
        self.at = time.time()
        (self.directory / "cut").touch()
        if self.seconds is not None:
            time.sleep(self.seconds)
            self.over_at = time.time()
            self.machine.plug_in()


# All algorithms at once meet the same cut, each in a job of its own.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "per_machine", "names"), [(0, 1, list(ALGORITHMS)), (1, 2, ["bytegrad", "decentralized"])]
)
def test_a_cable_that_is_out_for_two_seconds(node, per_machine, names, machines, tmp_path):
    """Training goes on, and ends with the weights that it would have had."""
    cut = Cut(machines[node], names, tmp_path, seconds=2)
    cut.start()
    size = 2 * per_machine
    try:
        places = launch(
            fit_across_a_cut, size * len(names), machines, per_machine, names, tmp_path, init_group=False, timeout=100
        )
    finally:
        cut.join()
    reference = dict(zip(ALGORITHMS, undisturbed(per_machine), strict=True))
    for job, name in enumerate(names):
        ranks = places[size * job :][:size]
        assert all(torch.equal(final, ranks[0][0]) for final, _ in ranks), name
        assert all(ended_at > cut.over_at for _, ended_at in ranks), f"{name} did not meet the cut"
        if name != "async":  # whose rounds depend on the time
            assert torch.equal(ranks[0][0], reference[name]), name


class Killed(Regression):
    """All ranks of one machine die before their fifth batch."""

    def __init__(self, ranks=(), directory=None, **options) -> None:
        super().__init__(**options)
        self.ranks, self.directory = ranks, directory

    def training_step(self, batch, batch_idx):
        if batch_idx == 4 and self.global_rank in self.ranks:
            Path(self.directory, f"dead-{self.trainer.strategy.algorithm.name}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def fit_and_lose(place, machines, per_machine, names, node, directory):
    """Train with one algorithm, while the ranks of one machine die; return the error and when it came."""
    job, _, _ = take_place(place, machines, per_machine)
    model = make_model(Killed, names[job])
    model.ranks, model.directory = range(node * per_machine, (node + 1) * per_machine), directory
    return error_of(lambda: fit_model(model, names[job], per_machine))


def fit_and_be_cut(place, machines, per_machine, names, directory):
    """Train with one algorithm, while the cable is taken out for good; return the error and when it came."""
    job, _, _ = take_place(place, machines, per_machine)
    model = make_model(CutInMidTraining, names[job])
    model.directory = directory
    return error_of(lambda: fit_model(model, names[job], per_machine))


def fit_model(model, name, per_machine, timeout=TIMEOUT):
    """Train for one epoch."""
    trainer = make_trainer(strategy=make_strategy(name, timeout), max_epochs=1)
    trainer.fit(model, loader(NUM_UPDATES * 4 * per_machine))


def error_of(run):
    """Return the text of the error that ends a run, and the time of it."""
    with pytest.raises(RuntimeError) as caught:
        run()
    return str(caught.value), time.time()


def check_ends(outcomes, per_machine, names, since):
    """Every rank that lives has ended soon, with a sentence that names the exchange and the step."""
    size = 2 * per_machine
    for place, outcome in outcomes.items():
        assert outcome.ok, outcome.describe()
        sentence, ended_at = outcome.result
        name, rank = names[place // size], place % size
        # Between machines the first ranks exchange; a further one waits for its own first rank, which ends.
        first = rank - rank % per_machine
        peer = first if rank != first else (per_machine if rank == 0 else 0)
        lost = f"rank {peer}" if size == 2 else f"(a peer|rank {peer})"
        assert re.search(rf"rank {rank} lost {lost} in {name}'s [a-z -]+ at step \d+: ", sentence), sentence
        assert ended_at - since(name) < TIMEOUT + PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize(("per_machine", "names"), [(1, list(ALGORITHMS)), (2, ["bytegrad", "decentralized"])])
@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_whose_processes_are_killed(node, per_machine, names, machines, tmp_path):
    """The ranks of the other machine end and say whom they lost, also where rank 0 and its store are gone."""
    size = 2 * per_machine
    outcomes = launch(
        fit_and_lose, size * len(names), machines, per_machine, names, node, tmp_path,
        init_group=False, allow_failure=True, timeout=100,
    )  # fmt: skip
    dead = [outcome for outcome in outcomes if outcome.exitcode == -signal.SIGKILL]
    alive = {place: outcome for place, outcome in enumerate(outcomes) if outcome not in dead}

    assert len(dead) == len(alive) == per_machine * len(names)
    check_ends(alive, per_machine, names, lambda name: (tmp_path / f"dead-{name}").stat().st_mtime)


@pytest.mark.slow
@pytest.mark.parametrize(("per_machine", "names"), [(1, list(ALGORITHMS)), (2, ["bytegrad", "decentralized"])])
def test_a_cable_that_stays_out(per_machine, names, machines, tmp_path):
    """As when a machine loses its power: nothing comes any more, and after the timeout all ranks say so."""
    cut = Cut(machines[1], names, tmp_path)
    cut.start()
    try:
        outcomes = launch(
            fit_and_be_cut, 2 * per_machine * len(names), machines, per_machine, names, tmp_path,
            init_group=False, allow_failure=True, timeout=100,
        )  # fmt: skip
    finally:
        cut.join()
    check_ends(dict(enumerate(outcomes)), per_machine, names, lambda name: cut.at)


# -- machines that do not fit --------------------------------------------------------------------------------


def fit_as(place, machines, places, interface, timeout=TIMEOUT):
    """Train as a rank that is told its numbers: node, place on it, ranks per node, as Lightning would tell them."""
    node, local_rank, per_machine = places[place]
    take_place(node * per_machine + local_rank, machines, per_machine, interface)
    return error_of(lambda: fit_model(make_model(Regression, "bytegrad"), "bytegrad", per_machine, timeout))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_host_name_that_stands_for_loopback(bad, machines):
    """On Debian a machine's own name stands for 127.0.1.1, where gloo then listens: every rank names the remedy."""
    machines[bad].hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machines[bad].host}\n")
    places = [(0, 0, 1), (1, 0, 1)]
    start = time.time()
    for sentence, ended_at in launch(fit_as, 2, machines, places, None, init_group=False):
        assert f"no other machine can reach node{bad}, whose own name stands for 127.0.1.1" in sentence
        assert "set GLOO_SOCKET_IFNAME to the network interface" in sentence
        assert ended_at - start < TIMEOUT  # none waits


@pytest.mark.slow
def test_the_interface_of_the_host_name(machines):
    """Without GLOO_SOCKET_IFNAME gloo listens where the machine's own name says, which may be right; and with it,
    a name that stands for loopback does no harm."""
    (by_name, _) = launch(fit_each, 2, machines, 1, ["bytegrad"], None, init_group=False)
    for machine in machines:
        machine.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.host}\n")
    (by_interface, _) = launch(fit_each, 2, machines, 1, ["bytegrad"], INTERFACE, init_group=False)
    assert torch.equal(by_name["bytegrad"][0], by_interface["bytegrad"][0])


def test_one_rank_here_and_two_there(machines):
    """Under Lightning's own launcher each node counts for itself. The ranks notice when they meet."""
    places = [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
    start = time.time()
    for sentence, ended_at in launch(fit_as, 3, machines, places, INTERFACE, init_group=False):
        assert re.search("ranks count themselves differently there, (2 and 4|4 and 2): start the same number", sentence)
        assert ended_at - start < TIMEOUT


@pytest.mark.slow
def test_two_ranks_here_and_one_there(machines):
    """Here the second machine's rank 1 takes the place of the first one's: one of them says so, and no rank stays."""
    places = [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    start = time.time()
    ranks = launch(fit_as, 3, machines, places, INTERFACE, 3, init_group=False)
    names = r"rank 1 of \d came to .*, where process \d+ on node\d already is rank 1: .*start as many processes on every node"
    assert any(re.search(names, sentence) for sentence, _ in ranks)
    assert all(ended_at - start < TIMEOUT + PATIENCE for _, ended_at in ranks)


# -- the commands of README ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]

# Every algorithm in turn, and at last a fit without end, for the other machine to be killed in.
TRAIN = """
import socket
import lightning.pytorch as pl
import torch
from models import Regression, loader, weights
from test_two_machines import ALGORITHMS, NUM_UPDATES, Endless, make_model, make_strategy

torch.set_num_threads(1)
results = {}
for name in (*ALGORITHMS, "the end"):
    model = make_model(Regression, name) if name in ALGORITHMS else Endless()
    trainer = pl.Trainer(
        strategy=make_strategy(name if name in ALGORITHMS else "bytegrad", timeout=60), accelerator="cpu", devices=2,
        num_nodes=2, max_epochs=1 if name in ALGORITHMS else -1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    if name == "the end":
        torch.save((socket.gethostname(), trainer.local_rank, results), f"results-{trainer.global_rank}.pt")
    trainer.fit(model, loader(NUM_UPDATES * 8))
    results[name] = weights(model)
"""


class Endless(Regression):
    """Says when it trains."""

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            Path(f"training-{self.global_rank}").touch()
        return super().training_step(batch, batch_idx)


# What srun does: tasks on all nodes of the job, each with its numbers.
SRUN = """#!{python}
import os, subprocess, sys
from pathlib import PosixPath
sys.path.insert(0, {tests!r})
from network import Machine

machines, per_node = {machines}, int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
for task in range(int(os.environ["SLURM_NTASKS"])):
    node, local = divmod(task, per_node)
    numbers = dict(SLURM_PROCID=str(task), SLURM_LOCALID=str(local), SLURM_NODEID=str(node))
    tasks.append(subprocess.Popen(sys.argv[1:], env={{**os.environ, **numbers}}, preexec_fn=machines[node].enter))
sys.exit(max(abs(task.wait()) for task in tasks))
"""


def readmes_scripts(launcher):
    """Return README's scripts that use a launcher: one for each machine, or the batch script of node0."""
    section = re.search(r"^## Two machines\n(.*?)^## ", (ROOT / "README.md").read_text(), re.S | re.M)[1]
    return [block for block in re.findall(r"```(?:console|bash)\n(.*?)```", section, re.S) if launcher in block]


def variables_of_a_batch_job(script):
    """Return what sbatch sets for a script on node0 and node1."""
    asked = dict(re.findall(r"--([a-z-]+)=(\d+)", " ".join(re.findall(r"^#SBATCH (.*)", script, re.M))))
    nodes, per_node = asked["nodes"], asked["ntasks-per-node"]
    return {
        "SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "job.sh", "SLURM_NODELIST": "node[0-1]", "SLURM_NNODES": nodes,
        "SLURM_NTASKS_PER_NODE": per_node, "SLURM_NTASKS": str(int(nodes) * int(per_node)),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["torchrun", "NODE_RANK", "srun"])
def test_the_commands_of_readme(launcher, machines, tmp_path):
    """On two machines as Debian sets them up, README's commands start four ranks, which find each other and train to
    the weights of one machine. When node1's processes are killed, node0's command ends, and says what it has lost."""
    scripts = readmes_scripts(launcher)
    for machine, other in (machines, machines[::-1]):
        machine.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.host}\n{other.address} {other.host}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    tests = str(Path(__file__).parent)
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    environ |= {"PYTHONPATH": f"{tests}:{ROOT}", "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    if launcher == "srun":
        srun = tmp_path / "srun"
        srun.write_text(SRUN.format(python=sys.executable, tests=tests, machines=machines))
        srun.chmod(0o755)
        environ |= variables_of_a_batch_job(scripts[0])
    assert len(scripts) == (1 if launcher == "srun" else 2)
    commands, outputs = [], [tmp_path / "output-0", tmp_path / "output-1"]
    for machine, script, path in zip(machines, scripts, outputs, strict=False):
        with path.open("wb") as output:
            commands.append(machine.start(script, cwd=tmp_path, env=environ, stdout=output, stderr=subprocess.STDOUT))
    try:
        wait_for(*(tmp_path / f"training-{rank}" for rank in range(4)), patience=200)
        for pid in machines[1].pids():
            os.kill(pid, signal.SIGKILL)
        codes = [command.wait(60) for command in commands]
    finally:
        for machine in machines:
            for pid in machine.pids():
                os.kill(pid, signal.SIGKILL)
        for command, path in zip(commands, outputs, strict=False):
            command.wait()
            print(path.read_text())

    assert all(codes)
    assert re.search(r"rank [01] lost (a peer|rank 2) in bytegrad's [a-z -]+ at step \d+: ", outputs[0].read_text())
    ranks = [torch.load(tmp_path / f"results-{rank}.pt") for rank in range(4)]
    assert [rank[:2] for rank in ranks] == [("node0", 0), ("node0", 1), ("node1", 0), ("node1", 1)]
    for name, expected in zip(ALGORITHMS, undisturbed(2), strict=True):
        final = [results[name] for *_, results in ranks]
        assert all(torch.equal(final[0], other) for other in final[1:]), name
        if name != "async":  # whose rounds depend on the time
            assert torch.equal(final[0], expected), name
