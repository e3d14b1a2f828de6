"""Odd models, optimizers and settings: each trains with every algorithm, or is refused with the reason and a remedy."""

import copy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from models import ManualRegression, Regression, loader, some_quick, weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import launch, make_trainer

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import ALGORITHMS, AsyncModelAverage, DiLoCo, LocalSGD, QAdamOptimizer

MAKERS = {
    **ALGORITHMS,
    "async": partial(AsyncModelAverage, sync_interval_ms=0),
    "local_sgd": partial(LocalSGD, period=3),
    "diloco": partial(DiLoCo, period=3),
}
GRADIENT = [name for name, cls in ALGORITHMS.items() if cls.exchanges == "gradients"]
WEIGHT = [name for name, cls in ALGORITHMS.items() if cls.exchanges == "weights"]


class Odd(Regression):
    """The base of the models here: takes qadam's optimizer where that is the algorithm."""

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.trainer.strategy.algorithm.name == "qadam":
            return QAdamOptimizer(parameters, lr=0.01, warmup_steps=2)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)


def fit(rank, name, model_class, wrap=None, callbacks=(), options=None, epochs=2, **trainer_options):
    """Fit; gradient algorithms are checked after every update. Return the start's and the end's weights."""
    torch.manual_seed(rank)
    checked = {"check_replicas_every_n_steps": 1} if name in GRADIENT else {}
    model = model_class()
    trainer = make_trainer(
        strategy=DistOptStrategy(MAKERS[name](**(options or {})), **checked),
        max_epochs=epochs,
        limit_train_batches=4,
        callbacks=[make() for make in callbacks],
        **trainer_options,
    )
    start = copy.deepcopy(model.state_dict())
    trainer.fit(model if wrap is None else wrap(model), loader())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return start, model.state_dict(), weights(model)


def agree(results):
    """Return whether all ranks ended with the same weights, and not with those they began with."""
    same = all(torch.equal(result[2], results[0][2]) for result in results)
    moved = [
        key for key in results[0][1] if not torch.equal(results[0][0].get(key, torch.zeros(0)), results[0][1][key])
    ]
    return same and bool(moved)


# -- layers that come late, change or go -------------------------------------------------------------------------------


class MadeInSetup(Odd):
    """Has no layers before setup; their values differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def setup(self, stage) -> None:
        if self.head is None:
            self.head = nn.Linear(8, 8)

    def loss(self, batch):
        return super().loss(batch + self.head(batch))


class MadeInConfigureModel(MadeInSetup):
    def setup(self, stage) -> None:
        """Not here."""

    def configure_model(self) -> None:
        if self.head is None:
            self.head = nn.Linear(8, 8)


class Replaced(MadeInSetup):
    """Replaces a layer at the second epoch, by one that differs between ranks."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = nn.Linear(8, 8)
            self.optimizers().add_param_group({"params": list(self.head.parameters())})


class ReplacedAndForgotten(MadeInSetup):
    """Replaces a layer, and tells no optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = nn.Linear(8, 8)


class OtherMemory(Odd):
    """Gives a weight other memory at every epoch."""

    def on_train_epoch_start(self) -> None:
        self.net[0].weight.data = 0.5 * self.net[0].weight.data


@pytest.mark.parametrize("model", [MadeInSetup, MadeInConfigureModel, Replaced, ReplacedAndForgotten, OtherMemory])
@pytest.mark.parametrize("name", some_quick(ALGORITHMS))
def test_layers_that_come_late(name, model):
    """Layers made in setup or configure_model, replaced layers and replaced memory: replicas agree."""
    results = launch(fit, 2, name, model)

    assert agree(results)
    if model is not ReplacedAndForgotten:
        assert not torch.equal(results[0][1]["net.0.weight"], results[0][0]["net.0.weight"])


class Backbone(Odd):
    """The form that BackboneFinetuning wants."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def loss(self, batch):
        return super().loss(self.backbone(batch))


class BackboneAtEpoch1(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, train_bn=False)


@pytest.mark.parametrize("name", some_quick(ALGORITHMS))
def test_unfrozen_layers_are_exchanged(name):
    """A backbone that is unfrozen in mid-run is exchanged from then on: it moves, and ends equal on all ranks."""
    results = launch(partial(fit, callbacks=[BackboneAtEpoch1]), 2, name, Backbone)

    assert agree(results)
    assert not torch.equal(results[0][1]["backbone.0.weight"], results[0][0]["backbone.0.weight"])


