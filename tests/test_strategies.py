"""The strategies in real Trainers on real ranks."""

import copy
import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from models import ManualRegression, Regression, loader, weights
from torch import nn
from worlds import launch, make_trainer

from lightning_distopt import DistOptBaguaStrategy, DistOptDDPStrategy, DistOptStrategy
from lightning_distopt.algorithms import ALGORITHMS, ByteGrad

GRADIENT_STRATEGIES = ("distopt_ddp", "distopt_bagua", "distopt_bagua_gradient_allreduce", "distopt_bagua_bytegrad")
EXACT_STRATEGIES = ("distopt_ddp", "distopt_bagua")


class EpochWeights(Callback):
    """Keeps the weights after every epoch and every update."""

    def __init__(self) -> None:
        self.epochs, self.updates = [], []

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        self.updates.append(weights(pl_module))

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.epochs.append(weights(pl_module))


def fit(rank, strategy, model_class=Regression, batches=12, **trainer_options):
    """Fit on one rank; return the weights after every update, every epoch, and at the end."""
    seen = EpochWeights()
    model = model_class()
    trainer = make_trainer(
        strategy=strategy, max_epochs=2, limit_train_batches=batches, callbacks=[seen], **trainer_options
    )
    trainer.fit(model, loader())
    return seen.updates, seen.epochs, weights(model), getattr(trainer.strategy, "bytes_sent", None)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4, "batches": 6}], ids=["plain", "accumulated"])
@pytest.mark.parametrize("model", [Regression, ManualRegression], ids=["automatic", "manual"])
def test_exact_strategies_equal_lightnings_ddp(size, options, model):
    """distopt_ddp and distopt_bagua end with the weights of Lightning's own ddp, leftover batches included."""
    if model is ManualRegression and "accumulate_grad_batches" in options:
        options = {"batches": 6}  # Lightning refuses automatic accumulation in manual optimization
    reference = launch(partial(fit, **options), size, "ddp", model)
    for strategy in EXACT_STRATEGIES:
        results = launch(partial(fit, **options), size, strategy, model)
        for rank in range(size):
            torch.testing.assert_close(results[rank][2], reference[rank][2], rtol=1e-6, atol=1e-6)
            assert all(map(torch.equal, results[rank][1], results[0][1]))


def test_bytegrad_keeps_replicas_equal_and_learns():
    """With bytegrad both ranks hold the same bits after every update, near the weights of an exact all-reduce."""
    exact = launch(fit, 2, "distopt_ddp")
    quantised = launch(fit, 2, "distopt_bagua_bytegrad")

    assert all(map(torch.equal, quantised[0][0], quantised[1][0]))
    assert not torch.equal(quantised[0][2], exact[0][2])
    torch.testing.assert_close(quantised[0][2], exact[0][2], rtol=0.05, atol=0.05)


def bytes_of_one_million(rank, strategy):
    """Train one million parameters for 3 updates and count."""

    class Big(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 1))

    model = Big()
    trainer = make_trainer(strategy=strategy, max_steps=3)
    trainer.fit(model, loader())
    return trainer.strategy.bytes_sent, sum(p.numel() for p in model.parameters())


def test_bytegrad_sends_a_quarter():
    """Bytes sent are within 1 % of 2 (W - 1) / W N per update, and at most 0.252 of an all-reduce's."""
    exact = launch(bytes_of_one_million, 2, "distopt_bagua_gradient_allreduce")
    quantised = launch(bytes_of_one_million, 2, "distopt_bagua_bytegrad")

    for (exact_bytes, numel), (quantised_bytes, _) in zip(exact, quantised, strict=True):
        assert exact_bytes == 3 * 4 * numel
        assert quantised_bytes <= 0.252 * exact_bytes
        assert quantised_bytes == pytest.approx(3 * numel, rel=0.01)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("strategy", [*GRADIENT_STRATEGIES, *sorted(f"distopt_bagua_{n}" for n in ())])
def test_evaluation_works_without_fit(strategy, stage):
    """validate, test and predict need no fit before them."""
    results = launch(evaluate, 2, strategy, stage)

    assert len(results) == 2


def evaluate(rank, strategy, stage):
    """Run one stage alone."""
    trainer = make_trainer(strategy=strategy)
    return bool(getattr(trainer, stage)(Regression(), loader(8)))


