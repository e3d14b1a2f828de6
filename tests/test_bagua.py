"""The adapter to the original Bagua, held to the signatures of bagua 0.9.2 by a stand-in that records calls."""

import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from worlds import run_ranks

from lightning_distopt import BaguaDistributedOption
from lightning_distopt.bagua import BAGUA_ALGORITHMS, BAGUA_SETTINGS, require_bagua

API = json.loads(Path(__file__).with_name("bagua_api.json").read_text())
ALGORITHMS = "bagua.torch_api.algorithms"

# An option of every algorithm that Bagua has, and the default that "auto" stands for.
OPTIONS = {
    "gradient_allreduce": {"hierarchical": True, "average": False},
    "bytegrad": {"hierarchical": "auto", "average": True},
    "qadam": {"hierarchical": False, "lr": 0.01, "warmup_steps": 50, "betas": (0.8, 0.9), "eps": 1e-6,
              "weight_decay": 0.1},
    "decentralized": {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2},
    "low_precision_decentralized": {"hierarchical": True, "communication_interval": 3},
    "async": {"peer_selection_mode": "all", "sync_interval_ms": 250, "warmup_steps": 4},
}  # fmt: skip


def signature(name):
    """Return a recorded signature."""
    parameters = [
        inspect.Parameter(
            entry["name"], getattr(inspect.Parameter, entry["kind"]), default=entry.get("default", inspect._empty)
        )
        for entry in API["signatures"][name]
    ]
    return inspect.Signature(parameters)


class Recorder:
    """Binds every call to the recorded signature, which raises where it does not fit, and keeps it."""

    def __init__(self) -> None:
        self.calls = {}

    def function(self, name, result=None):
        """Return a stand-in for one function."""

        def call(*args, **kwargs):
            self.calls[name] = dict(signature(name).bind(*args, **kwargs).arguments)
            return result

        return call

    def cls(self, module, name):
        """Return a stand-in for one class."""
        init = self.function(f"{module}:{name}.__init__")
        return type(name, (), {"__init__": init})


class Net(nn.Linear):
    """What nn.Module becomes once bagua is imported."""


