"""Replicas agree whenever someone looks, and go on from their own weights afterwards."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from models import Regression, loader, some_quick, weights
from torch import nn
from worlds import launch, make_trainer, run_ranks

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import ALGORITHMS, AsyncModelAverage, DiLoCo, LocalSGD
from lightning_distopt.collectives import DistributedRuntimeException, Group, checksum
from lightning_distopt.replicas import check_replicas

MAKERS = {
    **ALGORITHMS,
    "async": partial(AsyncModelAverage, sync_interval_ms=10**9),
    "local_sgd": partial(LocalSGD, period=3),
    "diloco": partial(DiLoCo, period=4, overlap_steps=2),
}
UNEQUAL = [name for name, cls in ALGORITHMS.items() if not cls.replicas_equal]
EQUAL = ["gradient_allreduce", "bytegrad"]


class Normed(Regression):
    """With running statistics; validates on the same batches on every rank, and leaves metrics unsynced."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], nn.BatchNorm1d(16), *self.net[1:])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch).squeeze(-1) - batch.sum(-1)).square().mean())

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.trainer.limit_val_batches == 0:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Looks(pl.Callback):
    """Keeps what validation sees, what training has around it, and what was decided."""

    def __init__(self) -> None:
        self.seen, self.before, self.after = [], [], []
        self.stayed, self.metrics, self.rates = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        self.before.append(state(pl_module))

    def on_validation_start(self, trainer, pl_module) -> None:
        self.seen.append(state(pl_module))

    def on_validation_end(self, trainer, pl_module) -> None:
        self.stayed.append(all(map(torch.equal, state(pl_module).values(), self.seen[-1].values())))
        self.metrics.append(trainer.callback_metrics["val_loss"].item())

    def on_train_batch_start(self, trainer, pl_module, *args) -> None:
        self.after.append(state(pl_module))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def state(module):
    """Copy a module's parameters and buffers."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same_loader():
    """A loader whose batches are the same on every rank."""
    return torch.utils.data.DataLoader(loader().dataset, batch_size=4, sampler=range(16))


def fit(rank, name, directory, validate=True, epochs=3, more=(), **options):
    """Fit, validating once per epoch; return what was looked at, the checkpoint chosen, and the end."""
    looks = Looks()
    best = ModelCheckpoint(directory, monitor="val_loss", save_top_k=1)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.5)
    trainer = make_trainer(
        strategy=DistOptStrategy(MAKERS[name](), **options),
        max_epochs=epochs,
        limit_train_batches=5,
        limit_val_batches=2 if validate else 0,
        callbacks=[looks, *([best, stopping] if validate else []), *(make() for make in more)],
        enable_checkpointing=validate,
        use_distributed_sampler=False,
    )
    model = Normed()
    trainer.fit(model, loader(), same_loader())
    return looks, best.best_model_path, trainer.current_epoch, state(model)


@pytest.mark.parametrize("name", UNEQUAL)
def test_evaluation_sees_the_mean_and_training_goes_on(name, tmp_path):
    """During fit every rank validates the mean of the replicas, decides alike, and goes on from its own bits."""
    results = launch(fit, 2, name, tmp_path)
    looks = [result[0] for result in results]

    assert not torch.equal(looks[0].before[4]["net.0.weight"], looks[1].before[4]["net.0.weight"])
    for epoch in range(len(looks[0].seen)):
        for key, mean in looks[0].seen[epoch].items():
            assert torch.equal(mean, looks[1].seen[epoch][key])
            own = [look.before[5 * epoch + 4][key] for look in looks]
            if mean.is_floating_point():
                torch.testing.assert_close(mean, (own[0] + own[1]) / 2, rtol=0, atol=1e-6)
            else:
                assert mean.dtype == own[0].dtype
    for look in looks:
        assert all(look.stayed)
        for epoch in range(1, len(look.after) // 5):
            for key, value in look.after[5 * epoch].items():
                assert torch.equal(value, look.before[5 * epoch - 1][key])
    assert looks[0].metrics == looks[1].metrics
    assert looks[0].rates == looks[1].rates
    assert results[0][1] == results[1][1] != ""
    assert results[0][2] == results[1][2]
    assert all(map(torch.equal, results[0][3].values(), results[1][3].values()))


@pytest.mark.parametrize("name", some_quick(UNEQUAL))
def test_looking_changes_nothing(name, tmp_path):
    """A fit that validates and saves ends with the bits of one that does neither."""
    watched = launch(partial(fit, epochs=1), 2, name, tmp_path)
    alone = launch(partial(fit, validate=False, epochs=1), 2, name, tmp_path)

    for (_, _, _, left), (_, _, _, right) in zip(watched, alone, strict=True):
        assert all(map(torch.equal, left.values(), right.values()))


class Start(pl.Callback):
    """Keeps the weights with which training starts."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.weights = weights(pl_module)


