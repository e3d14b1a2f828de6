"""Train a small GPT with several strategies and compare what each of them sends over the network.

    python examples/train_gpt.py
    python examples/train_gpt.py --strategies distopt_ddp distopt_bagua_bytegrad --steps 400

Each strategy trains the same model on the same text, on 2 CPU processes. A table at the end compares them,
and ``examples/out/loss_against_mb.png`` shows how far each has come for the bytes that it has sent.

``GPT`` and ``TopicsData`` are an ordinary LightningModule and LightningDataModule, which know of no strategy.
The lines that matter are the import of ``lightning_distopt`` and ``pl.Trainer(strategy=...)``.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_distopt import QAdamOptimizer  # importing the package registers the strategies

BASELINE = "distopt_ddp"
STRATEGIES = [
    BASELINE,
    "distopt_bagua_gradient_allreduce",
    "distopt_bagua_bytegrad",
    "distopt_bagua_qadam",
    "distopt_bagua_decentralized",
    "distopt_bagua_low_precision_decentralized",
    "distopt_bagua_async",
    "distopt_local_sgd",
    "distopt_diloco",
]
NUM_VALIDATIONS = 20  # points per curve
MB = 1_000_000


# -- model and data ------------------------------------------------------------------------------------------


class GPT(pl.LightningModule):
    """A GPT that predicts the next byte; 0.83 M parameters with the defaults."""

    def __init__(
        self,
        *,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 64,
        learning_rate: float = 3e-3,
        warmup_steps: int = 50,
        final_rate: float = 0.1,
        optimizer: Literal["adamw", "qadam"] = "adamw",
    ) -> None:
        """Build the model.

        Args:
            width: features per position, a multiple of ``heads``.
            depth: number of layers.
            heads: attention heads per layer.
            context: longest window in bytes; at least that of the data.
            learning_rate: AdamW's, after the warm-up.
            warmup_steps: updates over which the rate rises from 0; then it falls as a cosine.
            final_rate: what is left of ``learning_rate`` at the end, as a fraction.
            optimizer: "qadam" for the strategy distopt_bagua_qadam, which brings its own.

        Raises:
            ValueError: a value out of range.
        """
        super().__init__()
        _require_positive(width=width, depth=depth, heads=heads, context=context)
        _require_positive(learning_rate=learning_rate, warmup_steps=warmup_steps)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
        self.save_hyperparameters()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every next byte, [batch, time, 256], for bytes [batch, time] as int64."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return self.layers(x, mask, is_causal=True) @ self.token.weight.T  # tied to the input, as in GPT-2

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte over windows [batch, time + 1]."""
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of one batch of windows."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the mean over all windows of all ranks."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the mean over all windows of all ranks."""
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the most likely byte after each window but its last byte, [batch]."""
        return self(batch[:, :-1])[:, -1].argmax(-1)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a learning rate that rises, then falls."""
        if self.hparams.optimizer == "qadam":
            optimizer = QAdamOptimizer(
                self.parameters(), self.hparams.learning_rate, weight_decay=0.01, decoupled_weight_decay=True
            )
        else:
            optimizer = torch.optim.AdamW(self.parameters(), self.hparams.learning_rate)
        warmup_steps, final_rate = self.hparams.warmup_steps, self.hparams.final_rate
        num_steps = self.trainer.estimated_stepping_batches  # inf without an end: then the cosine stays 1

        def factor(step: int) -> float:
            fall = (1 - math.cos(math.pi * min(1.0, step / num_steps))) / 2
            return min(1.0, (step + 1) / warmup_steps) * (1 - (1 - final_rate) * fall)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TopicsData(pl.LightningDataModule):
    """Python's own help texts, ``pydoc_data.topics``: 90 % for training, 10 % for validation."""

    def __init__(self, *, context: int = 64, batch_size: int = 8, val_windows: int = 256, seed: int = 0) -> None:
        """Configure; reads nothing.

        Args:
            context: bytes per window.
            batch_size: windows per rank and step.
            val_windows: size of the validation set: always the same windows, spread evenly over its text.
            seed: decides which topics are held out. Training order follows ``pl.seed_everything``.

        Raises:
            ValueError: a value out of range.
        """
        super().__init__()
        _require_positive(context=context, batch_size=batch_size, val_windows=val_windows)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Cut the text into windows; both sets are views of it, [windows, context + 1]."""
        size, num_val = self.hparams.context + 1, self.hparams.val_windows
        text = torch.tensor(list(read_topics(self.hparams.seed)))
        train, val = text.tensor_split([len(text) * 9 // 10])
        spacing = (len(val) - size) // num_val
        if spacing < 1:
            raise ValueError(f"val_windows={num_val} and context={size - 1} need more than {len(val)} bytes")
        self.train = train.unfold(0, size, math.ceil(size / 4))  # an epoch shows each byte in 4 contexts
        self.val = val.unfold(0, size, spacing)[:num_val]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the training windows, shuffled."""
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation windows, always in the same order."""
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation windows: nothing is chosen by their loss."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation windows."""
        return self.val_dataloader()


