"""Checkpoints: what is in the file, what lies beside it, and that a stopped run goes on as if it had never stopped."""

import os
import shutil
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Regression, loader, some_quick, weights
from torch import nn
from worlds import launch, make_trainer

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import (
    ALGORITHMS,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    QAdam,
    QAdamOptimizer,
)
from lightning_distopt.algorithms.comm_hook import PowerSGD

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists:UserWarning", "ignore:The dirpath has changed:UserWarning"
)

# With settings under which five updates leave something under way, and a run repeats itself.
MAKERS = {
    "gradient_allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "qadam": QAdam,
    "decentralized": Decentralized,
    "low_precision_decentralized": LowPrecisionDecentralized,
    "async": partial(AsyncModelAverage, sync_interval_ms=10**9, warmup_steps=2),
    "local_sgd": partial(LocalSGD, period=3),
    "powersgd": partial(PowerSGD, start_powerSGD_iter=2),
    "diloco": partial(DiLoCo, period=4, overlap_steps=2, compression="int4"),
}
UNEQUAL = [name for name, cls in ALGORITHMS.items() if not cls.replicas_equal]
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
QADAM = partial(QAdamOptimizer, lr=0.01, warmup_steps=3)
EPOCH = 5


class Normed(Regression):
    """With statistics that differ between ranks, integers among them."""

    def __init__(self, make_optimizer=SGD) -> None:
        super().__init__(make_optimizer=make_optimizer)
        self.net = nn.Sequential(self.net[0], nn.BatchNorm1d(16), *self.net[1:])


class States(pl.Callback):
    """Keeps this rank's weights, buffers and optimizer state at the end of every epoch."""

    def __init__(self) -> None:
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        tensors = {name: t.detach().clone() for name, t in pl_module.named_parameters()}
        state = trainer.optimizers[0].state_dict()["state"]
        for index, own in state.items():
            tensors.update({f"{index} {name}": torch.as_tensor(value).clone() for name, value in own.items()})
        self.epochs.append(tensors)


def fit(rank, name, directory, make_optimizer=SGD, epochs=2, ckpt_path=None, model_class=Normed, **checkpointing):
    """Fit with a checkpoint per epoch; return the states by epoch, the weights at the end, and the bytes sent."""
    states = States()
    options = {"filename": "{epoch}", "save_top_k": -1, **checkpointing}
    saving = ModelCheckpoint(directory, enable_version_counter=False, **options)
    trainer = make_trainer(
        strategy=DistOptStrategy(MAKERS[name]()),
        max_epochs=epochs,
        limit_train_batches=EPOCH,
        limit_val_batches=2,
        callbacks=[states, saving],
        enable_checkpointing=True,
    )
    model = model_class(make_optimizer=make_optimizer)
    trainer.fit(model, loader(), loader(), ckpt_path=ckpt_path)
    return states.epochs, weights(model)


def optimizers_of(name):
    """Return the optimizers to try."""
    return {"qadam": QADAM} if name == "qadam" else {"sgd": SGD, "adamw": ADAMW}


RESUMED = [
    pytest.param(name, make, id=f"{name}-{optimizer}", marks=[pytest.mark.slow] if optimizer == "adamw" else [])
    for name in MAKERS
    for optimizer, make in optimizers_of(name).items()
]


@pytest.mark.parametrize(("name", "make"), RESUMED)
def test_a_resumed_run_equals_one_that_never_stopped(name, make, tmp_path):
    """10 updates equal 5, a checkpoint, new processes and 5 more: every rank's weights and optimizer state, bit for bit."""
    straight = launch(fit, 2, name, tmp_path / "straight", make)
    launch(fit, 2, name, tmp_path / "half", make, 1)
    resumed = launch(fit, 2, name, tmp_path / "resumed", make, 2, tmp_path / "half" / "epoch=0.ckpt")

    for (whole, end), (second, resumed_end) in zip(straight, resumed, strict=True):
        assert whole[1].keys() == second[0].keys()
        for key in whole[1]:
            assert torch.equal(whole[1][key], second[0][key]), key
        assert torch.equal(end, resumed_end)


