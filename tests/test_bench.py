"""The benchmark's command line, and what it counts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lightning_distopt import bench
from lightning_distopt.algorithms import AsyncModelAverage, DiLoCo


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("0.5", 0.5), ("1e-3", 0.001), ("true", True), ("False", False), ("int8", "int8"), ("-1", -1)],
)
def test_values_on_the_command_line(text, value):
    read = bench.parse_value(text)
    assert (type(read), read) == (type(value), value)


def test_an_entry_may_hold_options():
    diloco = bench.make_entry("diloco:period=20,overlap_steps=10,compression=int4,nesterov=false,outer_lr=0.5")
    assert repr(diloco) == repr(DiLoCo(period=20, overlap_steps=10, compression="int4", nesterov=False, outer_lr=0.5))
    assert isinstance(bench.make_entry("async"), AsyncModelAverage)
    assert bench.make_entry("ddp") is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("bytegard", "unknown algorithm 'bytegard'; valid are: compute, ddp"),
        ("diloco:perid=3", "unknown option 'perid' of diloco (did you mean 'period'?)"),
        ("diloco:period", "'period' in 'diloco:period' must read option=value"),
        ("local_sgd:period=0", "period must be at least 1, got 0"),
        ("ddp:period=3", "ddp has no options"),
        ("diloco:period=3,period=4", "'diloco:period=3,period=4' sets period twice"),
        ("torch.nn.ReLU", "torch.nn.ReLU must be a class derived from lightning_distopt.algorithms.base.Algorithm"),
        ("os.getcwd", "os.getcwd must be a class derived from"),
    ],
)
def test_a_wrong_entry_ends_with_a_sentence(entry, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--algorithms", entry])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "0"], "--params must be a number above 0, got 0.0"),
        (["--params", "nan"], "--params must be a number above 0, got nan"),
        (["--timeout", "-1"], "--timeout must be a number above 0, got -1.0"),
        (["--warmup", "-3"], "--warmup must be at least 0, got -3"),
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--json", "no/such/folder/table.json"], "there is no folder 'no/such/folder'; make it first"),
    ],
)
def test_a_wrong_number_or_file_ends_with_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("num_params", [1, 500, 2e5, 1e6, 12.6e6])
def test_a_model_has_about_as_many_parameters_as_asked_for(num_params):
    numel = sum(p.numel() for p in bench.SquareLayers(num_params, 1, 0).parameters())
    assert numel == pytest.approx(num_params, rel=0.06, abs=1)


def test_ranks_are_not_waited_for_where_one_has_failed():
    codes = ("import sys; sys.exit(3)", "import time; time.sleep(60)")
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    try:
        assert bench.wait_for_all(processes, grace=0.2) == [3, None]
    finally:
        processes[1].kill()
        processes[1].wait()


STOPPED = """
import signal, subprocess, sys
from lightning_distopt import bench

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
with bench.ended_by_signals():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        print("started", flush=True)
        child.wait()
    finally:
        child.kill()
        print("ended", child.wait(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_benchmark_ends_what_it_started(number):
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "started\n"
        parent.send_signal(number)
        assert parent.communicate(timeout=30)[0] == "ended -9\n"
    assert parent.returncode != 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
def test_a_wrong_rate_ends_with_a_sentence_and_leaves_no_network():
    def networks():
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    mine = f"lb{os.getpid() % 100000}"
    with pytest.raises(SystemExit, match="--rate nonsense: .* failed: .*rate"), bench.shaped_network(2, "nonsense"):
        pass
    assert mine not in networks()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
def test_a_network_can_be_made_again_while_a_process_lives_in_the_last_one():
    lives = []
    try:
        for _ in range(2):
            with bench.shaped_network(2, "1gbit") as prefixes:
                lives += [subprocess.Popen([*prefix, "sleep", "60"]) for prefix in prefixes]
                time.sleep(0.2)  # until it is in its namespace
    finally:
        for process in lives:
            process.kill()
            process.wait()


def test_periods_are_measured_whole():
    for entry, updates in (("local_sgd:period=4", 12), ("bytegrad", 9), ("ddp", 9)):
        assert bench.whole_periods(9, bench.make_entry(entry)) == updates
    assert bench.whole_periods(0, bench.make_entry("local_sgd:period=4")) == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_interface_sees_what_is_counted(tmp_path, capsys):
    """Also where an exchange is under way when the time is taken, and where a period is longer than asked for."""
    table = tmp_path / "table.json"
    entries = [
        "ddp",
        "decentralized",
        "async:sync_interval_ms=0",
        "local_sgd:period=5",
        "diloco:period=4,overlap_steps=2",
    ]
    # On an interface of its own where that can be made: others use lo, too.
    own = ["--rate", "1gbit"] if os.geteuid() == 0 and shutil.which("tc") else []
    bench.main(["--params", "2e6", "--steps", "3", "--warmup", "2", "--rounds", "1", "--json", str(table), *own,
                "--algorithms", *entries])  # fmt: skip
    rows = {row["name"]: row for row in json.loads(table.read_text())}
    assert list(rows) == entries
    assert rows["ddp"]["sent_mb"] is None
    for entry in entries[1:]:
        assert rows[entry]["sent_mb"] == pytest.approx(rows[entry]["interface_mb"], rel=0.05 if own else 0.2)
    numel = 2 * (1024 * 1024 + 1024)
    assert rows["decentralized"]["sent_mb"] == pytest.approx(4e-6 * numel, rel=0.01)
    assert rows["local_sgd:period=5"]["sent_mb"] == pytest.approx(4e-6 * numel / 5, rel=0.01)
    assert "MB on the interface" in capsys.readouterr().out