def start_of_fit(rank, name):
    """Start from values that differ between ranks; return them, and what training starts with."""
    model, start = Regression(), Start()
    with torch.no_grad():
        model.net[0].weight += rank
    own = weights(model)
    make_trainer(strategy=DistOptStrategy(name), max_steps=1, callbacks=[start]).fit(model, loader())
    return own, start.weights


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "qadam"])
def test_training_starts_with_the_weights_of_rank_0(name):
    """However each rank has initialised its model, all start from rank 0's."""
    results = launch(start_of_fit, 2, name)

    assert not torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(start, results[0][0]) for _, start in results)


class Unsynced(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def fit_unsynced(rank, name):
    """Fit a model whose monitored metric differs between ranks; return warnings that name the remedy."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            strategy=DistOptStrategy(name),
            max_epochs=3,
            limit_train_batches=2,
            callbacks=[EarlyStopping("val_loss", patience=9)],
        )
        trainer.fit(Unsynced(), loader(), loader(8))
    return [str(w.message) for w in caught if "The monitored" in str(w.message)]


@pytest.mark.parametrize("name", ["gradient_allreduce", "local_sgd"])
def test_an_unsynced_metric_is_named(name):
    """A monitored metric that differs between ranks is named once, with the remedy."""
    warned = launch(fit_unsynced, 2, name)

    assert len(warned[0]) == 1
    assert "The monitored val_loss differs between ranks" in warned[0][0]


# -- callbacks that average weights ----------------------------------------------------------------------------------


def make_ema():
    """Lightning's moving average, its weights in reach."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.5)


class EvaluatedWeights(pl.Callback):
    """Keeps the weights that validation batches see."""

    def __init__(self) -> None:
        self.seen = []

    def on_validation_batch_end(self, trainer, pl_module, *args) -> None:
        self.seen.append(weights(pl_module))


def fit_averaging(rank, name, averages, first, directory, model_class=Regression):
    """Fit with a callback that averages weights, before or after the others; return what the ranks saw and ended with."""
    seen, updates = EvaluatedWeights(), Looks()
    averaging = make_ema() if averages == "ema" else StochasticWeightAveraging(0.01, swa_epoch_start=1)
    saving = ModelCheckpoint(directory, save_last=True)
    callbacks = [averaging, seen, updates, saving] if first else [seen, updates, saving, averaging]
    trainer = make_trainer(
        strategy=DistOptStrategy(MAKERS[name]()),
        max_epochs=3,
        limit_train_batches=5,
        limit_val_batches=1,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    model = model_class()
    trainer.fit(model, loader(), loader())
    end = state(model)
    trainer.test(model, loader(8), verbose=False)
    return seen.seen, updates.before, end


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", some_quick(["gradient_allreduce", *UNEQUAL]))
def test_moving_average(name, first, tmp_path):
    """With EMAWeightAveraging every rank validates, saves and ends with the moving average of the mean of replicas."""
    results = launch(fit_averaging, 2, name, "ema", first, tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    mean = [
        {key: (left[key] + right[key]) / 2 for key in left}
        for left, right in zip(results[0][1], results[1][1], strict=True)
    ]
    average = mean[0]
    for update in mean[1:]:
        average = {key: (average[key] + value) / 2 for key, value in update.items()}

    assert all(map(torch.equal, results[0][0], results[1][0]))
    for key, value in average.items():
        torch.testing.assert_close(results[0][2][key], value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(saved[key], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(results[0][2][key], results[1][2][key])


class PlainNormed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], nn.BatchNorm1d(16), *self.net[1:])


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning", "ignore:Swapping scheduler:UserWarning")
@pytest.mark.parametrize("model_class", [Regression, PlainNormed], ids=["plain", "batch norm"])
@pytest.mark.parametrize("name", some_quick(["gradient_allreduce", *UNEQUAL]))
def test_stochastic_weight_averaging(name, model_class, tmp_path):
    """With StochasticWeightAveraging all ranks end with the mean, over epochs and ranks, of the weights at epoch starts."""
    results = launch(fit_averaging, 2, name, "swa", True, tmp_path, model_class)
    # It collects at the start of epochs 0, 1 and 2: Lightning counts swa_epoch_start from 1.
    mean = torch.stack([(a["net.0.weight"] + b["net.0.weight"]) / 2
                        for a, b in zip(results[0][1], results[1][1], strict=True)])  # fmt: skip
    expected = torch.stack([Regression().state_dict()["net.0.weight"], mean[4], mean[9]]).mean(0)

    for key, value in results[0][2].items():
        assert torch.equal(value, results[1][2][key]), key
    torch.testing.assert_close(results[0][2]["net.0.weight"], expected, rtol=1e-5, atol=1e-5)


# -- several runs in one process ---------------------------------------------------------------------------------------


def run_repeatedly(rank, name, directory):
    """Fit, validate, fit and test with one Trainer, then fit with another; return weights after every stage."""
    model, ends = Regression(), []
    trainer = make_trainer(strategy=DistOptStrategy(MAKERS[name]()), max_epochs=1, limit_train_batches=5)
    for stage in ("fit", "validate", "fit", "test"):
        if stage == "fit":
            trainer.fit_loop.max_epochs = 1 + trainer.current_epoch
        getattr(trainer, stage)(model, loader(40))
        ends.append(weights(model))
    other = make_trainer(strategy=DistOptStrategy(MAKERS[name]()), max_epochs=1, limit_train_batches=5)
    other.fit(model, loader())
    ends.append(weights(model))
    other.save_checkpoint(directory / "end.ckpt")
    return ends


@pytest.mark.parametrize("name", some_quick(name for name in ALGORITHMS if name != "qadam"))
def test_stages_and_trainers_follow_each_other(name, tmp_path):
    """fit, validate, fit and test work in one process, so does a second Trainer, and replicas agree after each."""
    results = launch(run_repeatedly, 2, name, tmp_path)

    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    first, validated, second, tested, other = results[0]
    assert torch.equal(first, validated)
    assert not torch.equal(validated, second)
    assert torch.equal(second, tested)
    assert not torch.equal(tested, other)


# -- the check ---------------------------------------------------------------------------------------------------------


class Astray(Regression):
    """Rank 1 changes one weight in its third batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            with torch.no_grad():
                self.net[2].weight[0, 3] += 1e-6


def fit_checked(rank, model_class, name, every):
    """Fit with the check on."""
    trainer = make_trainer(
        strategy=DistOptStrategy(name, check_replicas_every_n_steps=every), max_epochs=1, limit_train_batches=9
    )
    trainer.fit(model_class(), loader())


@pytest.mark.parametrize("name", EQUAL)
def test_the_check_finds_one_changed_bit(name):
    """Replicas that should be equal and are not end the run on every rank at the next check, with step and parameter."""
    launch(fit_checked, 2, Regression, name, 1)
    outcomes = launch(fit_checked, 2, Astray, name, 4, allow_failure=True)

    for outcome in outcomes:
        assert isinstance(outcome.error, DistributedRuntimeException)
        assert "differ after update 4: the first parameter that is not the same on every rank is 'net.2.weight'" in str(
            outcome.error
        )


@pytest.mark.parametrize("name", UNEQUAL)
def test_the_check_is_refused_where_replicas_differ(name):
    """For algorithms whose replicas differ by design the check has no meaning, and says so."""
    with pytest.raises(ValueError, match=f"check_replicas_every_n_steps=3 has no meaning with {name}"):
        DistOptStrategy(name, check_replicas_every_n_steps=3)


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_the_period_of_the_check_is_checked(value):
    """It is a number of steps."""
    with pytest.raises((ValueError, TypeError), match="check_replicas_every_n_steps"):
        DistOptStrategy("bytegrad", check_replicas_every_n_steps=value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_checksum_sees_values_and_order(dtype):
    """Equal elements have equal checksums, whatever the strides; another value, or another order, has another one."""
    tensor = (torch.arange(600_000).view(1000, 600) % 7 == 0).to(dtype)
    other = tensor.clone()
    other[999, 599] = other[0, 0] if other[999, 599] == 0 else 0

    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
    assert checksum(tensor) != checksum(other)
    assert checksum(tensor) != checksum(tensor.t())
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 3))


def test_the_check_costs_8_bytes():
    """Where replicas are equal, each rank sends 8 bytes to each other rank."""

    def check(rank, process_group):
        group = Group(process_group)
        torch_module = nn.Linear(3, 3)
        with torch.no_grad():
            torch_module.weight.fill_(1.0)
            torch_module.bias.fill_(2.0)
        check_replicas(torch_module, group, 1)
        return group.traffic.bytes_sent

    assert run_ranks(check, 3) == [16, 16, 16]
