"""The command line: strategies in configuration files, any module by its import path, errors that list what is valid."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from models import Regression, loader, some_quick
from worlds import launch

from lightning_distopt.algorithms import ALGORITHMS, ByteGrad
from lightning_distopt.cli import DistOptCLI, main

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))
FORMS = ["bytegrad", "bytegrad_options", "bytegrad_object"]

# Lightning 2.6 calls jsonargparse in the old way.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


class Model(Regression):
    """With arguments that have types."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__(lr)


class Data(pl.LightningDataModule):
    """The same few numbers for everything."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.length = length

    def train_dataloader(self):
        return loader(self.length)

    def val_dataloader(self):
        return loader(self.length)

    def test_dataloader(self):
        return loader(self.length)

    def predict_dataloader(self):
        return loader(self.length)


def module_arguments(folder, devices=1):
    """Arguments of a tiny run of ``python -m lightning_distopt``."""
    return [
        "--model=test_cli.Model",
        "--data=test_cli.Data",
        "--seed_everything=1",
        "--trainer.accelerator=cpu",
        f"--trainer.devices={devices}",
        "--trainer.max_epochs=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.log_every_n_steps=1",
        "--trainer.logger=CSVLogger",
        f"--trainer.logger.save_dir={folder}",
    ]


def configure(strategy, cli=DistOptCLI, **trainer):
    """Parse a configuration with this strategy and build its Trainer; return the CLI."""
    config = {"trainer": {"strategy": strategy, "accelerator": "cpu", "devices": 1, "logger": False, **trainer}}
    return cli(Model, Data, run=False, save_config_callback=None, seed_everything_default=False, args=config)


def in_process(rank, commands):
    """Run ``python -m lightning_distopt`` with each list of arguments."""
    for arguments in commands:
        sys.argv[1:] = arguments
        main()


@pytest.fixture(autouse=True)
def arguments(monkeypatch):
    """An empty command line, in a list that tests may fill."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return sys.argv


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_build_their_strategy(path):
    """Every file of the examples builds the strategy it names, in a plain LightningCLI, and again from its dump."""
    cli = LightningCLI
    strategy = yaml.safe_load(path.read_text())["trainer"]["strategy"]
    built = configure(strategy, cli)
    again = configure(yaml.safe_load(built.parser.dump(built.config))["trainer"]["strategy"], cli)

    assert repr(again.trainer.strategy.algorithm) == repr(built.trainer.strategy.algorithm)
    assert repr(again.trainer.strategy.option) == repr(built.trainer.strategy.option)
    assert path.stem.startswith(built.trainer.strategy.algorithm.name) or path.stem == "ddp_fp16"


def test_every_algorithm_has_a_configuration():
    """The examples show every algorithm."""
    assert set(ALGORITHMS) <= {path.stem for path in CONFIGS}


def test_forms_say_the_same():
    """By name, by name with options and by class: three ways to write one algorithm."""
    strategies = [
        yaml.safe_load((EXAMPLES / f"configs/{form}.yaml").read_text())["trainer"]["strategy"] for form in FORMS
    ]
    built = [configure(strategy).trainer.strategy for strategy in strategies]

    assert [type(strategy.algorithm) for strategy in built] == [ByteGrad] * 3
    assert [strategy.algorithm.hierarchical for strategy in built] == ["auto", False, False]


def test_an_option_object_is_a_form_too():
    """A DDPOption in a configuration needs nothing beside it, and takes its keywords from dict_kwargs."""
    option = {
        "class_path": "lightning_distopt.DDPOption",
        "init_args": {"backend": "gloo"},
        "dict_kwargs": {"comm_hook": "bf16"},
    }
    strategy = configure(
        {"class_path": "lightning_distopt.DistOptStrategy", "init_args": {"option": option}}
    ).trainer.strategy

    assert strategy.option.comm_hook == "bf16"


