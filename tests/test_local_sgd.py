"""LocalSGD and DiLoCo: what the contract in test_algorithms.py does not see."""

import copy
import io

import pytest
import torch
from models import Regression, loader, weights
from oracles import ORACLES, LocalSGD, flat, oracle_training
from torch import nn
from worlds import launch, make_trainer, run_ranks

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import ALGORITHMS, DiLoCo, make_algorithm
from lightning_distopt.collectives import DistributedRuntimeException, Group

EXACT = {"compression": "none", "outer_lr": 1.0, "outer_momentum": 0.0}


class Layers(nn.Module):
    """Five parameters of different sizes; the largest spans several blocks of a codec."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = {"first": (8, 40), "bias": (40,), "second": (40, 12), "scale": (), "head": (12, 1)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) / 4))

    def forward(self, x):
        return (torch.tanh(x @ self.first + self.bias) @ self.second * (1 + self.scale)) @ self.head


# With num_fragments=2: the largest parameter alone, and all others.
TWO_FRAGMENTS = [torch.arange(360, 840), torch.cat([torch.arange(360), torch.arange(840, 853)])]


def loss(model, rank, step):
    """A loss that differs between ranks in data and in size."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2000 * rank + step))
    x = x.to(next(model.parameters()).dtype)
    return (1 + rank) * (model(x) - x.sum(-1, keepdim=True)).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.9)


class Run:
    """One rank's training in a plain loop."""

    def __init__(self, algorithm, process_group, model=None, optimizer=None) -> None:
        self.rank, self.algorithm = process_group.rank(), algorithm
        self.group = Group(process_group if process_group.size() > 1 else None)
        self.model = copy.deepcopy(model if model is not None else Layers())
        self.optimizer = (optimizer or sgd)(p for p in self.model.parameters() if p.requires_grad)
        algorithm.setup(self.model, [self.optimizer], self.group)

    def update(self, step, skip=False):
        """One update; ``skip`` leaves the weights alone, as a GradScaler does that has seen an overflow."""
        self.optimizer.zero_grad()
        loss(self.model, self.rank, step).backward()
        self.algorithm.before_step()
        if not skip:
            self.optimizer.step()
        self.algorithm.after_step()

    def weights(self):
        return flat(self.model.parameters())


def outer_state(algorithm, kind):
    """One kind of outer state of all parameters as one vector, in the model's order."""
    state = algorithm.state_dict()["outer"]
    return flat(state[name][kind] for name, _ in Layers().named_parameters())


# -- equals the slow twin ------------------------------------------------------------------------------------

OPTIONS = [
    {"period": 1},
    {"period": 3},
    {"period": 3, "compression": "none"},
    {"period": 3, "compression": "fp16"},
    {"period": 3, "compression": "int4"},
    {"period": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"period": 3, "nesterov": False},
    {"period": 3, "warmup_steps": 4},
    {"period": 3, "overlap_steps": 1},
    {"period": 3, "overlap_steps": 2, "compression": "int4"},
    {"period": 3, "overlap_steps": 3, "outer_device": "cpu"},
    {"period": 4, "num_fragments": 2},
    {"period": 5, "num_fragments": 2, "overlap_steps": 2, "warmup_steps": 1},
    {"period": 2, "num_fragments": 2, "overlap_steps": 1, "compression": "none"},
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_equals_the_slow_twin(options, size):
    """Weights after every update, and in the end outer weights, momentum and error, are those of the oracle.

    In float64, and with data of which no value falls half-way between two codes: else a rounding would decide
    between them, and put the twins a level apart.
    """
    steps, model = 13, Layers().double()

    def train(rank, process_group):
        run = Run(DiLoCo(**options), process_group, model=model)
        history = []
        for step in range(steps):
            run.update(step)
            history.append(run.weights())
        run.algorithm.finish()
        states = {kind: outer_state(run.algorithm, kind) for kind in ("weight", "momentum")}
        if options.get("compression") != "none":
            states["error"] = outer_state(run.algorithm, "error")
        return [*history, run.weights()], states

    elements = {"elements": TWO_FRAGMENTS} if options.get("num_fragments") == 2 else {}
    oracle = ORACLES["diloco"](size, **options, **elements)
    expected = oracle_training(oracle, model, sgd, loss, steps)

    for rank, (history, states) in enumerate(run_ranks(train, size)):
        for step in range(steps + 1):
            torch.testing.assert_close(history[step], expected[step][rank], rtol=0, atol=1e-9)
        torch.testing.assert_close(states["weight"], oracle.outer, rtol=0, atol=1e-9)
        torch.testing.assert_close(states["momentum"], oracle.momentum, rtol=0, atol=1e-9)
        if "error" in states:
            torch.testing.assert_close(states["error"], oracle.errors[rank], rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "options"), [("diloco", EXACT), ("local_sgd", {})], ids=str)
