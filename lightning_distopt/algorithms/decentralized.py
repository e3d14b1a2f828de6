"""Decentralized training: replicas differ a little, and every exchange pulls them together."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_distopt.algorithms.base import WeightExchange, check_hierarchical, check_int, ring_bytes
from lightning_distopt.collectives import Group, Hierarchy, Mean, NodeMean, Pending
from lightning_distopt.quantize import MinMaxUInt8

__all__ = ["Decentralized", "LowPrecisionDecentralized"]

# Elements that are worked on at a time. On a CPU few enough to stay in its cache from the difference to the code; on a
# GPU so many that starting the kernels costs little. Ranks must agree.
SLICE_NUMEL = {"cpu": 2**19, "cuda": 2**22}
# Slices share a message of at most this size, two of the largest on a CPU: starting one costs as much as encoding
# 100,000 elements.
MESSAGE_BYTES = 2**20 + 2**12
MESSAGES_UNDER_WAY = 3


class Decentralized(WeightExchange):
    """Every rank trains on with the mean of its own and its peers' weights.

    With x_r rank r's weights and P_r its peers of this exchange, itself included::

        x_r <- mean of x_s over s in P_r, then x_r <- x_r + update from the gradient at the old x_r

    The exchange starts right after an update on a copy of the weights, travels during the next forward and
    backward pass, and is awaited just before the next update: while it is shorter than these it costs no
    time. What else changes the weights between two updates is overwritten by it. The ranks start equal, so
    the first update needs no exchange. The optimizer's state stays each rank's own.

    "all": the peers are all W ranks. Sends 2 (W - 1) / W * 4N bytes per rank and exchange (float32, N
    elements).

    "shift_one": one peer, another one each time. With h = W / 2, exchange t = 0, 1, ... pairs rank r < h
    with h + (t + r) mod h, so a rank meets each rank of the other half in h exchanges. Sends 4N bytes,
    whatever W is. A pair averages by an all-reduce in a group of its own: both get the same bits, and none
    needs a second buffer to receive in. These groups, h for every rank, are made in ``setup``.

    Adds one copy of the weights in memory. Replicas differ, by the updates since they last met. State: the
    number of updates, and the means that are not yet in the weights.

    Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
    Decentralized Parallel Stochastic Gradient Descent", 2017, arXiv:1705.09056, algorithm 1; Lian et al.,
    "Asynchronous Decentralized Parallel Stochastic Gradient Descent", 2018, arXiv:1710.06952; Gan et al.,
    "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021, arXiv:2107.01499.
    Differs from Bagua: no exchange before the first update; the pairs go by exchanges, counted from 0.

    Args:
        hierarchical: average inside the node first, then between the nodes' first ranks ("shift_one" pairs
            nodes); "auto" when there are several nodes with several ranks each.
        peer_selection_mode: "all" or "shift_one".
        communication_interval: updates per exchange.

    Raises:
        ValueError: in ``setup``, if "shift_one" cannot pair an odd number of ranks or nodes.
    """

    name = "decentralized"

    def __init__(
        self,
        hierarchical: bool | Literal["auto"] = "auto",
        peer_selection_mode: Literal["all", "shift_one"] = "all",
        communication_interval: int = 1,
    ) -> None:
        if peer_selection_mode not in ("all", "shift_one"):
            raise ValueError(f"peer_selection_mode must be 'all' or 'shift_one', got {peer_selection_mode!r}")
        self.hierarchical = check_hierarchical(hierarchical)
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = check_int("communication_interval", communication_interval, 1)

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        self._hierarchy = Hierarchy.of(group, self.hierarchical)
        self._peers = self._peers_by_exchange(group)
        super().setup(module, optimizers, group)

    def expected_bytes(self, numel: int, size: int) -> float:
        pair = self.peer_selection_mode == "shift_one" and size > 1
        return ring_bytes(4 * numel, 2 if pair else size) / self.communication_interval

    def restart(self) -> None:
        self._buffers = self.layout.empty() if self.group.size > 1 else []
        self._under_way: list[Mean | NodeMean] = []
        # Whether the buffers hold means that are not yet in the weights.
        self._due = False

    def after_update(self) -> None:
        if self.group.size == 1 or self.step % self.communication_interval:
            return
        exchange = self.step // self.communication_interval - 1
        peers = self._peers[exchange % len(self._peers)]
        self.layout.pack_(self._buffers)
        self._under_way = [self._mean(flat, peers) for flat in self._buffers]
        for mean in self._under_way:
            mean.scatter()
        self._due = True

    def before_update(self) -> None:
        self.flush()

    def flush(self) -> None:
        if self._due:
            self._wait()
            self.layout.unpack_(self._buffers)
            self._due = False

    def finish(self) -> None:
        self.flush()
        self._buffers = []  # average_weights_ needs as much
        self.average_weights_()
        self.restart()

    def teardown(self) -> None:
        self._buffers, self._under_way, self._due = [], [], False

    def state_dict(self) -> dict[str, Any]:
        self._wait()
        state: dict[str, Any] = {"step": self.step}
        if self._due:
            state["means"] = dict(zip(self.names, self.layout.views(self._buffers), strict=True))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._due = "means" in state
        if self._due:
            # A parameter that was not exchanged then keeps its value.
            self.layout.pack_(self._buffers)
            for name, view in zip(self.names, self.layout.views(self._buffers), strict=True):
                view.copy_(state["means"].get(name, view))

    def _peers_by_exchange(self, group: Group) -> list[Group | None]:
        """Return the group of each exchange, in a cycle; None on ranks that are not their node's first."""
        if self.peer_selection_mode == "all":
            return [group if self._hierarchy is None else self._hierarchy.leaders]
        ranks = range(0, group.size, 1 if self._hierarchy is None else group.local_size)
        half = len(ranks) // 2
        if len(ranks) % 2 and group.size > 1:
            group.barrier()  # a rank that left now would break what others still connect in Hierarchy.of
            what = "ranks" if self._hierarchy is None else "nodes"
            raise ValueError(
                f"peer_selection_mode='shift_one' makes pairs: it needs an even number of {what}, "
                f"got {len(ranks)} (W = {group.size} ranks, hierarchical={self.hierarchical!r}). "
                "Use peer_selection_mode='all'."
            )
        return [group.subgroup([[ranks[r], ranks[half + (t + r) % half]] for r in range(half)]) for t in range(half)]

    def _mean(self, flat: Tensor, peers: Group | None) -> Mean | NodeMean:
        def between(flat: Tensor, leaders: Group) -> Mean:
            return Mean(flat, leaders if peers is None else peers)

        if self._hierarchy is None:
            return between(flat, self.group)
        return NodeMean(flat, self._hierarchy, between)

    def _wait(self) -> None:
        for mean in self._under_way:
            mean.finish()
        self._under_way = []


