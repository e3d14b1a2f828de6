"""AsyncModelAverage: rounds that overlap with training, on ranks that run at different speeds."""

import copy
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from models import Regression, loader, weights
from oracles import ORACLES, flat, oracle_training
from torch import nn
from worlds import launch, make_trainer, run_ranks

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import AsyncModelAverage
from lightning_distopt.collectives import DistributedRuntimeException, Group

NEVER = 3_600_000  # an interval in ms that does not pass


class Walk(nn.Module):
    """Every update moves all weights of rank r by -(1 + r): so it is known where their mean must be.

    The forward pass reads the weight twice, and demands that it has not changed between.
    """

    def __init__(self, numel: int = 23, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self):
        first = self.weight.detach().clone()
        time.sleep(0.0005)
        assert torch.equal(first, self.weight)
        return self.weight.sum()


class Walker:
    """One rank that walks."""

    def __init__(self, rank, process_group, algorithm, module=None) -> None:
        self.rank, self.algorithm = rank, algorithm
        self.module = Walk() if module is None else module
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.group = Group(process_group if process_group.size() > 1 else None, timeout=timedelta(seconds=30))
        algorithm.setup(self.module, [self.optimizer], self.group)

    def update(self, pause=0.0):
        """One update, in which the rank pauses between forward and backward."""
        self.optimizer.zero_grad()
        loss = (1 + self.rank) * self.module()
        seen = self.weights()
        time.sleep(pause)
        loss.backward()
        assert torch.equal(self.weights(), seen)
        self.algorithm.before_step()
        self.optimizer.step()
        self.algorithm.after_step()

    def weights(self):
        """This rank's flat weights."""
        return flat(self.module.parameters())


def mean_walk(updates):
    """Where all weights must be when rank r has done ``updates[r]`` updates."""
    return -sum((1 + rank) * n for rank, n in enumerate(updates)) / len(updates)


def assert_all_at(results, position):
    """All ranks hold the same bits, and they are at this position."""
    for result in results:
        assert torch.equal(result, results[0])
    torch.testing.assert_close(results[0], torch.full_like(results[0], position), rtol=1e-5, atol=1e-4)


# -- the mathematics -----------------------------------------------------------------------------------------