def test_period_1_is_averaging_of_weights_in_every_step(name, options, size):
    """With outer lr 1, no momentum, no compression all ranks hold the mean weights after every update."""

    def train(rank, process_group):
        run = Run(make_algorithm(name, period=1, **options), process_group)
        history = []
        for step in range(8):
            run.update(step)
            history.append(run.weights())
        return history

    expected = oracle_training(LocalSGD(size, period=1), Layers(), sgd, loss, 8)

    for rank, history in enumerate(run_ranks(train, size)):
        for step in range(8):
            torch.testing.assert_close(history[step], expected[step][rank], rtol=0, atol=1e-6)


def test_period_1_is_gradient_averaging_for_plain_sgd():
    """For SGD without momentum, the mean of the updated weights is the update with the mean gradient."""

    def train(rank, process_group):
        def plain(parameters):
            return torch.optim.SGD(parameters, lr=0.01)

        local = Run(make_algorithm("local_sgd", period=1), process_group, optimizer=plain)
        warm = Run(make_algorithm("local_sgd", warmup_steps=50), process_group, optimizer=plain)
        for step in range(50):
            local.update(step)
            warm.update(step)
        return local.weights(), warm.weights()

    for local, warm in run_ranks(train, 2):
        torch.testing.assert_close(local, warm, rtol=0, atol=1e-6)


@pytest.mark.parametrize("compression", ["none", "int4"])
def test_single_rank_is_lookahead_with_nesterov(compression):
    """A world of one is plain training with an outer Nesterov loop around it, whatever the compression."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=4, outer_lr=0.7, outer_momentum=0.9, compression=compression), process_group)
        for step in range(12):
            run.update(step)
        return run.weights()

    model = Layers()
    fast = sgd(model.parameters())
    slow = [p.detach().clone() for p in model.parameters()]
    outer = torch.optim.SGD(slow, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        fast.zero_grad()
        loss(model, 0, step).backward()
        fast.step()
        if step % 4 == 3:
            for s, p in zip(slow, model.parameters(), strict=True):
                s.grad = s - p.detach()
            outer.step()
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    p.copy_(s)

    (actual,) = run_ranks(train, 1)

    torch.testing.assert_close(actual, flat(model.parameters()), rtol=0, atol=1e-6)


def test_a_late_round_keeps_the_local_progress():
    """One rank, outer lr 1, no momentum: the outer weights follow the rank, which trains as if alone."""

    def train(rank, process_group):
        late = Run(DiLoCo(period=4, overlap_steps=3, **EXACT), process_group)
        plain = Run(make_algorithm("local_sgd", period=1000), process_group)
        for step in range(12):
            late.update(step)
            plain.update(step)
        return late.weights(), plain.weights()

    ((late, plain),) = run_ranks(train, 1)

    torch.testing.assert_close(late, plain, rtol=0, atol=1e-6)


# -- rounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"), [("local_sgd", {}), ("diloco", {}), ("diloco", {"compression": "int4"})], ids=str
)
def test_replicas_are_equal_right_after_a_round_and_not_before(name, options):
    """With period 4 all ranks hold the same bits after updates 4, 8, 12, and after no other."""

    def train(rank, process_group):
        run = Run(make_algorithm(name, period=4, **options), process_group)
        history = []
        for step in range(12):
            run.update(step)
            history.append(run.weights())
        return history

    histories = run_ranks(train, 3)
    first, *others = histories
    equal = [s + 1 for s in range(12) if all(torch.equal(other[s], first[s]) for other in others)]

    assert equal == [4, 8, 12]


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_replicas_are_equal_during_warmup_and_rounds_count_from_its_end(name):
    """With 3 warm-up steps and period 4: equal after updates 1 to 3, then after 7 and 11."""

    def train(rank, process_group):
        run = Run(make_algorithm(name, period=4, warmup_steps=3), process_group)
        history = []
        for step in range(12):
            run.update(step)
            history.append(run.weights())
        return history

    first, second = run_ranks(train, 2)

    assert [step + 1 for step in range(12) if torch.equal(first[step], second[step])] == [1, 2, 3, 7, 11]


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_skipped_updates_count(overlap_steps):
    """A rank whose GradScaler skips an update stays in step with the others."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=3, overlap_steps=overlap_steps, compression="none"), process_group)
        for step in range(6 + overlap_steps):
            run.update(step, skip=rank == 1 and step in (0, 4))
        return outer_state(run.algorithm, "weight")

    first, second = run_ranks(train, 2)

    assert torch.equal(first, second)
    assert not torch.equal(first, flat(Layers().parameters()))


