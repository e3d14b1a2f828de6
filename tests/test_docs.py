"""Documentation that is run: every block of README and of the docstrings, and tables that agree with signatures.

A block of README may be told something by a comment right before it, which readers do not see:

    <!-- prelude: NAME -->     the names it needs are made by ``PRELUDES[NAME]``
    <!-- file: NAME -->        it is a file of the project that a new user makes in the commands marked so:
    <!-- in: project -->       these commands are run, in order, in that project's folder
    <!-- not run: REASON -->   a test holds the list of these
"""

import argparse
import ast
import doctest
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.run import get_args_parser
from worlds import launch

import lightning_distopt
from lightning_distopt import BaguaDistributedOption, DDPOption, algorithms, bench, cli, options
from lightning_distopt.algorithms import ALGORITHMS
from lightning_distopt.algorithms.comm_hook import PowerSGD
from lightning_distopt.bagua import BAGUA_SETTINGS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_distopt"
README = (ROOT / "README.md").read_text()
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "lightning_distopt."))

# What cannot be run, with the reason that stands before the block.
NOT_RUN: dict[str, str] = {}

MODULE = """\
import os
os.environ["PL_TRAINER_MAX_EPOCHS"] = "1"  # Lightning's own way to say it from outside
import torch
import lightning.pytorch as pl
import lightning_distopt
from models import Numbers, Regression, loader

class MyModel(Regression):
    pass

class MyData(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(16)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

model, data = MyModel(), MyData()
"""

# Code to run before and after a block.
PRELUDES = {
    "": ("", ""),
    "model": (MODULE, ""),
    # The block makes a trainer.
    "trainer": (MODULE, "\nassert torch.isfinite(next(model.parameters())).all()\n"),
    # The block is methods of a LightningModule.
    "methods": (
        MODULE,
        """
for name, value in list(globals().items()):
    if getattr(value, "__module__", None) == "__main__" and not isinstance(value, type):
        setattr(MyModel, name, value)
strategy = "distopt_bagua_qadam" if "QAdamOptimizer" in globals() else "distopt_bagua_bytegrad"
pl.Trainer(devices=2, strategy=strategy).fit(model, data)
""",
    ),
    # The block is a training loop without a Trainer, on ranks that know each other's address.
    "loop": (
        """\
import os
import torch
from torch.nn.functional import mse_loss as loss_function
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batches = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(rank))
loader = [(x, x.sum(1, keepdim=True)) for x in batches]
""",
        """
from lightning_distopt import sync_model
inner = getattr(model, "module", model)
before = [p.detach().clone() for p in inner.parameters()]
sync_model(inner)
assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(inner.parameters(), before)), "replicas differ at the end"
""",
    ),
}

# Lightning's: what it thinks of small runs, of what is not installed, and how it calls jsonargparse.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed:UserWarning"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning"),
    pytest.mark.filterwarnings("ignore:No seed found, seed set to 0:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning"),
]


# -- blocks --------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """A fenced block of code.

    Attributes:
        where: file, or dotted name of what has the docstring.
        line: of the block's first line in the file, or in the docstring.
        language: what stands behind the fence.
        text: without the fences.
        told: what the comments before it say, by keyword.
    """

    where: str
    line: int
    language: str
    text: str
    told: dict[str, str] = field(default_factory=dict)

    def __str__(self):
        return f"{self.where}:{self.line}"


def blocks_of(text: str, where: str) -> Iterator[Block]:
    """Yield the fenced blocks of Markdown, or of a docstring."""
    told: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        comment = re.fullmatch(r"\s*<!-- (prelude|file|in|not run): (.*?) -->\s*", line)
        fence = re.fullmatch(r"(\s*)(`{3,})\s*(\S*).*", line)
        if comment:
            told[comment[1]] = comment[2]
        elif fence:
            indent, ticks, language = fence.groups()
            body = []
            for _, inner in lines:
                if inner.strip() == ticks:
                    break
                body.append(inner.removeprefix(indent))
            yield Block(where, number + 1, language, "\n".join(body) + "\n", told)
            told = {}
        elif line.strip():
            assert not told, f"{where}:{number}: the comment before this line belongs before a block of code"


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of every docstring of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield from _docstrings_below(ast.parse(path.read_text()), module)


def _docstrings_below(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    for child in ast.walk(ast.Module(node.body, [])) if not isinstance(node, ast.Module) else node.body:
        if child is not node and isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _docstrings_below(child, f"{name}.{child.name}")


def commands_of_examples() -> Iterator[Block]:
    """Yield the commands that the examples' docstrings show, each file's as a block."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if commands := re.findall(r"^ {4}((?:python|torchrun) .*)$", text, re.M):
            yield Block(path.name, 1, "console", "\n".join(commands))