@pytest.mark.parametrize("name", ["gradient_allreduce"])
def test_unfrozen_layers_train_as_on_one_rank(name):
    """Unfrozen in mid-run, two ranks with half the batch each train like one rank with the whole."""
    pair = launch(partial(fit_halves, name=name), 2, 2)
    alone = launch(partial(fit_halves, name=name), 1, 4)

    torch.testing.assert_close(pair[0], alone[0], rtol=1e-5, atol=1e-6)


class EvenBackbone(Backbone):
    """Its loss does not depend on the rank."""

    def loss(self, batch):
        return super().loss(batch) / (1 + self.global_rank)


def fit_halves(rank, batch_size, name):
    """Fit with a global batch of 4."""
    torch.manual_seed(0)
    model = EvenBackbone()
    trainer = make_trainer(
        strategy=DistOptStrategy(name), max_epochs=2, limit_train_batches=4, callbacks=[BackboneAtEpoch1()]
    )
    trainer.fit(model, loader(batch_size=batch_size))
    return weights(model)


# -- how gradients come about ------------------------------------------------------------------------------------------


class Checkpointed(Odd):
    """Tied weights under activation checkpointing."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def loss(self, batch):
        batch = batch.clone().requires_grad_()
        hidden = checkpoint(self.first, batch, use_reentrant=self.reentrant)
        return super().loss(checkpoint(self.second, hidden, use_reentrant=self.reentrant))


class Unchecked(Checkpointed):
    """The same without checkpointing."""

    def loss(self, batch):
        return Odd.loss(self, self.second(self.first(batch)))


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("name", some_quick(name for name in ALGORITHMS if name != "async"))
def test_activation_checkpointing_with_tied_weights(name):
    """Tied weights under activation checkpointing train as without it."""
    plain, checkpointed = (launch(fit, 2, name, model) for model in (Unchecked, Checkpointed))

    assert agree(checkpointed)
    torch.testing.assert_close(checkpointed[0][2], plain[0][2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", some_quick(GRADIENT))
def test_reentrant_checkpointing_of_tied_weights_is_refused(name):
    """DDP would silently exchange a part of the gradient only: refused in the first backward pass, with the remedy."""
    with pytest.raises(RuntimeError, match="'first.weight' got its gradient in several pieces.*use_reentrant=False"):
        launch(fit, 2, name, Reentrant)


def test_a_static_graph_takes_reentrant_checkpoints():
    """The remedy that the refusal names works."""
    reentrant, plain = (launch(fit_static, 2, model) for model in (Reentrant, Unchecked))

    torch.testing.assert_close(reentrant[0], plain[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(reentrant[0], reentrant[1])


def fit_static(rank, model_class):
    """Fit with static_graph=True."""
    torch.manual_seed(rank)
    model = model_class()
    strategy = DistOptStrategy("gradient_allreduce", static_graph=True)
    make_trainer(strategy=strategy, max_epochs=2, limit_train_batches=4).fit(model, loader())
    return weights(model)


@pytest.mark.parametrize("name", some_quick(WEIGHT))
def test_reentrant_checkpointing_where_weights_are_exchanged(name):
    """Algorithms that exchange weights do not look at backward, and take it."""
    assert agree(launch(fit, 2, name, Reentrant))


class PlainBackward(ManualRegression, Odd):
    """Manual optimization that bypasses Lightning."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


@pytest.mark.parametrize("name", some_quick(ALGORITHMS))
def test_plain_backward_in_manual_optimization(name):
    """loss.backward() is refused before the first update where gradients are exchanged, and works elsewhere."""
    if name in GRADIENT:
        with pytest.raises(RuntimeError, match="self.manual_backward"):
            launch(fit, 2, name, PlainBackward)
    else:
        assert agree(launch(fit, 2, name, PlainBackward))


class Clipped(Odd):
    """Its gradients are large, and of different size on the ranks."""

    def loss(self, batch):
        return 100 * super().loss(batch)


@pytest.mark.parametrize(
    ("name", "options"), [("gradient_allreduce", {}), ("local_sgd", {"period": 9, "warmup_steps": 9})]
)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_acts_on_the_averaged_gradient(name, options, algorithm):
    """Clipping sees the mean gradient: two ranks train as one whose loss is that mean."""
    clip = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    pair = launch(partial(fit, options=options, **clip), 2, name, Clipped)
    ddp = launch(partial(fit_stock, **clip), 2, Clipped)

    assert agree(pair)
    torch.testing.assert_close(pair[0][2], ddp[0], rtol=1e-5, atol=1e-6)


