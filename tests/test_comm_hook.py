"""The compressed all-reduces of DDPOption(comm_hook=...)."""

import copy

import pytest
import torch
from oracles import flat
from test_algorithms import Run, loss
from torch import nn
from worlds import run_ranks

from lightning_distopt.algorithms.comm_hook import HalfAllReduce, PowerSGD

# Of a float32 all-reduce's bytes on two ranks, 4 N.
N = 23 * 40 + 40 + 40


class TwoLayers(nn.Module):
    """A matrix that is worth compressing, a bias, and a vector."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(23, 40)
        self.last = nn.Parameter(torch.empty(40))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        self.to(dtype)

    def forward(self, x):
        return torch.tanh(self.layer(x.to(self.last.dtype))) @ self.last


def train(algorithm, steps=6, size=2, dtype=torch.float32):
    """Train on real ranks; return per rank the weights after every update, and the bytes sent in each."""

    def rank_main(rank, process_group):
        run = Run(copy.deepcopy(algorithm), process_group, TwoLayers(dtype))
        history, sent = [], []
        for step in range(steps):
            before = run.group.traffic.bytes_sent
            run.update(step)
            history.append(run.weights())
            sent.append(run.group.traffic.bytes_sent - before)
        return history, sent

    return run_ranks(rank_main, size)


def mean_gradients(model, size, step):
    """Return the undivided gradients of every rank, by parameter."""
    gradients = []
    for rank in range(size):
        twin = copy.deepcopy(model)
        loss(twin, rank, step).backward()
        gradients.append({name: p.grad for name, p in twin.named_parameters()})
    return gradients


def oracle(size, start, rank_of_matrix, steps=6):
    """PowerSGD in one process, slow and obvious: return the weights after every update."""
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    name, history = "layer.weight", []
    errors = [torch.zeros(40, 23) for _ in range(size)]
    # The first draw of the generator whose seed is the parameter's place in the module.
    place = [n for n, _ in model.named_parameters()].index(name)
    q = torch.randn(23, rank_of_matrix, generator=torch.Generator().manual_seed(place))
    for step in range(steps):
        gradients = mean_gradients(model, size, step)
        for parameter_name, parameter in model.named_parameters():
            parameter.grad = sum(g[parameter_name] for g in gradients) / size
        if step >= start:
            matrices = [g[name] + e for g, e in zip(gradients, errors, strict=True)]
            p = torch.linalg.qr(sum(m @ q for m in matrices) / size)[0]
            q = sum(m.T @ p for m in matrices) / size
            errors = [m - p @ q.T for m in matrices]
            model.layer.weight.grad = p @ q.T
        optimizer.step()
        history.append(flat(model.parameters()))
    return history


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("start", "rank_of_matrix"), [(0, 1), (2, 2)])
def test_powersgd_equals_its_oracle(size, start, rank_of_matrix):
    """Real ranks hold what one process computes, the same bits everywhere, and send what the docstring says."""
    results = train(PowerSGD(rank_of_matrix, start), size=size)

    for history, sent in results:
        for actual, expected in zip(history, oracle(size, start, rank_of_matrix), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, history, results[0][0]))
        ring = 2 * (size - 1) / size * 4
        expected_bytes = [ring * (N if step < start else (23 + 40) * rank_of_matrix + 80) for step in range(6)]
        assert sent == pytest.approx(expected_bytes, abs=8)


def test_powersgd_resumes_exactly():
    """3 updates, saved and loaded into new objects, and 3 more equal 6 updates bit for bit."""
    algorithm = PowerSGD(2, 1)
    straight = train(algorithm)

    def first_half(rank, process_group):
        run = Run(PowerSGD(2, 1), process_group, TwoLayers())
        for step in range(3):
            run.update(step)
        return copy.deepcopy((run.module.state_dict(), run.optimizer.state_dict(), run.algorithm.state_dict()))

    saved = run_ranks(first_half, 2)

    def second_half(rank, process_group):
        weights, optimizer, state = saved[rank]
        run = Run(PowerSGD(2, 1), process_group, TwoLayers())
        run.module.load_state_dict(weights)
        run.optimizer.load_state_dict(optimizer)
        run.algorithm.load_state_dict(state)
        for step in range(3, 6):
            run.update(step)
        return run.weights()

    for (history, _), resumed in zip(straight, run_ranks(second_half, 2), strict=True):
        assert torch.equal(history[-1], resumed)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 2**-10), ("bf16", 2**-7)])
@pytest.mark.parametrize("size", [2, 3])
def test_half_precision_sends_half_and_stays_near(dtype, tolerance, size):
    """On gloo both formats send half the bytes, keep replicas equal, and end near an exact all-reduce."""
    results = train(HalfAllReduce(dtype), size=size)
    exact = train(PowerSGD(), size=size)

    for history, sent in results:
        assert all(map(torch.equal, history, results[0][0]))
        assert sum(sent) == pytest.approx(sum(exact[0][1]) / 2, rel=0.02)
        torch.testing.assert_close(history[-1], exact[0][0][-1], rtol=tolerance, atol=tolerance)
        assert not torch.equal(history[-1], exact[0][0][-1])


@pytest.mark.parametrize("algorithm", [HalfAllReduce("bf16"), PowerSGD(1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_train(algorithm, dtype):
    """Models in bfloat16 and float64 keep replicas equal."""
    results = train(algorithm, dtype=dtype)

    assert torch.equal(results[0][0][-1], results[1][0][-1])
    assert torch.isfinite(results[0][0][-1]).all()


@pytest.mark.parametrize("algorithm", [HalfAllReduce("fp16"), PowerSGD(1, 0)], ids=str)
def test_one_rank_sends_nothing(algorithm):
    """A single rank trains as without an exchange."""
    ((history, sent),) = train(algorithm, size=1)
    ((plain, _),) = train(PowerSGD(), size=1)

    assert sum(sent) == 0
    assert torch.equal(history[-1], plain[-1])
