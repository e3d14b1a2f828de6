"""What a user installs: the package in a fresh environment, beside the packages that come with it or in its way."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry
from test_docs import PROJECT_FILES
from worlds import launch

from lightning_distopt import DistOptStrategy
from lightning_distopt.cli import main
from lightning_distopt.strategies import register_strategies

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    """Run a command; return what it printed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- a fresh environment -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory):
    """The Python of a new environment, into which the built wheel is installed; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    # torch and lightning are those of this environment. Its own *.pth, and so an editable install, do not count there.
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_wheel_works_in_a_fresh_environment(fresh_python, tmp_path):
    """The wheel imports without a warning, from where it was installed, and trains on two processes."""
    what = "import lightning_distopt as package; print(package.__file__, package.__version__)"
    where, version = run(fresh_python, "-W", "error", "-c", what, cwd=tmp_path).split()

    assert Path(where).is_relative_to(fresh_python.parents[1])
    assert f'__version__ = "{version}"' in (ROOT / "lightning_distopt/__init__.py").read_text()

    (tmp_path / "train.py").write_text(PROJECT_FILES["train.py"])
    printed = run(fresh_python, "train.py", "1", cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})

    assert "on 2 ranks; each sends about" in printed
    assert "`max_epochs=1` reached" in printed


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_import_takes_little_beside_lightning(fresh_python, tmp_path):
    """Importing the package takes less than 0.3 s more than importing Lightning: the shortest of three times."""
    what = """
import time, lightning.pytorch
start = time.perf_counter()
import lightning_distopt
print(time.perf_counter() - start)
"""
    seconds = min(float(run(fresh_python, "-c", what, cwd=tmp_path)) for _ in range(3))

    assert seconds < 0.3


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
