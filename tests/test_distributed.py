"""Ranks, the process group, seeds, and one model on every rank."""

import inspect
import os
import random
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from models import Regression, loader
from torch import nn
from worlds import launch, run_ranks

from lightning_distopt import distributed, options
from lightning_distopt.collectives import Group
from lightning_distopt.distributed import (
    DistributedRuntimeException,
    get_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    init_torch,
    is_dist,
    is_local_master,
    is_master,
    join_process_group,
    master_only,
    mean_of_replicas_,
    set_cuda_flags,
    sync_model,
)

VARIABLES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_JOB_NAME",
    "SLURM_NTASKS_PER_NODE",
    "TORCHELASTIC_USE_AGENT_STORE",
]


@pytest.fixture
def environ(monkeypatch):
    """Return a function that makes the environment that of a process which a launcher started."""

    def set_to(variables, lightning_rank=0):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(rank_zero_only, "rank", lightning_rank)

    set_to({})
    return set_to


# -- ranks ---------------------------------------------------------------------------------------------------


def ranks():
    """Return what the six functions say."""
    return get_rank(), get_local_rank(), get_world_size(), is_dist(), is_master(), is_local_master()


def torchrun(node, local):
    return {"RANK": 2 * node + local, "LOCAL_RANK": local, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": node}  # fmt: skip


def srun(node, local):
    return {"SLURM_PROCID": 2 * node + local, "SLURM_LOCALID": local, "SLURM_NTASKS": 4,
            "SLURM_JOB_NAME": "train.sh"}  # fmt: skip


def lightning_scripts(node, local):
    return {"NODE_RANK": node, "LOCAL_RANK": local, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}


def lightning_scripts_inside_one_task(node, local):
    return {**lightning_scripts(node, local), "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 1}


LAUNCHERS = [torchrun, srun, lightning_scripts, lightning_scripts_inside_one_task]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__)
def test_every_process_of_two_nodes_knows_its_place(environ, launcher):
    """Two nodes of two processes: all ranks are right before any group exists, and one process is master."""
    seen = []
    for node in range(2):
        for local in range(2):
            environ(launcher(node, local))
            seen.append(ranks())

    assert seen == [
        (0, 0, 4, True, True, True),
        (1, 1, 4, True, False, False),
        (2, 0, 4, True, False, True),
        (3, 1, 4, True, False, False),
    ]


@pytest.mark.parametrize(
    ("variables", "lightning_rank", "expected"),
    [
        pytest.param({}, 0, (0, 0, 1, False, True, True), id="one plain process"),
        pytest.param({"LOCAL_RANK": 0}, 0, (0, 0, 1, False, True, True), id="first fork"),
        pytest.param({"LOCAL_RANK": 1}, 1, (1, 1, 2, True, False, False), id="second fork"),
        pytest.param({"RANK": 1, "WORLD_SIZE": 2}, 0, (1, 1, 2, True, False, False), id="no LOCAL_RANK"),
        pytest.param({"RANK": "", "WORLD_SIZE": " 2 "}, 0, (0, 0, 2, True, True, True), id="empty and padded"),
        pytest.param(
            {"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_NAME": "bash"}, 0,
            (0, 0, 1, False, True, True), id="shell in an allocation",
        ),
        pytest.param(
            {"NODE_RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4}, 0,
            (3, 1, 4, True, False, False), id="only two nodes are possible",
        ),
        pytest.param(
            {"NODE_RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 8}, 4,
            (4, 0, 8, True, False, True), id="Lightning knows the nodes",
        ),
        pytest.param(
            {"LOCAL_RANK": 1, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 1}, 1,
            (1, 1, 2, True, False, False), id="second fork of one task",
        ),
        pytest.param({"NODE_RANK": 1}, 2, (2, 0, 3, True, False, True), id="a node's main process, with a Trainer"),
        pytest.param({}, 3, (3, 3, 4, True, False, False), id="a cluster that Lightning knows"),
    ],
)  # fmt: skip
def test_ranks_follow_the_launcher(environ, variables, lightning_rank, expected):
    """Ranks are those of the launcher's variables; where these are silent, Lightning's own."""
    environ(variables, lightning_rank)

    assert ranks() == expected


@pytest.mark.parametrize("variables", [{"NODE_RANK": 1}, {"NODE_RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 8}])
def test_an_unknown_rank_is_refused_but_is_not_master(environ, variables):
    """On a further node whose size nobody tells, get_rank says what to set, and the master is still elsewhere."""
    environ(variables)

    assert (is_master(), is_local_master(), is_dist()) == (False, True, True)
    with pytest.raises(DistributedRuntimeException, match="set LOCAL_WORLD_SIZE"):
        get_rank()


@pytest.mark.parametrize("value", ["one", "-1", "1.0"])
def test_a_variable_that_is_no_number_is_named(environ, value):
    """A rank that is not a whole number is refused with variable and value."""
    environ({"RANK": value})

    with pytest.raises(DistributedRuntimeException, match=f"RANK must be a whole number.*'{value}'"):
        get_rank()


def before_and_after(rank):
    """Return the ranks before the group exists, after, and after a second call."""
    before = ranks()
    for _ in range(2):
        init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.barrier()  # a rank that ended now would leave others that still connect to it
    return before, ranks(), dist.get_rank()


@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_ranks_are_the_same_before_and_after(local_size):
    """init_process_group makes a group in which every process has the rank that it had before; once."""
    for rank, (before, after, in_group) in enumerate(
        launch(before_and_after, 4, init_group=False, local_size=local_size)
    ):
        assert before == after == (rank, rank % local_size, 4, True, rank == 0, rank % local_size == 0)
        assert in_group == rank


class Recorder(DDPStrategy):
    """Writes down the ranks before the group exists, when it does, and at the end of fit."""

    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.path = path

    def record(self, when):
        with Path(self.path).open("a") as file:
            file.write(f"{when} {self.local_rank} {get_rank()} {get_local_rank()} {is_master()}\n")

    def setup_environment(self):
        self.record("before")
        super().setup_environment()
        self.record("in")

    def teardown(self):
        super().teardown()
        self.record("after")


def fit_with_forks(rank, path):
    """Fit on two forks of this process; return the ranks in this process before and after."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    first = ranks()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=Recorder(path, start_method="fork"), max_steps=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=Path(path).parent,
    )  # fmt: skip
    trainer.fit(Regression(), loader())
    return first, ranks()


def test_ranks_under_lightnings_forks(tmp_path):
    """In a notebook's forks ranks are right before, during and after fit, with one master."""
    path = tmp_path / "ranks"
    ((first, last),) = launch(fit_with_forks, 1, str(path), init_group=False)

    assert first == last == (0, 0, 1, False, True, True)
    assert sorted(path.read_text().split("\n"))[1:] == sorted(
        f"{when} {rank} {rank} {rank} {rank == 0}" for rank in range(2) for when in ("after", "before", "in")
    )


SCRIPT = """
import sys
from pathlib import Path
import lightning.pytorch as pl
from lightning_distopt import distributed as d
from models import Regression, loader

def record(when):
    with Path(sys.argv[2]).open("a") as file:
        file.write(f"{when} {d.get_rank()} {d.get_local_rank()} {d.is_master()}\\n")

d.init_torch(seed=1, backend="gloo")
if sys.argv[1] == "fit":
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False,
                         enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(Regression(), loader())
record("end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_init_torch_under_real_launchers(tmp_path, environ, launcher):
    """A script that begins with init_torch runs under torchrun and under Lightning's launcher of scripts."""
    script, path = tmp_path / "script.py", tmp_path / "ranks"
    script.write_text(SCRIPT)
    runner = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if launcher == "torchrun" else []
    what = "fit" if launcher == "lightning" else "init"
    paths = [str(Path(distributed.__file__).parents[1]), str(Path(__file__).parent)]
    ran = subprocess.run(
        [sys.executable, *runner, str(script), what, str(path)], check=False, timeout=100, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, cwd=tmp_path,
    )  # fmt: skip

    assert ran.returncode == 0, ran.stderr
    assert sorted(path.read_text().splitlines()) == ["end 0 0 True", "end 1 1 False"]


# -- the process group ---------------------------------------------------------------------------------------


def test_signatures_are_enots():
    """Names, order and defaults of the arguments are those that ENOT's documentation gives."""
    half_an_hour = timedelta(seconds=1800)

    def arguments(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]

    assert {function: arguments(function) for function in (init_process_group, init_torch, sync_model)} == {
        init_process_group: [("backend", "nccl"), ("init_method", "env://"), ("timeout", half_an_hour)],
        init_torch: [
            ("seed", None), ("cuda_optimize_for_speed", False), ("cuda_reproducible", False),
            ("backend", "nccl"), ("init_method", "env://"), ("timeout", half_an_hour),
        ],
        sync_model: [
            ("model", inspect.Parameter.empty), ("sync_parameters", True), ("sync_buffers", True),
            ("reduce_parameters", True), ("reduce_buffers", True),
        ],
    }  # fmt: skip
    assert issubclass(DistributedRuntimeException, RuntimeError)


def test_the_module_passes_on_the_options():
    """The options are to be had here, too, and other names are refused as every module does."""
    assert distributed.DDPOption is options.DDPOption
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        distributed.nonsense  # noqa: B018 - the access is the test


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": 1, "RANK": 0}, {"LOCAL_RANK": 1}])
def test_a_job_of_one_process_makes_no_group(environ, variables):
    """Without WORLD_SIZE above 1 nothing happens, whatever the backend."""
    environ(variables)
    init_process_group()

    assert not dist.is_initialized()


WORLD_OF_2 = {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29400}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"backend": "nccl"}, "'nccl' needs a CUDA device.*use backend='gloo'"),
        ({}, {"backend": "smoke"}, "'smoke' is not available.*use one of gloo"),
        ({"RANK": None, "LOCAL_RANK": None}, {}, "neither RANK nor LOCAL_RANK is set"),
        ({"RANK": 2}, {}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE must be a whole number.*'two'"),
        ({"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 1}, {}, "LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1"),
        ({"MASTER_ADDR": None}, {}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, {}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": 70000}, {}, "MASTER_PORT=70000: ports go from 1 to 65535"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, {}, "cannot use MASTER_ADDR=no.such.host.invalid"),
        ({}, {"init_method": "tcp://no.such.host.invalid:1234"}, "cannot use tcp://no.such.host.invalid:1234"),
        ({}, {"init_method": "tcp://127.0.0.1"}, "'tcp://127.0.0.1' must be .*tcp://host:port"),
        ({}, {"init_method": "tcp://127.0.0.1:http"}, "'tcp://127.0.0.1:http' must be"),
        ({}, {"init_method": "file://relative/path"}, "'file://relative/path' must be .*file:///path"),
        ({}, {"init_method": "file:///no/such/file"}, "create the directory /no/such first"),
        ({}, {"init_method": "file:///dev"}, "cannot use file:///dev: .*directory"),
        ({}, {"init_method": "mail://me"}, "'mail://me' must be env://"),
        ({}, {"timeout": timedelta(0)}, "timeout must be positive"),
        ({}, {"timeout": timedelta(seconds=0.5)}, "waited 0.5 s at MASTER_ADDR=127.0.0.1, MASTER_PORT=29400"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_sentence(environ, changes, options, message):
    """What is wrong is said at once, in one line, with the variable or address; no group is left behind."""
    environ({name: value for name, value in {**WORLD_OF_2, **changes}.items() if value is not None})
    start = time.monotonic()
    with pytest.raises(DistributedRuntimeException, match=message) as caught:
        init_process_group(**{"backend": "gloo", **options})

    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5
    assert not dist.is_initialized()


def test_local_rank_must_be_a_gpu(environ, monkeypatch):
    """With nccl, a LOCAL_RANK beyond the GPUs of the node is refused before CUDA starts."""
    environ({**WORLD_OF_2, "LOCAL_RANK": 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "nccl")

    with pytest.raises(DistributedRuntimeException, match="LOCAL_RANK is 1, but torch finds 1 GPUs"):
        init_process_group()


def test_timeout_must_be_a_timedelta(environ):
    """A number of seconds is refused as what it is."""
    environ(WORLD_OF_2)
    with pytest.raises(TypeError, match="timedelta, got 1800"):
        init_process_group("gloo", timeout=1800)


def join_where_somebody_else_is(rank, world_rank, listens):
    """Join at a port that another program has; return the sentence and the seconds that it took."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        start = time.monotonic()
        with pytest.raises(DistributedRuntimeException) as caught:
            join_process_group(
                "gloo", f"tcp://127.0.0.1:{other.getsockname()[1]}", 2, world_rank, timeout=timedelta(seconds=1)
            )
        return str(caught.value), time.monotonic() - start


def join_as_torch_does(rank):
    """Join on rank 0 as Lightning does, on rank 1 as this package does; return the sum of the ranks."""
    if rank == 0:
        dist.init_process_group("gloo", rank=0, world_size=2)
    init_process_group("gloo")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


def test_ranks_that_torch_has_brought_are_met():
    """A script's ranks meet in one group, no matter which of them come by init_process_group of torch itself."""
    assert launch(join_as_torch_does, 2, init_group=False, timeout=20) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("world_rank", "listens", "message"),
    [
        (0, True, "the port is in use"),
        (1, True, "waited 1 s at tcp://127.0.0.1:"),  # TCPStore itself would wait forever
        (1, False, "waited 1 s at tcp://127.0.0.1:"),
    ],
)
def test_a_wrong_port_ends_in_time(world_rank, listens, message):
    """A port that another program holds, or nobody, is an error within the timeout."""
    ((sentence, seconds),) = launch(join_where_somebody_else_is, 1, world_rank, listens, init_group=False)

    assert message in sentence
    assert seconds < 4


def join_file(rank, path, seconds=20):
    """Meet at a file, add up the ranks, and return the sum or the sentence."""
    try:
        init_process_group("gloo", f"file://{path}", timeout=timedelta(seconds=seconds))
    except DistributedRuntimeException as error:
        return str(error)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("exists", [False, True])
def test_ranks_meet_at_a_file_again_and_again(tmp_path, exists):
    """A file, also an empty one, brings ranks together and is gone afterwards: the next run may use its name."""
    path = tmp_path / "meet"
    for _ in range(2):
        if exists:
            path.touch()

        assert launch(join_file, 3, str(path), init_group=False) == [3.0, 3.0, 3.0]
        assert list(tmp_path.iterdir()) == []


def die_while_waiting(rank, path):
    """Die without a word while waiting for rank 1."""
    os.environ["WORLD_SIZE"] = "2"
    threading.Timer(0.3, os._exit, [9]).start()
    join_file(rank, path)


def dead_run(path):
    """Leave what a run leaves that dies while it waits at the file."""
    launch(die_while_waiting, 1, str(path), init_group=False, allow_failure=True)


def torch_file_store(path):
    """Leave what torch's own file rendezvous leaves."""
    store = dist.FileStore(str(path), 2)
    store.set("key", "value")
    content = path.read_bytes()
    del store
    path.write_bytes(content)


def reused_port(path):
    """Leave what a dead run leaves whose port another program listens at now."""
    server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    path.write_text(f"distopt token 127.0.0.1 {server.port}")
    return server


@pytest.mark.parametrize("leave", [dead_run, torch_file_store, reused_port], ids=lambda leave: leave.__name__)
def test_a_stale_file_is_refused_by_every_rank(tmp_path, leave):
    """What a dead run has left is refused at once on all ranks, with the path and what to do, and not removed."""
    path = tmp_path / "meet"
    still_running = leave(path)

    assert path.stat().st_size > 0
    start = time.monotonic()
    for sentence in launch(join_file, 2, str(path), 60, init_group=False):
        assert str(path) in sentence
        assert "delete it, or choose another path" in sentence
    assert time.monotonic() - start < 10
    del still_running


def test_rank_0_that_waits_in_vain_cleans_up(tmp_path, environ):
    """Rank 0 says which ranks did not come and takes its file away; another rank says for what it waited."""
    environ({**WORLD_OF_2, "WORLD_SIZE": 3})
    path = tmp_path / "meet"

    assert join_file(0, path, 0.3).endswith(f"waited 0.3 s at {path}: ranks [1, 2] did not come")
    assert list(tmp_path.iterdir()) == []
    environ({**WORLD_OF_2, "RANK": 1})
    assert join_file(1, path, 0.3).endswith(f"waited 0.3 s for rank 0 to write {path}")


# -- the master ----------------------------------------------------------------------------------------------


class Owner:
    """Has a guarded method."""

    @master_only
    def add(self, a, *, b=1):
        """Add."""
        return a + b


@pytest.mark.parametrize("rank", [0, 1])
def test_master_only_runs_on_the_master(environ, rank):
    """Functions and methods run on the master, before a group exists, too, and give None elsewhere."""
    environ({"RANK": rank, "WORLD_SIZE": 2})

    assert Owner().add(2, b=3) == (5 if rank == 0 else None)
    assert (Owner.add.__name__, Owner.add.__doc__) == ("add", "Add.")


@master_only
def save_averaged(group, call):
    """Do on one rank what needs all."""
    call(group)


@pytest.mark.parametrize(
    "call",
    [
        lambda group: sync_model(nn.Linear(1, 1)),
        lambda group: sync_model(nn.Linear(1, 1), group=group),
        lambda group: mean_of_replicas_(nn.Linear(1, 1), group),
        lambda group: group.barrier(),
        lambda group: group.gather_objects(1),
    ],
    ids=["sync_model", "sync_model in a group", "mean_of_replicas_", "barrier", "gather_objects"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_collective_inside_master_only_raises_at_once(environ, size, call):
    """A collective on the master alone raises with the function's name, in a job of one process, too."""

    def fn(rank, process_group):
        try:
            save_averaged(Group(process_group), call)
        except DistributedRuntimeException as error:
            return str(error)
        return None

    messages = run_ranks(fn, size)

    assert "inside save_averaged, which runs on the master rank only" in messages[0]
    assert messages[1:] == [None] * (size - 1)


def test_master_only_refuses_what_it_cannot_guard():
    """The body of a generator or coroutine would run unguarded, so neither is taken."""

    def generator():
        yield

    async def coroutine():
        pass

    for fn in (generator, coroutine, classmethod(len), 3):
        with pytest.raises(TypeError, match="master_only needs a plain function"):
            master_only(fn)


# -- seeds and flags -----------------------------------------------------------------------------------------


def flags():
    """Return all that set_cuda_flags may change."""
    matmul = torch.backends.cuda.matmul
    return {
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic,
        "tf32": matmul.allow_tf32,
        "precision": getattr(matmul, "fp32_precision", None),
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ((False, False), {}),
        ((True, False), {"benchmark": True, "tf32": True, "precision": flags()["precision"] and "tf32"}),
        ((False, True), {"deterministic": True, "algorithms": True, "workspace": ":4096:8"}),
    ],
    ids=["none", "speed", "reproducible"],
)
def test_flags_are_set_and_come_back(options, changed):
    """A wish sets its flags and no others, does not start CUDA, and restore puts all back as it was."""
    before = flags()
    restore = set_cuda_flags(*options)
    during = flags()
    restore()
    restore()

    assert during == {**before, **changed}
    assert flags() == before
    assert not torch.cuda.is_initialized()


def test_flags_that_were_set_before_come_back(monkeypatch):
    """Earlier values that are not the defaults come back, too, and torch's newer TF32 flag does no harm."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        restore = set_cuda_flags(reproducible=True)
        during = flags()
        restore()
        after = flags()
    finally:
        torch.use_deterministic_algorithms(False)

    assert (during["workspace"], during["benchmark"], during["warn_only"]) == (":4096:8", False, False)
    assert (after["workspace"], after["benchmark"], after["warn_only"]) == (":0:0", True, True)
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        earlier, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        set_cuda_flags(optimize_for_speed=True)()
        now, matmul.fp32_precision = matmul.fp32_precision, earlier

        assert now == "tf32"
        assert not matmul.allow_tf32
        torch.backends.cudnn.benchmark = False


def test_both_flags_exclude_each_other():
    """Speed and reproducibility at once are refused, and nothing changes."""
    before = flags()
    with pytest.raises(RuntimeError, match="cuda_optimize_for_speed and cuda_reproducible exclude each other"):
        init_torch(cuda_optimize_for_speed=True, cuda_reproducible=True)

    assert flags() == before


@pytest.mark.parametrize("numpy_installed", [True, False])
def test_init_torch_seeds_all_generators(environ, monkeypatch, numpy_installed):
    """The same seed gives the same streams in random, NumPy and torch, and NumPy may be missing."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    if not numpy_installed:
        monkeypatch.setitem(sys.modules, "numpy", None)
    streams = []
    for seed in (7, 7, 8):
        init_torch(seed)
        streams.append((random.random(), np.random.rand() if numpy_installed else None, torch.rand(1).item()))
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])

    assert streams[0] == streams[1]
    assert all(a != b for a, b in zip(streams[0], streams[2], strict=True) if a is not None)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**32, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_seeds_are_refused(environ, seed, error):
    """A seed that NumPy would not take is refused with its value."""
    with pytest.raises(error, match=f"seed must be .*{seed}"):
        init_torch(seed)


# -- one model on every rank ---------------------------------------------------------------------------------

AVERAGED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
COPIED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def values(shape, dtype, rank, salt):
    """Return seeded values that differ between ranks."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


class Zoo(nn.Module):
    """Parameters and buffers of all dtypes and layouts, other values on every rank, and other strides."""

    def __init__(self, rank):
        super().__init__()
        for salt, dtype in enumerate(AVERAGED + COPIED):
            name = str(dtype).removeprefix("torch.")
            trainable = dtype in AVERAGED
            self.register_parameter(f"p_{name}", nn.Parameter(values((3, 5), dtype, rank, salt), trainable))
            self.register_buffer(f"b_{name}", values((4,), dtype, rank, salt + 50), persistent=salt % 2 == 0)
            self.register_buffer(f"scalar_{name}", values((), dtype, rank, salt + 100))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(values((3, 4), torch.float32, rank, 200).t())
        base = values((4, 3), torch.float32, rank, 201)
        self.around = base.clone(), base
        self.column = nn.Parameter(base[:, 1])
        self.expanded = nn.Parameter(values((1, 3), torch.float32, rank, 202).expand(5, 3))
        self.register_buffer("expanded_mask", values((4, 1), torch.int16, rank, 203).expand(4, 6))
        self.register_buffer("conjugated", values((3,), torch.complex64, rank, 204).conj())
        with torch.inference_mode():
            self.register_buffer("made_in_inference_mode", values((4,), torch.float32, rank, 207))
        image = values((2, 3, 4, 5), torch.float32, rank, 205)
        strided = image.to(memory_format=torch.channels_last) if rank % 2 == 0 else image
        self.image = nn.Parameter(strided)
        self.norm = nn.BatchNorm1d(3)
        self.norm(values((8, 3), torch.float32, rank, 206))
        self.norm.num_batches_tracked += rank
        self.none = None
        self.tied = self.image


def contents(model):
    """Copy all parameters and buffers, tied ones by each of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone().contiguous().resolve_conj() for name, tensor in named}


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bucket_bytes", [None, 64])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reduce", [(True, True), (True, False), (False, True), (False, False)])
def test_sync_model_equals_a_mean_of_gathered_copies(monkeypatch, size, reduce, bucket_bytes, context):
    """Every tensor becomes the mean of the replicas, or rank 0's, on every rank; memory next to a view stays."""
    if bucket_bytes is not None:
        monkeypatch.setattr(distributed, "BUCKET_BYTES", bucket_bytes)

    def fn(rank, process_group):
        model = Zoo(rank)
        before = contents(model)
        with context():
            sync_model(model, reduce_parameters=reduce[0], reduce_buffers=reduce[1])
        earlier, base = model.around
        earlier[:, 1] = base[:, 1]
        parameters = set(dict(model.named_parameters(remove_duplicate=False)))
        return before, contents(model), parameters, torch.equal(earlier, base)

    results = run_ranks(fn, size)

    parameters = results[0][2]
    for name, first in results[0][0].items():
        expected, rtol = first, 0.0
        if (first.is_floating_point() or first.is_complex()) and reduce[0 if name in parameters else 1]:
            wide = torch.complex128 if first.is_complex() else torch.float64
            expected = torch.stack([before[name].to(wide) for before, *_ in results]).mean(0).to(first.dtype)
            rtol = 1e-6 if first.dtype.itemsize > 2 else 2**-8  # one rounding of bfloat16
        for _, after, _, neighbours_untouched in results:
            torch.testing.assert_close(after[name], expected, rtol=rtol, atol=rtol / 10)
            assert torch.equal(after[name], results[0][1][name])
            assert neighbours_untouched


def test_parameters_or_buffers_alone():
    """What is not asked for keeps every rank's own values."""

    def fn(rank, process_group):
        model = nn.BatchNorm1d(2)
        nn.init.constant_(model.weight, rank)
        model.running_mean.fill_(rank)
        sync_model(model, sync_parameters=rank < 0)
        buffers_only = model.weight[0].item(), model.running_mean[0].item()
        model.running_mean.fill_(rank)
        sync_model(model, sync_buffers=False)
        return buffers_only, (model.weight[0].item(), model.running_mean[0].item())

    assert run_ranks(fn, 2) == [((0.0, 0.5), (0.5, 0.0)), ((1.0, 0.5), (0.5, 1.0))]


@pytest.mark.parametrize("size", [2, 3, 10])
def test_masks_of_the_lowest_float_stay_finite(size):
    """The mean of equal values is that value, also the largest that a float can have."""

    def fn(rank, process_group):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.bias, torch.finfo(torch.float32).min)
        nn.init.constant_(model.weight, 1.1)
        before = contents(model)
        sync_model(model)
        return before, contents(model)

    for before, after in run_ranks(fn, size):
        torch.testing.assert_close(after, before, rtol=0 if size == 2 else 2e-7, atol=0)


def test_a_model_of_300_tensors_costs_four_collectives():
    """Exchanges are few and large, and a tied tensor travels once."""

    def fn(rank, process_group):
        model = nn.Sequential(*(nn.BatchNorm1d(7) for _ in range(60)))
        model.append(nn.Linear(3, 3).double())
        group = Group(process_group)
        sync_model(model, group=group)
        untied = group.traffic.bytes_sent
        model.tied = nn.BatchNorm1d(7, track_running_stats=False)
        model.tied.weight, model.tied.bias = model[0].weight, model[0].bias
        sync_model(model, group=group)
        return group.traffic.num_collectives, group.traffic.bytes_sent == 2 * untied

    assert run_ranks(fn, 2) == [(8, True)] * 2


def test_buckets_bound_the_working_memory(monkeypatch):
    """No exchange is larger than one bucket, also when a single tensor is."""
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 1024)
    sizes = set()

    class Watched(Group):
        def all_reduce_(self, flat):
            sizes.add(flat.numel() * flat.element_size())
            return super().all_reduce_(flat)

    def fn(rank, process_group):
        model = nn.Linear(50, 40)
        nn.init.constant_(model.weight, rank)
        sync_model(model, group=Watched(process_group))
        return model.weight.min().item(), model.weight.max().item()

    assert run_ranks(fn, 2) == [(0.5, 0.5)] * 2
    assert max(sizes) <= 1024


class Seen(torchmetrics.Metric):
    """A metric with a buffer, a parameter and a submodule of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(2))
        self.net = nn.Linear(1, 1)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value):
        self.total += value

    def compute(self):
        return self.total


def test_torchmetrics_are_left_alone():
    """State, buffers and networks of metrics inside the model keep every rank's own values."""

    def fn(rank, process_group):
        model = nn.ModuleDict({"net": nn.Linear(1, 1), "seen": Seen(), "mean": torchmetrics.MeanMetric()})
        model["all"] = torchmetrics.MetricCollection({"another": Seen()})
        model["seen"].update(rank + 1.0)
        for tensor in (*model.parameters(), *model.buffers()):
            nn.init.constant_(tensor, rank)
        model["mean"].update(rank)
        sync_model(model)
        seen, another, mean = model["seen"], model["all"]["another"], model["mean"]
        own = [seen.total, seen.rows[0], seen.net.weight, another.rows[0], mean.mean_value]
        return model["net"].weight.item(), [tensor.item() for tensor in own]

    assert run_ranks(fn, 2) == [(0.5, [1.0, 0.0, 0.0, 0.0, 0.0]), (0.5, [2.0, 1.0, 1.0, 1.0, 1.0])]


def sentence_of_sync(model, **options):
    try:
        sync_model(model, **options)
    except DistributedRuntimeException as error:
        return str(error)
    return None


DTYPES = (torch.float32, torch.float64)
DIFFERENCES = {
    "name": (lambda rank: nn.Linear(2, 2, bias=rank == 0), {}, "bias (2,) torch.float32 where rank 1 has nothing"),
    "shape": (lambda rank: nn.Linear(2, 2 + rank), {}, "rank 1 has the parameter weight (3, 2)"),
    "dtype": (
        lambda rank: nn.Linear(2, 2).to(DTYPES[rank]),
        {},
        "rank 1 has the parameter weight (2, 2) torch.float64",
    ),
    "arguments": (lambda rank: nn.Linear(2, 2), {"reduce_buffers": [True, False]}, "reduce_buffers=True where"),
    "no shape": (lambda rank: nn.LazyLinear(2), {}, "weight, which has no shape yet"),
}


@pytest.mark.parametrize(("models", "options", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_models_that_differ_are_refused_on_every_rank(models, options, message):
    """The first difference in names, shapes, dtypes or arguments is named, on every rank alike."""

    def fn(rank, process_group):
        return sentence_of_sync(models(rank), **{name: choices[rank] for name, choices in options.items()})

    for sentence in run_ranks(fn, 2):
        assert message in sentence
        assert "\n" not in sentence


def lose_a_peer(rank):
    """Rank 1 raises where rank 0 expects it."""
    if rank == 1:
        raise ValueError("my own fault")
    sync_model(nn.Linear(2, 2))


def test_a_rank_that_raises_ends_the_others():
    """The rank that fails shows its own error; the other one says within seconds whom it lost, and in what."""
    start = time.monotonic()
    first, second = launch(lose_a_peer, 2, allow_failure=True)

    assert str(second.error) == "my own fault"
    assert isinstance(first.error, DistributedRuntimeException)
    assert "rank 0 lost rank 1 in sync_model" in str(first.error)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("rank", [0, 1])
def test_sync_model_before_the_group_exists(environ, rank):
    """In a job of two processes without a group, sync_model says what to call first; alone it does nothing."""
    model = nn.Linear(2, 2)
    before = contents(model)

    assert sentence_of_sync(model) is None
    environ({"RANK": rank, "WORLD_SIZE": 2})
    assert "call init_process_group() or init_torch() first" in sentence_of_sync(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in contents(model).items())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_of_replicas_can_be_taken_back(size):
    """The mean takes every replica's place, and restore gives every rank its own bits back, NaN included."""

    def bits(model):
        return b"".join(bytes(tensor.reshape(-1).view(torch.uint8)) for tensor in contents(model).values())

    def fn(rank, process_group):
        model = Zoo(rank)
        model.p_float64.data[0, 0] = float("nan")
        group = Group(process_group)
        before = bits(model)
        restore = mean_of_replicas_(model, group)
        mean = bits(model)
        collectives = group.traffic.num_collectives
        restore()
        after = bits(model)
        nn.init.zeros_(model.norm.weight)
        restore()
        local = group.traffic.num_collectives == collectives
        return before == after, mean, local, model.norm.weight.sum().item()

    results = run_ranks(fn, size)

    assert {mean for _, mean, *_ in results} == {results[0][1]}
    assert [(same, local, zero) for same, _, local, zero in results] == [(True, True, 0.0)] * size


def test_a_mean_that_fails_leaves_the_replica(monkeypatch):
    """When the exchange fails in the middle, the model has its own values again."""

    class Broken(Group):
        def broadcast_(self, flat, src=0):
            raise DistributedRuntimeException("the cable is out")

    def fn(rank, process_group):
        model = Zoo(rank)
        before = contents(model)
        with pytest.raises(DistributedRuntimeException, match="cable"):
            mean_of_replicas_(model, Broken(process_group))
        return all(torch.equal(before[name], tensor) for name, tensor in contents(model).items())

    assert run_ranks(fn, 2) == [True, True]
