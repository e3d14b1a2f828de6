"""QAdam and its optimizer: both phases, and every way in which training is out of the ordinary."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from models import ManualRegression, Regression, loader, weights
from oracles import flat
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import launch, make_trainer, run_ranks

from lightning_distopt.algorithms import ByteGrad, QAdam, QAdamOptimizer, qadam
from lightning_distopt.algorithms.base import BucketHook
from lightning_distopt.collectives import Group


class Weights(nn.Module):
    """Parameters whose gradients a test chooses: the loss is the inner product of both."""

    def __init__(self, **shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, gradients):
        return sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())


class Run:
    """One rank: a module in DDP, QAdam, and an optimizer."""

    def __init__(self, process_group, module, optimizers, algorithm=None, local_size=None, **ddp) -> None:
        self.group = Group(process_group if process_group.size() > 1 else None, local_size=local_size)
        self.rank = process_group.rank()
        self.module = copy.deepcopy(module)
        self.model = DistributedDataParallel(self.module, process_group=process_group, **ddp)
        made = optimizers(self.module)
        self.optimizers = made if isinstance(made, list) else [made]
        self.algorithm = QAdam() if algorithm is None else algorithm
        BucketHook(self.model, self.algorithm)
        self.algorithm.setup(self.module, self.optimizers, self.group)

    def backward(self, gradients):
        """Backward of the loss with these gradients, times (1 + rank)."""
        ((1 + self.rank) * self.model(gradients)).backward()

    def update(self, gradients, clip=None):
        """One update of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(gradients)
        self.algorithm.before_step()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.algorithm.after_step()

    def weights(self):
        """This rank's flat weights."""
        return flat(self.module.parameters())


