"""Decentralized and LowPrecisionDecentralized: who meets whom, what travels, and that replicas stay true."""

import copy
import ctypes
import hashlib
import io
import itertools
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracles import ORACLES, flat, oracle_training
from test_algorithms import OneWeight, loss, make_optimizer
from torch import nn
from worlds import launch, run_ranks

from lightning_distopt.algorithms import Decentralized, LowPrecisionDecentralized, make_algorithm
from lightning_distopt.collectives import Group

ALGORITHMS = [
    ("decentralized", {}),
    ("decentralized", {"peer_selection_mode": "shift_one"}),
    ("low_precision_decentralized", {}),
]


class Mixed(nn.Module):
    """What parameters may be: large enough for several messages, of any type, shape and strides."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape, dtype=torch.float32):
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))

        self.large = parameter(1300, 1000)
        self.transposed = nn.Parameter(parameter(30, 20).detach().t())
        self.narrow = nn.Parameter(parameter(40).detach().bfloat16())
        self.wide = parameter(7, dtype=torch.float64)
        self.complex = parameter(5, 3, dtype=torch.complex64)
        self.scalar = parameter()
        self.empty = nn.Parameter(torch.empty(0, 3))


class Rank:
    """One rank that trains in a plain loop; without a loss its gradients are noise, other on each rank."""

    def __init__(self, algorithm, process_group, module, local_size=None) -> None:
        self.rank = process_group.rank()
        self.group = Group(process_group if process_group.size() > 1 else None, local_size=local_size)
        self.module = copy.deepcopy(module)
        self.algorithm = algorithm
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        algorithm.setup(self.module, [self.optimizer], self.group)

    def update(self, step, loss=None):
        """One update."""
        self.optimizer.zero_grad()
        if loss is not None:
            loss(self.module, self.rank, step).backward()
        else:
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            for p in filter(lambda p: p.requires_grad, self.module.parameters()):
                p.grad = (1 + self.rank) * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        self.algorithm.before_step()
        self.optimizer.step()
        self.algorithm.after_step()

    def exchange(self, values):
        """Let an update set the weights to ``values``, and return what the exchange makes of them."""
        with torch.no_grad():
            self.module.weight.copy_(values)
        self.algorithm.after_step()
        self.algorithm.before_step()
        return self.weights()

    def weights(self):
        """This rank's flat weights."""
        return flat(p.to(torch.complex128) for p in self.module.parameters())

    def replicas(self):
        """A copy of this rank's replicas by parameter name."""
        return copy.deepcopy(self.algorithm.state_dict()["replicas"])


def assert_replicas_are_true(by_rank):
    """What every rank holds of its neighbours has the same bits as what these hold of themselves."""
    size = len(by_rank)
    for rank, replicas in enumerate(by_rank):
        assert list(replicas) == list(by_rank[0])
        for name, three in replicas.items():
            assert torch.equal(three["left"], by_rank[(rank - 1) % size][name]["own"]), (rank, name)
            assert torch.equal(three["right"], by_rank[(rank + 1) % size][name]["own"]), (rank, name)


# -- decentralized -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 6])
def test_shift_one_meets_every_peer_of_the_other_half(size):
    """In W/2 exchanges a rank meets every rank of the other half once, and both leave with the same bits."""
    half = size // 2
    values = torch.randn(2 * half, size, 23, generator=torch.Generator().manual_seed(0))

    def train(rank, process_group):
        run = Rank(Decentralized(peer_selection_mode="shift_one"), process_group, OneWeight())
        return [run.exchange(values[t, rank]).real.float() for t in range(2 * half)]

    results = run_ranks(train, size)

    for rank in range(size):
        others = range(half, size) if rank < half else range(half)
        peers = []
        for t in range(2 * half):
            means = {peer: (values[t, rank] + values[t, peer]) / 2 for peer in others}
            peers += [peer for peer in others if torch.equal(results[rank][t], means[peer])]
        assert sorted(peers[:half]) == list(others)
        assert peers[half:] == peers[:half]