DOCSTRINGS = dict(docstrings())
BLOCKS = [
    *blocks_of(README, "README.md"),
    *(block for name, text in DOCSTRINGS.items() for block in blocks_of(text, name)),
]
RUN = [block for block in BLOCKS if "not run" not in block.told]
FILES = [block for block in RUN if "file" in block.told]
PYTHON = [block for block in RUN if block.language in ("python", "diff") and block not in FILES]
CONSOLE = [
    *(block for block in RUN if block.language in ("console", "bash", "sh")),
    *commands_of_examples(),
]
YAML = [block for block in RUN if block.language == "yaml"]
EXAMPLES = [
    example
    for name, text in DOCSTRINGS.items()
    if (example := doctest.DocTestParser().get_doctest(text, {}, name, None, 0)).examples
]


def test_blocks_are_found():
    """There is something of every kind; and README's fences are as many as its blocks need."""
    assert PYTHON
    assert CONSOLE
    assert YAML
    assert EXAMPLES
    assert len(re.findall(r"^\s*```", README, re.M)) == 2 * sum(block.where == "README.md" for block in BLOCKS)


def test_every_block_is_of_a_kind_that_is_run():
    """No block is of an unknown language, and those that are not run are few and known, each with its reason."""
    known = PYTHON + FILES + CONSOLE + YAML
    other = [str(block) for block in RUN if block not in known]

    assert other == [], "which language is this? Only blocks in python, diff, yaml, console, bash and sh are run"
    assert {block.text: block.told["not run"] for block in BLOCKS if "not run" in block.told} == NOT_RUN


def test_no_code_hides_in_a_literal_block():
    """``::`` blocks of docstrings are equations and pictures. Code is written with ``>>>``, so that it is run."""
    hidden = []
    for name, text in DOCSTRINGS.items():
        for literal in re.findall(r"::\n\n((?: {4}.*\n|\n)+)", text + "\n"):
            try:
                tree = ast.parse(textwrap.dedent(literal))
            except SyntaxError:
                continue
            if any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.Call) for node in ast.walk(tree)):
                hidden.append((name, literal))

    assert hidden == []


# -- python --------------------------------------------------------------------------------------------------


def sides(block: Block) -> tuple[str, str | None]:
    """Return the code as it is afterwards, and as it was before where the block is a diff."""
    if block.language != "diff":
        return block.text, None
    lines = block.text.splitlines()
    assert all(line[:2] in ("", "  ", "+ ", "- ", "+", "-") for line in lines), "a line begins with '+ ', '- ' or '  '"
    after, before = ("\n".join(line[2:] for line in lines if line[:1] != gone) for gone in "-+")
    return after, before


def run_source(rank, source, name):
    """Run a script on this rank, as torchrun would, in a folder of the world's own."""
    # Its names are looked up in the running module, as those of a script are.
    os.environ["TORCHELASTIC_RUN_ID"] = "docs"
    os.chdir(os.environ["WORLD_DIR"])
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), vars(main))


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(block):
    """The block runs on two ranks. Of a diff that is the new side; the old one needs packages that are not here."""
    after, before = sides(block)
    if before is not None:
        compile(before, str(block), "exec")
    head, tail = PRELUDES[block.told.get("prelude", "")]
    launch(run_source, 2, f"{head}{after}{tail}", str(block), init_group=False)


def run_examples(rank, name):
    """Run the ``>>>`` lines of a docstring."""
    os.chdir(os.environ["WORLD_DIR"])
    (example,) = [example for example in EXAMPLES if example.name == name]
    module = max((module for module in MODULES if f"{name}.".startswith(f"{module}.")), key=len)
    example.globs = {k: v for k, v in vars(importlib.import_module(module)).items() if not k.startswith("__")}
    report = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("example", [example.name for example in EXAMPLES])
def test_examples_in_docstrings_run(example):
    """What a docstring shows is what happens."""
    assert launch(run_examples, 1, example, init_group=False) == [""]


# -- configuration files -------------------------------------------------------------------------------------