def random(step, **shapes):
    """Random gradients, the same on every rank but for its factor."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def mean_factor(size):
    """Mean of (1 + rank)."""
    return (size + 1) / 2


SHAPES = {"a": (5, 3), "b": (7,)}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"betas": (0.8, 0.9), "eps": 1e-3},
    ],
    ids=str,
)
def test_warmup_equals_adam_on_averaged_gradients(size, options):
    """In warm-up, with groups and a scheduler, weights are those of Adam on the mean gradient."""

    def groups(module):
        return [{"params": [module.a], "lr": 0.03}, {"params": [module.b], "weight_decay": 0.5}]

    def train(rank, process_group):
        run = Run(process_group, Weights(**SHAPES), lambda m: QAdamOptimizer(groups(m), lr=0.01, **options))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizers[0], 30)
        for step in range(20):
            run.update(random(step, **SHAPES))
            scheduler.step()
        return run.weights()

    module = Weights(**SHAPES)
    adam = torch.optim.Adam(groups(module), lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 30)
    for step in range(20):
        for name, gradient in random(step, **SHAPES).items():
            getattr(module, name).grad = gradient * mean_factor(size)
        adam.step()
        scheduler.step()

    for actual in run_ranks(train, size):
        torch.testing.assert_close(actual, flat(module.parameters()), rtol=0, atol=1e-6)


def slow_twin(x, gradients, *, warmup_steps, lr, decay=0.0, decoupled=False):
    """Weights after each update on one rank, by the documented equations in double precision."""
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    x = x.double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    late = (gradients[:warmup_steps] == 0).all(dim=0)
    history = []
    for t, gradient in enumerate(gradients.double(), start=1):
        g = gradient if decoupled else gradient + decay * x
        if decoupled:
            x = x - lr * decay * x
        m = beta1 * m + (1 - beta1) * g
        if t <= warmup_steps:
            v = beta2 * v + (1 - beta2) * g**2
            corrected = v / (1 - beta2**t)
        else:
            if t == warmup_steps + 1:
                v[late] = 0
                frozen = v / (1 - beta2**warmup_steps)
            v[late] = beta2 * v[late] + (1 - beta2) * g[late] ** 2
            own = (v / (1 - beta2 ** (t - warmup_steps))).clamp(min=frozen[~late].mean())
            corrected = torch.where(late, own, frozen)
        x = x - lr * m / (1 - beta1**t) / (corrected.sqrt() + eps)
        history.append(x)
    return torch.stack(history).float()


@pytest.mark.parametrize("decay", [{}, {"decay": 0.3}, {"decay": 0.3, "decoupled": True}], ids=str)
@pytest.mark.parametrize("with_algorithm", [True, False])
def test_equals_its_slow_twin(decay, with_algorithm):
    """On one rank, with the algorithm or without it, every weight follows the documented equations."""
    warmup_steps = 5
    gradients = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    gradients[:, 1] = 1.0
    gradients[:warmup_steps, 2] = 0.0  # starts right after warm-up
    gradients[:20, 3] = 0.0  # starts long after it
    gradients[:20, 4] = 0.0
    gradients[:, 4] *= 100  # and much larger than the others
    options = {
        "weight_decay": decay.get("decay", 0.0),
        "decoupled_weight_decay": decay.get("decoupled", False),
    }

    def train(rank, process_group):
        run = Run(
            process_group,
            Weights(a=5),
            lambda m: QAdamOptimizer(m.parameters(), 0.01, warmup_steps, **options),
        )
        history = []
        for row in gradients:
            if with_algorithm:
                run.update({"a": row})
            else:
                run.module.a.grad = row.clone()
                run.optimizers[0].step()
            history.append(run.weights())
        return torch.stack(history)

    [actual] = run_ranks(train, 1)
    start = Weights(a=5).a.detach()
    expected = slow_twin(start, gradients, warmup_steps=warmup_steps, lr=0.01, **decay)

    # The floor is rounded to three digits.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_keep_moving_under_a_constant_gradient(size):
    """Under a constant gradient every weight goes on by lr per update, in warm-up and for long after it."""
    constant = {"a": torch.linspace(0.5, 2.0, 11)}

    def train(rank, process_group):
        run = Run(process_group, Weights(a=11), lambda m: QAdamOptimizer(m.parameters(), lr=0.01, warmup_steps=5))
        history = [run.weights()]
        for _ in range(60):
            run.update(constant)
            history.append(run.weights())
        return torch.stack(history)

    for history in run_ranks(train, size):
        moved = (history[:-1] - history[1:]) / 0.01

        torch.testing.assert_close(moved, torch.ones_like(moved), rtol=0, atol=0.02)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("whole", [True, False], ids=["whole parameter", "some elements"])
@pytest.mark.parametrize("decay", [0.0, 1e-4])
def test_zero_gradient_through_warmup_neither_explodes_nor_stops(size, whole, decay):
    """Weights without a gradient in warm-up start when it comes, by no more than Adam's bound per update."""
    idle = slice(None) if whole else slice(3)
    bound = 0.01 * (1 - 0.9) / math.sqrt(1 - 0.999)

    def train(rank, process_group):
        run = Run(
            process_group,
            Weights(a=6, b=6),
            lambda m: QAdamOptimizer(m.parameters(), lr=0.01, warmup_steps=4, weight_decay=decay),
        )
        start = run.module.a.detach().clone()
        history = []
        for step in range(60):
            gradient = torch.ones(6)
            if step < 30:
                gradient[idle] = 0.0
            run.update({"a": gradient, "b": torch.ones(6)})
            history.append(run.module.a.detach()[idle].clone())
        return start[idle], torch.stack(history)

    for start, history in run_ranks(train, size):
        steps = history.diff(dim=0).abs()

        assert steps.max() <= 1.01 * bound
        if decay == 0.0:
            assert (history[29] - start).abs().max() < 0.1
        assert (history[29] - history[-1]).min() > 0.1


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("layout", ["row-major", "column-major", "gradient in other strides"])
def test_the_size_of_pieces_changes_nothing(decay, decoupled, layout, monkeypatch):
    """Parameters updated in pieces end as those updated at once, in warm-up and after, with idle elements."""

    def train():
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(5, 7, generator=generator)
        parameter = torch.nn.Parameter(weights.t() if layout == "column-major" else weights)
        optimizer = QAdamOptimizer(
            [parameter], lr=0.1, warmup_steps=3, weight_decay=decay, decoupled_weight_decay=decoupled
        )
        for step in range(8):
            gradient = torch.randn(parameter.shape, generator=generator)
            if step < 6:
                gradient[1, 2] = gradient[-1] = 0.0
            if layout == "gradient in other strides":
                gradient = gradient.t().contiguous().t()
            parameter.grad = gradient
            optimizer.step()
        return parameter.detach()

    whole = train()
    monkeypatch.setattr(qadam, "PIECE_NUMEL", 4)

    assert torch.equal(train(), whole)


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_stays_in_force_after_warmup(decoupled):
    """With gradients that cancel, decay alone pulls the weights to zero, also after warm-up."""

    def train(rank, process_group):
        def optimizer(module):
            return QAdamOptimizer(
                module.parameters(),
                lr=0.02,
                warmup_steps=3,
                weight_decay=1.0,
                decoupled_weight_decay=decoupled,
            )

        run = Run(process_group, Weights(a=9), optimizer)
        sizes = [run.weights().abs().sum()]
        for step in range(40):
            run.update({"a": torch.full((9,), 0.01 * (-1) ** step)})
            sizes.append(run.weights().abs().sum())
        return sizes

    for sizes in run_ranks(train, 2):
        assert sizes[40] < 0.75 * sizes[4]


