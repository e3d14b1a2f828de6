"""The callbacks in real Trainers on real ranks."""

import copy
import pickle
import random
import time
import warnings
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from models import ManualRegression, Regression, loader, weights
from torch import nn
from worlds import launch, make_trainer

from lightning_distopt import CommMonitor, DistOptStrategy, InitTorch, MasterOnlyCallback, PeriodicModelSync
from lightning_distopt.algorithms import WeightExchange
from lightning_distopt.collectives import DistributedRuntimeException
from lightning_distopt.distributed import master_only, sync_model


class NoExchange(WeightExchange):
    """Leaves every replica to itself, also at the end."""

    name = "no_exchange"

    def finish(self) -> None:
        pass


class LooseStrategy(DDPStrategy):
    """A strategy of somebody else that leaves every replica to itself."""

    def configure_ddp(self) -> None:
        pass


class Observer(Callback):
    """Keeps the weights at the end of every batch and every epoch."""

    def __init__(self) -> None:
        self.batches, self.epochs = [], []

    @property
    def state_key(self) -> str:
        return f"Observer{id(self)}"

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        self.batches.append(weights(pl_module))

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.epochs.append(weights(pl_module))


class TenParameters(Regression):
    """Ten parameters in two groups of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))
        with torch.no_grad():
            for i, parameter in enumerate(self.net.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) / 4)

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return torch.optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.002}], lr=0.01)


class TwoOptimizers(ManualRegression):
    """The second optimizer updates in every second batch."""

    def configure_optimizers(self):
        first, second = self.net[0].parameters(), self.net[2].parameters()
        return torch.optim.SGD(first, lr=0.02), torch.optim.SGD(second, lr=0.02)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        if batch_idx % 2:
            second.step()
        self.zero_grad()


TRAINER_OPTIONS = ("max_epochs", "accumulate_grad_batches", "plugins", "max_steps", "enable_checkpointing")


def observed_fit(rank, model_class=TenParameters, *, strategy=None, batches=12, extra=(), fit=None, **options):
    """Fit under a PeriodicModelSync.

    Args:
        rank: of this process.
        model_class: of the model.
        strategy: by default one that does not exchange.
        batches: per epoch.
        extra: callbacks that come last.
        fit: arguments of Trainer.fit.
        **options: of the Trainer and of PeriodicModelSync.

    Returns:
        The observers before and after the sync, and the weights at the end.
    """
    trainer_options = {name: options.pop(name) for name in TRAINER_OPTIONS if name in options}
    before, after = Observer(), Observer()
    model = model_class()
    trainer = make_trainer(
        strategy=strategy or DistOptStrategy(NoExchange()),
        callbacks=[before, PeriodicModelSync(**options), after, *extra],
        limit_train_batches=batches,
        **{"max_epochs": 1, **trainer_options},
    )
    trainer.fit(model, loader(), **(fit or {}))
    return before, after, weights(model)


def synced_batches(results):
    """Return the batches, from 1, that a sync followed; check that it made different replicas equal."""
    synced = []
    (before, after, _), (other_before, other_after, _) = results
    for i, (own, new) in enumerate(zip(before.batches, after.batches, strict=True)):
        if not torch.equal(own, new):
            assert not torch.equal(own, other_before.batches[i])
            assert torch.equal(new, other_after.batches[i])
            torch.testing.assert_close(new, (own + other_before.batches[i]) / 2)
            synced.append(i + 1)
    return synced


# -- PeriodicModelSync -------------------------------------------------------------------------------------------


def test_three_periods():
    """12 updates with period 4 give exactly 3 syncs: replicas equal right after each, different just before."""
    results = launch(partial(observed_fit, every_n_steps=4), 2)

    assert synced_batches(results) == [4, 8, 12]
    for before, after, end in results:
        assert torch.equal(end, after.batches[-1])
        assert len(before.batches) == 12


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"every_n_steps": 3, "accumulate_grad_batches": 2}, [6, 12]),
        ({"every_n_steps": 4, "model_class": TwoOptimizers}, [4, 8, 12]),
        ({"every_n_steps": 5, "strategy": LooseStrategy()}, [5, 10]),
    ],
    ids=["accumulation", "two optimizers", "another strategy"],
)
def test_updates_are_counted(options, batches):
    """Accumulating batches do not count, two optimizers do not count twice, and the last sync ends the fit."""
    results = launch(partial(observed_fit, **options), 2)

    assert synced_batches(results) == batches
    assert torch.equal(results[0][2], results[1][2])


class Overflow(TenParameters):
    """On rank 1, the gradients of the second batch overflow."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (float("inf") if self.global_rank == 1 and batch_idx == 1 else 1)


