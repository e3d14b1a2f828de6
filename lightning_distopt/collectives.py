"""What goes over the wire: collectives on flat buffers, counted where they are sent.

A :class:`Group` wraps one ``torch.distributed`` process group. Every byte that this package sends passes one of its
methods, and is counted there in a :class:`Traffic`, with the time in which this rank stood still for an exchange. On
top of it stand :class:`FlatLayout` (many tensors as one buffer, and back), :class:`Mean` and :class:`CompressedMean`
(the mean of one flat tensor over all ranks) and :class:`NodeMean` (the same on two levels).

All collectives must be called by every rank of the group in the same order, from one thread at a time: two threads on
one gloo group give silently wrong sums. Tensors must be 1-D and contiguous: on other strides gloo is silently wrong and
may overwrite memory beside a view.
"""

import hashlib
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distopt.quantize import ALIGNMENT, Codec

__all__ = [
    "CompressedMean",
    "DistributedRuntimeException",
    "FlatLayout",
    "Group",
    "Hierarchy",
    "Mean",
    "NodeMean",
    "Pending",
    "Traffic",
    "check_collective_allowed",
    "checksum",
    "forbid_collectives",
    "local_world_size",
]

DEFAULT_TIMEOUT = timedelta(seconds=1800)

# torch 2.13 renamed this collective and warns about the old name; older releases have the old name only.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistributedRuntimeException(RuntimeError):  # noqa: N818 - the name is ENOT's
    """A distributed operation failed, or was called where it cannot work. The text says what and where."""


_forbidden_by: ContextVar[str | None] = ContextVar("collectives_forbidden_by", default=None)


@contextmanager
def forbid_collectives(function_name: str) -> Iterator[None]:
    """Let every collective inside the block raise at once, naming ``function_name``, instead of hanging."""
    token = _forbidden_by.set(function_name)
    try:
        yield
    finally:
        _forbidden_by.reset(token)


def check_collective_allowed(what: str) -> None:
    """Raise if this code runs on one rank only.

    Args:
        what: the collective that is about to be called, for the message.

    Raises:
        DistributedRuntimeException: inside a block of :func:`forbid_collectives`.
    """
    function_name = _forbidden_by.get()
    if function_name is not None:
        raise DistributedRuntimeException(
            f"{what} was called inside {function_name}, which runs on the master rank only: the other ranks would "
            f"never join, and this rank would wait for them forever. Call it outside of {function_name}, on every rank."
        )


@dataclass
class Traffic:
    """What this rank has sent and waited for, over a group and all its subgroups.

    Attributes:
        bytes_sent: bytes that this rank has sent. An all-reduce of n bytes counts as a ring: 2 (W - 1) / W n.
        evaluation_bytes: sent besides, for validation and checkpoints to see the mean of replicas that differ.
        num_collectives: how many collectives this rank has started.
        seconds_waited: seconds that this rank's host thread stood still for exchanges.
        label: who uses the group, for error messages.
        step: the optimizer update under way, for error messages.
    """

    bytes_sent: int = 0
    evaluation_bytes: int = 0
    num_collectives: int = 0
    seconds_waited: float = 0.0
    label: str = "distopt"
    step: int = 0