def test_fragments_have_their_rounds_one_after_the_other():
    """With two fragments and period 4, the second fragment's round comes two updates after the first's."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=4, num_fragments=2), process_group)
        history, sent = [], [run.group.traffic.bytes_sent]
        for step in range(8):
            run.update(step)
            history.append(run.weights())
            sent.append(run.group.traffic.bytes_sent)
        return history, torch.tensor(sent).diff().tolist()

    (first, sent), (second, _) = run_ranks(train, 2)
    one, other = TWO_FRAGMENTS

    assert [step + 1 for step in range(8) if torch.equal(first[step][one], second[step][one])] == [2, 6]
    assert [step + 1 for step in range(8) if torch.equal(first[step][other], second[step][other])] == [4, 8]
    assert [step + 1 for step in range(8) if sent[step]] == [2, 4, 6, 8]


def test_optimizer_state_stays_local():
    """The inner momentum of a rank is not touched by a round."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=2), process_group)
        run.update(0)
        run.optimizer.zero_grad()
        loss(run.model, rank, 1).backward()
        run.algorithm.before_step()
        run.optimizer.step()
        before = copy.deepcopy(run.optimizer.state_dict()["state"])
        run.algorithm.after_step()
        return before, run.optimizer.state_dict()["state"]

    for before, after in run_ranks(train, 2):
        for i, state in before.items():
            assert torch.equal(state["momentum_buffer"], after[i]["momentum_buffer"])


def test_several_optimizers_have_their_own_rounds():
    """Of two optimizers one steps twice as often: the parameters of each meet by its own count."""

    def train(rank, process_group):
        model, group = Layers(), Group(process_group)
        parts = [[model.first, model.bias], [model.second, model.scale, model.head]]
        optimizers = [sgd(part) for part in parts]
        algorithms = [DiLoCo(period=2, overlap_steps=1), DiLoCo(period=2)]
        for algorithm, optimizer in zip(algorithms, optimizers, strict=True):
            algorithm.setup(model, [optimizer], group)
        equal = []
        for step in range(8):
            for i in (0, 1) if step % 2 else (0,):
                optimizers[i].zero_grad()
                loss(model, rank, step).backward()
                algorithms[i].before_step()
                optimizers[i].step()
                algorithms[i].after_step()
            equal.append([flat(part) for part in parts])
        for algorithm in algorithms:
            algorithm.finish()
        return equal, flat(model.parameters())

    (first, end), (second, other_end) = run_ranks(train, 2)

    assert [step + 1 for step in range(8) if torch.equal(first[step][1], second[step][1])] == [1, 4, 5, 8]
    assert not any(torch.equal(first[step][0], second[step][0]) for step in range(8))
    assert torch.equal(end, other_end)


# -- what is not a float32 parameter -------------------------------------------------------------------------


