"""Predicted times against hand-computed ones, predicted bytes against the formulas, and the recommendation."""

import json
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from worlds import run_ranks

from lightning_distopt import bench
from lightning_distopt.advise import (
    Cost,
    DryGroup,
    Prediction,
    Start,
    Update,
    Wait,
    Work,
    background,
    mb_per_update,
    recommend,
    replay,
    work_and_transfer,
)
from lightning_distopt.algorithms import ALGORITHMS, GradientAllReduce, make_algorithm

# 1 s of latency, 2 s per byte.
SLOW = {"all-reduce": Cost(1.0, 2.0, 2.0, 0.0)}
# Takes half of its time from a processor.
BUSY = {"all-reduce": Cost(0.0, 2.0, 2.0, 0.5)}
# Alone an exchange uses half of the link.
IDLE = {"all-reduce": Cost(0.0, 2.0, 1.0, 0.0)}
KINDS = ("all-reduce", "all-to-all", "all-gather", "broadcast", "exchange with its peers")
REDUCE = Start("all-reduce", 5)


@pytest.mark.parametrize(
    ("trace", "costs", "ends"),
    [
        # blocking: 3 of work, 1 + 2 * 5 of exchange
        ([Work(3), REDUCE, Wait(0), Update()], SLOW, [14]),
        # hidden in part: the exchange from 3 to 14, the work from 3 to 7
        ([Work(3), REDUCE, Work(4), Wait(0), Update()], SLOW, [14]),
        # hidden wholly
        ([REDUCE, Work(20), Wait(0), Update()], SLOW, [20]),
        # two share the link: 0 to 10 and 10 to 20, and the latency of the second
        ([REDUCE, REDUCE, Wait(0), Wait(1), Update()], SLOW, [21]),
        # awaited an update later: 0 to 11, 3 of work before and after
        ([REDUCE, Work(3), Update(), Wait(0), Work(3), Update()], SLOW, [3, 14]),
        # 10 of work in 15, then 2 undisturbed
        ([REDUCE, Work(12), Update()], BUSY, [17]),
        # 2 undisturbed, 4 of work in 6, then the other 6 of the exchange
        ([Work(2), REDUCE, Work(4), Wait(0), Update()], BUSY, [14]),
        # alone 10; two at a time leave the link no pause: 10 for both, not 20
        ([REDUCE, Wait(0), REDUCE, Wait(1), Update()], IDLE, [20]),
        ([REDUCE, REDUCE, Wait(0), Wait(1), Update()], IDLE, [10]),
    ],
)
def test_a_trace_on_a_link(trace, costs, ends):
    assert replay(trace, costs) == pytest.approx(ends)


def test_rounds_in_the_background():
    """An update takes 10; a round 4 of work, 25 of exchange, which slows the host by 2."""
    assert background(10, 4, 25, 2, interval=0) == (10 + 6 / 3, 3)  # 25 take three updates
    assert background(10, 4, 25, 2, interval=50) == (10 + 6 / 5, 5)
    assert background(100, 4, 25, 2, interval=0) == (106, 1)


def test_a_trace_added_up():
    trace = [Work(3), REDUCE, Wait(0), Update(), Work(1), REDUCE, Update()]
    assert work_and_transfer(trace, BUSY) == (4, 20, 10)
    assert mb_per_update(trace) == 5e-6


def prediction(name, step_ms, exact=False, replicas_equal=False, any_optimizer=True):
    return Prediction(name, step_ms, 1.0, exact, replicas_equal or exact, any_optimizer)


@pytest.mark.parametrize(
    ("exact", "equal", "differ", "chosen"),
    [(100, 95, 92, "exact"), (120, 100, 95, "equal"), (120, 100, 80, "differ"), (80, 100, 90, "exact")],
)
def test_what_changes_training_less_is_preferred_within_a_tenth(exact, equal, differ, chosen):
    sentence = recommend(
        [
            prediction("differ", differ),
            prediction("other_optimizer", 1, replicas_equal=True, any_optimizer=False),
            prediction("equal", equal, replicas_equal=True),
            prediction("exact", exact, exact=True),
        ]
    )
    assert sentence.startswith(f"Recommended: {chosen}, ")
    assert ("compare the loss, or use equal (100 ms)" in sentence) == (chosen == "differ")