def test_exchange_runs_between_two_updates():
    """The weights are sent right after an update; the mean shows only when the next gradient is there."""
    values = torch.randn(2, 23, generator=torch.Generator().manual_seed(0))

    def train(rank, process_group):
        run = Rank(Decentralized(), process_group, OneWeight())
        sent = [run.group.traffic.bytes_sent]
        run.algorithm.before_step()
        sent.append(run.group.traffic.bytes_sent)
        with torch.no_grad():
            run.module.weight.copy_(values[rank])
        run.algorithm.after_step()
        sent.append(run.group.traffic.bytes_sent)
        between = run.weights().real.float()
        run.algorithm.before_step()
        sent.append(run.group.traffic.bytes_sent)
        return sent, between, run.weights().real.float()

    results = run_ranks(train, 2)

    for rank, (sent, between, after) in enumerate(results):
        assert sent[0] == sent[1] < sent[2] == sent[3]
        assert torch.equal(between, values[rank])
        assert torch.equal(after, (values[0] + values[1]) / 2)


@pytest.mark.parametrize(
    ("size", "local_size", "hierarchical", "text"),
    [
        (3, None, "auto", r"got 3 \(W = 3 ranks, hierarchical='auto'\)"),
        (6, 2, True, r"nodes, got 3 \(W = 6 .*=True\)"),
    ],
)
def test_shift_one_refuses_what_cannot_be_paired(size, local_size, hierarchical, text):
    """An odd number of ranks or nodes is an error on every rank that says W, the mode and hierarchical."""

    def train(rank, process_group):
        algorithm = Decentralized(hierarchical, peer_selection_mode="shift_one")
        with pytest.raises(ValueError, match=f"peer_selection_mode='shift_one' .*{text}"):
            Rank(algorithm, process_group, OneWeight(), local_size)
        return True

    assert run_ranks(train, size) == [True] * size


# -- low precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicas_of_neighbours_are_true(size):
    """After every update a replica has the bits of the neighbour's own, and the weights are the own one."""

    def train(rank, process_group):
        run = Rank(LowPrecisionDecentralized(), process_group, Mixed())
        history = [run.replicas()]
        for step in range(4):
            run.update(step)
            history.append(run.replicas())
            for name, parameter in run.module.named_parameters():
                own = history[-1][name]["own"]
                own = torch.view_as_complex(own) if parameter.is_complex() else own.view(parameter.shape)
                assert torch.equal(own.to(parameter.dtype), parameter.detach())
        return history

    for by_rank in zip(*run_ranks(train, size), strict=True):
        assert_replicas_are_true(by_rank)


def test_quantisation_errors_do_not_add_up():
    """What one exchange loses, the next ones make up for: without new updates all ranks come to one point."""
    values = torch.randn(3, 23, generator=torch.Generator().manual_seed(0))

    def train(rank, process_group):
        run = Rank(LowPrecisionDecentralized(), process_group, OneWeight())
        weights = run.exchange(values[rank])
        for _ in range(60):
            weights = run.exchange(run.module.weight.detach().clone())
        return weights.real.float()

    results = run_ranks(train, 3)

    for weights in results:
        torch.testing.assert_close(weights, results[0], rtol=0, atol=1e-5)
        # An exchange keeps the mean but for the half levels lost in the first, coarse ones.
        torch.testing.assert_close(weights, values.mean(0), rtol=0, atol=0.05)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-7, 1.0, 1e30])