def test_clipping_acts_on_the_gradient_then_on_the_momentum():
    """In warm-up clipping bounds the mean gradient, afterwards the averaged first moment."""

    def train(rank, process_group):
        run = Run(process_group, Weights(a=2), lambda m: QAdamOptimizer(m.parameters(), lr=0.01, warmup_steps=2))
        norms = []
        for _ in range(6):
            run.update({"a": torch.tensor([3.0, 4.0])}, clip=1.0)
            norms.append(float(run.module.a.grad.norm()))
        return norms, run.weights()

    (norms, first), (_, second) = run_ranks(train, 2)

    # After warm-up m = 0.9 * 0.19 + 0.1 * 7.5 = 0.921, then 0.9 * 0.921 + 0.75 > 1, which is clipped.
    assert norms == pytest.approx([1.0, 1.0, 0.921, 1.0, 1.0, 1.0], abs=1e-3)
    assert torch.equal(first, second)


def test_sends_a_quarter_after_warmup():
    """In warm-up a float32 all-reduce's bytes; afterwards those of bytegrad."""
    numel = 100_000

    def train(rank, process_group):
        run = Run(process_group, Weights(a=numel), lambda m: QAdamOptimizer(m.parameters(), warmup_steps=2))
        return counted(run, [random(step, a=numel) for step in range(4)])

    def bytegrad(rank, process_group):
        run = Run(process_group, Weights(a=numel), lambda m: torch.optim.SGD(m.parameters()), ByteGrad())
        return counted(run, [random(0, a=numel)])

    quantised = run_ranks(bytegrad, 2)[0][0]

    assert run_ranks(train, 2) == [[4 * numel, 4 * numel, quantised, quantised]] * 2
    assert quantised <= 1.01 * numel


def counted(run, gradients):
    """Bytes sent by each update."""
    totals = [run.group.traffic.bytes_sent]
    for gradient in gradients:
        run.update(gradient)
        totals.append(run.group.traffic.bytes_sent)
    return [after - before for before, after in itertools.pairwise(totals)]


def test_group_added_in_midrun_has_its_own_warmup():
    """A group added later warms up as Adam, its bucket at full precision; then that is quantised again."""

    def train(rank, process_group):
        run = Run(process_group, Weights(a=8, b=8), lambda m: QAdamOptimizer([m.a], lr=0.01, warmup_steps=3))
        late, sent = [], []
        for step in range(14):
            if step == 6:
                run.optimizers[0].add_param_group({"params": [run.module.b], "lr": 0.1})
            sent += counted(run, [random(step, a=8, b=8)])
            late.append(run.module.b.detach().clone())
        return late, sent, run.weights()

    results = run_ranks(train, 2)
    module = Weights(a=8, b=8)
    adam = torch.optim.Adam([module.b], lr=0.1)
    for step in range(6, 9):
        module.b.grad = random(step, a=8, b=8)["b"] * 1.5
        adam.step()

    for late, sent, final in results:
        exact, quantised = sent[0], sent[3]
        torch.testing.assert_close(late[8], module.b.detach(), rtol=0, atol=1e-6)
        assert quantised < exact
        assert sent == [exact] * 3 + [quantised] * 3 + [exact] * 3 + [quantised] * 5
        assert not torch.equal(late[-1], late[8])
        assert torch.equal(final, results[0][2])