class Normalised(nn.Module):
    """BatchNorm's running statistics beside a constant mask and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.fill_(0.1)
        self.register_buffer("mask", torch.full((30, 30), 0.1).tril())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1 + int(x[0, 0] > 0)
        return self.head(self.norm(x + 3 * x[0].mean()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("name", "options"), [("local_sgd", {}), ("diloco", {"overlap_steps": 1})], ids=str)
def test_buffers_are_averaged_at_rounds(name, options, size):
    """Floating buffers that differ become their mean; equal ones and integers keep their bits."""

    def train(rank, process_group):
        run = Run(make_algorithm(name, period=4, **options), process_group, model=Normalised())
        end = 4 + options.get("overlap_steps", 0)
        for step in range(end - 1):
            run.update(step)
        sent = run.group.traffic.bytes_sent
        run.optimizer.zero_grad()
        loss(run.model, rank, end - 1).backward()
        before = copy.deepcopy(dict(run.model.named_buffers()))
        run.algorithm.before_step()
        run.optimizer.step()
        run.algorithm.after_step()
        return before, dict(run.model.named_buffers()), run.group.traffic.bytes_sent - sent

    results = run_ranks(train, size)

    for before, after, sent in results:
        for name_ in ("norm.running_mean", "norm.running_var"):
            wanted = sum(other[name_] for other, _, _ in results) / size
            torch.testing.assert_close(after[name_], wanted)
            assert not torch.equal(before[name_], after[name_])
            assert torch.equal(after[name_], results[0][1][name_])
        for name_ in ("mask", "seen", "norm.num_batches_tracked"):
            assert torch.equal(before[name_], after[name_])
            assert before[name_].dtype == after[name_].dtype
        assert sent < 1500


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_bfloat16_parameters_have_float32_outer_weights(overlap_steps):
    """Rounds of bfloat16 parameters add up in float32; the replicas hold them rounded."""

    def train(rank, process_group):
        algorithm = DiLoCo(period=2, overlap_steps=overlap_steps, compression="none")
        run = Run(algorithm, process_group, model=Layers().bfloat16())
        for step in range(6):
            run.update(step)
        return run.weights(), outer_state(run.algorithm, "weight")

    (first, outer), (second, other_outer) = run_ranks(train, 2)

    assert outer.dtype == torch.float32
    assert torch.equal(outer, other_outer)
    assert not torch.equal(outer, outer.bfloat16().float())
    assert first.dtype == torch.bfloat16
    if overlap_steps == 0:
        assert torch.equal(first, outer.bfloat16())
        assert torch.equal(second, outer.bfloat16())


def test_parameters_without_a_gradient_take_part():
    """A parameter that one rank never uses is exchanged all the same."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=2, compression="none"), process_group)
        for step in range(4):
            run.optimizer.zero_grad()
            loss(run.model, rank, step).backward()
            if rank == 1:
                run.model.head.grad = None
            run.algorithm.before_step()
            run.optimizer.step()
            run.algorithm.after_step()
        return run.weights()

    first, second = run_ranks(train, 2)

    assert torch.equal(first, second)


# -- parameters that come and go -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"overlap_steps": 2}, {"num_fragments": 2, "overlap_steps": 1}], ids=str)
def test_parameters_may_be_unfrozen_and_frozen_in_mid_run(options):
    """Replicas agree after the next round, on late parameters too; what stays keeps its outer state."""

    def train(rank, process_group):
        model = Layers()
        model.second.requires_grad_(False)
        run = Run(DiLoCo(period=4, **options), process_group, model=model)
        for step in range(5):  # a round is under way where there is overlap
            run.update(step)
        kept = run.algorithm.state_dict()["outer"]["first"]["momentum"]
        run.model.second.requires_grad_(True)
        run.optimizer.add_param_group({"params": [run.model.second]})
        run.model.bias.requires_grad_(False)
        with torch.no_grad():
            run.model.second.add_(rank)  # what was not exchanged before may differ
        run.optimizer.zero_grad()
        loss(run.model, rank, 5).backward()
        run.algorithm.before_step()
        still = run.algorithm.state_dict()["outer"]["first"]["momentum"]
        run.optimizer.step()
        run.algorithm.after_step()
        for step in range(6, 14):
            run.update(step)
        outer = run.algorithm.state_dict()["outer"]
        run.algorithm.finish()
        return kept, still, outer, run.weights()

    (kept, still, outer, first), (_, _, other_outer, second) = run_ranks(train, 2)

    assert kept.count_nonzero() or options
    if "overlap_steps" not in options:
        assert torch.equal(kept, still)
    assert torch.equal(first, second)
    assert set(outer) == {"first", "second", "scale", "head"}
    for name in outer:
        assert torch.equal(outer[name]["weight"], other_outer[name]["weight"])


