"""The options: what they accept, plain loops against the Lightning driver, and how a failed meeting ends."""

import copy
import datetime
import os
import pickle
import re
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Numbers, Regression, loader, weights
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader
from worlds import launch, make_trainer

from lightning_distopt import (
    BaguaDistributedOption,
    DDPOption,
    DistOptBaguaStrategy,
    DistOptDDPStrategy,
    DistOptStrategy,
    DistributedBaseOption,
    QAdamOptimizer,
    algorithms,
    get_default_distributed_option,
)
from lightning_distopt.algorithms import ALGORITHMS, ByteGrad

STEPS = 20
SECONDS = timedelta(seconds=30)


def free_port():
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- what they accept ------------------------------------------------------------------------------------------------


def test_the_base_is_abstract():
    """Nobody can build an option that converts nothing."""
    with pytest.raises(TypeError, match="abstract"):
        DistributedBaseOption(23456)


@pytest.mark.parametrize(("make", "attributes"), [
    (lambda: DDPOption(backend="nccl"), {"backend": "nccl", "initialization_method": "tcp", "master_port": 23456}),
    (lambda: DDPOption(backend="nccl", init_method="tcp"), {"initialization_method": "tcp", "master_addr": None}),
    (lambda: DDPOption(backend="gloo", init_method="file", sync_file="/tmp/x"), {"initialization_method": "file"}),
    (lambda: DDPOption("file", "gloo"), {"backend": "gloo", "initialization_method": "file"}),
    (lambda: DDPOption(backend="nccl", master_port=23333, master_addr="localhost"),
     {"master_port": 23333, "master_addr": "localhost"}),
    (lambda: DDPOption(comm_hook="fp16"), {"options": {"comm_hook": "fp16"}}),
    (get_default_distributed_option, {"backend": "gloo"}),
    (lambda: get_default_distributed_option(device_id=0), {"backend": "nccl"}),
    (lambda: get_default_distributed_option(2), {"backend": "nccl", "algorithm": "gradient_allreduce"}),
    (lambda: BaguaDistributedOption("gradient_allreduce"), {"algorithm": "gradient_allreduce", "master_port": 23456}),
    (lambda: BaguaDistributedOption("qadam", lr=1e-3, warmup_steps=50),
     {"algorithm": "qadam", "options": {"lr": 1e-3, "warmup_steps": 50}}),
    (lambda: BaguaDistributedOption("async", sync_interval_ms=100, warmup_steps=5), {"algorithm": "async"}),
])  # fmt: skip
def test_documented_arguments(make, attributes):
    """PERSIA's documented calls build an option whose attributes can be read, also after pickling and copying."""
    option = make()

    for twin in (option, pickle.loads(pickle.dumps(option)), copy.deepcopy(option)):
        assert {name: getattr(twin, name) for name in attributes} == attributes
        assert twin.init_with_env_file() is (option.initialization_method == "file")
        assert repr(twin) == repr(option)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DDPOption("file", "gloo", sync_file="/tmp/x"),
        lambda: DDPOption(init_method="file", sync_file="/tmp/x", timeout=timedelta(seconds=9)),
        lambda: DDPOption("tcp", None, comm_hook="powersgd", matrix_approximation_rank=2, master_port=1234),
        lambda: BaguaDistributedOption("diloco", period=7, backend="gloo", engine="torch", master_addr="node0"),
        lambda: BaguaDistributedOption(ByteGrad(hierarchical=False), initialization_method="tcp"),
    ],
)
def test_repr_is_the_call_that_makes_the_option(make):
    option = make()
    names = {"datetime": datetime, "DDPOption": DDPOption, "BaguaDistributedOption": BaguaDistributedOption}
    twin = eval(repr(option), {**vars(algorithms), **names})
    for name in ("initialization_method", "backend", "sync_file", "timeout", "master_addr", "master_port"):
        assert getattr(twin, name) == getattr(option, name)
    assert repr(twin.new_algorithm()) == repr(option.new_algorithm())


