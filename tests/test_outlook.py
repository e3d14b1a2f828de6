"""What is said before training: the expected bytes, one line at the start of fit, the repr, and what Fabric answers."""

import re

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import StrategyRegistry
from models import Regression, loader
from torch import nn
from worlds import launch, make_trainer

from lightning_distopt import BaguaDistributedOption, DistOptBaguaStrategy, DistOptDDPStrategy, DistOptStrategy
from lightning_distopt.algorithms import ALGORITHMS, Algorithm, make_algorithm
from lightning_distopt.algorithms.comm_hook import HalfAllReduce

EXPECTED = [
    ("gradient_allreduce", {}),
    ("bytegrad", {}),
    ("qadam", {}),
    ("decentralized", {"communication_interval": 2}),
    ("decentralized", {"peer_selection_mode": "shift_one"}),
    ("low_precision_decentralized", {"communication_interval": 2}),
    ("local_sgd", {"period": 2}),
    ("diloco", {"period": 2, "compression": "none"}),
    ("diloco", {"period": 2, "compression": "fp16"}),
    ("diloco", {"period": 2, "compression": "int8"}),
    ("diloco", {"period": 4, "compression": "int4", "num_fragments": 2}),
]
UPDATES = 4


class Wide(Regression):
    """Enough weights that what rounding up adds to a message is little."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 1))


class SentPerUpdate(Wide):
    """Notes how many bytes were sent before every batch, and before anything is sent at the end of fit."""

    def on_train_batch_start(self, batch, batch_idx):
        self.sent = [*getattr(self, "sent", []), self.trainer.strategy.bytes_sent]


def sent_per_update(rank, name, options):
    """Return the bytes that this rank has sent in ``UPDATES`` updates after the first one, and the expected ones."""
    torch.manual_seed(0)
    strategy = DistOptBaguaStrategy(name, **options, **({"warmup_steps": 1} if name == "qadam" else {}))
    model = SentPerUpdate()
    if name == "qadam":
        model.make_optimizer = torch.optim.Adam
    trainer = make_trainer(strategy=strategy, max_steps=UPDATES + 2)
    trainer.fit(model, loader())
    numel = sum(p.numel() for p in model.parameters())
    return model.sent[1 + UPDATES] - model.sent[1], UPDATES * strategy.algorithm.expected_bytes(
        numel, trainer.world_size
    )


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "options"), EXPECTED, ids=str)
def test_expected_bytes_are_those_that_are_sent(name, options, size):
    """What an algorithm announces is what its ranks send together, to 3 % (messages are rounded up to 8 bytes)."""
    results = launch(sent_per_update, size, name, options)
    sent, expected = (sum(values) for values in zip(*results, strict=True))

    assert sent == pytest.approx(expected, rel=0.03)


def test_half_precision_halves():
    """16-bit gradients cost half of 32-bit ones."""
    assert (
        HalfAllReduce("bf16").expected_bytes(1000, 4)
        == make_algorithm("gradient_allreduce").expected_bytes(1000, 4) / 2
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_sends_nothing(name):
    """Alone, no algorithm announces bytes."""
    assert make_algorithm(name).expected_bytes(1000, 1) in (0, None)


class Silent(Algorithm):
    """An algorithm of a user's, which says nothing about bytes."""

    name = "silent"
    exchanges = "weights"


def fit(rank, strategy):
    """Fit for one update."""
    make_trainer(strategy=strategy, max_steps=1).fit(Regression(), loader())


ANNOUNCED = [
    (
        "distopt_bagua_bytegrad",
        "ByteGrad(hierarchical='auto', average=True) on 2 ranks; each sends about 176 bytes per update",
    ),
    ("distopt_bagua_async", "an amount that depends on the run per update"),
    (
        DistOptStrategy(algorithm=Silent()),
        "Silent() on 2 ranks; each sends an amount that depends on the run per update",
    ),
]


@pytest.mark.parametrize(("strategy", "line"), ANNOUNCED, ids=["bytegrad", "async", "own"])
def test_fit_starts_with_one_line(strategy, line):
    """Rank 0, and it alone, says which algorithm runs on how many ranks, and what it will send."""
    outcomes = launch(fit, 2, strategy, allow_failure=True)

    assert all(outcome.ok for outcome in outcomes)
    assert outcomes[0].output.count(line) == 1
    assert "per update" not in outcomes[1].output


def evaluate(rank):
    """Validate, test and predict."""
    trainer = make_trainer(strategy="distopt_bagua_bytegrad")
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(Regression(), loader(8))


def test_evaluation_announces_nothing():
    """The line speaks of updates, so it comes with fit only."""
    outcomes = launch(evaluate, 2, allow_failure=True)

    assert all(outcome.ok for outcome in outcomes)
    assert all("ByteGrad" not in outcome.output for outcome in outcomes)


def test_alone_the_line_says_so():
    """On one rank nothing is announced as sent."""
    (outcome,) = launch(fit, 1, "distopt_bagua_bytegrad", allow_failure=True)

    assert "on 1 rank, alone" in outcome.output


def test_repr_shows_what_was_configured():
    """A strategy shows its algorithm with all arguments, and its option."""
    assert "ByteGrad(hierarchical=False, average=True)" in repr(DistOptBaguaStrategy("bytegrad", hierarchical=False))
    assert "comm_hook='fp16'" in repr(DistOptDDPStrategy(comm_hook="fp16"))
    assert "bucket_cap_mb=2" in repr(DistOptStrategy(BaguaDistributedOption("bytegrad", bucket_cap_mb=2)))


@pytest.mark.parametrize("name", [n for n in StrategyRegistry.available_strategies() if n.startswith("distopt_")])
def test_fabric_names_what_to_use_instead(name):
    """Fabric answers our names with one sentence, not with an unknown key."""
    message = f"'{name}' is a strategy of lightning.pytorch.Trainer.*convert2distributed_model"
    with pytest.raises(TypeError, match=message) as caught:
        Fabric(strategy=name, accelerator="cpu", devices=1)

    assert not re.search(r"\n", str(caught.value))