@pytest.mark.parametrize("constant", [True, False])
def test_any_range_survives(scale, constant):
    """Changes that are all zero, all equal, tiny or huge stay finite and right; constant ones exactly so."""
    pattern = torch.ones(23) if constant else torch.linspace(-1, 1, 23)
    zero = OneWeight()
    with torch.no_grad():
        zero.weight.zero_()

    def train(rank, process_group):
        run = Rank(LowPrecisionDecentralized(), process_group, zero)
        return run.exchange(scale * (1 + rank) * pattern).real.float()

    for rank, weights in enumerate(run_ranks(train, 2)):
        target = scale * (1 + rank) * pattern  # replicas were zero: the difference is the weights themselves
        tolerance = 0.0 if constant else float(target.max() - target.min()) / 500
        torch.testing.assert_close(weights, target, rtol=0, atol=tolerance)


def test_values_that_are_not_finite_are_seen_by_the_neighbours():
    """A rank that diverges cannot pass wrong finite numbers on."""

    def train(rank, process_group):
        run = Rank(LowPrecisionDecentralized(), process_group, OneWeight())
        values = torch.ones(23)
        if rank == 0:
            values[5] = float("inf")
        run.exchange(values)
        return run.exchange(run.module.weight.detach().clone())

    for weights in run_ranks(train, 3):
        assert not weights.isfinite().any()


# -- both ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_size", [2, 3])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=str)
def test_two_levels_equal_the_oracle(name, options, interval, local_size):
    """Two nodes average inside, their first ranks exchange, and all ranks of a node get the result."""
    options = {**options, "communication_interval": interval}

    def train(rank, process_group):
        run = Rank(make_algorithm(name, **options), process_group, OneWeight(), local_size)
        history = []
        for step in range(5):
            run.update(step, loss)
            history.append(run.weights().real.float())
        run.algorithm.finish()
        return [*history, run.weights().real.float()]

    size = 2 * local_size
    actual = run_ranks(train, size)
    oracle = ORACLES[name](size, **options, local_size=local_size)
    expected = oracle_training(oracle, OneWeight(), make_optimizer(name, options), loss, 5)

    for step in range(6):
        for rank in range(size):
            # Quantised weights differ from the float64 oracle by float32's rounding; exact means hold to 1e-6.
            atol = 4e-6 if name == "low_precision_decentralized" else 1e-6
            torch.testing.assert_close(actual[rank][step], expected[step][rank], rtol=1e-5, atol=atol)


def test_three_nodes_in_a_ring_equal_the_oracle():
    """Three nodes of two ranks form the ring of three that the oracle forms."""

    def train(rank, process_group):
        run = Rank(LowPrecisionDecentralized(hierarchical=True), process_group, OneWeight(), 2)
        for step in range(5):
            run.update(step, loss)
        return run.weights().real.float()

    actual = run_ranks(train, 6)
    oracle = ORACLES["low_precision_decentralized"](6, local_size=2)
    expected = oracle_training(oracle, OneWeight(), make_optimizer("", {}), loss, 5)[4]

    for rank in range(6):
        torch.testing.assert_close(actual[rank], expected[rank], rtol=1e-5, atol=4e-6)  # float32 against float64