def fit_with_scaler(rank):
    """Fit with a GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return observed_fit(rank, Overflow, batches=6, every_n_steps=3, plugins=MixedPrecision("16-mixed", "cpu", scaler))


def test_skipped_update_counts():
    """Ranks stay paired when the GradScaler of one of them skips an update."""
    results = launch(fit_with_scaler, 2)

    assert synced_batches(results) == [3, 6]
    assert torch.equal(results[1][0].batches[0], results[1][0].batches[1])


def test_epochs():
    """every_n_epochs=2 syncs after epochs 2 and 4."""
    results = launch(partial(observed_fit, every_n_epochs=2, batches=3, max_epochs=4), 2)

    assert synced_batches(results) == []
    assert [torch.equal(*pair) for pair in zip(results[0][1].epochs, results[1][1].epochs, strict=True)] == [
        False, True, False, True,
    ]  # fmt: skip


def fit_and_save(rank, directory, **options):
    """Fit 5 updates, with a checkpoint after every third."""
    saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    return observed_fit(rank, extra=[saver], enable_checkpointing=True, **{"batches": 5, **options})


@pytest.mark.parametrize("strategy", [None, LooseStrategy()], ids=["own", "another"])
def test_checkpoints_hold_synced_weights(tmp_path, strategy):
    """A sync precedes a checkpoint: the file holds what both ranks hold, and they train on from there."""
    results = launch(partial(fit_and_save, strategy=strategy, every_n_steps=100), 2, tmp_path)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]
    third = [before.batches[2] for before, _, _ in results]

    assert not torch.equal(third[0], third[1])
    torch.testing.assert_close(torch.cat([v.reshape(-1) for v in saved.values()]), (third[0] + third[1]) / 2)
    assert torch.equal(results[0][2], results[1][2])


def test_resume_keeps_the_rhythm(tmp_path):
    """A run resumed after update 3 syncs after updates 4, 8 and 12, as if it had never stopped."""
    launch(partial(fit_and_save, every_n_steps=4), 2, tmp_path)
    resumed = {"batches": 20, "max_steps": 12, "fit": {"ckpt_path": tmp_path / "step=3.ckpt"}}
    results = launch(partial(fit_and_save, every_n_steps=4, **resumed), 2, tmp_path)

    assert [3 + batch for batch in synced_batches(results)] == [4, 8, 12]


def save_in_validation(rank, directory):
    """Save when validation ends, while the strategy shows the mean."""
    saver = ModelCheckpoint(directory, filename="{step}", monitor="val_loss")
    return observed_fit(
        rank,
        batches=3,
        every_n_steps=100,
        extra=[saver],
        enable_checkpointing=True,
        fit={"val_dataloaders": loader(4)},
    )


def test_checkpoint_in_validation(tmp_path):
    """A checkpoint written in validation holds the mean, and the fit still ends with equal replicas."""
    results = launch(save_in_validation, 2, tmp_path)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]

    torch.testing.assert_close(torch.cat([v.reshape(-1) for v in saved.values()]), results[0][2])
    assert torch.equal(results[0][2], results[1][2])


def save_average(rank, directory, sync_first):
    """Save with a WeightAveraging beside the sync."""
    saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=3)
    pair = [PeriodicModelSync(every_n_steps=1), WeightAveraging()]
    model = TenParameters()
    trainer = make_trainer(
        strategy=DistOptStrategy(NoExchange()),
        callbacks=[*(pair if sync_first else reversed(pair)), saver],
        max_steps=3,
        enable_checkpointing=True,
    )
    trainer.fit(model, loader())


@pytest.mark.parametrize("sync_first", [True, False])
def test_checkpoint_beside_weight_averaging(tmp_path, sync_first):
    """Lightning's WeightAveraging still saves its average as the model, whichever callback comes first."""
    launch(save_average, 2, tmp_path, sync_first)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    average, current = saved["state_dict"], saved["current_model_state"]

    assert any(not torch.equal(average[name], current[name]) for name in average)


def warned(rank, strategy, make_callback, fits=2):
    """Fit twice with one callback, and return the messages that speak of it."""
    callback = make_callback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(fits):
            make_trainer(strategy=strategy, callbacks=[callback], max_steps=2).fit(Regression(), loader())
    return [str(w.message) for w in caught if type(callback).__name__ in str(w.message)]