class OneWeight(nn.Module):
    """One parameter of 23 elements, which no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(23, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return x @ self.weight


def loss(model, rank, step):
    """A loss that differs between ranks in data and in size."""
    x = torch.randn(8, 23, generator=torch.Generator().manual_seed(100 * rank + step))
    return (1 + rank) * (model(x) - 1).square().mean()


def make_optimizer(parameters):
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class PunctualRun:
    """One rank's training in which every round is back before the next update: ``state_dict`` waits for
    it."""

    def __init__(self, rank, process_group, **options) -> None:
        self.rank, self.module = rank, OneWeight()
        self.optimizer = make_optimizer(self.module.parameters())
        self.algorithm = AsyncModelAverage(sync_interval_ms=0, **options)
        group = Group(process_group if process_group.size() > 1 else None)
        self.algorithm.setup(self.module, [self.optimizer], group)

    def update(self, step):
        """One update, and the end of the round."""
        self.optimizer.zero_grad()
        loss(self.module, self.rank, step).backward()
        self.algorithm.before_step()
        self.optimizer.step()
        self.algorithm.after_step()
        return self.algorithm.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_rounds_equal_the_oracle(size, warmup_steps):
    """When every round takes one update, x_r += mean - snapshot one update after the snapshot."""

    def train(rank, process_group):
        run, history = PunctualRun(rank, process_group, warmup_steps=warmup_steps), []
        for step in range(8):
            run.update(step)
            history.append(flat(run.module.parameters()))
        run.algorithm.finish()
        return [*history, flat(run.module.parameters())]

    actual = run_ranks(train, size)
    oracle = ORACLES["async"](size, sync_interval_ms=0, warmup_steps=warmup_steps)
    expected = oracle_training(oracle, OneWeight(), make_optimizer, loss, 8)

    for step in range(9):
        for rank in range(size):
            torch.testing.assert_close(actual[rank][step], expected[step][rank], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights_first", [True, False])
def test_resume_keeps_a_mean_under_way(weights_first):
    """Saved with a round in flight and loaded into new objects, training goes on with the same bits.

    The weights may be saved before or after the algorithm's state: taking that changes no weight.
    """

    def straight(rank, process_group):
        run = PunctualRun(rank, process_group)
        for step in range(6):
            run.update(step)
        return flat(run.module.parameters())

    def first_half(rank, process_group):
        run = PunctualRun(rank, process_group)
        for step in range(2):
            run.update(step)
        run.optimizer.zero_grad()
        loss(run.module, rank, 2).backward()
        run.algorithm.before_step()
        run.optimizer.step()
        run.algorithm.after_step()
        if weights_first:
            saved = copy.deepcopy(run.module.state_dict())
            return saved, run.optimizer.state_dict(), run.algorithm.state_dict()
        state = run.algorithm.state_dict()
        return run.module.state_dict(), run.optimizer.state_dict(), state

    expected = run_ranks(straight, 2)
    saved = run_ranks(first_half, 2)

    def second_half(rank, process_group):
        run = PunctualRun(rank, process_group)
        for part, state in zip((run.module, run.optimizer, run.algorithm), saved[rank], strict=True):
            part.load_state_dict(state)
        for step in range(3, 6):
            run.update(step)
        return flat(run.module.parameters())

    for actual, wanted in zip(run_ranks(second_half, 2), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("resumed", [False, True])
def test_state_of_a_rank_that_is_behind(resumed):
    """A rank with a mean not yet added, and a round to catch up with when the state is taken, loses neither."""

    def train(rank, process_group):
        walker = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0))
        walker.update()
        time.sleep(0.2)  # now the first round is back on both ranks
        if rank == 0:
            walker.update()  # adds it and starts the second round, in which rank 1 is missing
        before = walker.weights()
        state = walker.algorithm.state_dict()
        assert torch.equal(walker.weights(), before)
        if resumed:
            module, walker = walker.module, Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0))
            walker.module.load_state_dict(module.state_dict())
            walker.algorithm.load_state_dict(state)
        if rank == 1:
            walker.update()
        walker.algorithm.finish()
        return walker.weights()

    assert_all_at(run_ranks(train, 2), mean_walk([2, 2]))


def test_warmup_is_synchronous():
    """Replicas are equal after each of three warm-up updates, then differ, and are equal after finish."""

    def train(rank, process_group):
        walker = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0, warmup_steps=3))
        history = []
        for _ in range(6):
            walker.update()
            history.append(walker.weights())
        walker.algorithm.finish()
        return [*history, walker.weights()]

    first, second = run_ranks(train, 2)
    equal = [torch.equal(*pair) for pair in zip(first, second, strict=True)]

    assert equal[:3] == [True] * 3
    assert not all(equal[3:6])
    assert_all_at([first[-1], second[-1]], mean_walk([6, 6]))


@pytest.mark.parametrize("updates", [(40, 40), (40, 31), (0, 25), (20, 26, 23), (12, 9, 15, 20)])
@pytest.mark.parametrize("interval", [0, 3, NEVER])
def test_ranks_may_do_different_numbers_of_updates(updates, interval):
    """Every update of every rank is in the final mean exactly once, whatever their numbers and the
    interval."""

    def train(rank, process_group):
        walker = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=interval))
        for i in range(updates[rank]):
            walker.update(pause=0.001 * ((i + rank) % 3))
        walker.algorithm.finish()
        walker.algorithm.teardown()
        return walker.weights()

    assert_all_at(run_ranks(train, len(updates)), mean_walk(updates))


def test_rounds_happen_beside_training():
    """With a short interval replicas stay close together while they train; with a long one they drift
    apart."""

    def gap(interval):
        def train(rank, process_group):
            walker = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=interval))
            for _ in range(100):
                walker.update(pause=0.001)
                walker.group.barrier()
            return walker.weights()

        first, second = run_ranks(train, 2)
        return (first - second).abs().max()

    assert gap(NEVER) == 100
    assert gap(5) < 80


def test_two_instances_whose_rounds_start_in_different_order():
    """Two optimizers' rounds never mix, though one rank starts the first one's first and the other rank the
    second's."""

    def train(rank, process_group):
        small = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0))
        large = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0), Walk(1000))
        for _ in range(20):
            for walker in (small, large) if rank == 0 else (large, small):
                walker.update()
        for walker in (small, large):
            walker.algorithm.finish()
        return small.weights(), large.weights()

    results = run_ranks(train, 2)

    assert_all_at([small for small, _ in results], mean_walk([20, 20]))
    assert_all_at([large for _, large in results], mean_walk([20, 20]))