@pytest.mark.parametrize("name", some_quick(UNEQUAL))
def test_the_file_holds_the_mean_under_plain_keys(name, tmp_path):
    """A checkpoint holds the mean of the replicas under the module's own keys, each rank its own part beside it."""
    results = launch(fit, 2, name, tmp_path, SGD, 1)
    checkpoint = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    parts = sorted((tmp_path / "rank_states" / "epoch=0.ckpt").iterdir())

    assert checkpoint["state_dict"].keys() == Normed().state_dict().keys()
    assert checkpoint["state_dict"]["net.1.num_batches_tracked"].dtype == torch.int64
    for key, (first, second) in {k: [r[0][0][k] for r in results] for k in dict(Normed().named_parameters())}.items():
        torch.testing.assert_close(checkpoint["state_dict"][key], (first + second) / 2, rtol=0, atol=1e-7)
    for path, (states, _) in zip(parts, results, strict=True):
        part = torch.load(path, weights_only=True)
        assert all(torch.equal(part["replica"][name], states[0][name]) for name, _ in Normed().named_parameters())


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "qadam"])
def test_algorithms_without_own_state_write_one_file(name, tmp_path):
    """Where all ranks hold the same there is nothing beside the checkpoint."""
    launch(fit, 2, name, tmp_path, QADAM, 1)

    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0.ckpt"]


@pytest.mark.parametrize("name", some_quick(["gradient_allreduce", *UNEQUAL]))
def test_loads_everywhere(name, tmp_path):
    """A checkpoint loads in load_from_checkpoint, in a one-device Trainer, in stock ddp, and in another algorithm."""
    launch(fit, 2, name, tmp_path, SGD, 1)
    path = tmp_path / "epoch=0.ckpt"

    Normed.load_from_checkpoint(path, weights_only=True)
    for strategy in ("auto", "ddp"):
        launch(go_on, 1, strategy, path)
    launch(go_on, 2, "ddp", path)
    warned = launch(go_on, 2, "distopt_bagua_bytegrad", path)
    texts = [text for text in warned[0] if "was saved by" in text]

    assert len(texts) == (name in UNEQUAL)
    assert all(name in text and "Dropped" in text for text in texts)


def go_on(rank, strategy, path):
    """Resume for one epoch; return the warnings."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy=strategy, max_epochs=2, limit_train_batches=EPOCH)
        trainer.fit(Normed(), loader(), ckpt_path=path)
    assert trainer.global_step == 2 * EPOCH
    return [str(warning.message) for warning in caught]


def test_a_changed_world_size_loads_the_mean(tmp_path):
    """With another number of ranks every rank goes on from the mean, and a warning names what was dropped."""
    launch(fit, 2, "diloco", tmp_path, SGD, 1)
    with pytest.warns(UserWarning, match="saved by diloco on 2 ranks, and is loaded by diloco on 1: .*Dropped"):
        raise_warning(launch(go_on, 1, "distopt_diloco", tmp_path / "epoch=0.ckpt")[0])


def raise_warning(texts):
    """Show in this process what a rank was warned of."""
    import warnings

    for text in texts:
        if "Dropped" in text:
            warnings.warn(text, UserWarning, stacklevel=1)


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_part_is_named(damage, tmp_path):
    """A part that is missing, cut off or another's is named on all ranks, and the checkpoint before still loads."""
    launch(fit, 2, "local_sgd", tmp_path, SGD, 2)
    folder = tmp_path / "rank_states" / "epoch=1.ckpt"
    part = next(folder.glob("*-rank-1-of-2.pt"))
    if damage == "missing":
        part.unlink()
    elif damage == "truncated":
        part.write_bytes(part.read_bytes()[:-100])
    else:
        shutil.copy(next((tmp_path / "rank_states" / "epoch=0.ckpt").glob("*-rank-1-of-2.pt")), part)
    outcomes = launch(fit, 2, "local_sgd", tmp_path / "x", SGD, 3, tmp_path / "epoch=1.ckpt", allow_failure=True)

    for outcome in outcomes:
        assert "cannot go on exactly" in str(outcome.error)
        assert str(part) in str(outcome.error)
    launch(fit, 2, "local_sgd", tmp_path / "x", SGD, 2, tmp_path / "epoch=0.ckpt")


