"""Faults that were found by trying to break the package."""

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from models import ManualRegression, Regression, loader, weights
from torch import nn
from worlds import launch, make_trainer, run_ranks

from lightning_distopt import DistOptDDPStrategy, QAdamOptimizer, master_only
from lightning_distopt.collectives import CompressedMean, Group
from lightning_distopt.quantize import BlockInt4, MinMaxUInt8


class BiasBeforeNorm(Regression):
    """The first bias has no influence: its gradient is rounding noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def configure_optimizers(self):
        return QAdamOptimizer(self.parameters(), lr=1e-3, warmup_steps=20)


def fit_bias(rank):
    """Train past warm-up; return the largest weight."""
    model = BiasBeforeNorm()
    make_trainer(strategy="distopt_bagua_qadam", max_epochs=5).fit(model, loader(length=128, batch_size=4))
    return weights(model).abs().max().item()


def test_qadam_leaves_noise_alone():
    """A bias in front of a BatchNorm stays small after warm-up."""
    assert max(launch(fit_bias, 2)) < 3


def fit_after_finder(rank, strategy):
    """Let Lightning look for a learning rate, then train."""
    model = Regression(lr=0.01)
    trainer = make_trainer(
        strategy=strategy, max_epochs=1, callbacks=[LearningRateFinder(num_training_steps=8)], enable_checkpointing=True
    )
    trainer.fit(model, loader())
    return weights(model)


@pytest.mark.parametrize("strategy", ["distopt_local_sgd", "distopt_bagua_decentralized", "distopt_bagua_bytegrad"])
def test_a_learning_rate_finder_ends_nothing(strategy):
    """The fit after the finder's own exchanges as ever, and replicas agree at its end."""
    results = launch(fit_after_finder, 2, strategy)

    assert torch.equal(*results)


class Adversarial(ManualRegression):
    """A second net is frozen while the first one's turn lasts, until the next batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic = nn.Linear(1, 1)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net, self.critic)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.critic.requires_grad_(True)
        second.zero_grad()
        self.manual_backward((1 + self.global_rank) * self.critic(self.net(batch)).square().mean())
        second.step()
        self.critic.requires_grad_(False)
        first.zero_grad()
        self.manual_backward((1 + self.global_rank) * (self.critic(self.net(batch)) - 1).square().mean())
        first.step()


def fit_adversarial(rank):
    """Train two nets in turn."""
    model = Adversarial()
    make_trainer(strategy=DistOptDDPStrategy(find_unused_parameters=True), max_steps=12).fit(model, loader())
    return weights(model)


def test_parts_frozen_between_batches_are_still_exchanged():
    """Both nets end equal on both ranks."""
    assert torch.equal(*launch(fit_adversarial, 2))


class UnfreezesLate(Regression):
    """A layer gets its gradient from the fourth batch on, from inside training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx >= 3)
        return self.loss(batch)


def fit_late(rank):
    """Run into the refusal."""
    make_trainer(strategy="distopt_bagua_bytegrad", max_steps=6).fit(UnfreezesLate(), loader())


def test_unfreezing_inside_a_step_is_refused():
    """The layer is named, and the hook to use."""
    with pytest.raises(RuntimeError, match=r"'net\.0\.weight' was added or unfrozen inside.*on_train_batch_start"):
        launch(fit_late, 2)


@pytest.mark.parametrize("codec", [MinMaxUInt8(), BlockInt4()], ids=repr)
def test_nothing_has_a_mean(codec):
    """An empty tensor is exchanged without a byte."""

    def rank_main(rank, process_group):
        group = Group(process_group)
        mean = CompressedMean(torch.empty(0), group, codec)
        mean.scatter()
        mean.gather()
        return mean.finish().numel(), group.traffic.bytes_sent

    assert run_ranks(rank_main, 3) == [(0, 0)] * 3


class NoOptimizer(ManualRegression):
    def configure_optimizers(self):
        return []

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))


def fit_without_optimizer(rank, strategy):
    """Compute gradients and use none."""
    model = NoOptimizer()
    make_trainer(strategy=strategy, max_epochs=1, limit_train_batches=2).fit(model, loader())
    return model.net[0].weight.grad.clone()


def test_no_optimizer():
    """Gradients are exchanged without one; weights are not, which is said."""
    assert torch.equal(*launch(fit_without_optimizer, 2, "distopt_bagua_bytegrad"))
    with pytest.raises(ValueError, match="configure_optimizers returned none"):
        launch(fit_without_optimizer, 2, "distopt_local_sgd")


def test_master_only_wants_plain_functions():
    """The body of an asynchronous generator runs after the call."""

    async def numbers():
        yield 1

    with pytest.raises(TypeError, match="plain function"):
        master_only(numbers)