def read_topics(seed: int) -> bytes:
    """Return the help texts (about 465 kB, English), topics in an order given by ``seed``.

    Some topics contain others. Each paragraph is kept once, so that training never sees what is held out.

    Raises:
        RuntimeError: this Python has no ``pydoc_data.topics``.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this example trains on the text in pydoc_data.topics, which this Python lacks: some Linux "
            "distributions leave it out. Use a Python from python.org, uv or conda."
        ) from error
    texts = [topics[name] for name in sorted(topics)]
    random.Random(seed).shuffle(texts)
    return "\n\n".join(dict.fromkeys("\n\n".join(texts).split("\n\n"))).encode()


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


# -- one strategy: runs in a child process, and again in every rank that Lightning starts --------------------


class Curve(pl.Callback):
    """Records at every validation what training has cost so far. Its times exclude validation."""

    def __init__(self) -> None:
        """Start with an empty record."""
        self.points: list[dict[str, Any]] = []
        self.step_seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.step_seconds.append(time.perf_counter() - self._start)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Add one point of the curve."""
        point = {
            "step": trainer.global_step,
            "val_loss": trainer.callback_metrics["val_loss"].item(),
            "bytes_sent": getattr(trainer.strategy, "bytes_sent", None),  # None: not counted
            "seconds": sum(self.step_seconds),
        }
        self.points.append(point)


def train(
    strategy: str | Strategy,
    steps: int,
    devices: int,
    json_file: Path,
    *,
    seed: int = 0,
    num_nodes: int = 1,
    progress_bar: bool = True,
    **model_options: Any,
) -> None:
    """Train with one strategy and write down what rank 0 measured.

    Args:
        strategy: as for ``pl.Trainer``.
        steps: updates, a multiple of ``NUM_VALIDATIONS``.
        devices: processes on this machine.
        json_file: written by rank 0.
        seed: decides about initial weights and the order of the data.
        num_nodes: machines.
        progress_bar: whether to show one.
        **model_options: for ``GPT``.
    """
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # the text is in memory
    pl.seed_everything(seed, verbose=False)
    curve = Curve()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=steps // NUM_VALIDATIONS,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[curve],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=progress_bar,
    )
    model = GPT(optimizer="qadam" if strategy == "distopt_bagua_qadam" else "adamw", **model_options)
    trainer.fit(model, TopicsData())
    if trainer.is_global_zero:
        result = {
            "strategy": str(strategy),
            "val_loss": curve.points[-1]["val_loss"],
            "bytes_sent": getattr(trainer.strategy, "bytes_sent", None),  # at the end of fit, too
            "seconds_per_step": statistics.median(curve.step_seconds[5:]),  # the first few are slower
            "curve": curve.points,
        }
        json_file.write_text(json.dumps(result))


# -- all strategies, one after the other ---------------------------------------------------------------------


def train_in_child(strategy: str, steps: int, devices: int, timeout: float) -> dict[str, Any]:
    """Call ``train`` in a new process: Lightning starts further ranks by running the whole script again.

    Raises:
        SystemExit: the child failed or took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        json_file = Path(folder, "result.json")
        command = [sys.executable, __file__, "--run", strategy, "--json", str(json_file)]
        command += ["--steps", str(steps), "--devices", str(devices)]
        run_together(strategy, [(command, {})], timeout)
        return json.loads(json_file.read_text())


def run_together(name: str, commands: Iterable[tuple[list[str], dict[str, str]]], timeout: float) -> None:
    """Run one or several commands, each with more variables for its environment. When one fails, all end.

    Raises:
        SystemExit: one of them failed, or all together took longer than ``timeout`` seconds.
    """
    children: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout
    try:
        for command, variables in commands:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}  # one thread per rank
            # A session of its own, so that the child and its ranks can be ended together, however this ends.
            children.append(subprocess.Popen(command, start_new_session=True, env=environment))
        while None in (codes := [child.poll() for child in children]) and not any(codes):
            if time.monotonic() > deadline:
                sys.exit(f"{name} was stopped: it took longer than --timeout {timeout:g} seconds.")
            time.sleep(0.1)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended already
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if failed := [code for code in codes if code]:
        sys.exit(f"{name} failed with exit code {failed[0]}; its messages are above.")


def saving(result: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return how many times less than the baseline was sent, such as "4.0x"; "-" where that is unknown."""
    baseline = next((r["bytes_sent"] for r in results if r["strategy"] == BASELINE), None)
    return f"{baseline / result['bytes_sent']:.1f}x" if baseline and result["bytes_sent"] else "-"