@pytest.mark.parametrize(
    ("name", "options", "size", "bytes_per_element"),
    [
        ("decentralized", {}, 2, 4),
        ("decentralized", {}, 4, 6),
        ("decentralized", {"peer_selection_mode": "shift_one"}, 2, 4),
        ("decentralized", {"peer_selection_mode": "shift_one"}, 4, 4),
        ("low_precision_decentralized", {}, 2, 1),
        ("low_precision_decentralized", {}, 4, 2),
    ],
    ids=str,
)
def test_sends_what_it_says(name, options, size, bytes_per_element):
    """Every second update sends the documented number of bytes per element, the others send nothing."""
    model = nn.Linear(1000, 1000)

    def train(rank, process_group):
        run = Rank(make_algorithm(name, **options, communication_interval=2), process_group, model)
        sent = [run.group.traffic.bytes_sent]
        for step in range(4):
            run.update(step)
            sent.append(run.group.traffic.bytes_sent)
        run.algorithm.finish()
        return [after - before for before, after in itertools.pairwise(sent)]

    for sent in run_ranks(train, size):
        assert sent[0] == sent[2] == 0
        assert sent[1] == sent[3] == pytest.approx(bytes_per_element * 1_001_000, rel=3e-3)


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=str)
def test_parameters_of_any_kind_resume_from_a_file(name, options):
    """Saved with an exchange under way, and loaded by the safe loader, training goes on bit for bit."""

    def train(steps, saved=None, save=False):
        def rank_main(rank, process_group):
            run = Rank(make_algorithm(name, **options), process_group, Mixed())
            if saved is not None:
                saved[rank].seek(0)
                state = torch.load(saved[rank], weights_only=True)
                run.module.load_state_dict(state["module"])
                run.optimizer.load_state_dict(state["optimizer"])
                run.algorithm.load_state_dict(state["algorithm"])
            for step in steps:
                run.update(step)
            if not save:
                run.algorithm.state_dict()  # waits for the last exchange
                return run.weights()
            parts = {"module": run.module, "optimizer": run.optimizer, "algorithm": run.algorithm}
            file = io.BytesIO()
            torch.save({key: part.state_dict() for key, part in parts.items()}, file)
            return file

        return run_ranks(rank_main, 2)

    straight = train(range(5))
    resumed = train(range(3, 5), saved=train(range(3), save=True))

    for actual, expected in zip(resumed, straight, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=str)