WRONG = {
    "name": ("distopt_bagua_bytegra", "did you mean 'distopt_bagua_bytegrad'", "distopt_diloco"),
    "algorithm": (
        {"class_path": "lightning_distopt.DistOptBaguaStrategy", "init_args": {"algorithm": "bytegra"}},
        "did you mean 'bytegrad'",
        "low_precision_decentralized",
    ),
    "option": (
        {
            "class_path": "lightning_distopt.DistOptBaguaStrategy",
            "init_args": {"algorithm": "bytegrad", "options": {"hierarchicl": False}},
        },
        "did you mean 'hierarchical'",
        "average",
    ),
    "option_beside_options": (
        {
            "class_path": "lightning_distopt.DistOptBaguaStrategy",
            "init_args": {"algorithm": "bytegrad", "hierarchical": False},
        },
        "'hierarchical' is not accepted",
        "go into `options`",
    ),
    "option_of_class": (
        {
            "class_path": "lightning_distopt.DistOptStrategy",
            "init_args": {
                "algorithm": {"class_path": "lightning_distopt.algorithms.ByteGrad", "init_args": {"hierarchicl": False}}
            },
        },
        "did you mean 'hierarchical'",
        "average",
    ),
    "class": (
        {
            "class_path": "lightning_distopt.DistOptStrategy",
            "init_args": {"algorithm": {"class_path": "lightning_distopt.algorithms.ByteGrd"}},
        },
        "did you mean 'ByteGrad'",
        "DiLoCo",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "hint", "valid"), WRONG.values(), ids=WRONG)
def test_wrong_names_are_refused_with_the_valid_ones(strategy, hint, valid, capsys):
    """Whatever is misspelt, the error says so, and lists what is valid."""
    with pytest.raises((SystemExit, ValueError)) as caught:
        configure(strategy)
    message = capsys.readouterr().err + str(caught.value)

    assert hint in message
    assert valid in message


def test_auto_is_left_to_lightning():
    """Without a strategy, Lightning chooses."""
    assert not hasattr(configure("auto").trainer.strategy, "algorithm")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # every run has a folder of its own
def test_module_runs_everything(tmp_path):
    """``python -m lightning_distopt`` fits, validates, tests and predicts a model that is named by its path."""
    common = [*module_arguments(tmp_path), "--trainer.strategy=distopt_bagua_bytegrad"]
    launch(in_process, 1, [["fit", *common]], init_group=False)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    others = [[what, *common, f"--ckpt_path={checkpoint}"] for what in ("validate", "test", "predict")]
    launch(in_process, 1, others, init_group=False)
    logged = "".join(path.read_text() for path in tmp_path.rglob("metrics.csv"))

    assert "train_loss" in logged
    assert "val_loss" in logged
    assert "test_loss" in logged


@pytest.mark.parametrize("form", some_quick(FORMS, quick=("bytegrad_options",)))
def test_saved_configuration_runs_again(form, tmp_path):
    """The configuration that a fit saves beside its log repeats the fit, bit for bit."""
    config = EXAMPLES / f"configs/{form}.yaml"
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["fit", *module_arguments(first), f"--config={config}"]
    launch(in_process, 1, [command], init_group=False)
    (saved,) = first.rglob("config.yaml")
    launch(
        in_process, 1, [["fit", f"--config={saved}", f"--trainer.logger.init_args.save_dir={second}"]], init_group=False
    )
    weights = [torch.load(next(folder.rglob("*.ckpt")), weights_only=True)["state_dict"] for folder in (first, second)]

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_printed_configuration_holds_the_strategy(arguments, capsys):
    """``--print_config`` shows the strategy as it would be read again."""
    path = EXAMPLES / "configs/bytegrad_options.yaml"
    arguments += ["fit", "--model=test_cli.Model", "--data=test_cli.Data", f"--config={path}", "--print_config"]
    with pytest.raises(SystemExit) as caught:
        main()
    printed = yaml.safe_load(capsys.readouterr().out)

    assert caught.value.code == 0
    assert printed["trainer"]["strategy"] == yaml.safe_load(path.read_text())["trainer"]["strategy"]