def make_table(results: list[dict[str, Any]]) -> str:
    """Return the comparison as Markdown, aligned so that it reads well as plain text."""
    titles = ["strategy", "validation loss", "MB sent per rank", "seconds per step"]
    rows = [[*titles, f"saving against {BASELINE}"]]
    for r in results:
        sent = "-" if r["bytes_sent"] is None else f"{r['bytes_sent'] / MB:.1f}"
        numbers = [f"{r['val_loss']:.4f}", sent, f"{r['seconds_per_step']:.3f}", saving(r, results)]
        rows.append([r["strategy"], *numbers])
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    rows.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    aligned = ([row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in aligned)


def plot(results: list[dict[str, Any]], title: str, png_file: Path) -> None:
    """Draw validation loss against MB sent for the strategies that count what they send."""
    curves = {
        f"{r['strategy']} ({saving(r, results)})": [
            (point["bytes_sent"] / MB, point["val_loss"]) for point in r["curve"]
        ]
        for r in results
        if r["bytes_sent"] is not None
    }
    draw(curves, title, "MB sent per rank", png_file, legend=f"strategy (saving against {BASELINE})")


def draw(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    xlabel: str,
    png_file: Path,
    *,
    legend: str = "strategy",
    level: float | None = None,
) -> None:
    """Draw validation losses over a logarithmic axis.

    Args:
        curves: points (x, loss) by label.
        title: above the picture.
        xlabel: of the logarithmic axis.
        png_file: to be written.
        legend: its title.
        level: a loss at which to draw a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # Paul Tol's "muted" colours, told apart by colour-blind readers too; the markers serve a print in grey.
    colours = ["#332288", "#cc6677", "#117733", "#88ccee", "#aa4499", "#ddcc77", "#44aa99", "#882255"]
    colours += ["#999933"]
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for i, (label, points) in enumerate(curves.items()):
        axes.plot(
            *zip(*points, strict=True),
            color=colours[i % len(colours)],
            marker="os^DvP*X<"[i % 9],
            # The first lines are the widest and lie below: where lines coincide, all can be seen.
            linewidth=max(1.5, 5 - 2 * i),
            markersize=max(5, 10 - 3 * i),
            label=label,
        )
    if level is not None:
        axes.axhline(level, color="black", linestyle=":", linewidth=1)
    xs = [x for points in curves.values() for x, _ in points]
    if min(xs) > 0:
        axes.set_xscale("log", subs=[2, 5])
    else:  # also logarithmic, but with room for 0
        smallest = min((x for x in xs if x > 0), default=1.0)
        axes.set_xscale("symlog", linthresh=smallest, linscale=0.3, subs=[2, 5])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set(title=title, xlabel=xlabel, ylabel="validation loss (nats per byte)")
    axes.tick_params(which="both", length=4)
    axes.grid(which="major", alpha=0.5)
    axes.grid(which="minor", alpha=0.15)
    figure.legend(title=legend, loc="outside lower center", ncols=2 if len(curves) > 3 else 3)
    figure.savefig(png_file, dpi=150)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, metavar="NAME", help="to be compared")
    parser.add_argument("--steps", type=int, default=600, help=f"a multiple of {NUM_VALIDATIONS}")
    parser.add_argument("--devices", type=int, default=2, help="processes per strategy")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder for results")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one strategy may take")
    parser.add_argument("--run", metavar="NAME", help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)  # result of --run
    args = parser.parse_args()
    for name in ("steps", "devices", "timeout"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    steps = math.ceil(args.steps / NUM_VALIDATIONS) * NUM_VALIDATIONS
    if args.run:
        train(args.run, steps, args.devices, args.json)
        return
    known = StrategyRegistry.available_strategies()
    for name in args.strategies:
        if name not in known:
            parser.error(f"unknown strategy {name!r}; valid are {', '.join(sorted(known))}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends a running child too
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for i, name in enumerate(args.strategies, 1):
        print(f"\n[{i}/{len(args.strategies)}] {name}: {steps} steps, {args.devices} processes", flush=True)
        results.append(train_in_child(name, steps, args.devices, args.timeout))
    table = make_table(results)
    print(f"\n{table}\n")
    (args.out / "table.md").write_text(table + "\n")
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if any(r["bytes_sent"] is not None for r in results):
        png_file = args.out / "loss_against_mb.png"
        title = f"Byte-level GPT, {steps} steps on {args.devices} processes: loss against MB sent"
        plot(results, title, png_file)
        print(f"Picture: {png_file}")


if __name__ == "__main__":
    main()