def test_parameter_outside_every_optimizer_does_no_harm():
    """A parameter that no optimizer holds keeps its value, and its bucket is quantised after warm-up."""

    def train(rank, process_group):
        run = Run(process_group, Weights(a=64, b=64), lambda m: QAdamOptimizer([m.a], warmup_steps=1))
        sent = counted(run, [random(step, a=64, b=64) for step in range(3)])
        return sent, run.module.b.detach()

    for sent, kept in run_ranks(train, 2):
        assert sent[1] == sent[2] < sent[0] / 2
        assert torch.equal(kept, Weights(a=64, b=64).b)


@pytest.mark.parametrize("view", [True, False])
def test_unused_parameters(view):
    """A parameter unused on one rank has a gradient of zero there; one unused everywhere stands still."""
    unused_everywhere, unused_on_rank_1 = (6, 9), (3, 7)

    def train(rank, process_group):
        run = Run(
            process_group,
            Weights(**SHAPES),
            lambda m: QAdamOptimizer(m.parameters(), lr=0.01, warmup_steps=4),
            find_unused_parameters=True,
            gradient_as_bucket_view=view,
        )
        history = []
        for step in range(12):
            gradients = random(step, **SHAPES)
            if step in unused_everywhere or (step in unused_on_rank_1 and rank == 1):
                del gradients["b"]
            run.update(gradients)
            history.append((run.module.a.detach().clone(), run.module.b.detach().clone()))
        return history

    def alone(rank, process_group):
        module = Weights(**SHAPES)
        optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=4)
        for step in range(12):
            module.zero_grad()
            for name, gradient in random(step, **SHAPES).items():
                factor = 0.5 if name == "b" and step in unused_on_rank_1 else 1.5
                if name == "a" or step not in unused_everywhere:
                    getattr(module, name).grad = gradient * factor
            optimizer.step()
        return flat(module.parameters())

    first, second = run_ranks(train, 2)

    for (a, b), (a2, b2) in zip(first, second, strict=True):
        assert torch.equal(a, a2)
        assert torch.equal(b, b2)
    for step in unused_everywhere:
        assert torch.equal(first[step][1], first[step - 1][1])
        assert not torch.equal(first[step][0], first[step - 1][0])
    torch.testing.assert_close(flat(first[-1]), run_ranks(alone, 1)[0], rtol=0, atol=5e-3)


