"""What a user installs: the package in a fresh environment, beside the packages that come with it or in its way."""

import sys

import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry
from worlds import launch

from lightning_distopt import DistOptStrategy
from lightning_distopt.cli import main
from lightning_distopt.strategies import register_strategies

# -- pytorch_lightning, the other package of the same code ---------------------------------------------------

OTHER = {
    "__init__.py": "from pytorch_lightning import strategies, trainer\nfrom test_packaging import LightningModule\n",
    "strategies.py": "from test_packaging import StrategyRegistry\n",
    "trainer.py": "",
}
SENTENCE = "write `import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`"
StrategyRegistry = _StrategyRegistry()


class LightningModule:
    """That of pytorch_lightning, which is not Lightning's."""


class Model(LightningModule):
    """A user's model."""


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """A package of that name, with what this one touches."""
    folder = tmp_path / "pytorch_lightning"
    folder.mkdir()
    for name, source in OTHER.items():
        (folder / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


def ask_other_registry(rank, first):
    """Ask pytorch_lightning's registry for a strategy, with this package registered before or after its import."""
    if not first:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__ != "lightning_distopt.strategies"]
    import pytorch_lightning

    if not first:
        register_strategies()
    assert "distopt_ddp" in pytorch_lightning.strategies.StrategyRegistry
    pytorch_lightning.strategies.StrategyRegistry.get("distopt_bagua_bytegrad")


@pytest.mark.parametrize("first", [True, False])
def test_a_name_for_the_trainer_of_pytorch_lightning(first, other_package):
    """pytorch_lightning's own Trainer answers our names with the import to write, whichever was imported first."""
    with pytest.raises(TypeError, match=SENTENCE):
        launch(ask_other_registry, 1, first, init_group=False)


def build_beside_other(rank):
    """Build a strategy where pytorch_lightning is imported."""
    import pytorch_lightning  # noqa: F401

    DistOptStrategy("bytegrad")


def test_a_strategy_beside_pytorch_lightning(other_package):
    """A strategy object warns when it is built: nothing of ours is asked before a Trainer refuses it or the model."""
    with pytest.raises(UserWarning, match=SENTENCE):  # an error in tests
        launch(build_beside_other, 1, init_group=False)


def fit_on_command_line(rank):
    """Run the command line with that model."""
    import pytorch_lightning  # noqa: F401

    sys.argv[1:] = ["fit", "--model=test_packaging.Model"]
    main()


def test_a_model_of_pytorch_lightning_on_the_command_line(other_package):
    """The command line refuses it with the same sentence."""
    (outcome,) = launch(fit_on_command_line, 1, allow_failure=True)

    assert outcome.exitcode == 2
    assert SENTENCE in outcome.output