def test_help_comes_from_the_docstrings(arguments, capsys):
    """The help of a strategy explains its arguments."""
    arguments += ["fit", "--trainer.strategy.help=lightning_distopt.DistOptBaguaStrategy"]
    with pytest.raises(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.split())

    assert "One of Bagua's algorithms by name" in shown
    assert "among it the arguments of the algorithm" in shown


def run_python(*arguments, folder):
    """Run Python in ``folder``, with the tests' modules importable; return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_module_runs_two_processes(tmp_path):
    """``python -m lightning_distopt`` starts the second rank by itself, in whatever folder it is called."""
    command = ["-m", "lightning_distopt", "fit", *module_arguments(tmp_path / "out", devices=2)]
    printed = run_python(*command, "--trainer.strategy=distopt_bagua_bytegrad", folder=tmp_path)

    assert "on 2 ranks; each sends about" in printed


def run_example(*arguments):
    """Run ``examples/train.py`` with these arguments on this rank, as torchrun would."""
    os.environ["TORCHELASTIC_RUN_ID"] = "example"
    sys.path.insert(0, str(EXAMPLES))
    tiny = ["--model.width=16", "--model.depth=1", "--model.heads=2", "--data.val_windows=16"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    sys.argv = ["train.py", *map(str, arguments), *tiny, *quiet]
    runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")


def includes(whole, part):
    """Whether a configuration says what a part of it says; defaults may be added."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and includes(whole[name], part[name]) for name in part)
    return whole == part


def go_through_everything(rank, config, folder):
    """Print the configuration, fit, fit from the saved configuration, and evaluate in all ways; return what came."""
    short = ["--trainer.max_steps=4", "--trainer.val_check_interval=4"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run_example("fit", "--config", config, "--print_config")
    run_example("fit", "--config", config, f"--trainer.default_root_dir={folder / 'first'}", *short)
    torch.distributed.barrier()
    (saved,) = (folder / "first").rglob("config.yaml")
    run_example("fit", "--config", saved, f"--trainer.default_root_dir={folder / 'second'}")
    torch.distributed.barrier()
    first, second = (next((folder / name).rglob("*.ckpt")) for name in ("first", "second"))
    for what in ("validate", "test", "predict"):
        evaluation = folder / what
        run_example(what, "--config", config, f"--ckpt_path={first}", f"--trainer.default_root_dir={evaluation}")
    weights = [torch.load(path, weights_only=True)["state_dict"] for path in (first, second)]
    return printed.getvalue(), saved.read_text(), weights


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")  # of folders, seeds and checkpoints of earlier runs
@pytest.mark.filterwarnings("ignore::UserWarning:lightning_utilities")
def test_example_goes_through_everything(config, tmp_path):
    """With each file, ``examples/train.py`` prints, fits, fits again from what it saved, and evaluates, on two ranks.

    The second fit repeats the first bit for bit, but for async, whose rounds depend on time.
    """
    outcomes = launch(go_through_everything, 2, config, tmp_path, init_group=False, allow_failure=True)
    assert all(outcome.ok for outcome in outcomes), "\n".join(outcome.describe() for outcome in outcomes)
    printed, saved, (first, second) = outcomes[0].result
    strategy = yaml.safe_load(config.read_text())["trainer"]["strategy"]

    assert includes(yaml.safe_load(printed)["trainer"]["strategy"], strategy)
    assert includes(yaml.safe_load(saved)["trainer"]["strategy"], strategy)
    assert "val_loss" in outcomes[0].output
    assert "test_loss" in outcomes[0].output
    if config.stem != "async":
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_example_runs_on_two_processes(tmp_path):
    """``examples/train.py`` starts the second process by itself."""
    tiny = ["--model.width=16", "--model.depth=1", "--model.heads=2", "--data.val_windows=16", "--trainer.max_steps=4"]
    config = EXAMPLES / "configs/bytegrad.yaml"
    where = f"--trainer.default_root_dir={tmp_path}"
    printed = run_python(EXAMPLES / "train.py", "fit", f"--config={config}", where, *tiny, folder=tmp_path)

    assert "on 2 ranks; each sends about" in printed
    assert "`max_steps=4` reached" in printed