def test_parts_go_with_their_checkpoint(tmp_path):
    """What save_top_k removes, it removes with its parts; a checkpoint that is written over has the new parts only."""
    launch(partial(fit, save_top_k=1, save_last=True), 2, "local_sgd", tmp_path, SGD, 3)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2.ckpt", "last.ckpt", "rank_states"]
    assert sorted(path.name for path in (tmp_path / "rank_states").iterdir()) == ["epoch=2.ckpt", "last.ckpt"]
    assert all(len(list(path.iterdir())) == 2 for path in (tmp_path / "rank_states").iterdir())


@pytest.mark.parametrize("save_last", [True, "link"])
def test_the_last_checkpoint_is_found(save_last, tmp_path):
    """ckpt_path="last" finds the last checkpoint, a link too, and not the folder with the parts."""
    launch(partial(fit, save_last=save_last), 2, "local_sgd", tmp_path, SGD, 1)
    straight = launch(fit, 2, "local_sgd", tmp_path / "straight", SGD, 2)
    resumed = launch(partial(fit, save_last=save_last), 2, "local_sgd", tmp_path, SGD, 2, "last")

    assert torch.equal(resumed[1][0][0]["net.0.weight"], straight[1][0][1]["net.0.weight"])


def test_a_moved_checkpoint_takes_its_parts_along(tmp_path):
    """Moved and renamed together, a checkpoint and its folder still belong to each other; alone, the file names its lack."""
    launch(fit, 2, "local_sgd", tmp_path / "here", SGD, 1)
    straight = launch(fit, 2, "local_sgd", tmp_path / "straight", SGD, 2)
    there = tmp_path / "there"
    (there / "rank_states").mkdir(parents=True)
    shutil.move(tmp_path / "here" / "epoch=0.ckpt", there / "new.ckpt")
    outcomes = launch(fit, 2, "local_sgd", tmp_path / "x", SGD, 2, there / "new.ckpt", allow_failure=True)
    shutil.move(tmp_path / "here" / "rank_states" / "epoch=0.ckpt", there / "rank_states" / "new.ckpt")
    resumed = launch(fit, 2, "local_sgd", tmp_path / "x", SGD, 2, there / "new.ckpt")

    assert all("rank_states/new.ckpt" in str(outcome.error) for outcome in outcomes)
    assert all("is missing" in str(outcome.error) for outcome in outcomes)
    assert all(torch.equal(left[1], right[1]) for left, right in zip(resumed, straight, strict=True))


def test_a_failed_save_leaves_the_checkpoint_before(tmp_path):
    """Where one rank cannot write its part all ranks end with its reason, and the older checkpoint of that name loads."""
    launch(partial(fit, filename="same"), 2, "local_sgd", tmp_path, SGD, 1)
    before = (tmp_path / "same.ckpt").read_bytes()
    outcomes = launch(fit_on_a_full_disk, 2, tmp_path, allow_failure=True)

    assert (tmp_path / "same.ckpt").read_bytes() == before
    for outcome in outcomes:
        assert "was not saved" in str(outcome.error)
        assert "rank 1: OSError: [Errno 28] No space left on device" in str(outcome.error)
    launch(partial(fit, filename="same"), 2, "local_sgd", tmp_path, SGD, 2, tmp_path / "same.ckpt")

    assert len(list((tmp_path / "rank_states" / "same.ckpt").iterdir())) == 2


def fit_on_a_full_disk(rank, directory):
    """Fit where rank 1 cannot write."""
    if rank == 1:

        def full(*args, **kwargs):
            raise OSError(28, os.strerror(28))

        torch.save = full
    fit(rank, "local_sgd", directory, epochs=1, filename="same")


def test_a_checkpoint_after_an_error_waits_for_nobody(tmp_path):
    """save_on_exception saves what the rank has, although others may be anywhere."""
    outcomes = launch(fit_until_error, 2, tmp_path, allow_failure=True)

    assert all("stop here" in str(outcome.error) for outcome in outcomes)
    saved = [path for path in Path(tmp_path).iterdir() if path.suffix == ".ckpt"]
    assert saved
    assert "lightning_distopt" not in torch.load(saved[0], weights_only=True)


class Stops(Normed):
    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            raise ValueError("stop here")
        return super().training_step(batch, batch_idx)


def fit_until_error(rank, directory):
    """Fit a model that raises on all ranks."""
    fit(rank, "local_sgd", directory, model_class=Stops, save_on_exception=True)
