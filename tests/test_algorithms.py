"""The contract that every algorithm keeps, over every world size."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from oracles import ORACLES, flat, oracle_training
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import run_ranks

from lightning_distopt.advise import DryGroup, Start, Wait
from lightning_distopt.algorithms import ALGORITHMS, ByteGrad, QAdamOptimizer, make_algorithm
from lightning_distopt.algorithms.base import BucketHook
from lightning_distopt.collectives import Group

STEPS = 6
# Every algorithm with its defaults, and with the options that change what it computes.
CASES: list[tuple[str, dict]] = [
    ("gradient_allreduce", {}),
    ("bytegrad", {}),
    ("qadam", {}),
    ("decentralized", {}),
    ("decentralized", {"communication_interval": 2}),
    ("decentralized", {"peer_selection_mode": "shift_one"}),
    ("decentralized", {"peer_selection_mode": "shift_one", "communication_interval": 2}),
    ("low_precision_decentralized", {}),
    ("low_precision_decentralized", {"communication_interval": 2}),
    # When a round comes back is chance, so here none starts; test_async_average.py has the rounds.
    ("async", {"sync_interval_ms": 3_600_000}),
    ("async", {"sync_interval_ms": 3_600_000, "warmup_steps": 4}),
    ("local_sgd", {"period": 2}),
    ("local_sgd", {"period": 3, "warmup_steps": 2}),
    ("diloco", {"period": 2}),
    ("diloco", {"period": 1, "compression": "none", "outer_lr": 0.7, "outer_momentum": 0.9}),
    ("diloco", {"period": 2, "compression": "fp16", "nesterov": False, "warmup_steps": 1}),
    ("diloco", {"period": 2, "compression": "int4", "overlap_steps": 1, "outer_device": "cpu"}),
    ("diloco", {"period": 4, "overlap_steps": 3, "outer_momentum": 0.0}),
    ("diloco", {"period": 4, "num_fragments": 2, "overlap_steps": 2}),
]
SIZES = (1, 2, 3, 4)
ROUNDING = 4e-6  # of float32 against the oracle's float64, for gradients around 10 and six updates
WORLDS = [
    (name, options, size)
    for name, options in CASES
    for size in SIZES
    if size == 1 or size % 2 == 0 or options.get("peer_selection_mode") != "shift_one"  # which makes pairs
]


class OneWeight(nn.Module):
    """One parameter of 23 elements: no multiple of any world size, and in DDP one bucket in the same order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(23, generator=generator))

    def forward(self, x):
        return x @ self.weight


def loss(model, rank, step):
    """A loss that differs between ranks in data and in size."""
    x = torch.randn(8, 23, generator=torch.Generator().manual_seed(100 * rank + step))
    return (1 + rank) * (model(x) - 1).square().mean()


def make_optimizer(name, options):
    """Build what the algorithm wants as the optimizer; SGD with momentum unless it needs its own."""
    if name == "qadam":
        return lambda parameters: QAdamOptimizer(parameters, lr=0.01, warmup_steps=2)  # both phases run
    return lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Run:
    """One rank's training in a plain loop: what the drivers do, and nothing more."""

    def __init__(self, algorithm, process_group, model=None, optimizer=None) -> None:
        self.group = Group(process_group if process_group.size() > 1 else None)
        self.rank = process_group.rank()
        self.module = copy.deepcopy(model if model is not None else OneWeight())
        self.algorithm = algorithm
        self.optimizer = optimizer or make_optimizer(algorithm.name, algorithm.config())(self.module.parameters())
        self.model = self.module
        if algorithm.exchanges == "gradients":
            self.model = DistributedDataParallel(self.module, process_group=process_group)
            BucketHook(self.model, algorithm)
        algorithm.setup(self.module, [self.optimizer], self.group)

    def update(self, step, micro_batches=1):
        """One update, accumulated over micro-batches."""
        self.optimizer.zero_grad()
        for i in range(micro_batches):
            if self.algorithm.exchanges == "gradients":
                self.model.require_backward_grad_sync = i == micro_batches - 1
            (loss(self.model, self.rank, step * micro_batches + i) / micro_batches).backward()
        self.algorithm.before_step()
        self.optimizer.step()
        self.algorithm.after_step()

    def weights(self):
        """This rank's flat weights."""
        return flat(self.module.parameters())


@pytest.mark.parametrize(("name", "options", "size"), WORLDS, ids=str)
def test_equals_its_oracle(name, options, size):
    """Real ranks hold after every update, and after finish, what the oracle says."""

    def train(rank, process_group):
        run = Run(make_algorithm(name, **options), process_group)
        history = []
        for step in range(STEPS):
            run.update(step)
            history.append(run.weights())
        run.algorithm.finish()
        run.algorithm.teardown()
        return [*history, run.weights()]

    actual = run_ranks(train, size)
    expected = oracle_training(ORACLES[name](size, **options), OneWeight(), make_optimizer(name, options), loss, STEPS)

    for step in range(STEPS + 1):
        for rank in range(size):
            torch.testing.assert_close(actual[rank][step], expected[step][rank], rtol=1e-5, atol=ROUNDING)