@pytest.fixture
def recorder(monkeypatch):
    """Install the stand-in: a package bagua, CUDA, and an environment of its own."""
    recorder = Recorder()
    api = ModuleType("bagua.torch_api")
    api.communication = SimpleNamespace(_default_pg=None)
    api.init_process_group = recorder.function("bagua.torch_api.communication:init_process_group")
    monkeypatch.setitem(sys.modules, "bagua", ModuleType("bagua"))
    monkeypatch.setitem(sys.modules, "bagua.torch_api", api)
    for qualified in API["signatures"]:
        module_name, _, function = qualified.partition(":")
        if module_name.startswith(ALGORITHMS) and function.endswith("__init__"):
            module = sys.modules.get(module_name) or ModuleType(module_name)
            monkeypatch.setitem(sys.modules, module_name, module)
            class_name = function.partition(".")[0]
            setattr(module, class_name, recorder.cls(module_name, class_name))
    implementation = SimpleNamespace()
    for name in ("abort", "resume"):
        stand_in = recorder.function(f"{ALGORITHMS}.async_model_average:AsyncModelAverageAlgorithmImpl.{name}")
        setattr(implementation, name, lambda model, stand_in=stand_in: stand_in(implementation, model))
    convert = recorder.function("bagua.torch_api.distributed:BaguaModule.with_bagua")

    def with_bagua(model, *args, **kwargs):
        convert(model, *args, **kwargs)
        model.bagua_algorithm = implementation
        return model

    monkeypatch.setattr(Net, "with_bagua", with_bagua, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return recorder


def convert(option, optimizer=torch.optim.SGD):
    """Convert beside a group of one rank."""

    def rank_main(rank, process_group):
        model = Net(2, 1)
        given = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
        return given, *option.convert2distributed_model(model, 1, 0, 0, "10.0.0.1", given)

    return run_ranks(rank_main, 1)[0]


@pytest.mark.parametrize("name", BAGUA_ALGORITHMS)
def test_every_call_fits_bagua(recorder, name):
    """Each algorithm is built and handed to with_bagua as bagua 0.9.2 declares it, twice with one option."""
    option = BaguaDistributedOption(name, engine="bagua", **OPTIONS[name])
    for _ in range(2):
        given, model, optimizer = convert(option)
        module, class_name = BAGUA_ALGORITHMS[name]
        built = recorder.calls[f"{ALGORITHMS}.{module}:{class_name}.__init__"]
        converted = recorder.calls["bagua.torch_api.distributed:BaguaModule.with_bagua"]

        assert converted["optimizers"] == [optimizer]
        assert type(converted["algorithm"]).__name__ == class_name
        assert "bagua.torch_api.communication:init_process_group" in recorder.calls
        expected = {key: value for key, value in OPTIONS[name].items() if value != "auto"}
        if name == "qadam":
            made = recorder.calls[f"{ALGORITHMS}.q_adam:QAdamOptimizer.__init__"]
            assert built["q_adam_optimizer"] is optimizer is not given
            expected = {"hierarchical": False}
            for_optimizer = {key: value for key, value in OPTIONS[name].items() if key != "hierarchical"}
            assert {key: made[key] for key in for_optimizer} == for_optimizer
        assert {key: built[key] for key in expected} == expected
        model.algorithm.abort()
        model.algorithm.resume()
        model.algorithm.finish()


def test_qadam_needs_no_optimizer(recorder):
    """Bagua's QAdamOptimizer is made from the model."""
    _, _, optimizer = convert(BaguaDistributedOption("qadam", engine="bagua"), optimizer=None)

    assert type(optimizer).__name__ == "QAdamOptimizer"


def test_settings_become_the_variables_that_bagua_reads(recorder):
    """PERSIA's settings arrive under the names in bagua's env.py; what is not given has PERSIA's default."""
    convert(BaguaDistributedOption(
        "bytegrad", engine="bagua", default_bucket_size=2**20, autotune_level=1, bagua_service_port=29999,
        autotune_max_samples=7, autotune_warmup_time=3, is_output_autotune_log=True,
        autotune_sampling_confidence_time=1.5, master_port=23333,
    ))  # fmt: skip

    expected = {
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23333", "RANK": "0", "WORLD_SIZE": "1",
        "BAGUA_DEFAULT_BUCKET_SIZE": str(2**20), "BAGUA_AUTOTUNE": "1", "BAGUA_SERVICE_PORT": "29999",
        "BAGUA_AUTOTUNE_MAX_SAMPLES": "7", "BAGUA_AUTOTUNE_WARMUP_TIME_S": "3", "BAGUA_IS_OUTPUT_AUTOTUNE_LOG": "1",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "1.5", "AUTO_TUNE_SERVER_ADDR": "10.0.0.1:29999",
    }  # fmt: skip
    assert {name: os.environ[name] for name in expected} == expected
    variables = {variable for variable, _ in BAGUA_SETTINGS.values()} - {"LD_LIBRARY_PATH"}
    assert variables <= set(API["environment"])
    convert(BaguaDistributedOption("bytegrad", engine="bagua"))
    assert os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] == str(10 * 2**20)
    assert os.environ["BAGUA_IS_OUTPUT_AUTOTUNE_LOG"] == ""  # Bagua takes any other text for true


def test_bagua_net(recorder, monkeypatch):
    """enable_bagua_net puts the library of bagua_core first in the search path, whether there was a path or not."""
    option = BaguaDistributedOption("bytegrad", engine="bagua", enable_bagua_net=True)
    with pytest.raises(RuntimeError, match="bagua_core"):
        convert(option)
    spec = SimpleNamespace(origin="/x/bagua_core/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    os.environ.pop("LD_LIBRARY_PATH", None)
    convert(option)

    assert os.environ["LD_LIBRARY_PATH"] == "/x/bagua_core/data/bagua-net"


def test_what_is_missing_is_named(monkeypatch):
    """Without Linux, CUDA or the package, the error says which, and what to use instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device.*engine='torch'"):
        require_bagua()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "bagua", None)
    with pytest.raises(RuntimeError, match="needs the package bagua.*engine='torch'"):
        require_bagua()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="Linux only.*darwin"):
        require_bagua()


@pytest.mark.parametrize(("arguments", "message"), [((None, torch.optim.SGD), "device_id="), ((0, None), "optimizer=")])
def test_missing_arguments_are_named(recorder, arguments, message):
    """The original needs a GPU's number and, but for qadam, an optimizer."""
    device_id, optimizer = arguments
    model = Net(2, 1)
    given = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        BaguaDistributedOption("bytegrad", engine="bagua").convert2distributed_model(model, 1, 0, device_id, "x", given)
