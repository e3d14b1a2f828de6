"""Predict what an algorithm costs on a network, from parts that are measured one by one.

A :class:`DryGroup` stands in for the ranks of a training: it sends nothing, and notes what an algorithm would have
sent, when the algorithm waits for it, and how long it works in between. :func:`replay` puts such a trace on a link,
with the alpha-beta model: n bytes take alpha + beta n seconds, one exchange after the other, beside the host's work.
So the formulas of the algorithms, and how they overlap with the backward pass, are not written down a second time, and
an algorithm of the user's own is predicted as well. :func:`recommend` chooses.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_distopt.collectives import Group, Pending

__all__ = [
    "Cost",
    "DryGroup",
    "Prediction",
    "Start",
    "Update",
    "Wait",
    "Work",
    "background",
    "mb_per_update",
    "recommend",
    "replay",
    "work_and_transfer",
]

# Another algorithm must be faster by this factor to be worth what it changes.
WORTH = 1.1

# What an encoded bucket of gradients holds.
LARGE_BYTES = 2**20


@dataclass(frozen=True)
class Work:
    """The host works for some seconds, as measured with nothing under way."""

    seconds: float


@dataclass(frozen=True)
class Start:
    """An exchange starts.

    Attributes:
        kind: of the exchange, as :class:`Group` names it.
        num_bytes: sent by this rank.
    """

    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Wait:
    """The host waits for an exchange.

    Attributes:
        start: which one, counting those that start from 0.
    """

    start: int


@dataclass(frozen=True)
class Update:
    """An update ends."""


Trace = Sequence[Work | Start | Wait | Update]


@dataclass(frozen=True)
class Cost:
    """What one kind of exchange costs on a link.

    Attributes:
        latency: alpha, seconds of a very small exchange.
        alone_per_byte: beta of an exchange with no other one beside it: seconds for every further byte that a rank
            sends, up to ``LARGE_BYTES``.
        seconds_per_byte: beta where the next exchange is always under way. Smaller on some links, where one exchange
            alone leaves them idle at times.
        slowdown: while the host works and bytes travel, both take longer by this part, 0 to 1: the exchange takes
            processor time, too.
        alone_beyond: as ``alone_per_byte``, for the bytes beyond ``LARGE_BYTES``; by default the same. Larger on links
            whose queues a large exchange overflows.
    """

    latency: float
    alone_per_byte: float
    seconds_per_byte: float
    slowdown: float
    alone_beyond: float | None = None

    def seconds(self, num_bytes: float) -> float:
        """Return what an exchange takes alone."""
        beyond = self.alone_per_byte if self.alone_beyond is None else self.alone_beyond
        within = min(num_bytes, LARGE_BYTES)
        return self.latency + within * self.alone_per_byte + (num_bytes - within) * beyond


@dataclass(frozen=True)
class Prediction:
    """One algorithm on one link.

    Attributes:
        name: of the algorithm, with its options.
        step_ms: milliseconds per update.
        sent_mb: MB that a rank sends per update.
        exact: whether every rank uses the exact mean gradient in every update.
        replicas_equal: whether all ranks hold the same weights after every update.
        any_optimizer: whether it runs under the optimizer that the user has.
    """

    name: str
    step_ms: float
    sent_mb: float
    exact: bool
    replicas_equal: bool
    any_optimizer: bool


class DryGroup(Group):
    """A group that sends nothing, and notes what an algorithm does with it.

    Exchanges are over at once, as if every rank held this rank's values. Time spent on that is not noted.

    Attributes:
        trace: what was done so far.
    """

    def __init__(self, size: int) -> None:
        """Pretend to be rank 0.

        Args:
            size: number of ranks, each on a node of its own as far as traffic goes.
        """
        super().__init__()
        self.size = self.local_size = size
        self.trace: list[Work | Start | Wait | Update] = []
        self._num_started = 0
        self._last = time.perf_counter()

    def note(self, event: Start | Wait | Update) -> None:
        """Note an event, and the work since the last one."""
        self.trace += [Work(time.perf_counter() - self._last), event]
        self._last = time.perf_counter()

    def add_work(self, seconds: float) -> None:
        """Note work that is not done."""
        self.trace.append(Work(seconds))

    def subgroup(self, members: Sequence[Sequence[int]]) -> "Group | None":
        """Return a group of as many ranks, which notes into the same trace."""
        mine = [ranks for ranks in members if self.rank in ranks]
        return _DrySubgroup(self, len(mine[0])) if mine else None

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value as often as there are ranks."""
        return [value] * self.size

    def _start(self, what: str, num_bytes: int, start: Callable[[], Sequence[dist.Work]], *tensors: Tensor) -> Pending:
        if self.size == 1:
            return Pending(self, (), what)
        self.traffic.bytes_sent += num_bytes
        self.traffic.num_collectives += 1
        return self.pretend(what, num_bytes, self.size, tensors)

    def pretend(self, what: str, num_bytes: int, size: int, tensors: Sequence[Tensor]) -> Pending:
        """Note an exchange, and give its tensors the values that equal ranks would have given them."""
        self.note(Start(what, num_bytes))
        if what == "all-reduce":
            tensors[0].mul_(size)
        elif what == "all-gather":
            tensors[0].view(size, -1).copy_(tensors[1].clone())  # which may lie in it
        elif what == "all-to-all":
            tensors[0].copy_(tensors[1])
        elif what != "broadcast":
            half = len(tensors) // 2
            for sent, received in zip(tensors[:half], tensors[half:], strict=True):
                received.copy_(sent)
        self._num_started += 1
        self._last = time.perf_counter()
        return _DryPending(self, self._num_started - 1, what)