def test_parameters_that_join_and_leave():
    """A layer that is unfrozen, and one that is frozen, at different moments of the rounds: nothing is
    lost."""

    class Two(Walk):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(torch.zeros(5), requires_grad=False)

        def forward(self):
            return super().forward() + self.late.sum()

    def train(rank, process_group):
        walker = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0), Two())
        for i in range(30):
            walker.module.late.requires_grad_(10 <= i < 20)
            walker.update(pause=0.001 * rank)
        walker.algorithm.finish()
        return walker.module.weight.detach(), walker.module.late.detach()

    results = run_ranks(train, 2)

    assert_all_at([weight for weight, _ in results], mean_walk([30, 30]))
    assert_all_at([late for _, late in results], mean_walk([10, 10]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype):
    """bfloat16, double and complex weights are averaged."""

    class Real(Walk):
        def forward(self):
            return super().forward().real if self.weight.is_complex() else super().forward()

    def train(rank, process_group):
        walker = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0), Real(23, dtype))
        for _ in range(10):
            walker.update()
        walker.algorithm.finish()
        return walker.weights()

    assert_all_at(run_ranks(train, 2), mean_walk([10, 10]))


def test_bytes():
    """A round sends what an all-reduce of the weights sends; in warm-up as much is sent per update."""

    def sent(warmup_steps, updates):
        def train(rank, process_group):
            algorithm = AsyncModelAverage(sync_interval_ms=0, warmup_steps=warmup_steps)
            walker = Walker(rank, process_group, algorithm, Walk(1000))
            before = walker.group.traffic.bytes_sent
            for _ in range(updates):
                walker.update()
            return walker.group.traffic.bytes_sent - before

        return run_ranks(train, 2)

    assert sent(0, 1) == [4000, 4000]
    assert sent(3, 3) == [3 * 4000, 3 * 4000]


# -- abort and resume ----------------------------------------------------------------------------------------


def test_abort_and_resume_in_any_order():
    """Before setup, twice, out of order and after teardown they do no harm; aborted ranks start no round."""

    def train(rank, process_group):
        algorithm = AsyncModelAverage(sync_interval_ms=0)
        algorithm.resume()
        algorithm.abort()
        algorithm.abort()
        walker = Walker(rank, process_group, algorithm)
        walker.update()
        algorithm.state_dict()  # the round that setup has made possible is back on both ranks
        algorithm.resume()
        algorithm.abort()
        algorithm.abort()
        before = walker.group.traffic.bytes_sent
        for _ in range(10):
            walker.update()
        sent_aborted = walker.group.traffic.bytes_sent - before
        gap_aborted = walker.weights()
        algorithm.resume()
        algorithm.resume()
        walker.update()
        sent_resumed = walker.group.traffic.bytes_sent - before
        algorithm.abort()
        algorithm.finish()
        algorithm.teardown()
        algorithm.teardown()
        algorithm.abort()
        algorithm.resume()
        algorithm.resume()
        return sent_aborted, sent_resumed, gap_aborted, walker.weights()

    results = run_ranks(train, 2)

    assert [result[:2] for result in results] == [(0, 92), (0, 92)]
    assert not torch.equal(results[0][2], results[1][2])
    assert_all_at([result[3] for result in results], mean_walk([12, 12]))


