"""The scripts in examples/ that train the GPT: whole runs at tiny sizes, and what their tables say."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = 'DiLoCo(period=10, outer_momentum=0, compression="int4", overlap_steps=4)'
INT8 = 'DiLoCo(period=50, compression="int8")'


@pytest.fixture
def example(monkeypatch):
    """Import one of the scripts as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def run_example(script, *options):
    command = [sys.executable, EXAMPLES / script, *map(str, options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


def result(strategy="distopt_ddp", losses=(3.0, 2.0), seconds=(5.0, 10.0), sent=100):
    """What one training leaves behind; as many points as ``NUM_VALIDATIONS``, the last ones as given."""
    points = [(9.0, 0.1)] * (20 - len(losses)) + list(zip(losses, seconds, strict=True))
    curve = [
        {"step": 10 * (i + 1), "val_loss": loss, "seconds": s, "bytes_sent": sent * (i + 1) // 20}
        for i, (loss, s) in enumerate(points)
    ]
    return {"strategy": strategy, "val_loss": losses[-1], "bytes_sent": sent, "curve": curve}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_compares_strategies(tmp_path):
    """The demo trains with each strategy, and leaves a table, the numbers and a picture."""
    run_example(
        "train_gpt.py", "--steps", 20, "--strategies", "distopt_ddp", "distopt_bagua_bytegrad", "--out", tmp_path
    )

    table = (tmp_path / "table.md").read_text().splitlines()
    results = json.loads((tmp_path / "results.json").read_text())
    assert [line.split()[1] for line in table[2:]] == ["distopt_ddp", "distopt_bagua_bytegrad"]
    assert table[3].split()[-2] == "4.0x"
    assert [r["curve"][-1]["step"] for r in results] == [20, 20]
    assert (tmp_path / "loss_against_mb.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_are_compared_and_kept(tmp_path):
    """Each strategy trains once; a second call reads what the first has left."""
    options = ["tokens", "--steps", 20, "--seeds", 0, "--ranks", 2, "--runs", tmp_path]
    options += ["--strategies", "distopt_ddp", "LocalSGD(period=16)"]
    first = run_example("low_communication.py", *options)

    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == [f"{name}, 2 ranks, 20 steps, seed 0.json" for name in ("LocalSGD(period=16)", "distopt_ddp")]
    ddp, local_sgd = (line.split(" | ") for line in first.stdout.splitlines()[2:])
    assert (ddp[0], ddp[4], ddp[6]) == ("| `distopt_ddp`", "+0.00 %", "1/1.0")
    assert local_sgd[6] == "1/10.0"  # one round, and an average at the end
    losses = [json.loads((tmp_path / name).read_text())["val_loss"] for name in files]
    assert losses[0] != losses[1]

    again = run_example("low_communication.py", *options)
    assert (again.stdout, again.stderr) == (first.stdout, "")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
@pytest.mark.timeout(900)
def test_seconds_are_compared_on_a_slow_link(tmp_path):
    """Two nodes with a slow link between them: every strategy sends what it should, and a picture is drawn."""
    options = ["seconds", "--scale", 0.01, "--slowness", 2, "--runs", tmp_path, "--out", tmp_path]
    printed = run_example("low_communication.py", *options).stdout

    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [
        "| `distopt_ddp`",
        "| `distopt_bagua_bytegrad`",
        "| `LocalSGD(period=16)`",
        f"| `{INT8}`",
        f"| `{SHORT}`",
    ]
    assert [row[1] for row in rows] == ["20"] * 5
    assert rows[0][-1] == "1.0 |"
    assert (tmp_path / "loss_against_seconds.png").stat().st_size > 10_000


def test_tokens_table(example):
    """Means over seeds, their spread, and differences to the baseline with the same ranks and seeds."""
    tokens_table = example("low_communication").tokens_table
    ddp = [result(losses=(2.02, 2.0, 2.0), seconds=(1, 2, 3)), result(losses=(1.0, 1.0, 1.0), seconds=(1, 2, 3))]
    diloco = [result(INT8, losses=(2.0, 2.0, 2.04), seconds=(1, 2, 3), sent=1)]

    lines = tokens_table({("distopt_ddp", 2): ddp, (INT8, 2): diloco}).splitlines()

    assert lines[2] == "| `distopt_ddp` | 2 | 1.5000 | 1.0000 | +0.00 % | 0.00 | 1/1.0 | -0.66 % |"
    assert lines[3] == f"| `{INT8}` | 2 | 2.0400 | 0.0000 | +2.00 % | 0.00 | 1/100.0 | +2.00 % |"


def test_seconds_table(example):
    """The time of the first point at the baseline's loss or below; none where it is not reached."""
    seconds_table = example("low_communication").seconds_table
    fast = result("fast", losses=(2.0, 1.5), seconds=(1.0, 2.0))
    never = result("never", losses=(3.0, 2.1))

    lines = seconds_table([result(), fast, never]).splitlines()

    assert lines[2] == "| `distopt_ddp` | 200 | 50 | 10.0 | 2.0000 | 10.0 | 1.0 |"
    assert lines[3] == "| `fast` | 200 | 10 | 2.0 | 1.5000 | 1.0 | 10.0 |"
    assert lines[4] == "| `never` | 200 | 50 | 10.0 | 2.1000 | - | - |"


def test_a_failing_process_ends_the_others(example):
    """The exit code is told at once, and so is a timeout."""
    run_together = example("train_gpt").run_together
    fails, sleeps = [sys.executable, "-c", "exit(3)"], [sys.executable, "-c", "import time; time.sleep(100)"]

    with pytest.raises(SystemExit, match="name failed with exit code 3"):
        run_together("name", [(sleeps, {}), (fails, {})], timeout=30)
    with pytest.raises(SystemExit, match="name was stopped: it took longer than --timeout 0.1 seconds"):
        run_together("name", [(sleeps, {})], timeout=0.1)
