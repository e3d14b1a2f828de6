"""AsyncModelAverage: the weights are averaged beside training, and nobody waits."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distopt.algorithms.base import WeightExchange, check_int
from lightning_distopt.collectives import Group, Pending

__all__ = ["AsyncModelAverage"]


class AsyncModelAverage(WeightExchange):
    """Ranks train on their own; in rounds, beside training, their weights are averaged.

    In a round rank r copies its weights to a snapshot s_r, which is averaged in the background while it
    trains on. At the end of the first update after the mean has arrived: ``x_r += 1/W sum_q s_q - s_r``. So
    x_r moves to the mean and keeps what rank r has learned since. Weights change there only, right after an
    update, never between a forward pass and its backward pass. There is no thread.

    After warm-up ranks may run at their own speed and do different numbers of updates. A slow rank joins a
    round late; the others train on meanwhile, without averaging. ``finish`` and ``state_dict`` wait for all
    ranks. A round that stays open for longer than the timeout of the group is an error.

    Sends 2 (W - 1) / W * 4N bytes per rank and round (float32, N trainable elements), and as much per update
    in warm-up. Adds two copies of the weights: the snapshot and what is averaged. Replicas differ.

    State: the number of updates, and a mean that has arrived but was not yet added.

    Source: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021,
    arXiv:2107.01499; the idea: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient
    Descent", 2018, arXiv:1710.06952.
    Differs from Bagua: no thread and no lock on the weights; ``sync_interval_ms=0`` averages as often as it
    can (Bagua then never averages); :meth:`abort` and :meth:`resume` concern one rank and wait for nobody
    (Bagua's are a barrier); replicas agree after ``finish``.

    Args:
        peer_selection_mode: "all", a round averages over all ranks; there is no other mode.
        sync_interval_ms: milliseconds from the start of a round to the start of the next one, unless the
            round takes longer; 0 starts the next one as soon as it is over.
        warmup_steps: updates at the beginning that average gradients instead, and wait for all ranks.
    """

    name = "async"
    uneven_updates = True

    _rounds: Group | None = None  # what rounds run on
    _pending: list[Pending] | None = None  # the round in flight
    _snapshot: list[Tensor]
    _change: list[Tensor]  # in a round the sum over ranks, after it mean - snapshot
    _arrived = False  # whether that is still to be added to the weights
    _aborted = False

    def __init__(
        self, peer_selection_mode: Literal["all"] = "all", sync_interval_ms: int = 500, warmup_steps: int = 0
    ) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode must be 'all', got {peer_selection_mode!r}")
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = check_int("sync_interval_ms", sync_interval_ms, minimum=0)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, minimum=0)

    def setup(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], group: Group) -> None:
        self.teardown()
        super().setup(module, optimizers, group)
        self._rounds = _group_for_rounds(group)
        self._num_started = 0
        self._started_at = time.monotonic()
        self._aborted = False

    def restart(self) -> None:
        self._snapshot = self._change = []

    # -- one update ------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        if self.step < self.warmup_steps and self.group.size > 1:
            self.average_gradients_()

    def after_update(self) -> None:
        if self.group.size == 1:
            return
        if self.step <= self.warmup_steps:
            # Replicas are still equal: the first round is due one interval after they begin to differ.
            self._started_at = time.monotonic()
            return
        if self._pending is not None and all(pending.done() for pending in self._pending):
            self._receive()
        self._add_change()
        interval_passed = time.monotonic() - self._started_at >= self.sync_interval_ms / 1000
        if self._pending is None and interval_passed and not self._aborted:
            self._start_round()

    def abort(self) -> None:
        """Start no new round on this rank, until :meth:`resume`. Sends nothing, and waits for nobody.

        A mean under way is still added after a later update. A round that other ranks start meanwhile stays
        open until this rank joins it, after :meth:`resume`, or where all ranks meet: in ``finish`` and
        ``state_dict``. May be called repeatedly, and on some ranks only. ``setup`` always begins unaborted.
        """
        self._aborted = True

    def resume(self) -> None:
        """Start rounds again after :meth:`abort`; else do nothing."""
        self._aborted = False

    # -- rounds ----------------------------------------------------------------------------------------------
    #
    # A round ends only after every rank has started it, and a rank starts the next one only after that: so
    # the numbers of rounds that two ranks have started differ by one at most. Where ranks meet, those that
    # are behind must start the missing round, or the others would wait for it forever:
    #
    #     rank 0:  start 1 .... 1 arrives, start 2 ....... finish: counts (2, 1) .......... 2 arrives
    #     rank 1:  ...... start 1 ........... 1 arrives .. finish: counts (2, 1), start 2 . 2 arrives
    #
    # The collectives of one group are matched by order: on one group, rank 0's round 2 would here be summed
    # with rank 1's counts. So rounds have a group of their own. All else uses self.group, which every rank
    # enters at the same places of the program. And every instance has its own, for with two optimizers'
    # instances A and B:
    #
    #     rank 0:  A starts a round, B starts a round
    #     rank 1:  B starts a round, A starts a round

    def _start_round(self) -> None:
        assert self._rounds is not None
        self._snapshot = self._snapshot or self.layout.empty()
        self._change = self._change or self.layout.empty()
        self.layout.pack_(self._snapshot)
        for change, snapshot in zip(self._change, self._snapshot, strict=True):
            if self._arrived:
                # Still to be added to the weights: it goes along, and comes back within the new change.
                change.add_(snapshot)
            else:
                change.copy_(snapshot)
        self._arrived = False
        self._pending = [self._rounds.all_reduce_(change) for change in self._change]
        self._num_started += 1
        self._started_at = time.monotonic()

    def _receive(self) -> None:
        """Wait for the round in flight, if there is one."""
        if self._pending is None:
            return
        for pending in self._pending:
            pending.wait()
        self._pending = None
        for change, snapshot in zip(self._change, self._snapshot, strict=True):
            change.div_(self.group.size).sub_(snapshot)
        self._arrived = True

    def _add_change(self) -> None:
        if self._arrived:
            self.layout.add_(self._change)
            self._arrived = False

    def _catch_up(self) -> None:
        """Bring all ranks to the same number of rounds, none in flight. Collective; changes no weights."""
        if self.group.size == 1:
            return
        mine = torch.tensor([self._num_started], device=self.group.device)
        counts = torch.empty(self.group.size, dtype=mine.dtype, device=mine.device)
        self.group.all_gather(counts, mine).wait()
        most = int(counts.max())
        self._receive()
        while self._num_started < most:
            self._start_round()
            self._receive()

    def flush(self) -> None:
        self._catch_up()
        self._add_change()

    # -- the end, and state ----------------------------------------------------------------------------------

    def finish(self) -> None:
        self.flush()
        self.restart()  # frees two copies of the weights: averaging makes one of its own
        self.average_weights_()

    def teardown(self) -> None:
        rounds = None if self._rounds is None else self._rounds.process_group
        # A group's end waits for what is in flight on it. After an error that may never arrive: then the
        # group is left to the end of the process.
        if rounds is not None and self._pending is None:
            with contextlib.suppress(ValueError):  # it went with the default group
                dist.destroy_process_group(rounds)
        self._rounds = self._pending = None
        self._snapshot = self._change = []
        self._arrived = False

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. Collective: waits for the round in flight. Changes no weights."""
        self._catch_up()
        change = {}
        if self._arrived:
            views = self.layout.views(self._change)
            change = {name: view.clone() for name, view in zip(self.names, views, strict=True)}
        return {"step": self.step, "change": change}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._arrived = bool(state["change"]) and self.group.size > 1
        if self._arrived:
            self._change = self.layout.empty()
            for name, view in zip(self.names, self.layout.views(self._change), strict=True):
                # What was frozen then was in no round, and has nothing to add.
                view.copy_(state["change"].get(name, torch.zeros(())))


def _group_for_rounds(group: Group) -> Group:
    """Make a group of the same ranks for rounds alone. Collective."""
    if group.process_group is None:
        return group  # nothing is sent
    # gloo, for GPU tensors too: an NCCL kernel would occupy the GPU for as long as the round is open, and
    # whatever synchronises the device would wait for the slowest rank, which may be waiting for this one.
    ranks = dist.get_process_group_ranks(group.process_group)
    made = dist.new_group(ranks, timeout=group.timeout, backend="gloo")
    return Group(made, timeout=group.timeout, traffic=group.traffic)