def run_command_line(rank, arguments):
    """Run ``python -m lightning_distopt`` on this rank, as torchrun would."""
    os.environ["TORCHELASTIC_RUN_ID"] = "docs"
    os.chdir(os.environ["WORLD_DIR"])
    sys.argv[1:] = arguments
    cli.main()


@pytest.mark.parametrize("block", YAML, ids=str)
def test_configuration_fits(block, tmp_path):
    """A configuration in the documentation trains on two ranks."""
    path = tmp_path / "config.yaml"
    path.write_text(block.text)
    assert "trainer" in yaml.safe_load(block.text)
    arguments = ["fit", "--seed_everything=1", "--model=test_cli.Model", "--data=test_cli.Data", "--trainer.devices=2"]
    arguments += ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false"]
    launch(run_command_line, 2, [*arguments, f"--config={path}"], init_group=False)


# -- commands ------------------------------------------------------------------------------------------------


class Parsed(BaseException):
    """Arguments were valid; stop here."""


def commands_of(block: Block) -> list[str]:
    """Return the commands of a block, continued lines joined, without comments, prompts and output."""
    text = re.sub(r"\\\n\s*", "", block.text)
    lines = [shlex.join(shlex.split(line, comments=True)) for line in text.splitlines() if not line.startswith("#")]
    return [line for line in lines if line]


# Of the system, and of launchers that are not here: these only have to be named so.
SYSTEM_COMMANDS = {"cat", "cd", "export", "ip", "iperf3", "ls", "ping", "sbatch", "ssh", "tc"}
PROJECT_FILES = {block.told["file"]: block.text for block in FILES}


def parse_arguments_of(run, monkeypatch):
    """Call what reads the command line. It must come so far that its arguments are parsed."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args, **kwargs):
        parse(*args, **kwargs)
        raise Parsed

    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # the command line sets these; so they are put back
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(cli.DistOptCLI, "instantiate_classes", lambda self: (_ for _ in ()).throw(Parsed))
        with pytest.raises((Parsed, SystemExit)) as caught:
            run()
    assert isinstance(caught.value, Parsed) or caught.value.code == 0  # of --help


def check_command(words, monkeypatch):
    """Refuse a command that does not exist, or whose arguments it would not take."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]  # a variable for this command
    if not words:
        return
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets), f"make has {targets}"
    elif program == "pip":
        assert arguments[0] == "install"
        for name in arguments[1:]:
            extras = re.search(r"\[(.*)\]", name)
            known = lightning_distopt_extras()
            assert extras is None or set(extras[1].split(",")) <= known, f"there are the extras {known}"
    elif program in ("python", "python3"):
        check_python(arguments, monkeypatch)
    elif program == "srun":
        while arguments[0].startswith("-"):
            del arguments[0]
        check_command(arguments, monkeypatch)
    elif program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        start = ["-m"] if parsed.module else []
        check_python([*start, parsed.training_script, *parsed.training_script_args], monkeypatch)
    else:
        assert program in SYSTEM_COMMANDS, f"{program} is not known here: a program of the project, or of the system?"


def check_python(arguments, monkeypatch):
    """Check what stands behind ``python``."""
    module = arguments[0] == "-m"
    target, *rest = arguments[1:] if module else arguments
    monkeypatch.setattr(sys, "argv", [target, *rest])
    if module and target == "lightning_distopt":
        parse_arguments_of(cli.main, monkeypatch)
    elif module:
        assert target == "lightning_distopt.bench"
        parse_arguments_of(lambda: bench.main(rest), monkeypatch)
    elif target not in PROJECT_FILES:
        path = ROOT / target
        assert path.exists(), f"no file {target} in the repository, and no block of README is that file"
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.chdir(ROOT)
        parse_arguments_of(lambda: runpy.run_path(str(path), run_name="__main__"), monkeypatch)


