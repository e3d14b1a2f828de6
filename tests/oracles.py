"""Every algorithm again, slow and obvious: on a list of W flat tensors in one process, without a network.

An oracle is told what the ranks hold and answers what they must hold afterwards. :func:`oracle_training` drives one
through the same training that ``test_algorithms.py`` runs on real ranks.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Oracle:
    """What one exchange does to W ranks. The defaults exchange nothing."""

    def __init__(self, size: int, **options) -> None:
        self.size = size
        self.options = options

    def gradients(self, gradients: list[Tensor], step: int) -> list[Tensor]:
        """Return what the optimizers of the W ranks get, from the ranks' own flat gradients."""
        return gradients

    def before(self, weights: list[Tensor], step: int) -> list[Tensor]:
        """Return the W ranks' flat weights just before update ``step`` (0, 1, ...) is applied."""
        return weights

    def after(self, weights: list[Tensor], step: int) -> list[Tensor]:
        """Return the W ranks' flat weights just after update ``step`` was applied."""
        return weights

    def finish(self, weights: list[Tensor]) -> list[Tensor]:
        """Return the W ranks' flat weights at the end of fit."""
        return weights


def mean(tensors: list[Tensor]) -> Tensor:
    """Mean over ranks at double precision."""
    return (sum(t.double() for t in tensors) / len(tensors)).to(tensors[0].dtype)


def quantise(values: Tensor) -> Tensor:
    """Round values to 256 levels between the smallest and the largest."""
    if values.numel() == 0:
        return values
    wide = values.double()
    low, high = wide.min(), wide.max()
    if low == high:
        return values.clone()
    codes = ((wide - low) * 255 / (high - low)).round()
    return (low + codes * (high - low) / 255).to(values.dtype)


def quantise_blocks(values: Tensor, compression: str) -> Tensor:
    """Round values as float16, or in blocks of 256 to multiples of the block's largest over 127 or 7."""
    if compression == "fp16":
        return values.half().to(values.dtype)
    levels = {"int8": 127, "int4": 7}[compression]
    pieces = []
    for block in values.double().split(256):
        scale = block.abs().max() / levels if block.numel() else 1.0
        pieces.append(((block / scale).round() * scale if scale > 0 else block).to(values.dtype))
    return torch.cat(pieces)


