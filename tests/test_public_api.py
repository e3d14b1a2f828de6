"""What the package shows, how its modules lean on each other, and what is installed."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import threading
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
from worlds import launch

import lightning_distopt

PACKAGE = Path(lightning_distopt.__file__).parent
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "lightning_distopt."))

# Lowest first. A module imports from lower layers only; modules of one layer do not know each other.
LAYERS = [
    {"quantize"},
    {"collectives"},
    {"distributed", "replicas"},
    {"algorithms"},  # a package: its modules import each other
    {"bagua", "advise"},
    {"options", "checkpoints"},
    {"strategies", "callbacks"},
    {"bench", "cli"},
    {"__main__"},
]
WITHOUT_LIGHTNING = ("quantize", "collectives", "distributed", "replicas", "algorithms")


def layer_of(name):
    """Return the layer of a top-level module of the package."""
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


def imports_of(path):
    """Yield the dotted names that a file of the package imports, wherever in the file.

    Left out are a module-level ``__getattr__``, where a module passes on names of a higher layer when asked,
    and blocks for type checkers.
    """
    tree = ast.parse(path.read_text())

    def runs(node):
        if isinstance(node, ast.If):
            return ast.unparse(node.test) != "TYPE_CHECKING"
        return getattr(node, "name", None) != "__getattr__"

    for node in ast.walk(ast.Module([node for node in tree.body if runs(node)], [])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["lightning_distopt", *path.relative_to(PACKAGE).parts]
            parent = ".".join(base[: len(base) - node.level]) if node.level else ""
            module = ".".join(filter(None, [parent, node.module]))
            if module == "lightning_distopt":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    """A module imports from lower layers only, and the lower half of the package works without Lightning."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if name == "__init__":
        return
    layer = layer_of(name)
    assert layer is not None, f"{name} is new: give it its place in LAYERS"
    for imported in imports_of(path):
        root, _, rest = imported.partition(".")
        if root == "lightning_distopt":
            other = rest.partition(".")[0]
            is_lower = layer_of(other) is not None and layer_of(other) < layer

            assert is_lower or (other == name == "algorithms"), f"{name} imports {imported}"
        if name in WITHOUT_LIGHTNING:
            assert root not in {"lightning", "lightning_fabric", "pytorch_lightning"}, f"{name} imports {imported}"


def test_all_names_what_the_package_shows():
    """``__all__`` is sorted and names everything public that the package holds, and nothing else."""
    shown = {
        name
        for name, value in vars(lightning_distopt).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    } - {"register_strategies"}  # called by the package itself

    assert list(lightning_distopt.__all__) == sorted(shown)


@pytest.mark.parametrize("name", MODULES)
def test_modules_name_what_they_show(name):
    """Every module has an ``__all__`` without repetition, and holds all that it names, with a docstring."""
    module = importlib.import_module(name)

    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{public} has no docstring"


def what_runs(rank):
    """Return what importing the package has started."""
    return torch.cuda.is_initialized(), torch.distributed.is_initialized(), threading.active_count()


def test_importing_starts_nothing():
    """Importing the package starts neither CUDA nor a process group nor a thread."""
    assert launch(what_runs, 1, init_group=False) == [(False, False, 1)]


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    """The wheel holds the package's sources and py.typed, its version, and two requirements."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(PACKAGE.parent),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(metadata_name))
    info = metadata_name.removesuffix("METADATA")
    files = {name for name in names if not name.startswith(info)}
    sources = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py")}
    required = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}

    assert files == {*sources, "lightning_distopt/py.typed"}
    assert metadata["Version"] == lightning_distopt.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert required == {"torch>=2.6", "lightning>=2.5"}
    assert set(metadata.get_all("Provides-Extra")) == {"cli", "examples", "test", "bagua"}