def test_gradient_of_none_is_skipped():
    """The optimizer alone skips parameters without a gradient and counts no update for them."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = QAdamOptimizer([used, unused], warmup_steps=1)
    for _ in range(3):
        used.grad = torch.ones(2)
        optimizer.step()

    assert (used < 1).all()
    assert torch.equal(unused.detach(), torch.ones(2))
    assert len(optimizer.state_dict()["state"]) == 1


class Images(nn.Module):
    """A convolution and a transposed matrix: both are dense, neither is row-major."""

    def __init__(self, memory_format) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.matrix = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        if memory_format is torch.channels_last:
            self.conv.to(memory_format=memory_format)
            self.matrix.data = self.matrix.detach().t().contiguous().t()

    def forward(self, images):
        return (self.matrix @ self.conv(images).mean((0, 2, 3))).square().sum()


@pytest.mark.parametrize("view", [True, False])
def test_memory_layout_of_parameters_does_not_matter(view):
    """channels_last and transposed parameters train as row-major ones, and replicas of them stay equal."""

    def train(memory_format, size):
        def rank_main(rank, process_group):
            run = Run(
                process_group,
                Images(memory_format),
                lambda m: QAdamOptimizer(m.parameters(), lr=0.01, warmup_steps=2),
                gradient_as_bucket_view=view,
            )
            for step in range(10):
                run.update(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank)))
            return run.weights()

        return run_ranks(rank_main, size)

    [row_major], [other] = train(torch.contiguous_format, 1), train(torch.channels_last, 1)
    first, second = train(torch.channels_last, 2)

    torch.testing.assert_close(other, row_major, rtol=0, atol=1e-4)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    """bfloat16 and float64 parameters train in both phases, and replicas stay equal."""

    def train(rank, process_group):
        run = Run(
            process_group,
            Weights(a=9).to(dtype),
            lambda m: QAdamOptimizer(m.parameters(), 0.05, warmup_steps=2),
        )
        for _ in range(12):
            run.update({"a": torch.ones(9, dtype=dtype)})
        return run.weights()

    first, second = run_ranks(train, 2)

    assert first.dtype == dtype
    assert torch.equal(first, second)
    torch.testing.assert_close(first.double(), Weights(a=9).a.double() - 12 * 0.05, rtol=0, atol=0.1)


def test_non_finite_gradients_stay_visible():
    """A gradient that is not finite on one rank is not finite in p.grad on every rank, also after warm-up."""

    def train(rank, process_group):
        run = Run(process_group, Weights(a=9), lambda m: QAdamOptimizer(m.parameters(), warmup_steps=1))
        for step in range(2):
            run.update(random(step, a=9))
        gradient = torch.ones(9)
        if rank == 1:
            gradient[4] = math.inf
        run.optimizers[0].zero_grad()
        run.backward({"a": gradient})
        return bool(run.module.a.grad.isfinite().all())

    assert run_ranks(train, 2) == [False, False]


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_under_no_sync_equals_one_large_batch(view, set_to_none):
    """The hook folds the sum of the micro-batches, once per update, however gradients are reset."""

    def train(micro_batches):
        def rank_main(rank, process_group):
            run = Run(
                process_group,
                Weights(**SHAPES),
                lambda m: QAdamOptimizer(m.parameters(), lr=0.01, warmup_steps=2),
                gradient_as_bucket_view=view,
            )
            for step in range(8):
                run.optimizers[0].zero_grad(set_to_none)
                gradients = {name: g / micro_batches for name, g in random(step, **SHAPES).items()}
                with run.model.no_sync():
                    for _ in range(micro_batches - 1):
                        run.backward(gradients)
                run.backward(gradients)
                run.optimizers[0].step()
            return run.weights()

        return run_ranks(rank_main, 2)

    for accumulated, at_once in zip(train(4), train(1), strict=True):
        torch.testing.assert_close(accumulated, at_once, rtol=0, atol=1e-6)


def test_two_exchanges_before_one_update_are_refused():
    """After warm-up, two exchanges for one update are refused with the remedy; before it they are fine."""

    def train(rank, process_group):
        run = Run(process_group, Weights(a=9), lambda m: QAdamOptimizer(m.parameters(), warmup_steps=1))
        run.backward(random(0, a=9))
        run.backward(random(1, a=9))
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
        run.backward(random(2, a=9))
        run.optimizers[0].zero_grad()
        run.backward(random(3, a=9))
        run.optimizers[0].step()
        run.backward(random(4, a=9))
        run.backward(random(5, a=9))
        with pytest.raises(RuntimeError, match=r"twice since the last update.*no_sync.*accumulate_grad_batches"):
            run.optimizers[0].step()
        return True

    assert run_ranks(train, 2) == [True, True]


def test_two_optimizers_that_take_turns():
    """Two optimizers with backward passes of their own, one only every third time: both keep moving."""

    def train(rank, process_group):
        run = Run(
            process_group,
            Weights(**SHAPES),
            lambda m: [
                QAdamOptimizer([m.a], 0.01, warmup_steps=3),
                QAdamOptimizer([m.b], 0.01, warmup_steps=2),
            ],
            find_unused_parameters=True,
        )
        for step in range(15):
            for name, optimizer in zip("ab", run.optimizers, strict=True):
                if name == "a" or step % 3 == 2:
                    optimizer.zero_grad()
                    run.backward({name: torch.ones(SHAPES[name])})
                    optimizer.step()
        return run.module.a.detach(), run.module.b.detach()

    (a, b), (a2, b2) = run_ranks(train, 2)
    start = Weights(**SHAPES)

    assert torch.equal(a, a2)
    assert torch.equal(b, b2)
    torch.testing.assert_close(start.a - a, torch.full_like(a, 0.15), rtol=0, atol=2e-3)
    torch.testing.assert_close(start.b - b, torch.full_like(b, 0.05), rtol=0, atol=2e-3)


def test_hierarchical_equals_two_ranks_with_the_mean_of_each_node():
    """Two nodes of two ranks end as two ranks would whose gradients are the means of the nodes."""

    def train(factors, local_size):
        def rank_main(rank, process_group):
            run = Run(
                process_group,
                Weights(**SHAPES),
                lambda m: QAdamOptimizer(m.parameters(), lr=0.01, warmup_steps=3),
                QAdam(hierarchical=local_size is not None),
                local_size,
            )
            for step in range(8):
                factor = factors[rank] / (1 + rank)
                run.update({name: factor * g for name, g in random(step, **SHAPES).items()})
            return run.weights()

        return run_ranks(rank_main, len(factors))

    nodes = train([1.0, 2.0, 3.0, 5.0], local_size=2)
    leaders = train([1.5, 4.0], local_size=None)

    for actual in nodes:
        assert torch.equal(actual, nodes[0])
        torch.testing.assert_close(actual, leaders[0], rtol=0, atol=1e-5)


def test_checkpoint_past_warmup_goes_on_exactly():
    """A file that loads with weights_only=True restores both phases, late elements included, bit for bit."""

    def gradients(step):
        chosen = random(step, **SHAPES)
        if step < 7:
            chosen["b"][:3] = 0.0
        return chosen

    def make(process_group):
        return Run(
            process_group,
            Weights(**SHAPES),
            lambda m: QAdamOptimizer(m.parameters(), 0.01, 3, weight_decay=0.1),
        )

    def train(stop):
        def rank_main(rank, process_group):
            run = make(process_group)
            if stop is None:
                sent = counted(run, map(gradients, range(10)))
                return run.weights(), sent
            for step in range(stop):
                run.update(gradients(step))
            file = io.BytesIO()
            torch.save((run.module.state_dict(), run.optimizers[0].state_dict(), run.algorithm.state_dict()), file)
            file.seek(0)
            module, optimizer, algorithm = torch.load(file, weights_only=True)
            run = make(process_group)
            run.module.load_state_dict(module)
            run.optimizers[0].load_state_dict(optimizer)
            run.algorithm.load_state_dict(algorithm)
            sent = counted(run, map(gradients, range(stop, 10)))
            return run.weights(), sent

        return run_ranks(rank_main, 2)

    straight = train(None)
    for stop in (2, 3, 5):
        for (actual, sent), (expected, all_sent) in zip(train(stop), straight, strict=True):
            assert torch.equal(actual, expected)
            assert sent == all_sent[stop:]


def test_pickled_and_copied_optimizers_go_on():
    """An optimizer past warm-up that was pickled or copied with its parameters makes the same updates."""
    module = Weights(a=4)
    optimizer = QAdamOptimizer(module.parameters(), 0.01, warmup_steps=2, weight_decay=0.1)

    def update(optimizer, step):
        [parameter] = optimizer.param_groups[0]["params"]
        parameter.grad = random(step, a=4)["a"]
        optimizer.step()
        return parameter.detach().clone()

    for step in range(4):
        update(optimizer, step)
    twins = [pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)]
    expected = update(optimizer, 4)

    for twin in twins:
        assert torch.equal(update(twin, 4), expected)


def test_looking_at_an_unused_parameters_state_does_no_harm():
    """It leaves an empty state behind, which neither freezing nor loading takes for one with moments."""
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = QAdamOptimizer([used, unused], 0.01, warmup_steps=1)
    assert optimizer.state[unused] == {}

    for _ in range(3):
        used.grad = torch.ones(3)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    torch.testing.assert_close(used.detach(), torch.full((3,), 0.97))


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.Adam(ps, lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.3),
        lambda ps: torch.optim.Adam([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(ps)], foreach=True),
    ],
    ids=["Adam", "AdamW", "groups"],
)
@pytest.mark.parametrize("updates_before", [0, 3])
def test_from_adam_keeps_groups_options_moments_and_schedulers(make, updates_before):
    """A converted Adam or AdamW goes on as the original would have, its scheduler still in charge."""

    def train(convert):
        module = Weights(**SHAPES)
        optimizer = make(list(module.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(20):
            if convert and step == updates_before:
                optimizer = QAdamOptimizer.from_adam(optimizer, warmup_steps=50)
            for name, gradient in random(step, **SHAPES).items():
                getattr(module, name).grad = gradient
            optimizer.step()
            if updates_before == 0 and convert and step == 0:
                with pytest.warns(UserWarning, match="before `optimizer.step"):
                    scheduler.step()  # torch has not seen the scheduler's own optimizer step
            else:
                scheduler.step()
        return flat(module.parameters()), optimizer

    (actual, optimizer), (expected, _) = train(True), train(False)

    assert isinstance(optimizer, QAdamOptimizer)
    assert all(group["warmup_steps"] == 50 for group in optimizer.param_groups)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_moments_of_a_long_run_adam_are_frozen_with_their_own_bias():
    """Converted after more updates than warm-up has, an Adam is frozen at once and its steps stay as long."""
    module = Weights(a=4)
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(30):
        module.a.grad = torch.ones(4)
        adam.step()
    converted = QAdamOptimizer.from_adam(adam, warmup_steps=10)
    before = module.a.detach().clone()
    for _ in range(10):
        module.a.grad = torch.ones(4)
        converted.step()

    torch.testing.assert_close(before - module.a.detach(), torch.full((4,), 0.1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda ps: torch.optim.SGD(ps, lr=0.3),
            TypeError,
            r"got SGD.*return QAdamOptimizer\(self.parameters\(\), lr=0.3,",
        ),
        (type("MyAdam", (torch.optim.Adam,), {}), TypeError, "got MyAdam"),
        (lambda ps: torch.optim.Adam(ps, amsgrad=True), ValueError, "amsgrad=True"),
        (lambda ps: torch.optim.AdamW(ps, maximize=True), ValueError, "maximize=True"),
    ],
)
def test_from_adam_refuses_what_it_cannot_keep(make, error, message):
    """Other optimizers, and Adam's variants without a counterpart, are refused by name and left untouched."""
    optimizer = make(list(Weights(a=2).parameters()))
    with pytest.raises(error, match=message):
        QAdamOptimizer.from_adam(optimizer)

    assert "warmup_steps" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda ps: torch.optim.SGD(ps, lr=0.3),
            r"got SGD.*QAdamOptimizer\(self.parameters\(\), lr=0.3, warmup_steps=100\)",
        ),
        (
            lambda ps: torch.optim.AdamW(ps, weight_decay=0.2),
            r"got AdamW.*lr=0.001, warmup_steps=100, weight_decay=0.2, decoupled_weight_decay=True\)",
        ),
    ],
)
def test_another_optimizer_is_answered_with_the_line_to_write(make, line):
    """Setup refuses an optimizer of another kind, also beside a right one, and says what to write."""
    module = Weights(a=2, b=2)
    for optimizers in ([make([module.a])], [QAdamOptimizer([module.b]), make([module.a])]):
        with pytest.raises(TypeError, match=line):
            QAdam().setup(module, optimizers, Group())