class _Slice(NamedTuple):
    """Some rows of one parameter, with their 1-D pieces of the three replicas, and bytes of a message."""

    parameter: Parameter
    rows: slice
    own: Tensor
    left: Tensor
    right: Tensor
    code: slice

    def weights(self) -> Tensor:
        """The rows themselves, in whatever strides the parameter has."""
        return _real(self.parameter)[self.rows]


class LowPrecisionDecentralized(WeightExchange):
    """Ranks form a ring and tell both neighbours in 8 bits how their weights have changed.

    Every rank keeps replicas of itself, y_r, and of its left and right neighbour, all equal at the start.
    After an update has made x_r of y_r, with Q the 8-bit quantiser
    :class:`~lightning_distopt.quantize.MinMaxUInt8`::

        d_r <- Q(x_r + (y_left + y_right) / 3 - 5/3 y_r)
        y_r <- y_r + d_r;   y_left <- y_left + d_left;   y_right <- y_right + d_right;   x_r <- y_r

    Without Q this is ``x_r <- (y_left + y_r + y_right) / 3 + (x_r - y_r)``, the mean of three and the
    update. A rank adds to its replica of a neighbour what that neighbour adds to its own: the two hold the
    same bits for ever. The optimizer's state stays each rank's own.

    Sends 2N bytes per rank and exchange (N elements), and 8 bytes for every 4096 of them; at
    W = 2 both neighbours are one rank, which gets N. Blocks after the update: each slice of a parameter has extremes
    of its own, and while some slices travel the next ones are encoded. Adds three copies of the weights in
    memory (two at W = 2), and about 14 MB of messages and scratch (on CUDA 70 MB); hierarchical, a fourth copy during
    an exchange.
    Replicas differ. State: the number of updates, and the three replicas.

    Source: Tang et al., "Communication Compression for Decentralized Training", 2018, arXiv:1803.06443,
    algorithm 1 (DCD-PSGD); Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations",
    2021, arXiv:2107.01499.
    Differs from Bagua: the quantiser is exact for constant slices, and slices end where parameters end.

    Args:
        hierarchical: average exactly inside the node first, the nodes' first ranks form the ring; "auto"
            when there are several nodes with several ranks each.
        communication_interval: updates per exchange.
    """

    name = "low_precision_decentralized"

    def __init__(self, hierarchical: bool | Literal["auto"] = "auto", communication_interval: int = 1) -> None:
        self.hierarchical = check_hierarchical(hierarchical)
        self.communication_interval = check_int("communication_interval", communication_interval, 1)

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        self._hierarchy = Hierarchy.of(group, self.hierarchical)
        self._ring = group if self._hierarchy is None else self._hierarchy.leaders
        self._codec = MinMaxUInt8()
        self._replicas: dict[Parameter, dict[str, Tensor]] = {}
        super().setup(module, optimizers, group)

    def expected_bytes(self, numel: int, size: int) -> float:
        encoded = MinMaxUInt8().encoded_bytes(numel, torch.float32)
        return min(2, size - 1) * encoded / self.communication_interval

    def restart(self) -> None:
        on_ring = self._ring is not None and self._ring.size > 1
        # New parameters hold the same values on every rank, so their replicas are true without an exchange.
        self._neighbours = min(2, self._ring.size - 1) if self._ring is not None else 0
        known = self._replicas
        self._replicas = {p: known.get(p) or _replicas(p, self._neighbours) for p in self._parameters if on_ring}
        self._messages = list(self._cut())
        self._message_bytes = max((message[-1].code.stop for message in self._messages), default=0)

    def after_update(self) -> None:
        if self.step % self.communication_interval:
            return
        if self._hierarchy is not None:
            self._average_weights_(self._hierarchy.node)
        under_way: deque[tuple[list[_Slice], list[Tensor], Pending]] = deque()
        for message in self._messages:
            if len(under_way) == MESSAGES_UNDER_WAY:
                self._receive(*under_way.popleft())
            under_way.append(self._send(message))
        while under_way:
            self._receive(*under_way.popleft())
        if self._hierarchy is not None:
            self._broadcast_weights_(self._hierarchy.node)

    def finish(self) -> None:
        self._replicas, self._messages = {}, []  # average_weights_ needs the room
        self.average_weights_()
        self.restart()

    def teardown(self) -> None:
        self._replicas, self._messages = {}, []

    def state_dict(self) -> dict[str, Any]:
        names = dict(zip(self._parameters, self.names, strict=True))
        return {"step": self.step, "replicas": {names[p]: dict(three) for p, three in self._replicas.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        names = dict(zip(self._parameters, self.names, strict=True))
        for parameter, three in self._replicas.items():
            saved = state["replicas"].get(names[parameter], {})
            for side, replica in three.items():
                # A parameter that was not exchanged then is equal on all ranks.
                replica.copy_(saved.get(side, _real(parameter)))

    def _cut(self) -> Iterator[list[_Slice]]:
        """Yield messages of slices. Cut by shape and not by strides, which may differ between ranks."""
        message: list[_Slice] = []
        start = 0
        for parameter, three in self._replicas.items():
            numel = SLICE_NUMEL.get(parameter.device.type, SLICE_NUMEL["cuda"])
            rows = max(1, numel * len(three["own"]) // max(1, three["own"].numel()))
            for first in range(0, len(three["own"]), rows):
                place = slice(first, first + rows)
                own, left, right = (three[side][place].view(-1) for side in ("own", "left", "right"))
                num_bytes = self._codec.encoded_bytes(own.numel(), own.dtype)
                if message and start + num_bytes > MESSAGE_BYTES:
                    yield message
                    message, start = [], 0
                code = slice(start, start + num_bytes)
                message.append(_Slice(parameter, place, own, left, right, code))
                start = code.stop
        if message:
            yield message

    def _send(self, message: list[_Slice]) -> tuple[list[_Slice], list[Tensor], Pending]:
        """Encode what has changed, advance the own replica by it, make that the weights, start sending."""
        assert self._ring is not None
        device = message[0].own.device
        buffers = [self.group.borrow(self._message_bytes, device) for _ in range(1 + self._neighbours)]
        codes, *received = (buffer[: message[-1].code.stop] for buffer in buffers)
        for s in message:
            weights = s.weights()
            difference = torch.empty_like(s.own)
            shaped = difference.view(weights.shape)
            torch.add(weights, s.left.view(weights.shape), alpha=1 / 3 if self._neighbours == 2 else 2 / 3, out=shaped)
            if self._neighbours == 2:
                difference.add_(s.right, alpha=1 / 3)
            difference.sub_(s.own, alpha=5 / 3)
            self._codec.round_(difference, codes[s.code])
            s.own.add_(difference)
            weights.copy_(s.own.view(weights.shape))
        rank, size = self._ring.rank, self._ring.size
        # At W = 2 both neighbours are one rank, which needs one message. Else the first goes left, so the first to
        # come is the right one's.
        to = [(rank - 1) % size, (rank + 1) % size][: self._neighbours]
        come = [(rank + 1) % size, (rank - 1) % size][: self._neighbours]
        pending = self._ring.swap([(peer, codes) for peer in to], list(zip(come, received, strict=True)))
        return message, buffers, pending

    def _receive(self, message: list[_Slice], buffers: list[Tensor], pending: Pending) -> None:
        """Advance the replicas of the neighbours by what they sent."""
        pending.wait()
        for s in message:
            for codes, replica in zip(buffers[1:], (s.right, s.left), strict=False):
                self._codec.decode(codes[s.code], replica, beta=1.0)
        for buffer in buffers:
            self.group.give_back(buffer)

    def _average_weights_(self, node: Group) -> None:
        buffers = self.layout.pack_(self.layout.empty())
        for mean in [Mean(flat, node) for flat in buffers]:
            mean.scatter()
            mean.finish()
        self.layout.unpack_(buffers)

    def _broadcast_weights_(self, node: Group) -> None:
        buffers = self.layout.pack_(self.layout.empty())
        for flat in buffers:
            node.broadcast_(flat).wait()
        self.layout.unpack_(buffers)


def _real(parameter: Parameter) -> Tensor:
    """Return the parameter's own memory as a real tensor of at least one dimension."""
    tensor = parameter.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor if tensor.dim() else tensor.view(1)


def _replicas(parameter: Parameter, neighbours: int) -> dict[str, Tensor]:
    """Return contiguous copies, in float32 unless the parameter needs float64; one neighbour is on both sides."""
    weights = _real(parameter)
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    own, left, right = (
        torch.empty(weights.shape, dtype=dtype, device=weights.device).copy_(weights) if copies > 0 else None
        for copies in (1, 1, neighbours - 1)
    )
    assert own is not None
    assert left is not None
    return {"own": own, "left": left, "right": left if right is None else right}