class Pending:
    """A collective that is under way. ``wait`` is where its buffers become valid and its errors arrive."""

    def __init__(self, group: "Group", works: Sequence[dist.Work], what: str) -> None:
        self._group = group
        self._works = works
        self._what = what

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for the end of the exchange; on CUDA only the current stream waits, not the host.

        Raises:
            DistributedRuntimeException: a peer was lost or the timeout of the group passed.
        """
        if not self._works:
            return
        start = time.perf_counter()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._group.lost_peer(self._what, error) from error
        finally:
            self._group.traffic.seconds_waited += time.perf_counter() - start


class Group:
    """The ranks that exchange with each other, and what this rank has sent to the others.

    Attributes:
        rank: this process's place in the group, 0 to ``size - 1``.
        size: number of ranks, W.
        ranks: what the group's ranks are called in the whole job.
        local_size: number of consecutive ranks that share a node.
        traffic: counts what this rank sends; subgroups made by :meth:`subgroup` count into the same object.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        local_size: int | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        traffic: Traffic | None = None,
    ) -> None:
        """Wrap a process group.

        Args:
            process_group: a group that this rank is part of; None for a world of one rank, which sends nothing.
            local_size: ranks per node; by default all ranks share one node.
            timeout: of the process group; subgroups get the same.
            traffic: counter to use; by default a new one.
        """
        self.process_group = process_group
        self.rank = 0 if process_group is None else process_group.rank()
        self.size = 1 if process_group is None else process_group.size()
        self.ranks = [0] if process_group is None else dist.get_process_group_ranks(process_group)
        self.local_size = self.size if local_size is None else local_size
        self.timeout = timeout
        self.traffic = Traffic() if traffic is None else traffic
        self._free: dict[tuple[int, torch.device], list[Tensor]] = defaultdict(list)

    def subgroup(self, members: Sequence[Sequence[int]]) -> "Group | None":
        """Split off smaller groups that count into the same ``traffic``. Collective over the whole world.

        Args:
            members: for every new group the ranks of this group in it; the same on every rank, no rank twice.

        Returns:
            The new group that this rank is part of, or None.
        """
        mine: Group | None = None
        for ranks in members:
            one = len(ranks) == 1
            made = None if one else dist.new_group([self.ranks[r] for r in ranks], timeout=self.timeout)
            if self.rank in ranks:
                mine = Group(made, timeout=self.timeout, traffic=self.traffic)
        return mine

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, local_size={self.local_size})"

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce_(self, flat: Tensor) -> Pending:
        """Start summing over ranks, in place.

        Args:
            flat: 1-D, same numel and dtype on every rank; a floating or 64-bit integer type (uint8 sums wrap). Or a
                sparse gradient, of which every rank sends all it has to every other.
        """
        ring = 2 * _num_bytes(flat) // self.size
        return self._start(
            "all-reduce",
            (self.size - 1) * (_num_bytes(flat) if flat.is_sparse else ring),
            lambda: [dist.all_reduce(flat, group=self.process_group, async_op=True)],
            flat,
        )

    def all_to_all(self, output: Tensor, values: Tensor) -> Pending:
        """Start sending the k-th of W equal pieces of ``values`` to rank k.

        Args:
            output: 1-D, as large as ``values``; piece j is what rank j sent here.
            values: 1-D, numel divisible by W, same on every rank.
        """
        return self._start(
            "all-to-all",
            _num_bytes(values) // self.size * (self.size - 1),
            lambda: [dist.all_to_all_single(output, values, group=self.process_group, async_op=True)],
            output,
            values,
        )

    def all_gather(self, output: Tensor, values: Tensor) -> Pending:
        """Start collecting ``values`` of every rank, in rank order.

        Args:
            output: 1-D, W times as large as ``values``.
            values: 1-D, same numel on every rank.
        """
        return self._start(
            "all-gather",
            _num_bytes(values) * (self.size - 1),
            lambda: [_all_gather_flat(output, values, group=self.process_group, async_op=True)],
            output,
            values,
        )

    def broadcast_(self, flat: Tensor, src: int = 0) -> Pending:
        """Start copying rank ``src``'s values to every rank, in place.

        Args:
            flat: 1-D, same numel and dtype on every rank.
            src: rank in this group.
        """
        return self._start(
            "broadcast",
            _num_bytes(flat) * (self.size - 1) if self.rank == src else 0,
            lambda: [dist.broadcast(flat, group_src=src, group=self.process_group, async_op=True)],
            flat,
        )

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Pending:
        """Start sending to and receiving from single peers, all at once: one after the other could deadlock.

            rank 0: send to 1 ... waits for 1 to receive     rank 1: send to 0 ... waits for 0 to receive

        Args:
            sends: (peer, 1-D tensor). The i-th message carries tag i.
            receives: (peer, 1-D tensor). The i-th fits the peer's i-th send: two messages between the same two ranks
                (at W = 2 the left and the right neighbour are one rank) are told apart by their place in the list.
        """

        def start() -> list[dist.Work]:
            # gloo tells the peer that it may send, over the connection that carries what is sent to the peer: said
            # after a large message, it would be heard only once that has arrived.
            operations = [
                dist.P2POp(operation, tensor, group=self.process_group, tag=tag, group_peer=peer)
                for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
                for tag, (peer, tensor) in enumerate(messages)
            ]
            works: list[dist.Work] = dist.batch_isend_irecv(operations)
            return works

        tensors = [tensor for _, tensor in (*sends, *receives)]
        return self._start("exchange with its peers", sum(_num_bytes(tensor) for _, tensor in sends), start, *tensors)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.all_reduce_(torch.zeros(1, device=self.device)).wait()

    def gather_objects(self, value: Any) -> list[Any]:
        """Collect one small picklable value from every rank, in rank order. Its bytes are not counted."""
        check_collective_allowed("gather_objects")
        if self.process_group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def check_same(self, lines: Sequence[str], what: str) -> None:
        """Make sure that every rank came with the same text. Costs 8 bytes per rank when they agree.

        Args:
            lines: for instance one line per parameter: name, shape, dtype.
            what: what the lines describe, for the message.

        Raises:
            DistributedRuntimeException: on every rank, with the first difference.
        """
        if self.size == 1:
            return
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest()
        mine = torch.tensor([int.from_bytes(digest, "little")], dtype=torch.int64, device=self.device)
        every = torch.empty(self.size, dtype=torch.int64, device=self.device)
        self.all_gather(every, mine).wait()
        if bool((every == every[0]).all()):
            return
        texts = self.gather_objects(list(lines))
        other, theirs = next((rank, text) for rank, text in enumerate(texts) if text != texts[0])
        longest = max(len(texts[0]), len(theirs))
        first = next(i for i in range(longest) if texts[0][i : i + 1] != theirs[i : i + 1])
        left, right = ((text[first] if first < len(text) else "nothing") for text in (texts[0], theirs))
        raise DistributedRuntimeException(
            f"{what} differ between ranks: rank 0 has {left} where rank {other} has {right}. "
            "Every rank must build the same model."
        )

    @contextmanager
    def counted_as_evaluation(self) -> Iterator[None]:
        """Count what is sent inside the block as ``evaluation_bytes``: its amount depends on who looks how often."""
        before = self.traffic.bytes_sent
        yield
        self.traffic.evaluation_bytes += self.traffic.bytes_sent - before
        self.traffic.bytes_sent = before

    # -- buffers and errors ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where small tensors must lie for this group's backend."""
        if self.process_group is not None and dist.get_backend(self.process_group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def borrow(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return a 1-D uint8 buffer with undefined content; reused, since fresh pages are dear."""
        free = self._free[num_bytes, device]
        return free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Return a borrowed buffer that no exchange uses any more."""
        self._free[buffer.numel(), buffer.device].append(buffer)

    def release_buffers(self) -> None:
        """Free the memory of all buffers that were given back."""
        self._free.clear()

    def lost_peer(self, what: str, error: BaseException) -> DistributedRuntimeException:
        """Put a failed exchange into one sentence."""
        lost = f"rank {self.ranks[1 - self.rank]}" if self.size == 2 else "a peer"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return DistributedRuntimeException(
            f"rank {self.ranks[self.rank]} lost {lost} in {self.traffic.label}'s {what} at step {self.traffic.step}: "
            f"{reason}"
        )

    def _start(self, what: str, num_bytes: int, start: Callable[[], Sequence[dist.Work]], *tensors: Tensor) -> Pending:
        check_collective_allowed(f"{self.traffic.label}'s {what}")
        for tensor in tensors:
            if tensor.is_sparse:
                continue
            assert tensor.dim() == 1, f"{what} needs 1-D tensors, got shape {tuple(tensor.shape)}"
            assert tensor.is_contiguous(), f"{what} needs contiguous tensors"
        if self.size == 1:
            return Pending(self, (), what)
        self.traffic.bytes_sent += num_bytes
        self.traffic.num_collectives += 1
        try:
            return Pending(self, start(), what)
        except RuntimeError as error:
            raise self.lost_peer(what, error) from error


def local_world_size(world_size: int) -> int:
    """Ranks per node as torchrun and SLURM say it in the environment; without them all ranks share one node."""
    for variable in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(variable, "")
        if value.isdigit() and 0 < int(value) <= world_size:
            return int(value)
    return world_size


def _num_bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _num_bytes(tensor._indices()) + _num_bytes(tensor._values())
    return tensor.numel() * tensor.element_size()


# A checksum works in pieces, so that its integers need no more than a few MB.
_PIECE_NUMEL = 2**18
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """Return an integer that almost surely changes when any bit of a tensor does, or the order of its elements.

    Args:
        tensor: of any type and strides. Only elements count, not how they lie in memory.

    Returns:
        A 0-dimensional int64 tensor on the same device. Nothing is copied to the host.
    """
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(_INTEGERS[flat.element_size()])
    # Odd factors lose no bit, and sums wrap around: integers modulo 2^64.
    factors = torch.arange(min(_PIECE_NUMEL, bits.numel()), device=bits.device).mul_(2).add_(1).mul_(0x9E3779B97F4A7C1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(_PIECE_NUMEL):
        total = total * 0x100000001B3 + (piece * factors[: piece.numel()]).sum()
    return total


class FlatLayout:
    """Many tensors seen as few flat buffers: one for all that fit float32, one for all that need float64.

    bfloat16 and float16 tensors travel as float32, so that sums over ranks do not lose bits; complex ones as pairs of
    their real and imaginary parts. Strides do not matter: elements go by index. A tensor may get other memory
    (``parameter.data = ...``) as long as its shape and type stay.

    Attributes:
        tensors: the tensors, in the order given.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self._parts: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for tensor in self.tensors:
            dtype = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
            self._parts[dtype, tensor.device].append(tensor)

    @property
    def numel(self) -> int:
        """Elements in all buffers together."""
        return sum(_as_real(tensor).numel() for tensor in self.tensors)

    def empty(self) -> list[Tensor]:
        """Allocate 1-D buffers that hold all tensors; the content is undefined."""
        return [
            torch.empty(sum(_as_real(t).numel() for t in part), dtype=dtype, device=device)
            for (dtype, device), part in self._parts.items()
        ]

    def pack_(self, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy the tensors into buffers made by :meth:`empty`, and return these."""
        for _, part, views in self._paired(buffers):
            torch._foreach_copy_(views, part)
        return buffers

    def unpack_(self, buffers: Sequence[Tensor]) -> None:
        """Copy the buffers into the tensors."""
        with torch.no_grad():
            for _, part, views in self._paired(buffers):
                torch._foreach_copy_(part, views)

    def add_(self, buffers: Sequence[Tensor]) -> None:
        """Add the buffers to the tensors."""
        with torch.no_grad():
            for _, part, views in self._paired(buffers):
                for tensor, view in zip(part, views, strict=True):
                    tensor.add_(view)

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each tensor in the order given, its piece of the buffers in its shape."""
        pieces = {
            id(tensor): view
            for part, _, views in self._paired(buffers)
            for tensor, view in zip(part, views, strict=True)
        }
        return [pieces[id(tensor)] for tensor in self.tensors]

    def _paired(self, buffers: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """Yield for each buffer its tensors, their present memory, and the views of the buffer that belong to them."""
        for part, buffer in zip(self._parts.values(), buffers, strict=True):
            memory = [_as_real(tensor) for tensor in part]
            pieces = buffer.split([tensor.numel() for tensor in memory])
            yield part, memory, [piece.view(t.shape) for piece, t in zip(pieces, memory, strict=True)]


def _as_real(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


class Mean:
    """Mean over ranks of one flat tensor at full precision, in place, in three stages that a caller may interleave.

    ``scatter`` starts the first exchange, ``gather`` waits for it and starts the second one, ``finish`` waits and
    returns the tensor. Here one all-reduce is all there is.
    """

    def __init__(self, flat: Tensor, group: Group, average: bool = True) -> None:
        """Plan the exchange; nothing is sent yet.

        Args:
            flat: 1-D floating tensor, same numel and dtype on every rank; changed in place.
            group: the ranks that take part.
            average: the mean over ranks; else the sum.
        """
        self.flat = flat
        self._group = group
        self._average = average

    def scatter(self) -> None:
        """Stage 1."""
        if self._average:
            # Before the sum: float16 gradients would overflow in it. A product, as DDP does it: the same bits.
            self.flat.mul_(1 / self._group.size)
        self._pending = self._group.all_reduce_(self.flat)

    def gather(self) -> None:
        """Stage 2."""

    def finish(self) -> Tensor:
        """Stage 3."""
        self._pending.wait()
        return self.flat


class Hierarchy:
    """The ranks of one node, and the first ranks of all nodes.

    Attributes:
        node: the ranks on this rank's node.
        leaders: the first rank of every node; None on the other ranks.
    """

    def __init__(self, group: Group) -> None:
        """Make the subgroups. Collective.

        Args:
            group: all ranks; its size must be divisible by its ``local_size``.
        """
        starts = range(0, group.size, group.local_size)
        node = group.subgroup([range(start, start + group.local_size) for start in starts])
        assert node is not None
        self.node = node
        self.leaders = group.subgroup([list(starts)])

    @staticmethod
    def of(group: Group, setting: "bool | Literal['auto']") -> "Hierarchy | None":
        """Decide whether to use two levels. Collective if so.

        Args:
            group: all ranks.
            setting: True, False, or "auto": when there are several nodes with several ranks each.

        Raises:
            ValueError: nodes have different numbers of ranks, and True was asked for.
        """
        several = 1 < group.local_size < group.size
        regular = group.size % group.local_size == 0
        if setting is True and not several and group.size > 1:
            warnings.warn(
                f"hierarchical=True has no effect: {group.size} ranks, {group.local_size} per node, leave nothing to "
                "do on two levels",
                stacklevel=2,
            )
        if setting is True and several and not regular:
            raise ValueError(
                f"hierarchical=True needs equal nodes, got {group.size} ranks, {group.local_size} per node"
            )
        return Hierarchy(group) if setting and several and regular else None


class NodeMean:
    """Mean over all ranks on two levels: exact inside the node, any kind of mean between the leaders, broadcast."""

    def __init__(self, flat: Tensor, hierarchy: Hierarchy, between: "Callable[[Tensor, Group], Mean | CompressedMean]",
                 average: bool = True) -> None:  # fmt: skip
        """Plan the exchange; nothing is sent yet.

        Args:
            flat: 1-D floating tensor, same numel and dtype on every rank; changed in place.
            hierarchy: the two levels.
            between: makes the leaders' exchange from the tensor and their group.
            average: the mean inside the node; else the sum.
        """
        self.flat = flat
        self._node = hierarchy.node
        self._inside = Mean(flat, hierarchy.node, average)
        self._between = None if hierarchy.leaders is None else between(flat, hierarchy.leaders)

    def scatter(self) -> None:
        """Stage 1."""
        self._inside.scatter()
        self._inside.finish()
        if self._between is not None:
            self._between.scatter()

    def gather(self) -> None:
        """Stage 2."""
        if self._between is not None:
            self._between.gather()

    def finish(self) -> Tensor:
        """Stage 3."""
        if self._between is not None:
            self._between.finish()
        self._node.broadcast_(self.flat).wait()
        return self.flat


class CompressedMean:
    """Mean over ranks of one flat tensor, sent encoded: all-to-all, average at full precision, all-gather.

    The tensor is split in W chunks. Every rank sends its encoding of chunk k to rank k; rank k decodes them, averages
    them with its own values (which need no encoding), encodes the result, and all ranks gather it: 2 (W - 1) / W
    encoded tensors sent per rank, however large W is.
    The three stages are separate methods, so that a caller with several tensors can work on one while another travels.

    Every rank, the owner of a chunk included, ends with the decoded bytes, so all ranks end with the same values.
    """

    def __init__(
        self, flat: Tensor, group: Group, codec: Codec, average: bool = True, error: Tensor | None = None
    ) -> None:
        """Plan the exchange; nothing is sent yet.

        Args:
            flat: 1-D floating tensor, same numel and dtype on every rank; changed in place.
            group: the ranks that take part.
            codec: how values become bytes.
            average: the mean over ranks; else the sum.
            error: error feedback, 1-D like ``flat``: what this rank's codes lost in earlier exchanges. It is added to
                what this one sends, and replaced by what this one loses. A single rank loses nothing.
        """
        self.flat = flat
        self._error = error
        self._group = group
        self._codec = codec
        self._alpha = 1 / group.size if average else 1.0
        self._nothing_to_send = group.size == 1 or flat.numel() == 0
        self._chunk_numel = -(-flat.numel() // group.size)
        self._chunk_bytes = codec.encoded_bytes(self._chunk_numel, flat.dtype)
        self._chunks = [self._chunk(flat, k) for k in range(group.size)]

    def scatter(self) -> None:
        """Stage 1: encode, and start sending chunk k to rank k."""
        if self._nothing_to_send:
            return
        self._codes = self._group.borrow(self._chunk_bytes * self._group.size, self.flat.device)
        if self._error is not None:
            self._error.copy_(self.flat.add_(self._error))
        for k, piece in enumerate(self._pieces(self._codes)):
            if k != self._group.rank:
                codes = self._of(self._chunks[k], piece)
                self._codec.encode(self._chunks[k], codes, overwrite=True)
                if self._error is not None:
                    self._codec.decode(codes, self._chunk(self._error, k), alpha=-1.0, beta=1.0)
        self._received = self._room_in_flat()
        self._pending = self._group.all_to_all(self._received, self._codes)

    def gather(self) -> None:
        """Stage 2: average the own chunk, encode the mean, and start gathering all means."""
        if self._nothing_to_send:
            return
        self._pending.wait()
        own = self._chunks[self._group.rank]
        beta = self._alpha  # of the own values, when the first of the others' is added
        for k, piece in enumerate(self._pieces(self._received)):
            if k != self._group.rank:
                self._codec.decode(self._of(own, piece), own, alpha=self._alpha, beta=beta)
                beta = 1.0
        if not self._shares_memory(self._received):
            self._group.give_back(self._received)
        # All sends are done, so the same buffer takes the means; the own one is encoded into its place there.
        mean = self._codes[self._group.rank * self._chunk_bytes :][: self._chunk_bytes]
        error = None if self._error is None else self._chunk(self._error, self._group.rank)
        if error is not None:
            torch.mul(own, 1 / self._alpha, out=error)  # in the next mean this rank's part counts alpha times
        self._codec.round_(own, self._of(own, mean))
        if error is not None:
            error.sub_(own, alpha=1 / self._alpha)
        self._pending = self._group.all_gather(self._codes, mean)

    def finish(self) -> Tensor:
        """Stage 3: decode the means into ``flat``, and return it. A single rank's tensor comes back untouched."""
        if self._nothing_to_send:
            return self.flat
        self._pending.wait()
        for k, (chunk, piece) in enumerate(zip(self._chunks, self._pieces(self._codes), strict=True)):
            if k != self._group.rank:  # the own one is there
                self._codec.decode(self._of(chunk, piece), chunk)
        self._group.give_back(self._codes)
        return self.flat

    def _room_in_flat(self) -> Tensor:
        """Return bytes for what this rank receives: in ``flat`` itself where they fit beside its own chunk.

        Once encoded, the values are not needed any more. What is received there is decoded into the own chunk, and only
        then are the other chunks written.
        """
        num_bytes = self._codes.numel()
        size = self.flat.element_size()
        first = min(self._group.rank * self._chunk_numel, self.flat.numel()) * size
        last = first + self._chunks[self._group.rank].numel() * size
        offset = self.flat.storage_offset() * size
        for start, end in (
            (-offset % ALIGNMENT, first),
            (last + -(offset + last) % ALIGNMENT, self.flat.numel() * size),
        ):
            if end - start >= num_bytes:
                return self.flat.view(torch.uint8)[start : start + num_bytes]
        return self._group.borrow(num_bytes, self.flat.device)

    def _shares_memory(self, buffer: Tensor) -> bool:
        return buffer.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    def _chunk(self, flat: Tensor, k: int) -> Tensor:
        return flat[min(k * self._chunk_numel, flat.numel()) : (k + 1) * self._chunk_numel]

    def _pieces(self, buffer: Tensor) -> Iterable[Tensor]:
        return buffer.view(self._group.size, -1).unbind()

    def _of(self, chunk: Tensor, piece: Tensor) -> Tensor:
        # The last chunks may be shorter than the others, or empty.
        return piece[: self._codec.encoded_bytes(chunk.numel(), chunk.dtype)]