class Unquantisable(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        if kind == "complex":
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.table = nn.Embedding(4, 2, sparse=kind == "sparse")


@pytest.mark.parametrize(("kind", "message"), [("complex", "'phase'.*complex"), ("sparse", "'table.weight'.*sparse")])
def test_complex_and_sparse_parameters_are_refused(kind, message):
    """Setup refuses by name what cannot be quantised."""
    module = Unquantisable(kind)
    with pytest.raises(ValueError, match=message):
        QAdam().setup(module, [QAdamOptimizer(module.table.parameters())], Group())


def test_the_optimizer_alone_refuses_them_too():
    """Without the algorithm, complex parameters are refused at once, sparse gradients at the update."""
    with pytest.raises(ValueError, match="complex64"):
        QAdamOptimizer(Unquantisable("complex").parameters())
    module = Unquantisable("sparse")
    module.table(torch.tensor([1])).sum().backward()
    optimizer = QAdamOptimizer(module.parameters())
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("lr", -0.1, ValueError),
        ("lr", "fast", TypeError),
        ("warmup_steps", 0, ValueError),
        ("warmup_steps", 1.5, TypeError),
        ("betas", (0.9, 1.5), ValueError),
        ("betas", 0.9, ValueError),
        ("eps", -1e-9, ValueError),
        ("weight_decay", -0.2, ValueError),
        ("decoupled_weight_decay", 3, TypeError),
    ],
)
def test_bad_options_are_refused_with_their_value(option, value, error):
    """A bad option is refused in the constructor, and in a group's own options, which is then not added."""
    text = str(value[-1] if isinstance(value, tuple) else value)
    with pytest.raises(error, match=text):
        QAdamOptimizer(Weights(a=2).parameters(), **{option: value})
    optimizer = QAdamOptimizer(Weights(a=2).parameters())
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": Weights(b=2).parameters(), option: value})

    assert len(optimizer.param_groups) == 1


