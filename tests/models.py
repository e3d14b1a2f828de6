"""Small LightningModules that the Trainer tests share. Losses differ between ranks, so a missing exchange shows."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    """Seeded rows of 8 numbers."""

    def __init__(self, length: int = 64) -> None:
        self.rows = torch.randn(length, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def loader(length: int = 64, batch_size: int = 2) -> DataLoader:
    """A DataLoader over :class:`Numbers`, in order."""
    return DataLoader(Numbers(length), batch_size=batch_size)


class Regression(pl.LightningModule):
    """Two layers; the loss is multiplied by (1 + rank)."""

    def __init__(self, lr: float = 0.02, make_optimizer=None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        self.lr = lr
        self.make_optimizer = make_optimizer

    def loss(self, batch):
        return (1 + self.global_rank) * (self.net(batch).squeeze(-1) - batch.sum(-1)).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch).squeeze(-1) - batch.sum(-1)).square().mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", (self.net(batch).squeeze(-1) - batch.sum(-1)).square().mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        if self.make_optimizer is not None:
            return self.make_optimizer(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class ManualRegression(Regression):
    """The same, in manual optimization."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def weights(module) -> torch.Tensor:
    """Copy all parameters into one 1-D tensor."""
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def some_quick(names, quick=("bytegrad", "decentralized", "diloco")):
    """Return algorithm names as parameters of a test, all slow but one of each kind."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