@pytest.mark.parametrize("strategy", ["ddp", "distopt_bagua_bytegrad"])
def test_nothing_to_sync_is_said_once(strategy):
    """Under a strategy that keeps replicas equal, PeriodicModelSync says so once, on rank 0."""
    first, second = launch(warned, 2, strategy, partial(PeriodicModelSync, every_n_steps=1))

    assert len(first) == 1
    assert "equal after every update" in first[0]
    assert second == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_n_steps": 0},
        {"every_n_epochs": -1},
        {"every_n_steps": 2.0},
        {"sync_parameters": 1},
        {"sync_parameters": False, "sync_buffers": False},
    ],
)
def test_bad_schedules_are_refused(arguments):
    """A period below 1, a wrong type, or nothing to sync is refused at construction, by name."""
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        PeriodicModelSync(**arguments)


def fit_with_lbfgs(rank):
    """Fit with LBFGS."""
    model = Regression(make_optimizer=torch.optim.LBFGS)
    make_trainer(callbacks=[PeriodicModelSync(1)], strategy="distopt_ddp", max_steps=1).fit(model, loader())


def test_lbfgs_is_refused():
    """LBFGS, whose gradients per update differ between ranks, is refused before the first update."""
    with pytest.raises(ValueError, match="LBFGS"):
        launch(fit_with_lbfgs, 1)


# -- MasterOnlyCallback ------------------------------------------------------------------------------------------


class Notes(Callback):
    """Notes its hooks; a note that was loaded comes back."""

    def __init__(self) -> None:
        self.hooks, self.loaded = [], None

    def setup(self, trainer, pl_module, stage) -> None:
        self.hooks.append("setup")

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.hooks.append("on_train_epoch_end")
        self.log("from_the_master", 7.0)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self.hooks.append("on_save_checkpoint")

    def on_load_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self.hooks.append("on_load_checkpoint")

    def state_dict(self):
        return {"note": 5}

    def load_state_dict(self, state_dict) -> None:
        self.loaded = state_dict["note"]


class MasterNotes(MasterOnlyCallback, Notes):
    """The same, guarded by subclassing; its own hook calls the base's."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        super().on_train_epoch_end(trainer, pl_module)


def wrapped_notes():
    """Guard a callback that exists."""
    return MasterOnlyCallback.wrap(Notes())


def noted(rank, make_callback, path):
    """Fit, save, and fit on in another Trainer; return what the second callback noted."""
    first, second = make_callback(), make_callback()
    trainer = make_trainer(strategy="distopt_ddp", callbacks=[first], max_epochs=1)
    trainer.fit(Regression(), loader(8))
    trainer.save_checkpoint(path)
    trainer = make_trainer(strategy="distopt_ddp", callbacks=[second], max_epochs=2)
    trainer.fit(Regression(), loader(8), ckpt_path=path)
    return first.hooks, second.hooks, second.loaded, trainer.callback_metrics.get("from_the_master")


@pytest.mark.parametrize("make_callback", [MasterNotes, wrapped_notes])
def test_hooks_run_on_the_master(tmp_path, make_callback):
    """Overridden hooks run on rank 0 only; state is saved and loaded on every rank."""
    first, second = launch(noted, 2, make_callback, tmp_path / "file.ckpt")

    assert first == (
        ["setup", "on_train_epoch_end", "on_save_checkpoint"],
        ["setup", "on_load_checkpoint", "on_train_epoch_end"],
        5,
        7.0,
    )
    assert second == ([], ["on_load_checkpoint"], 5, None)


def test_wrapped_callback_stays_itself():
    """wrap returns the same object, of the same class and key for Lightning; it copies, pickles, and wraps twice."""
    plain = Notes()
    key = plain.state_key
    wrapped = MasterOnlyCallback.wrap(plain)

    assert wrapped is plain
    assert MasterOnlyCallback.wrap(wrapped) is wrapped
    for twin in (wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert isinstance(twin, MasterOnlyCallback)
        assert isinstance(twin, Notes)
        assert (twin.state_key, twin.hooks, twin.state_dict()) == (key, [], {"note": 5})


def lambda_runs(rank):
    """Return how often a wrapped LambdaCallback ran."""
    runs = []
    callback = MasterOnlyCallback.wrap(LambdaCallback(on_train_start=lambda *args: runs.append(1)))
    make_trainer(callbacks=[callback], max_steps=1, strategy="distopt_ddp").fit(Regression(), loader())
    return len(runs)


def test_wrap_guards_hooks_of_the_object():
    """Hooks that a callback holds as attributes, as LambdaCallback does, are guarded, too."""
    assert launch(lambda_runs, 2) == [1, 0]


class Reckless(MasterOnlyCallback):
    """Tries every collective on the master alone."""

    def __init__(self, path) -> None:
        self.path, self.refused, self.seconds = path, {}, 0.0

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        one = torch.ones(1)
        tries = {
            "reduce": lambda: trainer.strategy.reduce(one),
            "reduce_boolean_decision": lambda: trainer.strategy.reduce_boolean_decision(True),
            "barrier": trainer.strategy.barrier,
            "broadcast": lambda: trainer.strategy.broadcast(1),
            "all_gather": lambda: pl_module.all_gather(one),
            "sync_model": lambda: sync_model(pl_module),
            "log": lambda: pl_module.log("a", one, sync_dist=True),
            "log_dict": lambda: self.log_dict({"b": one}, sync_dist=True),
            "save_checkpoint": lambda: trainer.save_checkpoint(self.path),
        }
        start = time.monotonic()
        for name, attempt in tries.items():
            try:
                attempt()
            except DistributedRuntimeException as error:
                self.refused[name] = str(error)
            else:
                self.refused[name] = "not refused"
        self.seconds = time.monotonic() - start


def reckless_fit(rank, path):
    """Fit with Reckless."""
    callback = Reckless(path)
    trainer = make_trainer(strategy="distopt_ddp", callbacks=[callback], max_epochs=1, limit_train_batches=2)
    trainer.fit(Regression(), loader())
    return callback.refused, callback.seconds


def test_collectives_in_a_guarded_hook_are_refused(tmp_path):
    """Inside a hook of the master every collective raises at once, with the hook's name; then training goes on."""
    (refused, seconds), (elsewhere, _) = launch(reckless_fit, 2, tmp_path / "file.ckpt")

    assert {name: text for name, text in refused.items() if "Reckless.on_train_epoch_end" not in text} == {}
    assert len(refused) == 9
    assert seconds < 5
    assert elsewhere == {}