class _DrySubgroup(DryGroup):
    def __init__(self, parent: DryGroup, size: int) -> None:
        super().__init__(size)
        self._parent = parent
        self.traffic = parent.traffic

    def pretend(self, what: str, num_bytes: int, size: int, tensors: Sequence[Tensor]) -> Pending:
        return self._parent.pretend(what, num_bytes, size, tensors)


class _DryPending(Pending):
    def __init__(self, group: DryGroup, start: int, what: str) -> None:
        super().__init__(group, (), what)
        self._dry = group
        self._start = start

    def wait(self) -> None:
        self._dry.note(Wait(self._start))


def replay(trace: Trace, costs: Mapping[str, Cost]) -> list[float]:
    """Put a trace on a link.

    Exchanges share the link one after the other, in the order in which they start. An exchange takes at least as long
    as it does alone; in that time others may use what it leaves of the link. While the host works and bytes travel,
    both are slowed as :class:`Cost` says.

    Args:
        trace: of one rank; the others do the same at the same time.
        costs: of each kind of exchange in it.

    Returns:
        For every update the second at which it ends.
    """
    now = 0.0
    soonest: list[float] = []  # by exchange: when it would have arrived alone
    sent: list[float] = []  # by exchange: when its bytes had travelled, and its latency passed
    travelling: deque[tuple[Cost, float]] = deque()  # with the seconds that are left of it
    updates: list[float] = []

    def pass_time(seconds: float, working: bool) -> None:
        nonlocal now
        while travelling and seconds > 0:
            cost, left = travelling.popleft()
            passed = min(seconds, left)
            now += passed * (1 + cost.slowdown * working)
            seconds -= passed
            if left > passed:
                travelling.appendleft((cost, left - passed))
            else:
                sent.append(now + cost.latency)
        now += max(0.0, seconds)

    for event in trace:
        if isinstance(event, Work):
            pass_time(event.seconds, working=True)
        elif isinstance(event, Start):
            cost = costs[event.kind]
            soonest.append(now + cost.seconds(event.num_bytes))
            travelling.append((cost, event.num_bytes * cost.seconds_per_byte))
        elif isinstance(event, Wait):
            while event.start >= len(sent):
                pass_time(max(travelling[0][1], 1e-12), working=False)
            pass_time(max(sent[event.start], soonest[event.start]) - now, working=False)
        else:
            updates.append(now)
    return updates