@pytest.mark.parametrize("end", ["aborted", "resumed"])
def test_abort_on_one_rank_hangs_nobody(end):
    """One rank aborts before it has joined a round that the other has started; both train on and end with
    equal weights."""

    def train(rank, process_group):
        walker = Walker(rank, process_group, AsyncModelAverage(sync_interval_ms=0))
        if rank == 1:
            walker.algorithm.abort()
        for _ in range(20):
            walker.update()
        if rank == 1 and end == "resumed":
            walker.algorithm.resume()
            for _ in range(20):
                walker.update()
        walker.algorithm.finish()
        return walker.weights()

    start = time.monotonic()
    results = run_ranks(train, 2)

    assert time.monotonic() - start < 5
    assert_all_at(results, mean_walk([20, 20 if end == "aborted" else 40]))


def test_a_new_fit_begins_unaborted():
    """An abort that was never resumed does not leave the next fit without averaging."""

    def train(rank, process_group):
        algorithm = AsyncModelAverage(sync_interval_ms=0)
        for _ in range(2):
            walker = Walker(rank, process_group, algorithm)
            before = walker.group.traffic.bytes_sent
            walker.update()
            sent = walker.group.traffic.bytes_sent - before
            algorithm.abort()
            algorithm.finish()
            algorithm.teardown()
        return sent

    assert run_ranks(train, 2) == [92, 92]


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"peer_selection_mode": "shift_one"}, ValueError, "peer_selection_mode must be 'all', got 'shift_one'"),
    ({"sync_interval_ms": -1}, ValueError, "sync_interval_ms must be at least 0, got -1"),
    ({"sync_interval_ms": 0.5}, TypeError, "sync_interval_ms must be an int, got 0.5"),
    ({"warmup_steps": -3}, ValueError, "warmup_steps must be at least 0, got -3"),
    ({"warmup_steps": True}, TypeError, "warmup_steps must be an int, got True"),
])  # fmt: skip
def test_bad_arguments(options, error, message):
    """A value that cannot be is refused by name."""
    with pytest.raises(error, match=message):
        AsyncModelAverage(**options)


# -- processes -----------------------------------------------------------------------------------------------