class OddParts(Regression):
    """A frozen layer, a tied weight, and a layer that only rank 0 uses."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__(lr=0.002)
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.sometimes = nn.Linear(8, 8) if unused else None

    def loss(self, batch):
        hidden = self.tied(self.first(self.frozen(batch)))
        if self.sometimes is not None and self.global_rank == 0:
            hidden = hidden + self.sometimes(batch)
        return super().loss(hidden)


class OddPartsUnused(OddParts):
    def __init__(self) -> None:
        super().__init__(unused=True)


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_frozen_and_tied_parameters(strategy):
    """Frozen and tied parameters end equal on both ranks, as under Lightning's ddp."""
    results = launch(fit, 2, strategy, OddParts)

    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("strategy", GRADIENT_STRATEGIES)
def test_parameters_unused_on_one_rank(strategy):
    """A parameter that one rank does not use: Lightning's own error names the option; with the option it trains."""
    with pytest.raises(RuntimeError, match="find_unused_parameters"):
        launch(fit, 2, strategy, OddPartsUnused)
    results = launch(fit_with_unused, 2, strategy)

    assert torch.equal(results[0][2], results[1][2])


def fit_with_unused(rank, strategy):
    """Fit with the option that Lightning's error names."""
    chosen = StrategyRegistry[strategy]
    return fit(rank, chosen["strategy"](**chosen["init_params"], find_unused_parameters=True), OddPartsUnused)


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def loss(self, batch):
        return super().loss((batch * self.phase).real)


class Sparse(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 8, sparse=True)

    def loss(self, batch):
        rows = torch.arange(self.global_rank * 8, self.global_rank * 8 + len(batch))
        return super().loss(batch + self.table(rows))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(("model", "parameter"), [(Complex, "phase"), (Sparse, "table.weight")])
def test_unquantisable_gradients(model, parameter):
    """bytegrad refuses complex and sparse gradients by name before the first step; an all-reduce takes them."""
    with pytest.raises(ValueError, match=f"bytegrad cannot quantise the gradient of '{parameter}'"):
        launch(fit, 2, "distopt_bagua_bytegrad", model)
    results = launch(fit, 2, "distopt_bagua", model)
    reference = launch(fit, 2, "ddp", model)

    torch.testing.assert_close(results[0][2], reference[0][2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [
    lambda: DistOptStrategy("bytegard"),
    lambda: DistOptBaguaStrategy("bytegrad", options={"hierarchcal": True}),
    lambda: DistOptBaguaStrategy("bytegrad", hierarchical=3),
    lambda: DistOptBaguaStrategy("bytegrad", averag=True),
    lambda: DistOptBaguaStrategy(7),
    lambda: DistOptStrategy(timeout=5),
    lambda: DistOptDDPStrategy(find_unused=True),
])  # fmt: skip
def test_bad_arguments_are_refused_at_construction(make):
    """A wrong name, option or type is refused where it is written, with its value and what is valid."""
    with pytest.raises((ValueError, TypeError), match=r"bytegard|hierarchcal|3|averag|7|5|find_unused"):
        make()


@pytest.mark.parametrize("make", [
    lambda: DistOptStrategy(ByteGrad(hierarchical=False)),
    lambda: DistOptBaguaStrategy("bytegrad", options={"hierarchical": False}),
    lambda: DistOptBaguaStrategy("bytegrad", hierarchical=False, find_unused_parameters=True),
])  # fmt: skip
def test_options_reach_the_algorithm(make):
    """The three ways to give an option mean the same, and the strategy pickles and copies with it."""
    strategy = make()

    for twin in (strategy, pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert twin.algorithm.config() == {"hierarchical": False, "average": True}


def test_names_are_registered_and_keep_lightnings_own():
    """Every algorithm has a strategy name, importing twice does no harm, and 'ddp' is still Lightning's."""
    import importlib

    import lightning_distopt

    importlib.reload(lightning_distopt)
    for name in ("distopt_ddp", "distopt_bagua", *(f"distopt_bagua_{n}" for n in ("gradient_allreduce", "bytegrad"))):
        assert isinstance(pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy, DDPStrategy)
    assert type(pl.Trainer(strategy="ddp", accelerator="cpu", devices=1, logger=False).strategy) is DDPStrategy
    assert set(ALGORITHMS) >= {"gradient_allreduce", "bytegrad"}
