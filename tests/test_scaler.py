"""A GradScaler that finds infinities on one rank."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from models import Regression, loader, weights
from worlds import launch, make_trainer

from lightning_distopt.algorithms import ALGORITHMS


class InfiniteOnce(Regression):
    """Rank 1's gradients are infinite in the third batch."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * torch.inf if self.global_rank == 1 and batch_idx == 2 else loss


def fit(rank, name):
    """Train with loss scaling on the CPU; return the weights and the scale at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    prefix = ALGORITHMS[name].strategy_prefix
    trainer = make_trainer(
        strategy=prefix + name, max_steps=8, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    )
    model = InfiniteOnce(lr=0.01)
    trainer.fit(model, loader())
    return weights(model), scaler.get_scale()


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if algorithm.loss_scaling])
def test_an_update_that_one_scaler_skips(name):
    """Every rank goes on, paired with the others; weights stay finite, and agree at the end.

    Where gradients are exchanged all ranks see the infinity and skip together. Where weights are, rank 1 skips alone.
    """
    results = launch(fit, 2, name)

    assert torch.isfinite(results[0][0]).all()
    assert torch.equal(results[0][0], results[1][0])
    alone = ALGORITHMS[name].exchanges == "weights"
    assert [scale for _, scale in results] == ([1024.0, 512.0] if alone else [512.0, 512.0])


def test_qadam_refuses_a_loss_scaler():
    """Moments of scaled gradients would be wrong: the refusal names what to use."""
    with pytest.raises(ValueError, match="bf16-mixed"):
        launch(fit_qadam, 2)


def fit_qadam(rank):
    """Run into the refusal."""
    return fit(rank, "qadam")