@pytest.mark.parametrize("width", [1, 2])
def test_a_replaced_parameter_starts_with_its_present_values(width):
    """One that takes the place and the name of another, of its shape or another, has none of its outer state."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=2), process_group)
        for step in range(3):
            run.update(step)
        kept = run.algorithm.state_dict()["outer"]["first"]
        old, run.model.head = run.model.head, nn.Parameter(torch.full((12, width), 5.0))
        for param_group in run.optimizer.param_groups:
            param_group["params"] = [run.model.head if p is old else p for p in param_group["params"]]
        run.algorithm.before_step()
        return kept, run.algorithm.state_dict()["outer"]

    for kept, outer in run_ranks(train, 2):
        assert kept["momentum"].any()
        assert all(torch.equal(outer["first"][kind], kept[kind]) for kind in kept)
        assert torch.equal(outer["head"]["weight"], torch.full((12, width), 5.0))
        assert not outer["head"]["momentum"].any()
        assert not outer["head"]["error"].any()


def test_a_second_fit_starts_anew():
    """Setting an instance up again forgets the outer state of the fit before."""

    def train(rank, process_group):
        algorithm = DiLoCo(period=2, overlap_steps=1)
        results = []
        for _ in range(2):
            run = Run(algorithm, process_group)
            for step in range(6):
                run.update(step)
            results.append(run.weights())
            algorithm.flush()
        return results

    for first, second in run_ranks(train, 2):
        assert torch.equal(first, second)


# -- resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_at", [1, 4, 5, 6, 7, 9])
@pytest.mark.parametrize(
    "options",
    [
        {"period": 4, "overlap_steps": 4, "compression": "int4"},
        {"period": 6, "num_fragments": 2, "overlap_steps": 2, "outer_device": "cpu"},
        {"period": 4, "warmup_steps": 2, "overlap_steps": 3},
    ],
    ids=str,
)
def test_resume_is_exact_in_the_middle_of_a_round(options, saved_at):
    """Saved as a file at any update, then loaded in new objects: at the end all bits are the same."""

    def save(run):
        file = io.BytesIO()
        torch.save((run.model.state_dict(), run.optimizer.state_dict(), run.algorithm.state_dict()), file)
        return file.getvalue()

    def first_part(rank, process_group):
        run = Run(DiLoCo(**options), process_group)
        for step in range(12):
            if step == saved_at:
                file = save(run)
            run.update(step)
        return file, run.weights(), run.algorithm.state_dict()

    results = run_ranks(first_part, 3)

    def second_part(rank, process_group):
        model, optimizer, algorithm = torch.load(io.BytesIO(results[rank][0]), weights_only=True)
        run = Run(DiLoCo(**options), process_group)
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
        run.algorithm.load_state_dict(algorithm)
        for step in range(saved_at, 12):
            run.update(step)
        return run.weights(), run.algorithm.state_dict()

    for (_, wanted, wanted_state), (actual, state) in zip(results, run_ranks(second_part, 3), strict=True):
        assert torch.equal(actual, wanted)
        assert str(state) == str(wanted_state)


def test_one_rank_alone_may_ask_for_the_state():
    """state_dict waits for nobody, not even in the middle of a round."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=4, overlap_steps=3), process_group)
        for step in range(8):
            run.update(step)
            if rank == 1:
                run.algorithm.state_dict()
        run.algorithm.finish()
        return run.weights()

    first, second = run_ranks(train, 2)

    assert torch.equal(first, second)


def test_a_round_is_dropped_where_the_fragments_have_changed():
    """A state saved in mid-round loads under another num_fragments; what it changed is in the next round."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=4, overlap_steps=3, **EXACT), process_group)
        for step in range(5):
            run.update(step)
        other = Run(DiLoCo(period=4, num_fragments=2, **EXACT), process_group, model=run.model)
        other.optimizer.load_state_dict(run.optimizer.state_dict())
        other.algorithm.load_state_dict(run.algorithm.state_dict())
        for step in range(5, 8):
            other.update(step)
        return other.weights()

    first, second = run_ranks(train, 2)
    rest = TWO_FRAGMENTS[1]  # its round came last

    assert torch.equal(first[rest], second[rest])


# -- bytes and errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("compression", "factor"), [("none", 50), ("fp16", 100), ("int8", 190), ("int4", 370)], ids=str
)
def test_bytes_sent_per_period(compression, factor, size):
    """50 updates send a 50th, 100th, 190th, 370th of 50 all-reduces of a million float32, or less."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=50, compression=compression), process_group, model=nn.Linear(1000, 1000))
        start = run.group.traffic.bytes_sent  # of checking that all ranks have the same parameters
        for _ in range(50):
            run.algorithm.before_step()
            run.algorithm.after_step()
        return run.group.traffic.bytes_sent - start

    all_reduce = 2 * (size - 1) / size * 4 * 1_001_000

    for sent in run_ranks(train, size):
        assert 0 < sent <= 50 * all_reduce / factor + 64  # encoded chunks are padded


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
@pytest.mark.parametrize("size", [2, 3])
def test_no_average_at_the_end_right_after_a_round(name, size):
    """The end of fit costs an all-reduce of the weights where replicas differ, and next to nothing where not."""

    def train(num_updates):
        def run(rank, process_group):
            run = Run(make_algorithm(name, period=4), process_group)
            for step in range(num_updates):
                run.update(step)
            before, sent = run.weights(), run.group.traffic.bytes_sent
            run.algorithm.finish()
            return before, run.weights(), run.group.traffic.bytes_sent - sent

        return run_ranks(run, size)

    for before, after, sent in train(num_updates=8):
        assert torch.equal(before, after)
        assert sent <= 8 * size
    for before, after, sent in train(num_updates=9):
        assert not torch.equal(before, after)
        assert sent >= 2 * (size - 1) / size * 4 * before.numel()