class LogsOnTheMaster(Regression):
    """Logs a reduced value in a function of the master."""

    @master_only
    def note(self, loss) -> None:
        self.log("noted", loss, sync_dist=True)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.note(loss)
        return loss


def log_on_the_master(rank):
    """Fit LogsOnTheMaster."""
    make_trainer(strategy="distopt_ddp", max_steps=1).fit(LogsOnTheMaster(), loader())


def test_reduced_log_in_a_master_only_function():
    """self.log(sync_dist=True) inside a master_only method ends with its name, not with a hang."""
    with pytest.raises(DistributedRuntimeException, match="LogsOnTheMaster.note"):
        launch(log_on_the_master, 2)


# -- CommMonitor -------------------------------------------------------------------------------------------------


class Memory(DummyLogger):
    """Keeps what it is told, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = {}

    def log_metrics(self, metrics, step=None) -> None:
        self.lines[step] = {name: value for name, value in metrics.items() if name.startswith("comm/")}


class Larger(Regression):
    """A hundred thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 300), nn.Linear(300, 1))
        self.calls = []

    def log(self, name, *args, **kwargs) -> None:
        self.calls.append(name)
        super().log(name, *args, **kwargs)


def monitored(rank, strategy):
    """Fit 12 updates; return what was logged, by step, and the numbers behind it."""
    logger = Memory()
    model = Larger()
    trainer = make_trainer(
        strategy=strategy, callbacks=[CommMonitor()], max_steps=12, logger=logger, log_every_n_steps=5
    )
    start = time.perf_counter()
    trainer.fit(model, loader())
    seconds = time.perf_counter() - start
    num_parameters = sum(p.numel() for p in model.parameters())
    num_calls = sum(name.startswith("comm/") for name in model.calls)
    shown = {name for name in trainer.progress_bar_metrics if name.startswith("comm/")}
    return logger.lines, num_calls, shown, num_parameters, seconds


@pytest.mark.parametrize(("strategy", "saving"), [("distopt_ddp", 0.0), ("distopt_bagua_bytegrad", 0.75), (None, 1.0)])
def test_monitor_logs_what_is_sent(strategy, saving):
    """At W = 2 an all-reduce sends 4 bytes per parameter and update, bytegrad a quarter, no exchange nothing."""
    strategy = strategy or DistOptStrategy(NoExchange())
    lines, num_calls, shown, num_parameters, seconds = launch(monitored, 2, strategy)[0]

    assert sorted(lines) == [4, 9]  # Lightning counts from 0
    assert num_calls == 4 * 2
    for step, line in lines.items():
        assert set(line) == shown
        assert line["comm/saving"] == pytest.approx(saving, abs=0.02)
        assert line["comm/mb_per_step"] == pytest.approx((1 - saving) * 4e-6 * num_parameters, abs=0.02)
        assert 0 <= line["comm/wait_ms_per_step"] * (step + 1) <= 1000 * seconds
    growth = lines[9]["comm/mb_total"] - lines[4]["comm/mb_total"]
    assert growth == pytest.approx(5 * lines[9]["comm/mb_per_step"], abs=1e-3)


