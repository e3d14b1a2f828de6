"""The benchmark's command line, and what it counts."""

import json

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
    ],
)
def test_a_wrong_entry_ends_with_a_sentence(entry, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--algorithms", entry])
    assert message in capsys.readouterr().err


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
    bench.main(["--params", "2e6", "--steps", "3", "--warmup", "2", "--rounds", "1", "--json", str(table),
                "--algorithms", *entries])  # fmt: skip
    rows = {row["name"]: row for row in json.loads(table.read_text())}
    assert list(rows) == entries
    assert rows["ddp"]["sent_mb"] is None
    for entry in entries[1:]:
        assert rows[entry]["sent_mb"] == pytest.approx(rows[entry]["interface_mb"], rel=0.2)  # others use lo, too
    numel = 2 * (1024 * 1024 + 1024)
    assert rows["decentralized"]["sent_mb"] == pytest.approx(4e-6 * numel, rel=0.01)
    assert rows["local_sgd:period=5"]["sent_mb"] == pytest.approx(4e-6 * numel / 5, rel=0.01)
    assert "MB on the interface" in capsys.readouterr().out