def threads_and_files():
    """Count this process's threads, those that Python does not know of included, and its open files."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def walk_in_a_process(rank, updates, last_pause):
    """Walk with rounds far shorter than an update, and let go of everything."""
    walker = Walker(rank, dist.group.WORLD, AsyncModelAverage(sync_interval_ms=0))
    for i in range(updates[rank]):
        walker.update(pause=last_pause[rank] if i == updates[rank] - 1 else 0.001)
    walker.algorithm.finish()
    walker.algorithm.teardown()
    return walker.weights(), [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(("updates", "last_pause"), [
    ((200, 200), (0, 0)),
    ((30, 30), (0, 2)),
    ((50, 47), (0, 0)),
    ((30, 20, 27), (0, 1, 0)),
])  # fmt: skip
def test_processes_end_cleanly_with_equal_weights(updates, last_pause):
    """Though ranks do fewer updates, or sleep in their last one, all exit with 0 and equal weights."""
    results = launch(walk_in_a_process, len(updates), updates, last_pause)

    assert_all_at([weight for weight, _ in results], mean_walk(updates))
    assert all(names == ["MainThread"] for _, names in results)


# -- in a Trainer --------------------------------------------------------------------------------------------


class Logging(Regression):
    """Logs a number whose mean over ranks is known exactly."""

    def training_step(self, batch, batch_idx):
        self.log("number", torch.tensor(batch_idx + 10.0 * self.global_rank), sync_dist=True)
        return super().training_step(batch, batch_idx)


class Numbers(Callback):
    """Keeps the logged numbers, and the loss of every validation."""

    def __init__(self) -> None:
        self.numbers, self.val_losses = [], []

    def on_train_batch_end(self, trainer, *args) -> None:
        self.numbers.append(float(trainer.callback_metrics["number"]))

    def on_validation_end(self, trainer, pl_module) -> None:
        self.val_losses.append(float(trainer.callback_metrics["val_loss"]))


def fit_200_updates(rank, directory):
    """Train with logging, validation and checkpoints beside the rounds."""
    model, numbers = Logging(lr=0.001), Numbers()
    checkpoint = ModelCheckpoint(directory, every_n_train_steps=40, save_top_k=-1)
    trainer = make_trainer(
        strategy=DistOptStrategy(AsyncModelAverage(sync_interval_ms=0)), max_epochs=1, val_check_interval=50,
        limit_val_batches=2, callbacks=[numbers, checkpoint], enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(model, loader(800), loader(8))
    names = [thread.name for thread in threading.enumerate()]
    return numbers.numbers, numbers.val_losses, weights(model), names


def test_logging_validation_and_checkpoints_beside_the_rounds(tmp_path):
    """Logged means are exact, every rank sees the same losses, the files load, and the replicas end equal."""
    results = launch(fit_200_updates, 2, str(tmp_path))
    files = sorted(tmp_path.glob("*.ckpt"))

    for numbers, val_losses, final, names in results:
        assert numbers == [i + 5 for i in range(200)]
        assert val_losses == results[0][1]
        assert val_losses[-1] < val_losses[0]
        assert torch.equal(final, results[0][2])
        assert names == ["MainThread"]
    assert len(files) == 5
    for file in files:
        Regression().load_state_dict(torch.load(file, weights_only=True)["state_dict"])


class Quiet(Regression):
    """Logs nothing, so that ranks need not do the same number of batches; may sleep in its last one."""

    def __init__(self, last_batch=None) -> None:
        super().__init__()
        self.last_batch = last_batch

    def training_step(self, batch, batch_idx):
        if batch_idx == self.last_batch:
            time.sleep(2)
        return self.loss(batch)


def fit_unevenly(rank, fewer, sleep):
    """Fit 12 batches on rank 0; on rank 1 fewer, or with a long sleep in the last one."""
    model = Quiet(last_batch=11 if sleep and rank == 1 else None)
    strategy = DistOptStrategy(AsyncModelAverage(sync_interval_ms=0))
    trainer = make_trainer(strategy=strategy, max_epochs=1, limit_train_batches=12 - fewer * rank)
    trainer.fit(model, loader())
    return weights(model), trainer.global_step


@pytest.mark.parametrize(("fewer", "sleep"), [(3, False), (0, True)], ids=["3 fewer", "sleeps"])
def test_uneven_ranks_in_a_trainer(fewer, sleep):
    """A rank that runs 3 steps fewer, or sleeps in its last batch, ends cleanly with equal weights."""
    (first, first_steps), (second, second_steps) = launch(fit_unevenly, 2, fewer, sleep)

    assert torch.equal(first, second)
    assert (first_steps, second_steps) == (12, 12 - fewer)


def fit_30_times(rank):
    """Fit again and again in one process."""
    equal = []
    for _ in range(30):
        model = Regression()
        strategy = DistOptStrategy(AsyncModelAverage(sync_interval_ms=0))
        make_trainer(strategy=strategy, max_steps=3).fit(model, loader())
        final = weights(model)
        other = final.clone()
        dist.broadcast(other, src=0)
        equal.append(torch.equal(final, other))
    return equal


def test_30_short_fits_in_a_row():
    """All end with equal weights and exit code 0."""
    for equal in launch(fit_30_times, 2):
        assert equal == [True] * 30


def set_up_10_times(rank):
    """Use the algorithm again and again on one group; count what stays open."""
    used = []
    for _ in range(10):
        walker = Walker(rank, dist.group.WORLD, AsyncModelAverage(sync_interval_ms=0))
        for _ in range(3):
            walker.update()
        walker.algorithm.finish()
        walker.algorithm.teardown()
        used.append(threads_and_files())
    return used


def test_teardown_closes_the_group_of_the_rounds():
    """Threads and open files of a fit are gone after it."""
    for used in launch(set_up_10_times, 2):
        assert used[-1] == used[1]


class TwoOptimizers(Regression):
    """The first layer is updated in every batch, the last one in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.02, momentum=0.9) for i in (0, 2)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2 == 0:
            second.step()