def test_a_recommendation_from_few_candidates():
    assert "it is the fastest" in recommend([prediction("only", 5)])
    assert recommend([]).startswith("Nothing to recommend")


def test_a_dry_group_gives_what_equal_ranks_would():
    group = DryGroup(3)
    flat = torch.arange(6.0)
    group.all_reduce_(flat).wait()
    assert flat.tolist() == [0, 3, 6, 9, 12, 15]
    gathered = torch.zeros(6)
    group.all_gather(gathered, torch.tensor([1.0, 2.0])).wait()
    assert gathered.tolist() == [1, 2, 1, 2, 1, 2]
    received = torch.zeros(2)
    group.swap([(1, torch.tensor([4.0, 5.0]))], [(2, received)]).wait()
    assert received.tolist() == [4, 5]
    events = [event for event in group.trace if not isinstance(event, Work)]
    assert events == [
        Start("all-reduce", 32), Wait(0), Start("all-gather", 16), Wait(1), Start("exchange with its peers", 8), Wait(2),
    ]  # fmt: skip


class Mine(GradientAllReduce):
    """An algorithm that the package does not know."""

    name = "mine"


@pytest.mark.parametrize("entry", [*ALGORITHMS, "diloco:period=4,num_fragments=2,overlap_steps=1", "test_advise.Mine"])
@pytest.mark.parametrize("size", [2, 4])
def test_predicted_bytes_are_those_of_the_formula(entry, size):
    """Also on more ranks than there are, and for an algorithm that has no formula or no name here."""
    costs = dict.fromkeys(KINDS, Cost(0.0, 1e-9, 1e-9, 0.0))

    def predict(rank, process_group):
        module = bench.SquareLayers(2e6, 1, rank)
        workload = bench.Workload(module, torch.optim.SGD(module.parameters(), lr=1e-4))
        return bench.predict(entry, workload, bench.Compute(0.1, 0.01), costs, size, process_group)

    (predicted,) = run_ranks(predict, 1)
    numel = 2 * (1024 * 1024 + 1024)
    if entry == "async":
        bytes_expected = 4 * numel * 2 * (size - 1) / size / 5  # every 500 ms, of 110 ms each
    else:
        bytes_expected = bench.make_entry(entry).expected_bytes(numel, size)
    assert predicted.sent_mb == pytest.approx(bytes_expected / 1e6, rel=0.02)
    assert predicted.step_ms > 0
    assert predicted.replicas_equal == bench.make_entry(entry).replicas_equal


def test_weights_are_exchanged_beside_or_after_compute():
    """8.4 MB at 10 MB/s: decentralized hides them behind 2 s of compute, local_sgd waits, every other update."""
    costs = dict.fromkeys(KINDS, Cost(0.0, 1e-7, 1e-7, 0.0))

    def predict(rank, process_group, entry):
        module = bench.SquareLayers(2e6, 1, rank)
        workload = bench.Workload(module, torch.optim.SGD(module.parameters(), lr=1e-4))
        return bench.predict(entry, workload, bench.Compute(2.0, 0.0), costs, 2, process_group).step_ms

    hidden, blocking = (
        run_ranks(lambda rank, group, entry=entry: predict(rank, group, entry), 1)[0]
        for entry in ("decentralized", "local_sgd:period=2")
    )
    assert 2000 <= hidden < 2400
    assert 2000 + 420 <= blocking < 2000 + 420 + 400


MODEL = """
import lightning.pytorch as pl
import torch


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=8)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        self.unused = torch.nn.Linear(1000, 1000)

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch) - batch).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.trainer.max_steps * 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class ByHand(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
"""


