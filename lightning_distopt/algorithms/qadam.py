"""QAdam: Adam whose first moment, not its gradient, travels in 8 bits once the second moment is known."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim.optimizer import ParamsT

from lightning_distopt.algorithms.base import (
    GradientExchange,
    check_bool,
    check_int,
    check_number,
    require_dense_real,
    ring_bytes,
)
from lightning_distopt.collectives import Group
from lightning_distopt.quantize import MinMaxUInt8

__all__ = ["QAdam", "QAdamOptimizer"]


class QAdam(GradientExchange):
    """Adam on the mean gradient in warm-up; then v is frozen, and first moments are averaged in 8 bits.

    With t the updates of a parameter, T its ``warmup_steps``, g_r rank r's gradient, and Q the quantised
    mean over ranks of :class:`~lightning_distopt.algorithms.ByteGrad`::

        t <= T:  g = mean_r g_r,  m_t = b1 m_(t-1) + (1 - b1) g,  v_t = b2 v_(t-1) + (1 - b2) g^2   (Adam)
        t > T:   m_t = Q_r(b1 m_(t-1) + (1 - b1) g_r),            v_t = v_T
        x_t = x_(t-1) - lr * m_t / (1 - b1^t) / (sqrt(v_t / (1 - b2^min(t, T))) + eps)

    Needs :class:`QAdamOptimizer`, which does all but the folding and averaging of first moments. After
    warm-up ``p.grad`` holds the averaged first moment: gradient clipping and logged norms act on that.

    Sends what a float32 all-reduce sends in warm-up, afterwards 2 (W - 1) / W * N bytes per rank and update.
    A bucket in which any parameter is still in warm-up (in a group added in mid-run, or never used so far)
    travels at full precision. Replicas stay equal bit for bit. All state lives in the optimizer, step counts
    included, so warm-up does not start again after a resume.

    Source: QAdam in Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021,
    arXiv:2107.01499. After Chen et al., "Quantized Adam with Error Feedback", 2021, arXiv:2004.14180, and
    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    2021, arXiv:2102.02888, but without error feedback, like Bagua.
    Differs from Bagua: weight decay is in force after warm-up, too. The bias correction of v is frozen
    together with v; Bagua's goes on, which triples the step size in the end (b2 = 0.999, T = 100). Elements
    without a second moment are handled (see :class:`QAdamOptimizer`). Updates are counted per parameter.

    Args:
        hierarchical: average exactly inside the node first, then quantised between nodes; "auto" when there
            are several nodes with several ranks each.
    """

    name = "qadam"
    bucket_cap_mb = 4
    loss_scaling = False
    average = True  # a sum of first moments would be no moment

    def __init__(self, hierarchical: bool | Literal["auto"] = "auto") -> None:
        """Configure; opens nothing."""
        super().__init__(hierarchical)

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        """Start a fit.

        Raises:
            TypeError: an optimizer is no :class:`QAdamOptimizer`; with the line to write instead.
            ValueError: a parameter is complex or has sparse gradients.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, QAdamOptimizer):
                raise TypeError(
                    f"{self.name} needs its own optimizer, got {type(optimizer).__name__}. "
                    f"In configure_optimizers write instead: {_line_instead_of(optimizer)}"
                )
        require_dense_real(module, self)
        super().setup(module, optimizers, group)

    def expected_bytes(self, numel: int, size: int) -> float:
        return ring_bytes(MinMaxUInt8().encoded_bytes(numel, torch.float32), size)

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average the bucket's gradients; its first moments once all its parameters are past warm-up."""
        if bucket.index() == 0:
            # Anew for every update: groups are added, and loading a checkpoint replaces the group objects.
            self._held: dict[Tensor, tuple[QAdamOptimizer, dict[str, Any]]] = {
                parameter: (optimizer, group)
                for optimizer in self.optimizers
                if isinstance(optimizer, QAdamOptimizer)
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
        warming_up = False
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter not in self._held:
                continue
            optimizer, group = self._held[parameter]
            if optimizer.in_warmup(parameter, group):
                warming_up = True
            else:
                optimizer.fold_(parameter, group, _in_strides_of(parameter, gradient))
        return self.exchange(bucket, None if warming_up else MinMaxUInt8())

    def teardown(self) -> None:
        """Let go of the parameters."""
        self._held = {}


# Elements of a parameter that are updated at a time on a CPU: half a MB of each tensor.
PIECE_NUMEL = 2**17
# A second moment below this fraction of the mean one counts as zero: gradients of a hundredth of the usual size.
NOISE = 1e-4


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam for the first ``warmup_steps`` updates of each parameter, then with a frozen second moment.

    The optimizer half of :class:`QAdam`, whose docstring has the equations. Without that algorithm it folds
    the gradient into the first moment itself, and so trains like :class:`QAdam` on one rank.

    An element whose gradient was zero through all of warm-up, or rounding noise (second moment below 1e-4 of the mean
    one), has no second moment to freeze: divided
    by zero, its first update would be as large as 1 / eps. The second moment of such elements is therefore
    not frozen. It goes on as in Adam, starting anew at the end of warm-up, with the gradient that two
    averaged first moments give: g = (m_t - b1 m_(t-1)) / (1 - b1). So these elements move as soon as they
    get a gradient, and by no more than lr (1 - b1) / sqrt(1 - b2), the most that Adam moves anything. It is
    used only where larger than a floor, the mean frozen second moment of the parameter's other elements (of
    all parameters, if it has no others): else the quantiser's rounding errors would be scaled up to full
    steps where there is no gradient. A parameter with such elements costs one byte more per element.

    State per parameter: ``step`` (updates so far), ``exp_avg``, ``exp_avg_sq``; after warm-up ``frozen_at``
    (how many gradients are in ``exp_avg_sq``), and if there are any of the elements above, ``late`` (true for
    them) and ``floor``.

    Args:
        params: parameters, or groups with options of their own, as in every torch optimizer.
        lr: step size; schedulers may change it.
        warmup_steps: updates of plain Adam at full precision before the second moment is frozen; at least 1.
            The papers take a tenth to a fifth of training.
        betas: decay rates of the first and the second moment, each at least 0 and below 1.
        eps: added to the root of the second moment.
        weight_decay: in force in warm-up and after it.
        decoupled_weight_decay: as AdamW, x *= 1 - lr * weight_decay before each update; else as Adam,
            weight_decay * x is part of the gradient. After warm-up it joins behind the exchange: neither
            quantised nor clipped.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
    ) -> None:
        """Check the options of every group."""
        # Parameters whose gradient became an averaged first moment since the last update or zero_grad, and in
        # how many exchanges this rank had a gradient for them.
        self._folded: dict[Tensor, int] = {}
        options = {"lr": lr, "warmup_steps": warmup_steps, "betas": betas, "eps": eps}
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, {**options, **decay})

    @classmethod
    def from_adam(cls, optimizer: torch.optim.Optimizer, warmup_steps: int = 100) -> "QAdamOptimizer":
        """Take over from an Adam or AdamW: groups, their options, and moments if it has run already.

        The group dictionaries are shared, so a scheduler made for ``optimizer`` goes on to set its rates.

        Args:
            optimizer: not to be used any more.
            warmup_steps: for all groups; updates that ``optimizer`` has made count.

        Raises:
            TypeError: not an Adam or AdamW, or a subclass of one, whose rule may be another.
            ValueError: amsgrad, maximize or differentiable is set.
        """
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            raise TypeError(
                "only torch.optim.Adam and AdamW can become a QAdamOptimizer, got "
                f"{type(optimizer).__name__}. Write instead: {_line_instead_of(optimizer)}"
            )
        options = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        options["warmup_steps"] = warmup_steps
        options["decoupled_weight_decay"] = isinstance(optimizer, torch.optim.AdamW)
        for group in optimizer.param_groups:
            _check_group({**options, **group})  # before any of them is changed
        taken = cls(optimizer.param_groups, **options)
        taken.state.update(optimizer.state)
        taken._complete()
        return taken

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; each has its own warm-up.

        Raises:
            TypeError: an option has the wrong type.
            ValueError: an option is out of range, with its value; or a parameter is complex.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also the last step of load_state_dict.
        super().__setstate__(state)
        self._folded = {}
        self._complete()

    def _complete(self) -> None:
        """Bring groups and state that torch's Adam or load_state_dict have left into this class's form."""
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            _check_group(group)
        for own in filter(None, self.state.values()):  # one that was only looked at is empty
            own["step"] = int(own["step"])
            # load_state_dict casts all tensors to the parameter's type.
            own.update({name: own[name].bool() for name in ("idle", "late") if name in own})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        super().zero_grad(set_to_none)
        self._folded.clear()

    def in_warmup(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether the next update of ``parameter``, which is in ``group``, belongs to its warm-up."""
        return bool(self.state.get(parameter, {}).get("step", 0) < group["warmup_steps"])

    def fold_(self, parameter: Tensor, group: dict[str, Any], gradient: Tensor) -> None:
        """Replace this rank's gradient by its new first moment, in place; ``step`` will take it as such.

        Args:
            parameter: past its warm-up.
            group: the group that it is in.
            gradient: of its shape; zeros where this rank did not use the parameter.
        """
        self._folded[parameter] = self._folded.get(parameter, 0) + (parameter.grad is not None)
        gradient.lerp_(self.state[parameter]["exp_avg"].to(gradient.dtype), group["betas"][0])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes loss and gradients anew.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: gradients were exchanged twice for this update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Only here, not in fold_: in another optimizer's turn, gradients pass there that nobody wants.
        if any(times > 1 and parameter.grad is not None for parameter, times in self._folded.items()):
            raise RuntimeError(
                "qadam exchanged the gradients twice since the last update or zero_grad: the first "
                "exchange turned them into first moments, to which a second gradient cannot be added. Run "
                "all backward passes of an update but the last under no_sync() of DistributedDataParallel; "
                "in Lightning use accumulate_grad_batches."
            )
        self._sums: dict[int, tuple[float, int]] = {}  # most parameters end their warm-up in the same update
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_(parameter, parameter.grad, group)
        self._folded.clear()
        return loss

    def _update_(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise RuntimeError("QAdamOptimizer does not take sparse gradients, use torch.optim.SparseAdam")
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        warming_up = self.in_warmup(parameter, group)
        state["step"] += 1
        first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        beta1, beta2 = group["betas"]
        lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
        decoupled, decay = (decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)
        if warming_up and decay:
            # Here a zero second moment is no sign of a zero gradient.
            state["idle"] = state.get("idle", True) & (gradient == 0)
        if not warming_up and "frozen_at" not in state:
            self._freeze(state, beta2)

        # sqrt(v / c) + eps = (sqrt(v) + eps sqrt(c)) / sqrt(c): the last division joins the step size.
        root = math.sqrt(1 - beta2 ** state.get("frozen_at", step))
        late = [state["late"]] if "late" in state else []
        room = second.new_empty(0)
        for x, g, m, v, *masks in _pieces(parameter, gradient, first, second, *late):
            if room.shape != v.shape:
                room = torch.empty_like(v)  # one for all pieces: new memory is slow
            if decoupled:
                x.mul_(1 - lr * decoupled)
            if parameter in self._folded:
                momentum = g.add(x, alpha=(1 - beta1) * decay) if decay else g
            else:
                decayed = g.add(x, alpha=decay) if decay else g
                momentum = torch.lerp(m, decayed, 1 - beta1)
                if warming_up:
                    v.mul_(beta2).addcmul_(decayed, decayed, value=1 - beta2)
            denominator = torch.sqrt(v, out=room).add_(eps * root)
            for mask in masks:
                if mask.is_cuda or mask.any():  # a GPU would have to be waited for
                    recovered = momentum.sub(m, alpha=beta1).div_(1 - beta1)
                    moving = torch.addcmul(v * beta2, recovered, recovered, value=1 - beta2)
                    v.copy_(torch.where(mask, moving, v))
                    corrected = v.div(1 - beta2 ** (step - state["frozen_at"])).clamp_(min=state["floor"])
                    denominator = torch.where(mask, corrected.sqrt_().add_(eps).mul_(root), denominator)
            m.copy_(momentum)
            x.addcdiv_(m, denominator, value=-lr * root / (1 - beta1**step))

    def _freeze(self, state: dict[str, Any], beta2: float) -> None:
        """End the warm-up of one parameter: note when, and which of its elements have no second moment."""
        updates = state["step"] - 1
        state["frozen_at"] = updates
        second = state["exp_avg_sq"]
        # A gradient that is zero but for rounding noise, as that of a bias in front of a BatchNorm, leaves a second
        # moment that is no scale for anything: the quantiser's rounding over its root would be a large step.
        noise = NOISE * self._mean_second_moment(self.state.values(), beta2)
        late = (second <= noise * (1 - beta2**updates)) | state.pop("idle", False)
        if late.any():
            second.masked_fill_(late, 0.0)
            self._sums.pop(id(state), None)
            state["floor"] = self._mean_second_moment([state], beta2) or self._mean_second_moment(
                self.state.values(), beta2
            )
            state["late"] = late

    def _mean_second_moment(self, states: Iterable[dict[str, Any]], beta2: float) -> float:
        """Bias-corrected mean over the elements that have a second moment; 0 if there are none."""
        total, count = 0.0, 0
        for state in states:
            if state and "late" not in state:
                if id(state) not in self._sums:
                    second, updates = state["exp_avg_sq"], state.get("frozen_at", state["step"])
                    corrected = second.sum(dtype=torch.float64).item() / (1 - beta2**updates)
                    self._sums[id(state)] = corrected, int(second.count_nonzero())
                total += self._sums[id(state)][0]
                count += self._sums[id(state)][1]
        # Three digits: the order of the sum, which may differ between machines, must not show.
        return float(f"{total / max(count, 1):.3g}")


def _check_group(group: dict[str, Any]) -> None:
    check_number("lr", group["lr"], 0)
    check_int("warmup_steps", group["warmup_steps"], 1)
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    check_number("betas[0]", betas[0], 0, 1)
    check_number("betas[1]", betas[1], 0, 1)
    check_number("eps", group["eps"], 0)
    check_number("weight_decay", group["weight_decay"], 0)
    check_bool("decoupled_weight_decay", group["decoupled_weight_decay"])
    for flag in ("amsgrad", "maximize", "differentiable"):
        if group.get(flag):
            raise ValueError(f"{flag}=True has no counterpart in QAdamOptimizer: leave it out")
    for parameter in group["params"]:
        if isinstance(parameter, Tensor) and parameter.is_complex():
            raise ValueError(f"QAdamOptimizer takes real parameters, got one of {parameter.dtype}")


def _line_instead_of(optimizer: torch.optim.Optimizer) -> str:
    kept = [f"lr={optimizer.defaults.get('lr', 1e-3)!r}", "warmup_steps=100"]
    if optimizer.defaults.get("weight_decay"):
        kept.append(f"weight_decay={optimizer.defaults['weight_decay']!r}")
    if isinstance(optimizer, torch.optim.AdamW):
        kept.append("decoupled_weight_decay=True")
    return f"return QAdamOptimizer(self.parameters(), {', '.join(kept)})"


def _in_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    # bucket.gradients() are row-major views, but DDP writes a dense parameter's gradient in the parameter's
    # own strides (channels_last, a transpose).
    return gradient.as_strided(parameter.shape, parameter.stride()) if _is_dense(parameter) else gradient


def _is_dense(tensor: Tensor) -> bool:
    # empty_like keeps strides of dense tensors, and of no others.
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views that together cover tensors of one shape, on a CPU small enough for all of them to stay in its cache.

    Else every operation would carry its result to main memory and back.
    """
    first = tensors[0]
    if not first.is_cpu or not _is_dense(first) or any(t.stride() != first.stride() for t in tensors):
        yield tensors
        return
    flat = [t.as_strided((t.numel(),), (1,)) for t in tensors]
    yield from zip(*(torch.split(t, PIECE_NUMEL) for t in flat), strict=True)