def test_parameters_may_come_and_go(name, options):
    """Layers unfrozen in mid-run start equal, frozen ones end equal, the others are exchanged throughout."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.neck, self.head = (nn.Parameter(torch.linspace(-1, 1, n)) for n in (11, 5, 3))

    def train(rank, process_group):
        module = Body()
        module.body.requires_grad_(False)
        run = Rank(make_algorithm(name, **options), process_group, module)
        with torch.no_grad():
            run.module.body.add_(rank)  # what nobody exchanges may differ
        history = []
        for step in range(9):
            run.module.body.requires_grad_(step >= 3)
            run.module.head.requires_grad_(step < 6)
            run.update(step)
            history.append(
                {
                    "replicas": run.algorithm.state_dict().get("replicas"),
                    **{key: p.detach().clone() for key, p in run.module.named_parameters()},
                }
            )
            history[-1] = copy.deepcopy(history[-1])
        run.algorithm.finish()
        return history, run.weights()

    results = run_ranks(train, 2)

    left, right = (history for history, _ in results)
    for step in range(9):
        if name == "low_precision_decentralized":
            assert_replicas_are_true([left[step]["replicas"], right[step]["replicas"]])
            assert set(left[step]["replicas"]) == {"neck"} | ({"body"} if step >= 3 else set()) | (
                {"head"} if step < 6 else set()
            )
        assert not torch.equal(left[step]["neck"], right[step]["neck"])
        assert torch.equal(left[step]["head"], right[step]["head"]) == (step >= 6)
    assert (left[4]["body"] - right[4]["body"]).abs().max() < 0.5
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized"])
def test_state_after_finish_goes_on_from_the_mean(name):
    """A checkpoint made after the end of fit holds nothing of the time before the last average."""

    def train(rank, process_group):
        run = Rank(make_algorithm(name), process_group, OneWeight())
        for step in range(3):
            run.update(step, loss)
        run.algorithm.finish()
        state = copy.deepcopy(run.algorithm.state_dict())
        again = Rank(make_algorithm(name), process_group, run.module)
        again.algorithm.load_state_dict(state)
        return run.weights(), again.exchange(again.module.weight.detach().clone())

    for mean, weights in run_ranks(train, 2):
        torch.testing.assert_close(weights, mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cls", [Decentralized, LowPrecisionDecentralized])
def test_wrong_arguments_are_refused(cls):
    """An argument out of range or of the wrong type is refused with its name and value."""
    with pytest.raises(ValueError, match="communication_interval must be at least 1, got 0"):
        cls(communication_interval=0)
    with pytest.raises(TypeError, match="communication_interval must be an int, got 1.5"):
        cls(communication_interval=1.5)
    with pytest.raises(ValueError, match="hierarchical must be True, False or 'auto', got 'yes'"):
        cls(hierarchical="yes")


def test_unknown_peer_selection_mode_is_refused():
    """An unknown mode is refused, and both known ones are listed."""
    with pytest.raises(ValueError, match="must be 'all' or 'shift_one', got 'ring'"):
        Decentralized(peer_selection_mode="ring")


@pytest.mark.parametrize("cls", [Decentralized, LowPrecisionDecentralized])
def test_teardown_needs_no_setup(cls):
    """Teardown is harmless before a fit, and when repeated."""
    algorithm = cls()
    algorithm.teardown()

    assert algorithm.teardown() is None


# -- processes -----------------------------------------------------------------------------------------------


def stumbling_rank(rank, name, options, seed):
    """Train a 64 MB model with pauses of random length; return fingerprints of replicas and weights."""
    pauses = random.Random(1000 * seed + rank)
    module = nn.ParameterList([nn.Parameter(torch.zeros(4096, 1024)) for _ in range(4)])
    run = Rank(make_algorithm(name, **options), dist.group.WORLD, module)

    def pause(*_):
        if pauses.random() < 0.5:
            time.sleep(0.2 * pauses.random())

    run.optimizer.register_step_pre_hook(pause)
    run.optimizer.register_step_post_hook(pause)

    def fingerprint(tensors):
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()

    prints = []
    for step in range(4):
        run.update(step)
        replicas = run.algorithm.state_dict().get("replicas", {})
        prints.append({side: fingerprint(t[side] for t in replicas.values()) for side in ("own", "left", "right")})
    run.algorithm.finish()
    return prints, fingerprint(p.detach() for p in run.module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("name", "options"), ALGORITHMS, ids=str)
def test_large_models_and_late_ranks_do_not_hang(name, options, size):
    """Messages far larger than socket buffers, on ranks that come late in turn, arrive where they belong."""
    if options and size % 2:
        pytest.skip("shift_one makes pairs")

    results = launch(stumbling_rank, size, name, options, 1, timeout=100)

    for rank, (prints, final) in enumerate(results):
        for step, mine in enumerate(prints):
            assert mine["left"] == results[(rank - 1) % size][0][step]["own"]
            assert mine["right"] == results[(rank + 1) % size][0][step]["own"]
        assert final == results[0][1]


def peak_memory(rank, name, options):
    """Train a 50 MB model without and with the algorithm; return how many copies of it the latter adds."""
    # Otherwise malloc keeps freed gradients, or finds room in them, as chance will have it.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD

    def peak():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    module = nn.ParameterList([nn.Parameter(torch.zeros(1772, 1772)) for _ in range(4)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    algorithm, group = make_algorithm(name, **options), Group(dist.group.WORLD)
    group.barrier()

    def update(before=lambda: None, after=lambda: None):
        optimizer.zero_grad()
        sum((1 + rank) * p.sum() for p in module).backward()
        before()
        optimizer.step()
        after()

    for _ in range(2):
        update()
    plain = peak()
    algorithm.setup(module, [optimizer], group)
    for _ in range(3):
        update(algorithm.before_step, algorithm.after_step)
    algorithm.finish()
    return (peak() - plain) / sum(4 * p.numel() for p in module)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "options", "size", "copies"),
    [
        (name, options, size, 1 if name == "decentralized" else min(3, size))
        for name, options in ALGORITHMS
        for size in (2, 4)
    ],
    ids=str,
)
def test_memory_is_what_it_says(name, options, size, copies):
    """From setup to finish the peak grows by one copy of the weights, or three (two in a ring of two), and some MB of messages and scratch."""
    for added in launch(peak_memory, size, name, options):
        assert copies * 0.95 < added < copies + 0.35  # 50 MB of weights
