"""How far do local SGD and DiLoCo get? Two experiments with the GPT of ``train_gpt.py``.

    python examples/low_communication.py tokens    # loss after the same number of tokens, and bytes sent
    python examples/low_communication.py seconds   # loss against time on a slow link (root, iproute2)

Both leave one JSON file per training in ``--runs`` and skip what is there already, so that they can be stopped and
started again. ``tokens`` prints a table; ``seconds`` also draws ``examples/out/loss_against_seconds.png``.
"""

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_gpt import BASELINE, NUM_VALIDATIONS, draw, run_together, train

from lightning_distopt import DistOptStrategy
from lightning_distopt.algorithms import Algorithm, DiLoCo, LocalSGD
from lightning_distopt.bench import shaped_network

HERE = Path(__file__).parent
# A smaller GPT, 0.12 M parameters, whose learning rate falls to zero, so that all strategies have flattened in the end.
SMALL = {"width": 64, "depth": 2, "learning_rate": 2e-3, "final_rate": 0.0}
ALGORITHMS: dict[str, Algorithm] = {
    'DiLoCo(period=50, compression="int8")': DiLoCo(period=50, compression="int8"),
    'DiLoCo(period=50, compression="int4")': DiLoCo(period=50, compression="int4"),
    "LocalSGD(period=16)": LocalSGD(period=16),
}
# For a run of a few hundred updates: short periods, no outer momentum, and the exchange behind four updates.
SHORT = 'DiLoCo(period=10, outer_momentum=0, compression="int4", overlap_steps=4)'
ALGORITHMS[SHORT] = DiLoCo(period=10, outer_momentum=0, compression="int4", overlap_steps=4)
ALONE = "no exchange"  # what compute takes: replicas never meet before the end
# On the slow link: updates, of which those that exchange rarely get more. Each has a schedule of its own length.
LINK_STEPS = {
    BASELINE: 240,
    "distopt_bagua_bytegrad": 240,
    "LocalSGD(period=16)": 400,
    'DiLoCo(period=50, compression="int8")': 400,
    SHORT: 480,
}


def run(name: str, args: argparse.Namespace) -> None:
    """Be one training: in a child process, and again in every rank that Lightning starts."""
    algorithm = LocalSGD(period=1_000_000) if name == ALONE else ALGORITHMS.get(name)
    strategy = name if algorithm is None else DistOptStrategy(algorithm=algorithm)
    options = SMALL if args.experiment == "tokens" else {}
    train(
        strategy, args.steps, args.devices, args.json, seed=args.seed, num_nodes=args.nodes, progress_bar=False,
        **options,
    )  # fmt: skip


def command(experiment: str, name: str, file: Path, *, steps: int, seed: int, devices: int, nodes: int) -> list[str]:
    """Return the command line that makes one training in a process of its own."""
    numbers = {"steps": steps, "seed": seed, "devices": devices, "nodes": nodes}
    options = [f"--{key}={value}" for key, value in numbers.items()]
    return [sys.executable, __file__, experiment, f"--run={name}", f"--json={file}", *options]


# -- the same number of tokens -------------------------------------------------------------------------------


def compare_tokens(args: argparse.Namespace) -> None:
    """Train with every strategy, number of ranks and seed, and print the table."""
    args.runs.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for name in args.strategies:
        for seed in args.seeds:
            for ranks in args.ranks:
                file = args.runs / f"{name}, {ranks} ranks, {args.steps} steps, seed {seed}.json"
                if not file.exists():
                    print(file.stem, file=sys.stderr, flush=True)
                    line = command("tokens", name, file, steps=args.steps, seed=seed, devices=ranks, nodes=1)
                    run_together(file.stem, [(line, {})], args.timeout)
                results.setdefault((name, ranks), []).append(json.loads(file.read_text()))
    print(tokens_table(results))