def test_hierarchical_must_be_a_known_value():
    """The algorithm's one argument is checked."""
    with pytest.raises(ValueError, match=r"hierarchical must be .* got 'yes'"):
        QAdam(hierarchical="yes")


# -- in a Trainer --------------------------------------------------------------------------------------


class Seen(Regression):
    """Keeps the weights after every update."""

    def on_train_batch_end(self, *args):
        self.history = [*getattr(self, "history", []), weights(self)]


class TwoOptimizers(ManualRegression):
    """Two optimizers that take turns, in manual optimization."""

    def configure_optimizers(self):
        return [QAdamOptimizer(layer.parameters(), lr=0.01, warmup_steps=3) for layer in (self.net[0], self.net[2])]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class Scheduled(Seen):
    """With groups, weight decay and a scheduler."""

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "lr": 0.02}, {"params": self.net[2].parameters()}]
        optimizer = QAdamOptimizer(groups, lr=0.05, warmup_steps=4, weight_decay=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


def fit(rank, model_class, options, resume=None):
    """Fit on one rank; returns the weights at the end, and the loss that the fit started and ended with."""
    model = model_class()
    trainer = make_trainer(strategy="distopt_bagua_qadam", limit_train_batches=12, **options)
    trainer.fit(model, loader(), ckpt_path=resume)
    return weights(model)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}], ids=str)