def test_fragments_divide_the_peak():
    """With 4 fragments of equal layers, no update sends more than about a quarter of a whole round."""

    def peak(num_fragments):
        def train(rank, process_group):
            model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
            run = Run(DiLoCo(period=8, num_fragments=num_fragments), process_group, model=model)
            sent = [run.group.traffic.bytes_sent]
            for _ in range(8):
                run.algorithm.before_step()
                run.algorithm.after_step()
                sent.append(run.group.traffic.bytes_sent)
            return max(torch.tensor(sent).diff().tolist())

        return run_ranks(train, 2)[0]

    assert peak(4) <= 1.03 * peak(1) / 4  # more blocks are not full


@pytest.mark.parametrize(("compression", "levels"), [("int8", 127), ("int4", 7)])
def test_error_feedback_pays(compression, levels):
    """Where small changes share a block with a large one, error feedback makes the loss a fifth or less."""

    def train(feedback):
        def rank_main(rank, process_group):
            # One weight moves by ``levels`` * 0.3 per round; the others by at most 0.1: not half a level.
            model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(64))})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            algorithm = DiLoCo(period=5, compression=compression, outer_momentum=0.0)
            slope = levels * 0.3 / (5 * 0.1)
            algorithm.setup(model, [optimizer], Group(process_group))
            target = 1 + torch.arange(63) / 63 + 0.5 * (2 * rank - 1)
            for _ in range(300):
                optimizer.zero_grad()
                x = model["x"]
                (0.05 * (x[1:] - target).square().sum() - slope * x[0]).backward()
                algorithm.before_step()
                optimizer.step()
                algorithm.after_step()
                if not feedback:
                    state = algorithm.state_dict()
                    state["outer"]["x"]["error"].zero_()
                    algorithm.load_state_dict(state)
            common = target - 0.5 * (2 * rank - 1)
            return (model["x"].detach()[1:] - common).square().mean().item()

        return run_ranks(rank_main, 2)[0]

    assert train(feedback=True) < train(feedback=False) / 5


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_lost_rank_ends_the_others_in_their_next_exchange(overlap_steps):
    """When a rank has gone, the others raise a sentence that names it, as soon as they need it."""

    def train(rank, process_group):
        run = Run(DiLoCo(period=4, overlap_steps=overlap_steps), process_group)
        try:
            for step in range(20):
                run.update(step)
                if rank == 1 and step == 5:
                    return "left"
        except DistributedRuntimeException as error:
            return str(error)

    first, second = run_ranks(train, 2)

    assert second == "left"
    assert "rank 0 lost rank 1" in first