def tokens_table(results: dict[tuple[str, int], Sequence[dict[str, Any]]]) -> str:
    """Return as Markdown for each strategy and number of ranks the mean over seeds, beside the baseline's."""
    lines = [
        "| strategy | ranks | validation loss | spread | against distopt_ddp | MB sent per rank | bytes | last 10 % |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, ranks), runs in sorted(results.items(), key=lambda item: item[0][1]):
        losses = [r["val_loss"] for r in runs]
        loss, sent = statistics.mean(losses), statistics.mean(r["bytes_sent"] for r in runs)
        base = results[BASELINE, ranks]
        base_loss = statistics.mean(r["val_loss"] for r in base[: len(runs)])  # the same seeds
        base_sent = statistics.mean(r["bytes_sent"] for r in base)
        before = statistics.mean(r["curve"][-1 - NUM_VALIDATIONS // 10]["val_loss"] for r in runs)
        cells = [f"`{name}`", f"{ranks}", f"{loss:.4f}", f"{max(losses) - min(losses):.4f}"]
        cells += [f"{100 * (loss / base_loss - 1):+.2f} %", f"{sent / 1e6:.2f}", f"1/{base_sent / sent:.1f}"]
        cells += [f"{100 * (loss / before - 1):+.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# -- time on a slow link -------------------------------------------------------------------------------------


def compare_seconds(args: argparse.Namespace) -> None:
    """Train on two nodes with a slow link between them, print the table and draw the picture."""
    args.runs.mkdir(parents=True, exist_ok=True)
    steps = {name: max(1, round(n * args.scale / NUM_VALIDATIONS)) * NUM_VALIDATIONS for name, n in LINK_STEPS.items()}
    alone = train_on_link(ALONE, 4 * NUM_VALIDATIONS, "10gbit", args)
    compute = alone["seconds_per_step"]
    # A ring's all-reduce on two ranks: each sends the gradients once.
    num_bytes = train_on_link(BASELINE, NUM_VALIDATIONS, "10gbit", args)["bytes_sent"] / NUM_VALIDATIONS
    rate = f"{8 * num_bytes / (args.slowness * compute) / 1e6:.1f}mbit"
    print(f"compute {1e3 * compute:.1f} ms per update, {num_bytes / 1e6:.2f} MB per exchange: link of {rate}")
    results = [train_on_link(name, num_updates, rate, args) for name, num_updates in steps.items()]
    print(seconds_table(results))
    title = f"Byte-level GPT on two nodes, {rate[:-4]} Mbit/s: loss against time"
    draw_seconds(results, title, args.out / "loss_against_seconds.png")


def train_on_link(name: str, steps: int, rate: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train on two nodes of one process each, and return what rank 0 measured."""
    file = args.runs / f"{name}, {rate}, {steps} steps.json"
    if not file.exists():
        print(file.stem, file=sys.stderr, flush=True)
        # As a user would on two machines: the same command on both, told apart by the environment.
        line = command("seconds", name, file, steps=steps, seed=0, devices=1, nodes=2)
        variables = {"MASTER_ADDR": "10.123.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        with shaped_network(2, rate) as prefixes:
            commands = [([*p, *line], {**variables, "NODE_RANK": str(node)}) for node, p in enumerate(prefixes)]
            run_together(file.stem, commands, args.timeout)
    return {**json.loads(file.read_text()), "strategy": name}


def seconds_to(loss: float, curve: Sequence[dict[str, Any]]) -> float | None:
    """Return the training time of the first point that is at ``loss`` or below."""
    return next((point["seconds"] for point in curve if point["val_loss"] <= loss), None)


def seconds_table(results: Sequence[dict[str, Any]]) -> str:
    """Return as Markdown how long each strategy took, beside the baseline, which comes first."""
    target, baseline = results[0]["val_loss"], results[0]["curve"][-1]["seconds"]
    lines = [
        "| strategy | updates | ms per update | seconds | validation loss | seconds to ddp's loss | times faster |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        end, reached = r["curve"][-1], seconds_to(target, r["curve"])
        cells = [f"`{r['strategy']}`", f"{end['step']}", f"{1e3 * end['seconds'] / end['step']:.0f}"]
        cells += [f"{end['seconds']:.1f}", f"{r['val_loss']:.4f}"]
        cells += ["-", "-"] if reached is None else [f"{reached:.1f}", f"{baseline / reached:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_seconds(results: Sequence[dict[str, Any]], title: str, png_file: Path) -> None:
    """Draw validation loss against seconds of training, and a line at the baseline's final loss."""
    curves = {r["strategy"]: [(point["seconds"], point["val_loss"]) for point in r["curve"]] for r in results}
    draw(curves, title, "seconds of training", png_file, level=results[0]["val_loss"])
    print(f"Picture: {png_file}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("experiment", choices=["tokens", "seconds"])
    parser.add_argument("--steps", type=int, default=4000, help=f"updates, a multiple of {NUM_VALIDATIONS}")
    parser.add_argument("--strategies", nargs="+", default=[BASELINE, *list(ALGORITHMS)[:3]])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=HERE / "out" / "runs", help="folder of the JSON files")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder of the picture")
    parser.add_argument(
        "--slowness", type=float, default=20, help=f"{BASELINE}'s exchange takes so many times its compute"
    )
    parser.add_argument("--scale", type=float, default=1, help="of the numbers of updates on the slow link")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one training may take")
    parser.add_argument("--run", metavar="NAME", help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(args.run, args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends running children and the link too
    if args.experiment == "tokens":
        compare_tokens(args)
    else:
        compare_seconds(args)


if __name__ == "__main__":
    main()