def test_fits_with_scheduler_groups_clipping_and_accumulation(options):
    """In a whole fit ranks end with the same bits, and a single rank trains as with the optimizer alone."""
    both = launch(fit, 2, Scheduled, {"max_epochs": 2, **options})
    alone = launch(fit, 1, Scheduled, {"max_epochs": 2, **options})
    plain = launch(fit_plain, 1, Scheduled, {"max_epochs": 2, **options})

    assert torch.equal(both[0], both[1])
    assert not torch.equal(both[0], alone[0])
    if "gradient_clip_val" not in options:  # which acts on the gradient there, on the first moment here
        torch.testing.assert_close(alone[0], plain[0], rtol=0, atol=1e-4)


def fit_plain(rank, model_class, options):
    """Fit with Lightning's own ddp: QAdamOptimizer without QAdam."""
    model = model_class()
    make_trainer(strategy="ddp", limit_train_batches=12, **options).fit(model, loader())
    return weights(model)


def test_two_optimizers_in_manual_optimization():
    """Optimizers that take turns past their warm-up keep replicas equal."""
    results = launch(fit_two, 2)

    assert torch.equal(results[0], results[1])
    assert torch.isfinite(results[0]).all()


def fit_two(rank):
    """Fit two optimizers, each of which leaves the other's parameters unused."""
    from lightning_distopt import DistOptBaguaStrategy

    model = TwoOptimizers()
    strategy = DistOptBaguaStrategy("qadam", find_unused_parameters=True)
    make_trainer(strategy=strategy, limit_train_batches=12, max_epochs=1).fit(model, loader())
    return weights(model)


def test_resume_in_a_new_process_past_warmup(tmp_path):
    """3 epochs equal one, a checkpoint, a new process and two more, bit for bit: warm-up is not repeated."""
    straight = launch(fit_and_save, 2, str(tmp_path / "straight.ckpt"), 3, None)
    launch(fit_and_save, 2, str(tmp_path / "third.ckpt"), 1, None)
    resumed = launch(fit_and_save, 2, str(tmp_path / "end.ckpt"), 3, str(tmp_path / "third.ckpt"))

    for actual, expected in zip(resumed, straight, strict=True):
        assert torch.equal(actual, expected)


def fit_and_save(rank, path, epochs, resume):
    """Fit ``epochs`` of 6 updates in all, from a checkpoint if there is one, and save."""
    model = Scheduled()
    trainer = make_trainer(strategy="distopt_bagua_qadam", max_epochs=epochs, limit_train_batches=6)
    trainer.fit(model, loader(), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return weights(model)


def test_loss_scaling_is_refused():
    """A loss scaler is refused before the first update, with the precision to use instead."""
    with pytest.raises(ValueError, match=r"qadam keeps moments of the gradients.*bf16-mixed"):
        launch(fit, 1, Scheduled, {"max_epochs": 1, "plugins": MixedPrecision("16-mixed", "cpu")})