def bench_command(*arguments, torchrun=False):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if torchrun else []
    return [sys.executable, *launcher, "-m", "lightning_distopt.bench", "--advise", *arguments]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_advice_for_a_module_of_the_users(tmp_path):
    """What the module leaves without gradient is not counted, and its own optimizer is used."""
    (tmp_path / "mine.py").write_text(MODEL)
    command = bench_command("--model", "mine.Model", "--data", "mine.Data", "--json", "advice.json", "--verify",
                            "--algorithms", "ddp", *ALGORITHMS, "--rounds", "1", "--steps", "2", "--warmup", "1")  # fmt: skip
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Recommended: " in ended.stdout
    advice = json.loads((tmp_path / "advice.json").read_text())
    assert advice["num_params"] == 64 * 256 + 256 + 256 * 64 + 64
    assert [row["name"] for row in advice["rows"]] == ["ddp", *ALGORITHMS]
    assert all(row["predicted_ms"] > 0 and row["measured_ms"] > 0 for row in advice["rows"])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_advice_refuses_what_it_cannot_measure(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    command = bench_command("--model", "mine.ByHand", "--data", "mine.Data")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    assert "--advise measures automatic optimization only: give --params instead" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_advice_under_torchrun(tmp_path):
    """The ranks are those that torchrun has started; only the first one prints."""
    command = bench_command("--params", "1e6", "--algorithms", "ddp", "bytegrad", torchrun=True)
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Recommended: bytegrad") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "mine.Model"], "--model, --data and --verify belong to --advise"),
        (["--advise", "--data", "mine.Data"], "--data needs --model"),
        (["--advise", "--algorithms", "ddp_fp16"], "ddp_fp16 can be measured only"),
        (["--advise", "--algorithms", "no_such_module.Mine"], "cannot import 'no_such_module.Mine'"),
        (["--advise", "--model", "lightning_distopt.Nothing"], "cannot import 'lightning_distopt.Nothing'"),
        (["--advise", "--model", "torch.nn.ReLU"], "torch.nn.ReLU must be a class derived from lightning.pytorch"),
        (["--advise", "--model", "test_advise.NeedsWidth"], "NeedsWidth is made without arguments, and needs some"),
        (["--advise", "--model", "test_advise.Plain", "--data", "test_advise.Plain"], "core.datamodule.Lightning"),
        (["--advise", "--nproc", "1"], "--advise measures the link between ranks, and there is one rank only"),
        (["--advise", "--json", "no/such/folder/advice.json"], "there is no folder 'no/such/folder'; make it first"),
    ],
)
def test_wrong_arguments_end_with_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(arguments)
    assert message in capsys.readouterr().err


class Plain(pl.LightningModule):
    """Its training_step has no index of the batch, which Lightning allows."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        return self.layer(batch).sum()


class NeedsWidth(Plain):
    def __init__(self, width):
        super().__init__()
        self.width = width


class Skips(Plain):
    def training_step(self, batch, batch_idx):
        return None


class Detached(Plain):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch).detach()}


def test_a_training_step_without_index_is_measured():
    assert bench.TrainingStep(Plain(), torch.ones(2, 3))().requires_grad


@pytest.mark.parametrize("cls", [Skips, Detached])
def test_a_training_step_without_loss_ends_with_a_sentence(cls):
    with pytest.raises(SystemExit, match=f"training_step of {cls.__name__} must return a loss with a gradient"):
        bench.TrainingStep(cls(), torch.ones(2, 3))()


def test_what_gets_no_gradient_is_frozen():
    module = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(3, 1))
    module[0](torch.ones(3)).sum().backward()
    bench.freeze_unused(module)
    assert [p.requires_grad for p in module.parameters()] == [True, True, False, False]
    module[0].zero_grad()
    with pytest.raises(SystemExit, match="no parameter of the model got a gradient"):
        bench.freeze_unused(module)


def test_an_algorithm_of_the_users_by_its_path():
    assert isinstance(bench.make_entry("test_advise.Mine:average=false"), GradientAllReduce)
    assert repr(make_algorithm("bytegrad")) == repr(bench.make_entry("lightning_distopt.algorithms.ByteGrad"))