def work_and_transfer(trace: Trace, costs: Mapping[str, Cost]) -> tuple[float, float, float]:
    """Add up a trace.

    Returns:
        Seconds of the host's work, seconds of exchanges alone, and seconds by which these slow down other work.
    """
    work = sum(event.seconds for event in trace if isinstance(event, Work))
    starts = [event for event in trace if isinstance(event, Start)]
    transfer = sum(costs[event.kind].seconds(event.num_bytes) for event in starts)
    slowing = sum(event.num_bytes * costs[event.kind].seconds_per_byte * costs[event.kind].slowdown for event in starts)
    return work, transfer, slowing


def background(compute: float, work: float, transfer: float, slowing: float, interval: float) -> tuple[float, int]:
    """Predict an algorithm that exchanges in rounds for which nobody waits.

    A round starts after the first update that ends when the interval has passed and the round before is over.

    Args:
        compute: seconds of an update without any exchange.
        work: seconds of the host's work in one round.
        transfer: seconds that a round's exchange takes.
        slowing: seconds by which it slows down the host.
        interval: seconds from the start of a round to the start of the next one, at least.

    Returns:
        Seconds per update, and how many updates a round has.
    """
    updates = max(1, math.ceil(max(interval, transfer) / compute))
    return compute + (work + slowing) / updates, updates


def mb_per_update(trace: Trace) -> float:
    """Return the MB that a rank sends per update of a trace."""
    num_updates = sum(isinstance(event, Update) for event in trace)
    return sum(event.num_bytes for event in trace if isinstance(event, Start)) / 1e6 / max(1, num_updates)


def recommend(predictions: Sequence[Prediction]) -> str:
    """Choose an algorithm, and say why in a sentence.

    What changes training less is preferred, unless something else is more than 10 % faster: first algorithms with the
    exact mean gradient, then those that keep replicas equal, then the others, which change how training converges.
    Algorithms that need an optimizer of their own are left out.

    Args:
        predictions: of all candidates.
    """
    candidates = sorted((p for p in predictions if p.any_optimizer), key=lambda p: p.step_ms)
    if not candidates:
        return "Nothing to recommend: no algorithm that runs under any optimizer was among the candidates."
    fastest = candidates[0]
    tiers = [
        [p for p in candidates if p.exact],
        [p for p in candidates if p.replicas_equal and not p.exact],
        [p for p in candidates if not p.replicas_equal],
    ]
    chosen = next(tier[0] for tier in tiers if tier and tier[0].step_ms <= WORTH * fastest.step_ms)
    said = f"Recommended: {chosen.name}, {chosen.step_ms:.0f} ms per update"
    near = "it is the fastest"
    if chosen is not fastest:
        near = f"the fastest, {fastest.name} ({fastest.step_ms:.0f} ms), is not 10 % faster"
    if chosen.exact:
        return f"{said}: it trains with the exact mean gradient, and {near}."
    if chosen.replicas_equal:
        slower = f" the exact mean takes {tiers[0][0].step_ms:.0f} ms;" if tiers[0] else ""
        return f"{said}:{slower} it keeps replicas equal, and {near}."
    equal = min((p for p in candidates if p.replicas_equal), key=lambda p: p.step_ms, default=None)
    caution = "its replicas differ, which changes how training converges: compare the loss"
    if equal is None:
        return f"{said}: {near}; {caution}."
    return (
        f"{said}: it is {equal.step_ms / chosen.step_ms:.1f} times as fast as any that keeps replicas equal, but "
        f"{caution}, or use {equal.name} ({equal.step_ms:.0f} ms)."
    )
