"""LocalSGD and DiLoCo: replicas that train alone, and meet once per period."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_distopt.algorithms.base import WeightExchange, check_bool, check_int, check_number, ring_bytes
from lightning_distopt.collectives import CompressedMean, FlatLayout, Group, Mean, checksum
from lightning_distopt.quantize import BlockInt4, BlockInt8, Codec, Float16

__all__ = ["DiLoCo", "LocalSGD"]

# Blocks of 256: a sixth less error than with 1024, at the same speed, for 1 % (int4: 2 %) more bytes.
CODECS: dict[str, Codec | None] = {
    "none": None,
    "fp16": Float16(),
    "int8": BlockInt8(block=256),
    "int4": BlockInt4(block=256),
}
# Elements that the outer optimizer works on at a time: 1 MB of each tensor.
PIECE_NUMEL = 2**18


class LocalSGD(WeightExchange):
    """Replicas train alone for ``period`` updates, then all take the mean of their weights.

    After updates t = warmup_steps + period, warmup_steps + 2 period, ...: ``x_r <- 1/W sum_s x_s`` on every
    rank r. Before ``warmup_steps`` the gradients are averaged in every update instead (post-local SGD), and
    replicas stay equal.

    Sends 2 (W - 1) / W * 4N / period bytes per rank and update. Optimizer states (momentum, Adam's moments)
    stay local and are kept across averagings. Floating-point buffers, such as BatchNorm's statistics, are
    averaged whenever the weights are (with several optimizers: whenever the weights of one of them are);
    integer buffers stay as they are. State: the number of updates.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv:1805.09767, algorithm 1;
    the warm-up: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv:1808.07217.
    Differs from Bagua: which has no such algorithm.

    Args:
        period: updates between two averagings.
        warmup_steps: updates with averaged gradients at the start.
    """

    name = "local_sgd"
    strategy_prefix = "distopt_"

    def __init__(self, period: int = 16, warmup_steps: int = 0) -> None:
        self.period = check_int("period", period, 1)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, 0)

    def expected_bytes(self, numel: int, size: int) -> float:
        return ring_bytes(4 * numel, size) / self.period

    def before_update(self) -> None:
        if self.step < self.warmup_steps:
            self.average_gradients_()

    def after_update(self) -> None:
        # The end of the warm-up counts: it removes what rounding may have put between the replicas.
        since = self.step - self.warmup_steps
        if since >= 0 and since % self.period == 0:
            self.average_weights_()
            average_buffers_(self.module, self.group)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class DiLoCo(WeightExchange):
    """Replicas train alone for ``period`` updates; their mean change is the gradient of an outer optimizer.

    With outer weights X, equal on all ranks, and each rank's weights x_r, a round is::

        G = 1/W sum_r C(X - x_r)        the outer gradient, sent encoded by C
        X <- SGD(X, G)                  torch.optim.SGD with outer_lr, outer_momentum, nesterov
        x_r <- X                        on every rank

    Encoded with ``compression`` (integers in blocks of 256 with one scale each), a round goes as in ByteGrad:
    every rank sends chunk k to rank k, which averages at full precision, encodes again, and all gather. That
    makes 2 (W - 1) / W * N * b / period bytes per rank and update, whatever W is; b = 4 for "none", 2 for
    "fp16", 1.02 for "int8", 0.52 for "int4". What a rank's codes lose, in both directions, it adds to what it
    sends in the next round (error feedback).

    Which outer values: the papers use outer_lr=0.7, outer_momentum=0.9. That momentum sums over ten rounds
    and pays only in a long run, of hundreds of them. In one of 40 rounds (byte-level GPT, 2000 updates,
    period 50, two ranks, no compression) it ended with a loss 10 % above that of an all-reduce in every
    update; plain averaging (1.0, 0) 4.7 % above, and (1.0, 0.6) 0.4 % above: hence the defaults. With "int4"
    that became 0.8 %. Where weights still change fast, momentum overshoots: in the demo's first 400 updates,
    period 16, int8, a momentum of 0.6 ended at 2.60, 0.3 at 2.44, and LocalSGD at 2.25.

    Streaming: ``num_fragments`` splits the parameters in sets of about equal size. Each has one round per
    period, at its own time, evenly spread, so a round sends num_fragments times less. With ``overlap_steps``
    = o, a round that starts after update t is applied after update t + o on every rank: the exchange has the
    time of o updates. Its outer gradient is that of update t, and local progress made meanwhile is kept:
    ``x_r <- x_r + (X - x_r at update t)``.

    Optimizer states stay local and are kept across rounds. Floating-point buffers are averaged once per
    period (with several optimizers: once in the period of each); integer ones stay as they are. bfloat16 and
    float16 parameters have float32 outer weights. Parameters that appear in mid-run start with their present
    values and no outer momentum. Adds 1 (outer weights) to 3 (momentum, error) times the weights in memory,
    and 2 or 3 times those of a fragment during its round. A single rank sends nothing, and its outer
    optimizer makes plain training Lookahead. State: updates, outer weights, outer momentum, error; of a round
    under way what it started from.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    arXiv:2311.08105, algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication", 2025,
    arXiv:2501.18512 (fragments, overlap, 4 bits); Charles et al., "Communication-Efficient Language Model
    Training Scales Reliably and Robustly: Scaling Laws for DiLoCo", 2025, arXiv:2503.09799; both errors in
    one feedback: Tang et al., "DoubleSqueeze", 2019, arXiv:1905.05957.
    Differs from the papers: the default outer values, as said above. Fragments are whole parameters dealt out
    by size, so that no round is much larger than another; among equal layers that is the papers' strided
    split. A late round keeps all local progress, where the paper mixes old and new weights by a factor. Error
    feedback.
    Differs from Bagua: which has no such algorithm.

    Args:
        period: updates between two rounds of the same parameters.
        outer_lr: learning rate of the outer SGD; 1 without momentum is plain averaging.
        outer_momentum: momentum of the outer SGD, at least 0 and below 1.
        nesterov: whether the outer momentum is Nesterov's.
        compression: "none", "fp16", "int8" or "int4".
        num_fragments: number of sets of parameters that have their rounds at different times; at most
            ``period``.
        overlap_steps: updates between start and end of a round; at most the distance of two rounds,
            ``period // num_fragments``.
        warmup_steps: updates with averaged gradients at the start.
        outer_device: "cpu" keeps the outer state in the host's memory (pinned, where parameters are on a
            GPU); None keeps it with the parameters.
    """

    name = "diloco"
    strategy_prefix = "distopt_"

    _fragments: "Sequence[Fragment]" = ()
    _round: "Round | None" = None

    def __init__(
        self,
        period: int = 100,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.6,
        nesterov: bool = True,
        compression: Literal["none", "fp16", "int8", "int4"] = "int8",
        num_fragments: int = 1,
        overlap_steps: int = 0,
        warmup_steps: int = 0,
        outer_device: Literal["cpu"] | None = None,
    ) -> None:
        self.period = check_int("period", period, 1)
        self.outer_lr = check_number("outer_lr", outer_lr, 1e-6)
        self.outer_momentum = check_number("outer_momentum", outer_momentum, 0, below=1)
        self.nesterov = check_bool("nesterov", nesterov)
        self.compression = compression
        self.num_fragments = check_int("num_fragments", num_fragments, 1)
        self.overlap_steps = check_int("overlap_steps", overlap_steps, 0)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, 0)
        self.outer_device = outer_device
        if compression not in CODECS:
            raise ValueError(f"compression must be one of {', '.join(CODECS)}, got {compression!r}")
        if outer_device not in (None, "cpu"):
            raise ValueError(f"outer_device must be None or 'cpu', got {outer_device!r}")
        if num_fragments > period:
            raise ValueError(f"num_fragments must be at most period={period}, got {num_fragments}")
        distance = period // num_fragments
        if overlap_steps > distance:
            raise ValueError(
                f"overlap_steps must be at most period // num_fragments = {distance}, since a round ends "
                f"before the next one starts; got {overlap_steps}"
            )

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        self.teardown()
        super().setup(module, optimizers, group)

    def restart(self) -> None:
        # By identity: a layer that has taken another one's place has its name.
        kept = {
            id(tensor): views
            for fragment in self._fragments
            for tensor, (_, views) in zip(fragment.layout.tensors, fragment.named_views(), strict=True)
        }
        names = self.names
        parts = deal_by_size([tensor.numel() for tensor in self.layout.tensors], self.num_fragments)
        self._fragments = [
            Fragment(
                names=[names[i] for i in part],
                layout=FlatLayout(self.layout.tensors[i] for i in part),
                offset=(k + 1) * self.period // self.num_fragments % self.period,
                outer_device=self.outer_device,
                has_momentum=self.outer_momentum > 0,
                has_error=CODECS[self.compression] is not None,
            )
            for k, part in enumerate(parts)
        ]
        self._outer_optimizer = torch.optim.SGD(
            [{"params": [piece for fragment in self._fragments for piece in fragment.pieces]}],
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            nesterov=self.nesterov and self.outer_momentum > 0,
        )
        for fragment in self._fragments:
            # SGD would allocate it in its first step. Here it can be seen by parameter, to be saved.
            for piece, momentum in zip(fragment.pieces, split(fragment.momentum), strict=False):
                self._outer_optimizer.state[piece]["momentum_buffer"] = momentum
        self._load_outer_state(
            {name: kept.get(id(tensor), {}) for name, tensor in zip(names, self.layout.tensors, strict=True)}
        )

    def expected_bytes(self, numel: int, size: int) -> float:
        codec = CODECS[self.compression]
        encoded = 4 * numel if codec is None else codec.encoded_bytes(numel, torch.float32)
        return ring_bytes(encoded, size) / self.period

    def before_update(self) -> None:
        if self.step < self.warmup_steps:
            self.average_gradients_()

    def after_update(self) -> None:
        since = self.step - self.warmup_steps
        if since == 0:
            # Replicas were trained alike; this removes what rounding may have put between them.
            self.average_weights_()
            average_buffers_(self.module, self.group)
            for fragment in self._fragments:
                fragment.layout.pack_(fragment.outer)
        if since <= 0:
            return
        self._advance()
        for fragment in self._fragments:
            if since % self.period == fragment.offset:
                start = fragment.layout.pack_(fragment.layout.empty())
                self._round = Round(
                    fragment, start, self.step, self.group, CODECS[self.compression], keep_start=self.overlap_steps > 0
                )
        self._advance()

    def flush(self) -> None:
        self._advance(to_the_end=True)

    def teardown(self) -> None:
        self._round = None
        self._fragments = ()

    def _advance(self, to_the_end: bool = False) -> None:
        """Bring the round under way to where it must be after this update, which every rank counts alike."""
        current = self._round
        if current is None:
            return
        age = self.overlap_steps if to_the_end else self.step - current.step
        ends = age >= self.overlap_steps
        if ends:
            # First, so that after an error nobody saves it, or applies it again: its buffers are being overwritten.
            # What it would have brought is in the next one.
            self._round = None
        current.scatter()
        if age >= (self.overlap_steps + 1) // 2:
            current.gather()
        if ends:
            self._apply(current)

    def _apply(self, ended: "Round") -> None:
        fragment = ended.fragment
        gradients = [change.to(outer.device) for change, outer in zip(ended.finish(), fragment.outer, strict=True)]
        for piece, gradient in zip(fragment.pieces, split(gradients), strict=True):
            piece.grad = gradient
        self._outer_optimizer.step()
        self._outer_optimizer.zero_grad()
        if self.step == ended.step:
            # A sum would leave the replicas a rounding apart.
            fragment.layout.unpack_(fragment.outer)
        else:
            for outer, start in zip(fragment.outer, ended.start, strict=True):
                torch.sub(outer.to(start.device), start, out=start)
            fragment.layout.add_(ended.start)
        if fragment is self._fragments[-1]:
            average_buffers_(self.module, self.group)

    def state_dict(self) -> dict[str, Any]:
        # A round under way is saved by what it started from, and starts again after loading: no waiting.
        state = {"step": self.step, "outer": self._outer_state()}
        if self._round is not None:
            fragment = self._round.fragment
            starts = zip(fragment.names, fragment.layout.views(self._round.start), strict=True)
            state["round"] = {
                "step": self._round.step,
                "fragment": self._fragments.index(fragment),
                "start": {name: view.clone() for name, view in starts},
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._load_outer_state(state["outer"])
        self._round = None
        saved = state.get("round", {"fragment": self.num_fragments})
        for fragment in self._fragments[saved["fragment"] :][:1]:
            # Where options or parameters have changed, what this round would have brought is in the next one.
            if fragment.names == list(saved["start"]):
                start = fragment.layout.empty()
                for view, value in zip(fragment.layout.views(start), saved["start"].values(), strict=True):
                    view.copy_(value)
                self._round = Round(fragment, start, saved["step"], self.group, CODECS[self.compression])

    def _outer_state(self) -> dict[str, dict[str, Tensor]]:
        """Copy the outer state: per parameter its outer weights, momentum and error, those that there are."""
        return {
            name: {kind: view.clone() for kind, view in views.items()}
            for fragment in self._fragments
            for name, views in fragment.named_views()
        }

    def _load_outer_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        for fragment in self._fragments:
            for name, views in fragment.named_views():
                for kind, saved in state.get(name, {}).items():
                    if kind in views:
                        views[kind].copy_(saved)


class Fragment:
    """Parameters that have their rounds together, and their outer state: flat buffers as of ``layout``.

    Attributes:
        names: of the parameters.
        layout: the parameters.
        offset: rounds start after updates t with ``t % period == offset``, counted from the end of the
            warm-up.
        outer: the outer weights, equal on all ranks; at first the parameters' values.
        momentum: of the outer optimizer; empty without.
        error: what this rank's codes have lost and not yet made up for; empty without compression.
        pieces: the outer weights as the outer optimizer sees them: views that stay in a CPU's cache.
    """

    def __init__(
        self,
        *,
        names: list[str],
        layout: FlatLayout,
        offset: int,
        outer_device: str | None,
        has_momentum: bool,
        has_error: bool,
    ) -> None:
        def zeros() -> list[Tensor]:
            pinned = outer_device == "cpu"
            return [
                torch.zeros_like(flat, device=outer_device, pin_memory=pinned and flat.is_cuda)
                for flat in layout.empty()
            ]

        self.names = names
        self.layout = layout
        self.offset = offset
        self.outer = layout.pack_(zeros())
        self.momentum = zeros() if has_momentum else []
        self.error = zeros() if has_error else []
        self.pieces = split(self.outer)

    def named_views(self) -> list[tuple[str, dict[str, Tensor]]]:
        """Return for each parameter its name, and its pieces of the outer state by kind."""
        kinds = {"weight": self.outer, "momentum": self.momentum, "error": self.error}
        views = {kind: self.layout.views(buffers) for kind, buffers in kinds.items() if buffers}
        return [(name, {kind: views[kind][i] for kind in views}) for i, name in enumerate(self.names)]


class Round:
    """One exchange of one fragment: from each rank's change of the weights to the mean over ranks.

    ``scatter``, ``gather`` and ``finish`` as in :class:`CompressedMean`; the first two do nothing when
    repeated.

    Attributes:
        fragment: whose weights.
        start: flat weights of this rank when the round started; without ``keep_start`` overwritten, which saves a copy.
        step: the update after which it started.
    """

    def __init__(
        self,
        fragment: Fragment,
        start: Sequence[Tensor],
        step: int,
        group: Group,
        codec: Codec | None,
        keep_start: bool = True,
    ) -> None:
        self.fragment = fragment
        self.start = start
        self.step = step
        self._stage = 0
        # A copy: until the round ends, the fragment's error is what a checkpoint must hold to start it again.
        self._error = [error.to(start[i].device, copy=True) for i, error in enumerate(fragment.error)]
        self._means: list[Mean | CompressedMean] = []
        for i, now in enumerate(start):
            change = torch.sub(fragment.outer[i].to(now.device), now, out=None if keep_start else now)
            if codec is None:
                self._means.append(Mean(change, group))
            else:
                self._means.append(CompressedMean(change, group, codec, error=self._error[i]))

    def scatter(self) -> None:
        """Stage 1: start sending."""
        if self._stage < 1:
            for mean in self._means:
                mean.scatter()
            self._stage = 1

    def gather(self) -> None:
        """Stage 2: average, and start sending the means."""
        if self._stage < 2:
            for mean in self._means:
                mean.gather()
            self._stage = 2

    def finish(self) -> list[Tensor]:
        """Stage 3: return the mean changes, one per buffer of the layout."""
        changes = [mean.finish() for mean in self._means]
        self.fragment.error = [
            new if new.device == error.device else error.copy_(new)
            for error, new in zip(self.fragment.error, self._error, strict=True)
        ]
        return changes


def split(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return views of ``PIECE_NUMEL`` elements that together cover the buffers."""
    return [piece for buffer in buffers for piece in buffer.split(PIECE_NUMEL)]


def deal_by_size(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split items in parts of about equal size: the largest first, each to the part that is smallest so far.

    Args:
        sizes: of the items.
        num_parts: number of parts; some stay empty if there are fewer items.

    Returns:
        For each part the indices of its items, in order.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        smallest = totals.index(min(totals))
        totals[smallest] += sizes[i]
        parts[smallest].append(i)
    return [sorted(part) for part in parts]


def average_buffers_(module: torch.nn.Module, group: Group) -> None:
    """Replace every floating-point buffer that differs between ranks by its mean over ranks. Collective.

    Those that are equal, as masks and tables are, cost 8 bytes per rank.

    Args:
        module: with the same buffers on every rank.
        group: the ranks that take part.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if not buffers or group.size == 1:
        return
    sums = torch.stack([checksum(buffer).to(group.device) for buffer in buffers])
    every = sums.new_empty(group.size * len(buffers))
    group.all_gather(every, sums).wait()
    equal = (every.view(group.size, -1) == sums).all(0)
    layout = FlatLayout(buffer for buffer, same in zip(buffers, equal.tolist(), strict=True) if not same)
    flats = layout.pack_(layout.empty())
    for flat in flats:
        group.all_reduce_(flat.div_(group.size)).wait()
    layout.unpack_(flats)