def test_what_is_saved_after_a_lost_rank_goes_on():
    """A round that could not end leaves nothing in the state: neither this run's weights nor a later one's have it."""
    saved = {}

    def first_part(rank, process_group):
        run = Run(DiLoCo(period=4), process_group)
        for step in range(7):
            run.update(step)
        if rank == 0:
            with pytest.raises(DistributedRuntimeException, match="rank 0 lost rank 1"):
                run.update(7)
            saved.update(weights=run.weights(), model=run.model, algorithm=run.algorithm.state_dict())
            saved["outer"] = outer_state(run.algorithm, "weight")

    def second_part(rank, process_group):
        run = Run(DiLoCo(period=4), process_group, model=saved["model"])
        run.algorithm.load_state_dict(saved["algorithm"])
        run.algorithm.finish()
        return run.weights(), outer_state(run.algorithm, "weight")

    run_ranks(first_part, 2)
    [(weights, outer)] = run_ranks(second_part, 1)

    assert torch.equal(weights, saved["weights"])
    assert torch.equal(outer, saved["outer"])


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_round_that_was_applied_is_over(overlap_steps, monkeypatch):
    """An error in averaging the buffers, which comes last, does not let a round be applied twice."""

    def stop(*_):
        raise KeyboardInterrupt

    def train(rank, process_group):
        run = Run(DiLoCo(period=4, overlap_steps=overlap_steps), process_group)
        for step in range(3 + overlap_steps):
            run.update(step)
        with monkeypatch.context() as patched:
            patched.setattr("lightning_distopt.algorithms.local_sgd.average_buffers_", stop)
            with pytest.raises(KeyboardInterrupt):
                run.update(3 + overlap_steps)
        before = run.weights()
        run.algorithm.finish()
        return before, run.weights()

    [(before, after)] = run_ranks(train, 1)

    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period must be at least 1, got 0"),
        ({"outer_lr": 0}, "outer_lr must be at least .*, got 0"),
        ({"outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1, got 1.0"),
        ({"compression": "int2"}, "compression must be one of none, fp16, int8, int4, got 'int2'"),
        ({"num_fragments": 0}, "num_fragments must be at least 1, got 0"),
        ({"period": 4, "num_fragments": 5}, "num_fragments must be at most period=4, got 5"),
        ({"period": 9, "num_fragments": 2, "overlap_steps": 5}, "overlap_steps must be .* = 4, .* got 5"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"outer_device": "cuda"}, "outer_device must be None or 'cpu', got 'cuda'"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options, message):
    """The constructor names the value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        DiLoCo(**options)


def test_values_of_the_wrong_type_are_refused():
    """So does a wrong type."""
    with pytest.raises(TypeError, match="nesterov must be True or False, got 1"):
        DiLoCo(nesterov=1)
    with pytest.raises(TypeError, match=r"period must be an int, got 2\.5"):
        make_algorithm("local_sgd", period=2.5)


# -- in a Trainer --------------------------------------------------------------------------------------------


def fit(rank, strategy, options):
    """Fit on one rank; return final weights and bytes sent."""
    from lightning_distopt import DistOptBaguaStrategy

    model = Regression()
    built = DistOptBaguaStrategy(strategy, **options) if options else f"distopt_{strategy}"
    trainer = make_trainer(strategy=built, max_epochs=2, limit_train_batches=6, gradient_clip_val=1.0)
    trainer.fit(model, loader(), loader())
    return weights(model), trainer.strategy.algorithm.name, float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local_sgd", {}),
        ("diloco", {}),
        ("local_sgd", {"period": 2, "warmup_steps": 1}),
        ("diloco", {"period": 4, "num_fragments": 2, "overlap_steps": 1}),
    ],
    ids=str,
)
def test_trains_from_one_string(name, options):
    """Under its own name, with validation and clipping; all ranks end with the same weights and metric."""
    results = launch(fit, 2, name, options)

    assert all(torch.equal(result[0], results[0][0]) for result in results)
    assert [result[1:] for result in results] == [results[0][1:]] * 2
    assert results[0][1] == name
    assert name in ALGORITHMS


def fit_and_count(rank, num_updates, seed_by_rank):
    """Fit with an averaging every 4 updates; return final weights, bytes sent, and those of one averaging."""
    torch.manual_seed(rank if seed_by_rank else 0)
    model = Regression()
    nn.init.normal_(model.net[0].weight)
    strategy = DistOptStrategy(algorithm=make_algorithm("local_sgd", period=4))
    trainer = make_trainer(strategy=strategy, devices=2, max_steps=num_updates)
    trainer.fit(model, loader())
    return weights(model), strategy.bytes_sent, 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("num_updates", "seed_by_rank", "num_exchanges"), [(8, False, 2), (9, False, 3), (8, True, 3)], ids=str
)
def test_weights_are_sent_at_rounds_and_where_replicas_differ(num_updates, seed_by_rank, num_exchanges):
    """Beside its rounds a fit sends weights at its start if ranks seeded differently, at its end if no round has just been."""
    results = launch(fit_and_count, 2, num_updates, seed_by_rank)

    assert torch.equal(results[0][0], results[1][0])
    _, sent, one_exchange = results[0]  # rank 0's weights are those that are sent at the start
    assert num_exchanges * one_exchange <= sent <= num_exchanges * one_exchange + 100
