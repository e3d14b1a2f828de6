"""Write tests/bagua_api.json: the signatures of bagua 0.9.2 that the adapter calls.

    python tests/read_bagua_api.py                         downloads the source distribution with pip
    python tests/read_bagua_api.py bagua-0.9.2.tar.gz      reads one that is there

Nothing of it is imported or run: the source is parsed.
"""

import ast
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.9.2"
ALGORITHMS = "bagua/torch_api/algorithms"
# File, class (or None), and functions.
WANTED = [
    ("bagua/torch_api/communication.py", None, ["init_process_group"]),
    ("bagua/torch_api/distributed.py", "BaguaModule", ["with_bagua", "bagua_algorithm"]),
    (f"{ALGORITHMS}/gradient_allreduce.py", "GradientAllReduceAlgorithm", ["__init__"]),
    (f"{ALGORITHMS}/bytegrad.py", "ByteGradAlgorithm", ["__init__"]),
    (f"{ALGORITHMS}/decentralized.py", "DecentralizedAlgorithm", ["__init__"]),
    (f"{ALGORITHMS}/decentralized.py", "LowPrecisionDecentralizedAlgorithm", ["__init__"]),
    (f"{ALGORITHMS}/q_adam.py", "QAdamOptimizer", ["__init__"]),
    (f"{ALGORITHMS}/q_adam.py", "QAdamAlgorithm", ["__init__"]),
    (f"{ALGORITHMS}/async_model_average.py", "AsyncModelAverageAlgorithm", ["__init__"]),
    (f"{ALGORITHMS}/async_model_average.py", "AsyncModelAverageAlgorithmImpl", ["abort", "resume"]),
]


def download(folder: Path) -> Path:
    """Fetch the source distribution. pip builds its metadata, which takes minutes."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "bagua"]
    subprocess.run([*command, "--dest", str(folder), f"bagua=={VERSION}"], check=True)
    return folder / f"bagua-{VERSION}.tar.gz"


def parameters(function: ast.FunctionDef) -> list[dict]:
    """Return name, kind and, where there is one, the text of the default of every parameter."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [(a, d, "POSITIONAL_OR_KEYWORD") for a, d in zip(positional, defaults, strict=True)]
    pairs += [(a, d, "KEYWORD_ONLY") for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    found = []
    for argument, default, kind in pairs:
        entry = {"name": argument.arg, "kind": kind}
        found.append(entry if default is None else {**entry, "default": ast.unparse(default)})
    if arguments.vararg or arguments.kwarg:
        raise ValueError(f"{function.name} takes *args or **kwargs, which this script does not know")
    return found


def read(archive: Path) -> dict:
    """Return {"file:Class.function": parameters}, and which variables bagua/torch_api/env.py reads."""
    signatures = {}
    with tarfile.open(archive) as tar:
        for path, class_name, functions in WANTED:
            tree = ast.parse(tar.extractfile(f"bagua-{VERSION}/{path}").read())
            if class_name is not None:
                tree = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
            here = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
            module = path.removesuffix(".py").replace("/", ".")
            for name in functions:
                qualified = name if class_name is None else f"{class_name}.{name}"
                signatures[f"{module}:{qualified}"] = parameters(here[name])
        env = ast.parse(tar.extractfile(f"bagua-{VERSION}/bagua/torch_api/env.py").read())
    reads = [n for n in ast.walk(env) if isinstance(n, ast.Call) and ast.unparse(n.func) == "os.environ.get"]
    return {
        "bagua": VERSION,
        "signatures": signatures,
        "environment": sorted({ast.literal_eval(n.args[0]) for n in reads}),
    }


def main() -> None:
    """Read the archive and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(sys.argv[1]) if len(sys.argv) > 1 else download(Path(folder))
        text = json.dumps(read(archive), indent=1)
    Path(__file__).with_name("bagua_api.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