def test_repr_of_a_strategy_shows_what_was_configured():
    """And a pickled or copied one shows the same."""
    strategy = DistOptStrategy("bytegrad", check_replicas_every_n_steps=5, timeout=timedelta(seconds=9),
                               start_method="spawn", process_group_backend="gloo", hierarchical=False)  # fmt: skip
    for shown in ("ByteGrad(hierarchical=False", "check_replicas_every_n_steps=5", "timeout=datetime.timedelta(seconds=9)",
                  "start_method='spawn'", "process_group_backend='gloo'"):  # fmt: skip
        assert shown in repr(strategy)
    assert repr(pickle.loads(pickle.dumps(strategy))) == repr(copy.deepcopy(strategy)) == repr(strategy)
    assert "timeout" not in repr(DistOptStrategy("bytegrad"))


def test_settings_of_bagua_without_meaning_are_named_once():
    """The native engine warns about each setting that it ignores, and takes the bucket size."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        option = BaguaDistributedOption(
            "gradient_allreduce", enable_bagua_net=True, autotune_level=1, bagua_service_port=29501,
            autotune_max_samples=60, autotune_warmup_time=30, is_output_autotune_log=False,
            autotune_sampling_confidence_time=5.0, default_bucket_size=2**20,
        )  # fmt: skip
        pickle.loads(pickle.dumps(option))
        BaguaDistributedOption("decentralized", default_bucket_size=2**20)
    named = [str(warning.message).split()[0] for warning in caught]

    assert sorted(named) == sorted(option.options)  # the bucket size by decentralized, which has no buckets
    assert option.ddp_arguments()["bucket_cap_mb"] == 1
    assert all(warning.filename == __file__ for warning in caught)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: DDPOption(backend="mpi"), ValueError, "backend must be one of nccl, gloo, got 'mpi'"),
    (lambda: DDPOption("env"), ValueError, "initialization_method must be one of tcp, file, got 'env'"),
    (lambda: DDPOption(master_prt=1), ValueError, "'master_prt' of DDPOption .did you mean 'master_port'"),
    (lambda: DDPOption(master_port=70000), ValueError, "at most 65535, got 70000"),
    (lambda: DDPOption(master_port="x"), TypeError, "master_port must be an int, got 'x'"),
    (lambda: DDPOption(master_addr=7), TypeError, "master_addr must be .* got 7"),
    (lambda: DDPOption(timeout=5), TypeError, "timeout must be a datetime.timedelta, got 5"),
    (lambda: DDPOption(timeout=timedelta(0)), ValueError, "timeout must be positive"),
    (lambda: DDPOption(comm_hook="int8"), ValueError, "comm_hook must be one of fp16, bf16, powersgd, got 'int8'"),
    (lambda: DDPOption(comm_hook="fp16", matrix_approximation_rank=2), ValueError, "without comm_hook='powersgd'"),
    (lambda: DDPOption(comm_hook="powersgd", matrix_approximation_rank=0), ValueError, "at least 1, got 0"),
    (lambda: BaguaDistributedOption("bytegard"), ValueError, "did you mean 'bytegrad'"),
    (lambda: BaguaDistributedOption(7), TypeError, "got 7"),
    (lambda: BaguaDistributedOption("bytegrad", warmup_steps=3), ValueError, "'warmup_steps' of .*'bytegrad'"),
    (lambda: BaguaDistributedOption("qadam", lr=-1.0), ValueError, "lr must be at least 0, got -1.0"),
    (lambda: BaguaDistributedOption("bytegrad", engine="gpu"), ValueError, "engine must be one of auto, torch, bagua"),
    (lambda: BaguaDistributedOption("diloco", engine="bagua"), ValueError, "engine='bagua' does not know 'diloco'"),
    (lambda: BaguaDistributedOption(ByteGrad(), hierarchical=True), ValueError, "'hierarchical'"),
    (lambda: BaguaDistributedOption("async", find_unused_parameters=True), ValueError, "would have no effect"),
    (lambda: BaguaDistributedOption("bytegrad", autotune_level="1"), TypeError, "autotune_level must be an int"),
    (lambda: DistOptStrategy(option=DDPOption(), algorithm="bytegrad"), ValueError, "algorithm beside an option"),
    (lambda: DistOptStrategy(option=DDPOption(), static_graph=True), ValueError, "static_graph beside an option"),
    (lambda: DistOptStrategy(7), TypeError, "got 7"),
    (lambda: DistOptStrategy(BaguaDistributedOption("bytegrad", engine="bagua")), ValueError, "in plain loops only"),
    (lambda: DistOptDDPStrategy("file"), ValueError, "sync_file"),
    (lambda: DistOptDDPStrategy(comm_hook="int8"), ValueError, "int8"),
])  # fmt: skip
def test_wrong_arguments_are_refused_where_they_are_written(make, error, message):
    """A wrong name, value or type is answered with the value and what is valid."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(("convert", "error", "message"), [
    (lambda m, o: DDPOption().convert2distributed_model(m, 2, 0, optimizer=o), ValueError,
     "master_addr to DDPOption, or to convert2distributed_model"),
    (lambda m, o: DDPOption("file", "gloo").convert2distributed_model(m, 2, 0, optimizer=o), ValueError, "sync_file"),
    (lambda m, o: BaguaDistributedOption("async").convert2distributed_model(m, 2, 0), ValueError, "pass optimizer="),
    (lambda m, o: BaguaDistributedOption("qadam").convert2distributed_model(m, 2, 0, optimizer=o), TypeError,
     "got SGD.*QAdamOptimizer"),
    (lambda m, o: BaguaDistributedOption("async").convert2distributed_model(
        m, 2, 0, optimizer=torch.optim.LBFGS(m.parameters())), ValueError, "LBFGS"),
    (lambda m, o: DDPOption().convert2distributed_model(m, 0, 0), ValueError, "world_size must be at least 1, got 0"),
])  # fmt: skip
def test_missing_arguments_are_named_before_anybody_is_waited_for(convert, error, message):
    """What convert2distributed_model cannot work with is refused at once, without a process group."""
    model = nn.Linear(2, 1)
    with pytest.raises(error, match=message):
        convert(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert not dist.is_initialized()


@pytest.mark.parametrize(("address", "url"), [("localhost", "tcp://localhost:5"), ("fd00::1", "tcp://[fd00::1]:5")])
def test_the_options_address_wins(address, url):
    """The address comes from the option, else from the argument; IPv6 gets its brackets."""
    assert DDPOption(master_port=5, master_addr=address).init_method("other") == url
    assert DDPOption(master_port=5).init_method(address) == url


# -- plain loops against the Lightning driver ------------------------------------------------------------------------

GRADIENTS = {
    "ddp": partial(DDPOption, backend="gloo"),
    "fp16": partial(DDPOption, backend="gloo", comm_hook="fp16"),
    "bf16": partial(DDPOption, backend="gloo", comm_hook="bf16"),
    "powersgd": partial(DDPOption, backend="gloo", comm_hook="powersgd", start_powerSGD_iter=5),
    "gradient_allreduce": partial(BaguaDistributedOption, "gradient_allreduce"),
    "bytegrad": partial(BaguaDistributedOption, "bytegrad", default_bucket_size=512),
    "qadam": partial(BaguaDistributedOption, "qadam", warmup_steps=10),
}
WEIGHTS = {
    "decentralized": partial(BaguaDistributedOption, "decentralized", peer_selection_mode="shift_one"),
    "low_precision_decentralized": partial(BaguaDistributedOption, "low_precision_decentralized"),
    "local_sgd": partial(BaguaDistributedOption, "local_sgd", period=3),
    "diloco": partial(BaguaDistributedOption, "diloco", period=4, num_fragments=2, overlap_steps=1),
}


def make_optimizer(name, parameters):
    """Adam for qadam, which converts it; SGD with momentum for the others."""
    if name == "qadam":
        return torch.optim.Adam(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def batches(rank, size=2):
    """Yield this rank's batches, without end."""
    while True:
        yield from Numbers().rows[rank::size].split(2)


def loss_of(model, rank, batch):
    """The loss of :class:`models.Regression`."""
    return (1 + rank) * (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()


def train_plainly(rank, name, option, closure=False, **arguments):
    """The loop of a user who knows nothing of ranks. Return final weights, bytes sent, and the converted model."""
    net = Regression().net
    optimizer = make_optimizer(name, net.parameters())
    model, optimizer = option.convert2distributed_model(net, 2, rank, optimizer=optimizer, **arguments)
    for batch, _ in zip(batches(rank), range(STEPS), strict=False):
        optimizer.zero_grad()

        def compute(batch=batch):
            loss = loss_of(model, rank, batch)
            loss.backward()
            return loss

        if closure:
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()
    model.finish()
    return weights(net), model.bytes_sent


def train_with_lightning(rank, name, option):
    """The same in a Trainer, with the same option object."""
    model = Regression(make_optimizer=partial(make_optimizer, name))
    trainer = make_trainer(
        strategy=DistOptStrategy(option), max_steps=STEPS, max_epochs=-1, use_distributed_sampler=False
    )
    trainer.fit(model, DataLoader(Numbers().rows[rank::2], batch_size=2))
    return weights(model.net), trainer.strategy.bytes_sent


def both_drivers(rank, options, ports):
    """Both drivers with every option: init, train, destroy, init, Trainer.fit, destroy, all in one process."""
    results = {}
    for name, option in options.items():
        results[name] = []
        for train in (train_plainly, train_with_lightning, partial(train_plainly, closure=True)):
            option.master_port = ports.pop()
            results[name].append(train(rank, name, option))
            assert dist.get_backend() == "gloo"
            dist.destroy_process_group()
    return results


@pytest.mark.parametrize("method", ["tcp", "file"])
@pytest.mark.parametrize("cases", [GRADIENTS, WEIGHTS], ids=["gradients", "weights"])
def test_plain_loops_equal_the_lightning_driver(method, cases, tmp_path):
    """20 steps with one option object end with the same weights and bytes in both drivers, on both methods."""
    where = (
        {"init_method": "file", "sync_file": tmp_path / "meet"} if method == "file" else {"master_addr": "127.0.0.1"}
    )
    options = {name: make(timeout=SECONDS, **where) for name, make in cases.items()}
    results = launch(both_drivers, 2, options, [free_port() for _ in range(3 * len(cases))], init_group=False)

    for name in cases:
        for rank in range(2):
            first, *others = results[rank][name]
            assert torch.equal(first[0], results[0][name][0][0]), name
            for other in others:
                torch.testing.assert_close(other[0], first[0], rtol=1e-6, atol=1e-6, msg=name)
                assert first[1] > 0, name
                # Lightning's driver also checks that replicas agree, in 8 bytes or by their mean.
                assert other[1] == pytest.approx(first[1], abs=64) or name in WEIGHTS, name


def shares_the_job(rank, port):
    """Async beside an existing group, all of its switches, and accumulation."""
    group = dist.group.WORLD
    option = BaguaDistributedOption("async", sync_interval_ms=0, timeout=SECONDS)
    net = Regression().net
    optimizer = make_optimizer("async", net.parameters())
    model, optimizer = option.convert2distributed_model(net, 2, rank, None, "127.0.0.1", optimizer)
    for batch, step in zip(batches(rank), range(STEPS), strict=False):
        if step == 5:
            model.algorithm.abort()
        if step == 10:
            model.algorithm.resume()
        with model.no_sync():
            loss_of(model, rank, batch).backward()
        optimizer.step()
    model.algorithm.finish()
    assert dist.group.WORLD is group
    return weights(net), sorted(model.state_dict())


def test_async_keeps_the_existing_group_and_can_be_stopped():
    """The group of the job stays; abort, resume and finish are reached through the model; replicas agree at the end."""
    results = launch(shares_the_job, 2, free_port())

    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == ["module.0.bias", "module.0.weight", "module.2.bias", "module.2.weight"]


def convert_again(rank):
    """Convert one model and optimizer, destroy the group, and convert the module anew with the same optimizer."""
    option = BaguaDistributedOption("local_sgd", period=1)
    model = Regression().net
    optimizer = make_optimizer("local_sgd", model.parameters())
    sent = []
    for _ in range(2):
        distributed, optimizer = option.convert2distributed_model(model, 2, rank, None, "unused", optimizer)
        loss_of(distributed, rank, Numbers().rows[rank : rank + 2]).backward()
        optimizer.step()
        sent.append(distributed.bytes_sent)
        with pytest.raises(TypeError, match="pass the module inside"):
            option.convert2distributed_model(distributed, 2, rank, None, "unused", optimizer)
    return sent, weights(model)


def test_a_second_conversion_replaces_the_first():
    """An optimizer that is converted again serves the new model only."""
    results = launch(convert_again, 2)

    assert results[0][0][0] == results[0][0][1]
    assert torch.equal(results[0][1], results[1][1])


def follow_schedulers(rank):
    """Return, per place of the scheduler, the learning rates of each step; with and without a resume."""
    rates = {}
    for place in ("before", "after", "resumed"):
        net = Regression().net
        adam = torch.optim.Adam(net.parameters(), lr=0.1)
        scheduler = StepLR(adam, step_size=2) if place != "after" else None
        option = BaguaDistributedOption("qadam", warmup_steps=2)
        model, optimizer = option.convert2distributed_model(net, 2, rank, master_addr="unused", optimizer=adam)
        scheduler = scheduler or StepLR(optimizer, step_size=2)
        rates[place] = []
        for batch, _ in zip(batches(rank), range(6), strict=False):
            rates[place].append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss_of(model, rank, batch).backward()
            optimizer.step()
            scheduler.step()
            if place == "resumed":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return rates


def test_schedulers_stay_in_charge():
    """A scheduler made before or after the conversion sets the rate, warns of nothing, and survives a resume."""
    for rates in launch(follow_schedulers, 2):
        for place in ("before", "after", "resumed"):
            assert rates[place] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def fit_qadam(rank, strategy):
    """Fit with an Adam and its scheduler; return the strategy's optimizer class and rate."""

    class Scheduled(Regression):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}]

    trainer = make_trainer(strategy=strategy, max_steps=4)
    model = Scheduled()
    trainer.fit(model, loader())
    (optimizer,) = trainer.optimizers
    return type(optimizer), optimizer.param_groups[0]["warmup_steps"], optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("strategy", [
    DistOptStrategy(option=BaguaDistributedOption("qadam", warmup_steps=3)),
    DistOptBaguaStrategy("qadam", options={"warmup_steps": 3}),
])  # fmt: skip
def test_strategies_convert_adam_for_qadam(strategy):
    """With warmup_steps in the option, a LightningModule keeps its Adam and scheduler, and trains with QAdam."""
    for cls, warmup_steps, rate in launch(fit_qadam, 2, strategy):
        assert cls is QAdamOptimizer
        assert warmup_steps == 3
        assert rate == pytest.approx(0.01 / 16)


def test_qadam_makes_its_optimizer_and_takes_the_options():
    """Values in the option win over the optimizer's, and without an optimizer there is one with these values."""
    option = BaguaDistributedOption("qadam", lr=0.5, betas=(0.8, 0.9), warmup_steps=7)
    adam = torch.optim.Adam(nn.Linear(2, 1).parameters(), lr=0.1, eps=1e-5)
    adapted = option.adapt_optimizer(adam).param_groups[0]

    assert (adapted["lr"], adapted["betas"], adapted["warmup_steps"], adapted["eps"]) == (0.5, (0.8, 0.9), 7, 1e-5)


def test_every_algorithm_is_an_option():
    """Every name can be used without further arguments, and gives a new algorithm each time."""
    for name, cls in ALGORITHMS.items():
        option = BaguaDistributedOption(name)
        assert type(option.new_algorithm()) is cls
        assert option.new_algorithm() is not option.new_algorithm()


# -- how a failed meeting ends ---------------------------------------------------------------------------------------

SHORT = timedelta(seconds=2)


def convert_alone(rank, option, world_size=2, rank_id=0, device_id=None):
    """Convert on this rank only."""
    net = nn.Linear(2, 1)
    option.convert2distributed_model(net, world_size, rank_id, device_id)


def fit_alone(rank, option):
    """Fit on this rank only."""
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    make_trainer(strategy=DistOptStrategy(option), max_steps=1).fit(Regression(), loader())


def fails(fn, message, *args):
    """Hold one rank to ending in time, with one sentence and an exit code that is not 0."""
    start = time.monotonic()
    (outcome,) = launch(fn, 1, *args, init_group=False, allow_failure=True, timeout=30)

    assert time.monotonic() - start < 15
    assert outcome.exitcode not in (0, None), outcome.describe()
    assert outcome.error is not None, outcome.describe()
    text = str(outcome.error)
    assert "\n" not in text
    assert message in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without CUDA")
@pytest.mark.parametrize("device_id", [None, 0])
def test_nccl_without_cuda(device_id):
    """nccl on a machine without CUDA says so, and what to use."""
    fails(convert_alone, "gloo", DDPOption(backend="nccl", master_addr="127.0.0.1"), 2, 0, device_id)


@pytest.mark.parametrize("fn", [convert_alone, fit_alone])
def test_a_host_that_cannot_be_resolved(fn):
    """An unknown host name is named."""
    fails(fn, "host.invalid", DDPOption(backend="gloo", master_addr="host.invalid", timeout=SHORT))


@pytest.mark.parametrize("fn", [convert_alone, fit_alone])
def test_a_port_in_use(fn):
    """A port that somebody else listens on is named."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        fails(fn, str(port), DDPOption(backend="gloo", master_addr="127.0.0.1", master_port=port, timeout=SHORT))


def test_a_rank_that_does_not_fit():
    """A rank outside of the world is refused before anybody is waited for."""
    option = DDPOption(backend="gloo", master_addr="127.0.0.1", master_port=free_port(), timeout=SHORT)
    fails(convert_alone, "RANK is 2, but WORLD_SIZE is 2", option, 2, 2)


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_ranks_that_never_come(method, tmp_path):
    """Who waits alone gives up after the timeout of the option."""
    where = {"sync_file": tmp_path / "meet"} if method == "file" else {"master_addr": "127.0.0.1"}
    fails(convert_alone, "waited 2 s", DDPOption(method, "gloo", master_port=free_port(), timeout=SHORT, **where))


@pytest.mark.parametrize("fn", [convert_alone, fit_alone])
def test_a_stale_or_impossible_file(fn, tmp_path):
    """A file that a dead run has left is refused with its path and what to do; a missing directory is named."""
    (tmp_path / "stale").write_text("left by a dead run")
    fails(fn, f"{tmp_path}/stale", DDPOption("file", "gloo", sync_file=tmp_path / "stale", timeout=SHORT))
    fails(fn, f"{tmp_path}/no", DDPOption("file", "gloo", sync_file=tmp_path / "no" / "meet", timeout=SHORT))


def convert_beside(rank):
    """Convert with numbers that do not fit the group that exists."""
    option = DDPOption(backend="gloo", master_addr="127.0.0.1")
    option.convert2distributed_model(nn.Linear(2, 1), 3, rank)


def test_numbers_that_do_not_fit_the_existing_group():
    """A world_size that the existing group does not have is refused with both numbers."""
    outcomes = launch(convert_beside, 2, allow_failure=True)

    for outcome in outcomes:
        assert outcome.exitcode not in (0, None)
        assert "world_size=3" in str(outcome.error)
        assert "has 2 ranks" in str(outcome.error)


# -- the example -----------------------------------------------------------------------------------------------------

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "plain_loop.py")


def run_together(commands):
    """Run commands side by side; return what they printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(commands), "\n".join(outputs)
    return "\n".join(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["bytegrad", "async"])
@pytest.mark.parametrize("by", ["torchrun", "hand"])
def test_the_example_runs(by, algorithm):
    """Under torchrun and started by hand, both ranks end with the same loss on the text that was held out."""
    arguments = [EXAMPLE, "--steps", "20", "--algorithm", algorithm, "--master-port", str(free_port())]
    if by == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        commands = [[sys.executable, *launcher, *arguments]]
    else:
        commands = [[sys.executable, *arguments, "--world-size", "2", "--rank", str(rank)] for rank in range(2)]
    losses = re.findall(r"rank \d of 2: (\S+) nats", run_together(commands))

    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(losses[0]) < 5