def last_gradient(rank, name):
    """Return the gradient that the last update was made from."""
    model = Clipped()
    trainer = make_trainer(strategy=DistOptStrategy(MAKERS[name]()), max_steps=3, gradient_clip_val=0.1)
    trainer.fit(model, loader())
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", some_quick(WEIGHT))
def test_clipping_acts_on_each_ranks_own_gradient(name):
    """Where weights are exchanged, every rank clips its own gradient to the threshold."""
    first, second = launch(last_gradient, 2, name)

    assert first.norm().item() == pytest.approx(0.1, rel=1e-4)
    assert second.norm().item() == pytest.approx(0.1, rel=1e-4)
    assert not torch.allclose(first, second)


def fit_stock(rank, model_class, **options):
    """Fit under Lightning's own ddp."""

    class Stock(model_class):
        configure_optimizers = Regression.configure_optimizers

    torch.manual_seed(rank)
    model = Stock()
    make_trainer(strategy="ddp", max_epochs=2, limit_train_batches=4, **options).fit(model, loader())
    return weights(model)


class Lbfgs(Odd):
    """Its optimizer computes several gradients per update."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("name", some_quick(ALGORITHMS))
def test_lbfgs(name):
    """LBFGS trains where gradients are exchanged, and is refused by the other algorithms."""
    if name in ("gradient_allreduce", "bytegrad"):
        assert agree(launch(fit, 2, name, Lbfgs))
    else:
        with pytest.raises((ValueError, TypeError), match="LBFGS.*(Use gradient_allreduce|QAdamOptimizer)"):
            launch(fit, 2, name, Lbfgs)


# -- precision and compilers -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*precision='16-mixed'.*not supported on CPU:UserWarning")
@pytest.mark.parametrize(
    "precision", ["16-mixed", pytest.param("bf16-mixed", marks=pytest.mark.slow), "bf16-true", "64-true"]
)
@pytest.mark.parametrize("name", some_quick(ALGORITHMS))
def test_precision(name, precision):
    """Every algorithm trains in every precision that the CPU has; replicas agree."""
    results = launch(partial(fit, precision=precision), 2, name, Odd)

    assert agree(results)


@pytest.mark.parametrize("name", ["qadam"])
def test_loss_scaling_is_refused_with_frozen_moments(name):
    """qadam keeps moments of gradients, and refuses a loss scaler with the remedy."""
    with pytest.raises(ValueError, match="bf16-mixed"):
        launch(fit_scaled, 2, name)


def fit_scaled(rank, name):
    """Fit with a GradScaler."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    fit(rank, name, Odd, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


class Silent(Odd):
    """Without self.log, through which torch 2.13's compiler cannot see."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def compiled(model):
    """torch.compile without a C++ compiler."""
    return torch.compile(model, backend="eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", some_quick(name for name in ALGORITHMS if name != "async"))
def test_torch_compile(name):
    """A compiled module trains to the weights of the plain one."""
    results = launch(partial(fit, wrap=compiled), 2, name, Silent, timeout=100)
    plain = launch(fit, 2, name, Silent)

    assert agree(results)
    torch.testing.assert_close(results[0][2], plain[0][2], rtol=1e-4, atol=1e-5)


# -- other shapes and optimizers ---------------------------------------------------------------------------------------


class Shapes(Odd):
    """Parameters of no dimension, no element, other strides, two precisions and two uses; and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.ones(4, 8).t())
        self.precise = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def loss(self, batch):
        hidden = self.frozen * batch @ self.turned * self.precise.float() @ self.turned.t()
        return super().loss(self.scale * hidden / 64) + self.none.sum()


@pytest.mark.parametrize("name", some_quick(ALGORITHMS))
def test_shapes_types_and_strides(name):
    """Scalars, empty tensors, transposed ones, float64 and frozen parameters end equal on all ranks."""
    assert agree(launch(fit, 3, name, Shapes))


class TwoOptimizers(Odd):
    """Manual optimization with an optimizer per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        halves = [self.net[0].parameters(), self.net[2].parameters()]
        if self.trainer.strategy.algorithm.name == "qadam":
            return [QAdamOptimizer(half, lr=0.01, warmup_steps=2) for half in halves]
        return [torch.optim.SGD(half, lr=0.01, momentum=0.9) for half in halves]


@pytest.mark.parametrize("name", some_quick(ALGORITHMS))
def test_two_optimizers(name):
    """With an optimizer per half of the model all ranks end equal."""
    assert agree(launch(fit, 2, name, TwoOptimizers))


def test_a_parameter_that_no_optimizer_has_ends_equal():
    """A callback that changes a weight outside of all optimizers, on each rank otherwise, is levelled at the end."""
    results = launch(partial(fit, callbacks=[Noise]), 2, "local_sgd", Shapes)

    assert torch.equal(results[0][1]["frozen"], results[1][1]["frozen"])


class Noise(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        pl_module.frozen.add_(torch.randn(8))