def compressed_mean(tensors: list[Tensor]) -> Tensor:
    """The others' chunk k is quantised, rank k averages them with its own and quantises the mean. One rank sends nothing."""
    size = len(tensors)
    if size == 1:
        return tensors[0].clone()
    chunk = -(-tensors[0].numel() // size)
    result = []
    for k in range(size):
        pieces = [t[k * chunk : (k + 1) * chunk] for t in tensors]
        result.append(quantise(mean([piece if r == k else quantise(piece) for r, piece in enumerate(pieces)])))
    return torch.cat(result)


def on_two_levels(
    tensors: list[Tensor], options: dict, exchange: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Average in each node of ``options["local_size"]`` ranks, exchange between nodes, hand out in the node."""
    local_size = options.get("local_size", 1)
    nodes = exchange([mean(tensors[r : r + local_size]) for r in range(0, len(tensors), local_size)])
    return [node for node in nodes for _ in range(local_size)]


class GradientAllReduce(Oracle):
    def gradients(self, gradients: list[Tensor], step: int) -> list[Tensor]:
        return [mean(gradients)] * self.size


class ByteGrad(Oracle):
    def gradients(self, gradients: list[Tensor], step: int) -> list[Tensor]:
        return [compressed_mean(gradients)] * self.size


class QAdam(Oracle):
    """Does the whole update itself, in double precision, and overrules whatever the optimizer did."""

    lr, warmup_steps, beta1, beta2, eps = 0.01, 2, 0.9, 0.999, 1e-8

    def gradients(self, gradients: list[Tensor], step: int) -> list[Tensor]:
        if step == 0:
            self.momentum, self.second = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]).double()
        folded = [(self.beta1 * self.momentum.double() + (1 - self.beta1) * g).to(g.dtype) for g in gradients]
        if step < self.warmup_steps:
            self.momentum = mean(folded)
            self.second = self.beta2 * self.second + (1 - self.beta2) * mean(gradients).double().square()
        else:
            self.momentum = compressed_mean(folded)
        return gradients

    def before(self, weights: list[Tensor], step: int) -> list[Tensor]:
        momentum = self.momentum.double() / (1 - self.beta1 ** (step + 1))
        second = self.second / (1 - self.beta2 ** min(step + 1, self.warmup_steps))
        self.updated = [(w - self.lr * momentum / (second.sqrt() + self.eps)).to(w.dtype) for w in weights]
        return weights

    def after(self, weights: list[Tensor], step: int) -> list[Tensor]:
        return self.updated


class Decentralized(Oracle):
    def before(self, weights: list[Tensor], step: int) -> list[Tensor]:
        exchange, rest = divmod(step, self.options.get("communication_interval", 1))
        if step == 0 or rest:
            return weights
        return on_two_levels(weights, self.options, lambda nodes: self.exchange(nodes, exchange - 1))

    def exchange(self, weights: list[Tensor], t: int) -> list[Tensor]:
        if self.options.get("peer_selection_mode", "all") == "all" or self.size == 1:
            return [mean(weights)] * len(weights)
        half = len(weights) // 2
        peers = [half + (t + r) % half if r < half else (r - half - t) % half for r in range(len(weights))]
        return [mean([weights[r], weights[peer]]) for r, peer in enumerate(peers)]

    def finish(self, weights: list[Tensor]) -> list[Tensor]:
        return [mean(weights)] * self.size


class LowPrecisionDecentralized(Decentralized):
    def before(self, weights: list[Tensor], step: int) -> list[Tensor]:
        if step == 0:
            self.replicas = weights[:: self.options.get("local_size", 1)]
        return weights

    def after(self, weights: list[Tensor], step: int) -> list[Tensor]:
        if self.size == 1 or (step + 1) % self.options.get("communication_interval", 1):
            return weights
        return on_two_levels(weights, self.options, lambda nodes: self.exchange(nodes, step))

    def exchange(self, weights: list[Tensor], t: int) -> list[Tensor]:
        old = self.replicas
        neighbours = [(old[r - 1] + old[(r + 1) % len(old)]) / 3 for r in range(len(old))]
        differences = [x + n - 5 / 3 * y for x, n, y in zip(weights, neighbours, old, strict=True)]
        self.replicas = [y + quantise(d) for y, d in zip(old, differences, strict=True)]
        return self.replicas


class LocalSGD(Oracle):
    def gradients(self, gradients: list[Tensor], step: int) -> list[Tensor]:
        return [mean(gradients)] * self.size if step < self.options.get("warmup_steps", 0) else gradients

    def after(self, weights: list[Tensor], step: int) -> list[Tensor]:
        since = step + 1 - self.options.get("warmup_steps", 0)
        return [mean(weights)] * self.size if since >= 0 and since % self.options["period"] == 0 else weights

    def finish(self, weights: list[Tensor]) -> list[Tensor]:
        return [mean(weights)] * self.size


class DiLoCo(LocalSGD):
    """The option ``elements`` says which elements each fragment has; by default the first one has all."""

    def before(self, weights: list[Tensor], step: int) -> list[Tensor]:
        if step == self.options.get("warmup_steps", 0):
            self.outer, self.momentum = weights[0].clone(), torch.zeros_like(weights[0])
            self.errors = [torch.zeros_like(w) for w in weights]
            self.fragments = self.options.get("elements", [torch.arange(weights[0].numel())])
            self.under_way = None
        return weights

    def after(self, weights: list[Tensor], step: int) -> list[Tensor]:
        period, num_fragments = self.options["period"], self.options.get("num_fragments", 1)
        since = step + 1 - self.options.get("warmup_steps", 0)
        if since <= 0:
            return weights
        weights = self.apply(weights, step)
        for k, elements in enumerate(self.fragments):
            if since % period == (k + 1) * period // num_fragments % period:
                starts = [w[elements].clone() for w in weights]
                gradient = self.exchange([self.outer[elements] - start for start in starts], elements)
                self.under_way = (step + self.options.get("overlap_steps", 0), elements, starts, gradient)
        return self.apply(weights, step)

    def apply(self, weights: list[Tensor], step: int) -> list[Tensor]:
        if self.under_way is None or self.under_way[0] > step:
            return weights
        _, elements, starts, gradient = self.under_way
        self.under_way = None
        weights = [w.clone() for w in weights]
        lr, beta = self.options.get("outer_lr", 1.0), self.options.get("outer_momentum", 0.6)
        momentum = beta * self.momentum[elements] + gradient
        change = gradient + beta * momentum if self.options.get("nesterov", True) else momentum
        self.momentum[elements] = momentum
        self.outer[elements] -= lr * change
        for w, start in zip(weights, starts, strict=True):
            w[elements] += self.outer[elements] - start
        return weights

    def exchange(self, values: list[Tensor], elements: Tensor) -> Tensor:
        compression = self.options.get("compression", "int8")
        if compression == "none" or self.size == 1:
            return mean(values)
        values = [v + error[elements] for v, error in zip(values, self.errors, strict=True)]
        losses = [torch.zeros_like(v) for v in values]
        result = torch.zeros_like(values[0])
        chunk = -(-elements.numel() // self.size)
        for owner in range(self.size):
            own = slice(owner * chunk, (owner + 1) * chunk)
            received = [v[own] if r == owner else quantise_blocks(v[own], compression) for r, v in enumerate(values)]
            result[own] = quantise_blocks(mean(received), compression)
            for loss, value, code in zip(losses, values, received, strict=True):
                loss[own] = value[own] - code
            losses[owner][own] += self.size * (mean(received) - result[own])
        for error, loss in zip(self.errors, losses, strict=True):
            error[elements] = loss
        return result

    def finish(self, weights: list[Tensor]) -> list[Tensor]:
        return super().finish(self.apply(weights, 10**9))


class AsyncModelAverage(Oracle):
    """Interval 0: every round comes back within one update. Another interval: it never passes."""

    def gradients(self, gradients: list[Tensor], step: int) -> list[Tensor]:
        self.warming_up = step < self.options.get("warmup_steps", 0)
        return [mean(gradients)] * self.size if self.warming_up else gradients

    def after(self, weights: list[Tensor], step: int) -> list[Tensor]:
        if self.warming_up or self.options["sync_interval_ms"] > 0:
            return weights
        if step > self.options.get("warmup_steps", 0):
            weights = [w + mean(self.snapshots) - snapshot for w, snapshot in zip(weights, self.snapshots, strict=True)]
        self.snapshots = weights
        return weights

    def finish(self, weights: list[Tensor]) -> list[Tensor]:
        return [mean(weights)] * self.size


ORACLES: dict[str, type[Oracle]] = {
    "gradient_allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "qadam": QAdam,
    "decentralized": Decentralized,
    "low_precision_decentralized": LowPrecisionDecentralized,
    "async": AsyncModelAverage,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
}


def oracle_training(
    oracle: Oracle,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    steps: int,
) -> list[list[Tensor]]:
    """Train W copies of ``model`` in one process.

    Args:
        oracle: what the ranks exchange.
        model: initial model of every rank.
        make_optimizer: builds a rank's own optimizer from its parameters.
        loss: ``loss(model, rank, step)``.
        steps: number of updates.

    Returns:
        For every step the W flat weight vectors after it, and at the end those after ``finish``.
    """
    models = [copy.deepcopy(model) for _ in range(oracle.size)]
    optimizers = [make_optimizer(list(m.parameters())) for m in models]
    history = []
    for step in range(steps):
        for rank, replica in enumerate(models):
            replica.zero_grad(set_to_none=True)
            loss(replica, rank, step).backward()
        gradients = oracle.gradients([flat([p.grad for p in m.parameters()]) for m in models], step)
        for replica, gradient in zip(models, gradients, strict=True):
            for parameter, piece in zip(replica.parameters(), unflatten(gradient, replica), strict=True):
                parameter.grad = piece.clone()
        set_weights(models, oracle.before([flat(m.parameters()) for m in models], step))
        for optimizer in optimizers:
            optimizer.step()
        set_weights(models, oracle.after([flat(m.parameters()) for m in models], step))
        history.append([flat(m.parameters()) for m in models])
    history.append([t.clone() for t in oracle.finish([flat(m.parameters()) for m in models])])
    return history


def flat(tensors) -> Tensor:
    """Copy tensors into one 1-D tensor."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unflatten(vector: Tensor, model: nn.Module) -> list[Tensor]:
    """Cut a flat vector into pieces shaped like the model's parameters."""
    sizes = [p.numel() for p in model.parameters()]
    return [piece.view_as(p) for piece, p in zip(vector.split(sizes), model.parameters(), strict=True)]


def set_weights(models: list[nn.Module], weights: list[Tensor]) -> None:
    """Copy flat vectors into the models."""
    with torch.no_grad():
        for model, vector in zip(models, weights, strict=True):
            for parameter, piece in zip(model.parameters(), unflatten(vector.clone(), model), strict=True):
                parameter.copy_(piece)