@pytest.mark.parametrize(("name", "options", "size"), WORLDS, ids=str)
def test_replicas_agree_after_finish(name, options, size):
    """After finish all ranks hold the same bits, whether or not they differed before."""

    def train(rank, process_group):
        run = Run(make_algorithm(name, **options), process_group)
        gap = []
        for step in range(STEPS):
            run.update(step)
            gap.append(run.weights())
        run.algorithm.finish()
        return gap, run.weights()

    results = run_ranks(train, size)

    for _, final in results:
        assert torch.equal(final, results[0][1])
    if ALGORITHMS[name].replicas_equal:
        for history, _ in results:
            assert all(map(torch.equal, history, results[0][0]))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_resume_is_exact(name, options):
    """3 updates, saved and loaded into new objects, and 3 more equal 6 updates bit for bit on every rank."""

    def straight(rank, process_group):
        run = Run(make_algorithm(name, **options), process_group)
        for step in range(6):
            run.update(step)
        return run.weights()

    def first_half(rank, process_group):
        run = Run(make_algorithm(name, **options), process_group)
        for step in range(3):
            run.update(step)
        return copy.deepcopy((run.module.state_dict(), run.optimizer.state_dict(), run.algorithm.state_dict()))

    expected = run_ranks(straight, 2)
    saved = run_ranks(first_half, 2)

    def second_half(rank, process_group):
        weights, optimizer, algorithm = saved[rank]
        run = Run(make_algorithm(name, **options), process_group)
        run.module.load_state_dict(weights)
        run.optimizer.load_state_dict(optimizer)
        run.algorithm.load_state_dict(algorithm)
        for step in range(3, 6):
            run.update(step)
        return run.weights()

    for actual, wanted in zip(run_ranks(second_half, 2), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_accumulation_exchanges_once_per_update(name, options):
    """Accumulating over four micro-batches sends as many bytes as one large batch."""

    def train(micro_batches):
        def rank_main(rank, process_group):
            run = Run(make_algorithm(name, **options), process_group)
            for step in range(3):
                run.update(step, micro_batches)
            run.algorithm.finish()
            return run.group.traffic.bytes_sent

        return run_ranks(rank_main, 2)

    assert train(4) == train(1)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_single_rank_sends_nothing(name, options):
    """A world of one rank trains like plain training, and sends no byte."""

    def train(rank, process_group):
        run = Run(make_algorithm(name, **options), process_group)
        for step in range(3):
            run.update(step)
        run.algorithm.finish()
        return run.group.traffic.bytes_sent

    assert run_ranks(train, 1) == [0]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_pickles_copies_and_shows_its_configuration(name, options):
    """An algorithm travels as its configuration, and its repr shows it."""
    algorithm = make_algorithm(name, **options)

    for twin in (pickle.loads(pickle.dumps(algorithm)), copy.deepcopy(algorithm)):
        assert twin.config() == algorithm.config()
        assert repr(twin) == repr(algorithm)
    for option, value in options.items():
        assert f"{option}={value!r}" in repr(algorithm)


def test_wrong_names_are_answered_with_the_right_ones():
    """An unknown algorithm or option is refused with its name and the valid names."""
    with pytest.raises(ValueError, match="'bytegard'.*did you mean 'bytegrad'.*gradient_allreduce"):
        make_algorithm("bytegard")
    with pytest.raises(ValueError, match="'averge' of bytegrad.*average"):
        make_algorithm("bytegrad", averge=True)
    with pytest.raises(TypeError, match="average must be True or False, got 3"):
        make_algorithm("bytegrad", average=3)
    with pytest.raises(TypeError, match="got 7"):
        make_algorithm(7)


def test_every_algorithm_has_a_case_and_an_oracle():
    """No algorithm escapes the contract."""
    assert set(ALGORITHMS) == set(ORACLES) == {name for name, _ in CASES}


@pytest.mark.parametrize("num_buckets", range(1, 10))
def test_something_is_on_its_way_while_a_bucket_is_encoded(num_buckets):
    """Only the first and the last buckets wait for all that was sent; else the link would stand still meanwhile."""
    group = DryGroup(2)
    algorithm = ByteGrad()
    algorithm.setup(nn.Linear(1, 1), [], group)
    futures = [
        algorithm.reduce(
            SimpleNamespace(
                index=lambda i=i: i, buffer=lambda: torch.randn(5000), is_last=lambda i=i: i == num_buckets - 1
            )
        )
        for i in range(num_buckets)
    ]
    started = nothing_left = 0
    for event in group.trace:
        started += isinstance(event, Start)
        nothing_left += isinstance(event, Wait) and event.start == started - 1

    assert all(future.done() for future in futures)
    assert started == 2 * num_buckets
    assert nothing_left <= 3