def lightning_distopt_extras():
    """Return the extras that pyproject.toml offers."""
    table = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S)
    return set(re.findall(r"^(\w+) = \[", table[1], re.M))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the files of README's project, importable."""
    for name, text in PROJECT_FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    yield tmp_path
    for name in {Path(name).stem for name in PROJECT_FILES} - modules:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_commands_are_known(block, project, monkeypatch):
    """Every command exists, and takes the arguments that the documentation gives it."""
    for command in commands_of(block):
        check_command(shlex.split(command), monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "make demoo",
        "python -m lightning_distopt.bench --rat 200mbit --no-such-flag",
        "python -m lightning_distopt fit --model test_cli.Model --trainer.strtegy ddp",
        "torchrun --nproc-per-node 2 examples/no_such_file.py",
        "torchrun --no-such-flag examples/plain_loop.py",
        "python examples/plain_loop.py --no-such-flag",
        "pip install .[no_such_extra]",
        "no-such-program",
    ],
)
def test_unknown_commands_are_seen(command, monkeypatch):
    """A command with a mistake does not pass."""
    with pytest.raises((AssertionError, SystemExit)):
        check_command(shlex.split(command), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_new_user_goes_through_readme(project):
    """From an own LightningModule to a first run, a resumed one, and one from the command line, as README says it."""
    blocks = [block for block in CONSOLE if block.told.get("in") == "project"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    commands, printed = [command for block in blocks for command in commands_of(block)], []
    for command in commands:
        if command.startswith("pip "):
            continue  # the tests of packaging install it
        done = subprocess.run(
            command, shell=True, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        printed.append(done.stdout + done.stderr)
        assert done.returncode == 0, printed[-1]

    assert all(name in " ".join(commands) for name in (Path(name).stem for name in PROJECT_FILES))
    assert len(printed) >= 3
    assert all("on 2 ranks; each sends about" in text for text in printed)
    assert "Restored all states from the checkpoint" in printed[1]


# -- links ---------------------------------------------------------------------------------------------------


def test_links_lead_somewhere():
    """Files that README links to exist, and so do its sections."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", README, flags=re.S), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)\s]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target


# -- tables and signatures -----------------------------------------------------------------------------------

OWNERS = [
    *ALGORITHMS,
    "QAdamOptimizer",
    "DistOptStrategy",
    "DistOptBaguaStrategy",
    "DistOptDDPStrategy",
    "BaguaDistributedOption",
    "DDPOption",
    "InitTorch",
    "PeriodicModelSync",
]
REQUIRED = inspect.Parameter.empty


def options_in_readme() -> dict[tuple[str, str], object]:
    """Return the default of every option that README's tables name, by owner and name."""
    section = README.partition("\n## What does each option do\n")[2].partition("\n## ")[0]
    found: dict[tuple[str, str], object] = {}
    for row in re.findall(r"^\| (`.*) \|$", section, re.M):
        owners, names, default, meaning = (cell.strip() for cell in row.split("|"))
        value = eval(default.strip("`"), {"timedelta": timedelta}) if default else REQUIRED
        assert meaning
        for key in itertools.product(re.findall(r"`(.*?)`", owners), re.findall(r"`(.*?)`", names)):
            assert key not in found, f"{key} stands twice in README"
            found[key] = value
    return found


def options_in_signatures() -> dict[tuple[str, str], object]:
    """Return the default of every option as the code has it."""
    found = {}
    for owner in OWNERS:
        cls = ALGORITHMS.get(owner) or getattr(lightning_distopt, owner)
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                found[owner, name] = parameter.default
    # These two take the others as **options, and keep them under their names.
    for option in (DDPOption(), BaguaDistributedOption("bytegrad")):
        owner = type(option).__name__
        for name in options.RENDEZVOUS:
            attribute = "initialization_method" if name == "init_method" else name
            found.setdefault((owner, name), getattr(option, attribute))
        for name in IMPORTANT_DDP_ARGUMENTS:
            assert name in options.DDP_ARGUMENTS
            found[owner, name] = REQUIRED  # torch's, or the algorithm's
    found["DDPOption", "comm_hook"] = DDPOption().comm_hook
    for name, parameter in inspect.signature(PowerSGD).parameters.items():
        found["DDPOption", name] = parameter.default
    found["BaguaDistributedOption", "engine"] = BaguaDistributedOption("bytegrad").engine
    for name, (_, default) in BAGUA_SETTINGS.items():
        found["BaguaDistributedOption", name] = default
    return found


IMPORTANT_DDP_ARGUMENTS = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
)


def test_tables_of_options_agree_with_signatures():
    """README names every option of every algorithm, strategy, option object and callback, with its default."""
    assert options_in_readme() == options_in_signatures()


def test_tables_name_all_strategies():
    """Every registered strategy stands in the table that helps to choose."""
    names = {name for name in StrategyRegistry.available_strategies() if name.startswith("distopt_")}
    section = README.partition("\n## Which algorithm\n")[2].partition("\n## ")[0]

    assert set(re.findall(r"`(distopt_\w+)`", section)) == names


@dataclass
class Documented:
    """A function or class of the package, with what its docstring says.

    Attributes:
        name: dotted.
        node: its syntax tree.
        docstring: as written; that of ``__init__`` is joined to the class's.
    """

    name: str
    node: ast.ClassDef | ast.FunctionDef
    docstring: str

    def section(self, title: str) -> list[str]:
        """Return the names that a section of the docstring explains."""
        body = re.search(rf"^{title}:\n((?:[ ]{{4}}.*\n|\n)+)", self.docstring + "\n", re.M)
        return re.findall(r"^ {4}(\*{0,2}\w[\w.]*)(?: \(.*?\))?: ", body[1], re.M) if body else []


def documented() -> Iterator[Documented]:
    """Yield every class and function of the package that has a docstring."""

    def below(node: ast.AST, prefix: str) -> Iterator[Documented]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                name = f"{prefix}.{child.name}"
                text = ast.get_docstring(child) or ""
                if isinstance(child, ast.ClassDef):
                    text = "\n\n".join([text, *(ast.get_docstring(init) or "" for init in inits_of(child))])
                if text.strip():
                    yield Documented(name, child, text)
                yield from below(child, name)

    for path in sorted(PACKAGE.rglob("*.py")):
        yield from below(ast.parse(path.read_text()), path.relative_to(PACKAGE).with_suffix("").as_posix())


def inits_of(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the class's own constructor, in a list."""
    return [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]


def arguments_of(item: Documented) -> list[str]:
    """Return the names of a signature, in order, with their stars, without ``self``."""
    node = item.node
    if isinstance(node, ast.ClassDef) and not inits_of(node):
        # Inherited, or made by @dataclass.
        module, _, name = item.name.partition(".")
        dotted = f"lightning_distopt.{module.replace('/', '.')}".removesuffix(".__init__")
        cls = pkgutil.resolve_name(f"{dotted}:{name}")
        if issubclass(cls, BaseException):
            return []
        return [str(p).partition(":")[0].partition("=")[0] for p in inspect.signature(cls).parameters.values()]
    given = (inits_of(node)[0] if isinstance(node, ast.ClassDef) else node).args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


DOCUMENTED = list(documented())


def test_documented_arguments_are_those_of_the_signature():
    """Where a docstring explains arguments, it explains all of them, in the order of the signature, and no others."""
    wrong = {
        item.name: (explained, arguments_of(item))
        for item in DOCUMENTED
        if (explained := item.section("Args")) and explained != arguments_of(item)
    }

    assert len([item for item in DOCUMENTED if item.section("Args")]) > 50
    assert wrong == {}


def test_public_classes_explain_their_arguments():
    """A class that users build explains what they give it, in its docstring or in that of its constructor."""
    public = {*lightning_distopt.__all__, *algorithms.__all__}
    silent = [
        item.name
        for item in DOCUMENTED
        if isinstance(item.node, ast.ClassDef) and item.node.name in public
        if arguments_of(item) and not item.section("Args")
    ]

    assert silent == []


def test_documented_attributes_exist():
    """What a class's docstring lists under Attributes is set or declared in the class."""
    missing = []
    for item in DOCUMENTED:
        explained = item.section("Attributes")
        if explained and isinstance(item.node, ast.ClassDef):
            names = {node.attr for node in ast.walk(item.node) if isinstance(node, ast.Attribute)}
            names |= {node.id for node in ast.walk(item.node) if isinstance(node, ast.Name)}
            names |= {node.name for node in item.node.body if isinstance(node, ast.FunctionDef)}
            missing += [f"{item.name}: {name}" for name in explained if name not in names]

    assert missing == []


def test_references_in_docstrings_resolve():
    """``:class:`` and its like name things that exist."""
    broken = []
    for name, text in DOCSTRINGS.items():
        for target in re.findall(r":(?:class|func|data|exc|mod):`~?([\w.]+)`", text):
            module = importlib.import_module(max((m for m in MODULES if f"{name}.".startswith(f"{m}.")), key=len))
            try:
                if "." in target:
                    pkgutil.resolve_name(target)
                else:
                    getattr(module, target)
            except (ImportError, AttributeError):
                broken.append(f"{name}: {target}")

    assert broken == []