def test_monitor_under_another_strategy():
    """Under a strategy that does not count, CommMonitor says so once, on rank 0."""
    first, second = launch(warned, 2, "ddp", CommMonitor)

    assert len(first) == 1
    assert "does not count what it sends" in first[0]
    assert second == []


# -- InitTorch ---------------------------------------------------------------------------------------------------


def flags():
    """Return torch's flags that InitTorch may set."""
    return {
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn": torch.backends.cudnn.deterministic,
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def flags_over_time(rank, arguments, trainer_options, fail=False):
    """Return flags before, during two stages and afterwards, and what InitTorch warned of."""
    seen = [flags()]

    def look(*args):
        seen.append(flags())
        if fail:
            raise ValueError("on purpose")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [InitTorch(**arguments), LambdaCallback(on_train_start=look, on_validation_start=look)]
        trainer = make_trainer(callbacks=callbacks, max_steps=1, **trainer_options)
        for stage in (trainer.fit, trainer.validate):
            with suppress(ValueError):
                stage(Regression(), loader(4))
    seen.append(flags())
    return (
        seen,
        [str(w.message) for w in caught if "InitTorch" in str(w.message)],
        torch.cuda.is_initialized(),
    )


PLAIN = {"benchmark": False, "cudnn": False, "algorithms": False, "warn_only": False, "tf32": False}


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("cuda_optimize_for_speed", {"benchmark": True, "tf32": True}),
        ("cuda_reproducible", {"cudnn": True, "algorithms": True}),
    ],
)
def test_flags_come_and_go(argument, wanted, fail):
    """Flags hold during fit, and the earlier ones come back after it and after an error. CUDA does not start."""
    (seen, texts, cuda_started), = launch(flags_over_time, 1, {argument: True}, {}, fail)  # fmt: skip

    assert seen[0] == seen[-1] == PLAIN
    assert all(during == {**PLAIN, **wanted} for during in seen[1:-1])
    assert texts == []
    assert not cuda_started


@pytest.mark.parametrize(
    ("argument", "told", "during", "after"),
    [
        ("cuda_optimize_for_speed", {"benchmark": False}, {"tf32": True}, {}),
        ("cuda_reproducible", {"deterministic": False}, {"cudnn": True}, {}),
        ("cuda_reproducible", {"benchmark": True}, {"cudnn": True, "algorithms": True, "benchmark": True},
         {"benchmark": True}),
        ("cuda_reproducible", {"deterministic": "warn"}, {"cudnn": True, "algorithms": True, "warn_only": True},
         {"algorithms": True, "warn_only": True}),
    ],
)  # fmt: skip
def test_what_the_trainer_was_told_wins(argument, told, during, after):
    """Explicit deterministic= and benchmark= of the Trainer hold, in every fit, and are reported once."""
    (seen, texts, _), = launch(flags_over_time, 1, {argument: True}, told)  # fmt: skip

    assert seen == [PLAIN, {**PLAIN, **during}, {**PLAIN, **during}, {**PLAIN, **after}]
    assert len(texts) == 1
    assert f"{next(iter(told))}={next(iter(told.values()))}" in texts[0]
    assert argument in texts[0]


def draws(rank, seed):
    """Return what the generators give when fit starts."""
    seen = []

    def draw(*args, **kwargs):
        seen.append((random.random(), np.random.rand(), torch.rand(()).item()))

    callbacks = [InitTorch(seed), LambdaCallback(setup=draw)]
    make_trainer(callbacks=callbacks, max_steps=1, strategy="distopt_ddp").fit(Regression(), loader())
    return seen


def test_seeds():
    """The same seed gives every rank, and every run, the same streams in random, NumPy and torch."""
    first, second = launch(draws, 2, 3)

    assert first == second == launch(draws, 2, 3)[0]
    assert first != launch(draws, 2, 4)[0]


def test_speed_and_reproducibility_exclude_each_other():
    """Both flags at once are refused, and leave the flags alone."""
    before = flags()
    with pytest.raises(RuntimeError, match="cuda_optimize_for_speed"):
        InitTorch(cuda_optimize_for_speed=True, cuda_reproducible=True)

    assert flags() == before