class LayerWeights(Callback):
    """Keeps the weights of both layers after every batch."""

    def __init__(self) -> None:
        self.layers = []

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        self.layers.append([weights(pl_module.net[i]) for i in (0, 2)])


def fit_two_optimizers(rank, interval):
    """Fit 8 batches with 3 updates of warm-up."""
    model, seen = TwoOptimizers(), LayerWeights()
    strategy = DistOptStrategy(AsyncModelAverage(sync_interval_ms=interval, warmup_steps=3))
    trainer = make_trainer(strategy=strategy, max_epochs=1, limit_train_batches=8, callbacks=[seen])
    trainer.fit(model, loader())
    return seen.layers, weights(model)


def test_two_optimizers():
    """Each optimizer exchanges its own parameters and counts its own updates: 3 of each are warm-up."""
    apart, close = launch(fit_two_optimizers, 2, NEVER), launch(fit_two_optimizers, 2, 0)
    equal = [
        [torch.equal(*pair) for pair in zip(*layers, strict=True)]
        for layers in zip(apart[0][0], apart[1][0], strict=True)
    ]

    assert [first for first, _ in equal] == [True] * 3 + [False] * 5
    assert [last for _, last in equal] == [True] * 6 + [False] * 2
    assert torch.equal(apart[0][1], apart[1][1])
    assert torch.equal(close[0][1], close[1][1])


class Failing(Quiet):
    """Raises on rank 1."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            raise ArithmeticError("rank 1 gives up")
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def fit_failing(rank, interval):
    """Fit 100 batches, of which rank 1 does 3."""
    strategy = DistOptStrategy(AsyncModelAverage(sync_interval_ms=interval))
    make_trainer(strategy=strategy, max_epochs=1).fit(Failing(), loader(400))


@pytest.mark.parametrize("interval", [0, NEVER])
def test_one_rank_fails(interval):
    """When rank 1 raises, rank 0 ends within seconds, and says whom it lost."""
    first, second = launch(fit_failing, 2, interval, timeout=20, allow_failure=True)

    assert not first.killed
    assert isinstance(second.error, ArithmeticError)
    assert isinstance(first.error, DistributedRuntimeException)
    assert "rank 0 lost rank 1 in async's" in str(first.error)


def fit_and_evaluate(rank):
    """fit, validate, fit, test with one Trainer."""
    model = Regression(lr=0.001)
    strategy = DistOptStrategy(AsyncModelAverage(sync_interval_ms=0))
    trainer = make_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(model, loader(), loader(8))
    losses = [trainer.validate(model, loader(8), verbose=False)[0]["val_loss"]]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(), loader(8))
    losses.append(trainer.test(model, loader(8), verbose=False)[0]["test_loss"])
    return losses, weights(model), trainer.global_step


def test_fit_validate_fit_test_with_one_trainer():
    """Evaluation between two fits sees equal weights, and the second fit averages again."""
    results = launch(fit_and_evaluate, 2)

    for losses, final, steps in results:
        assert losses == results[0][0]
        assert losses[1] < losses[0]
        assert torch.equal(final, results[0][1])
        assert steps == 32
