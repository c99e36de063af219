"""What is written of a run: everything, as JSON, without a word of where it ran."""

import dataclasses
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import parsed, shown_command
from bench.plot import draw
from bench.report import as_json, lines
from tests.bench.samples import run

KEYS = {
    *(
        "throughput_ratio",
        "latency_ratio",
        "memory_ratio",
        "memory_ratio_with_shares",
        "targets",
        "other_cores",
        "closed",
        "open",
        "memory_bytes",
    ),
    *("ready_after_s", "stages", "service", "threads_ms", "hardware", "versions", "settings", "command", "date"),
}
ROW = {
    *("side", "repeat", "requests", "seconds", "throughput", "p50_ms", "p99_ms"),
    *("server_cpu_ms", "client_cpu_ms", "idle_cores", "other_cores"),
}


def written() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(as_json(run(), {"ours": {}}, shown_command(parsed([])))))
    return found


def test_everything_is_in_it() -> None:
    found = written()
    assert found.keys() == KEYS
    assert [row.keys() for row in found["closed"]] == [ROW | {"in_flight"}] * 12
    assert [row.keys() for row in found["open"]] == [ROW | {"rate"}] * 2
    assert found["throughput_ratio"] == pytest.approx(3.0)
    assert found["latency_ratio"] == pytest.approx(4 / 14)
    assert found["memory_ratio"] == pytest.approx(0.5)
    assert found["memory_ratio_with_shares"] == pytest.approx(900 / 1500)
    assert found["versions"].keys() >= {"commit", "python", "torch", "grpcio", "aiohttp"}
    assert found["hardware"]["cores"] >= 1
    assert found["threads_ms"] == {
        "ec-producer serve 1, main thread": pytest.approx(4.0),
        "forkserver 2, main thread": pytest.approx(3.0),
    }


def test_it_names_no_place(tmp_path: Path) -> None:
    options = parsed(["--model", str(tmp_path / "folder"), "--out", str(tmp_path), "--saved", str(tmp_path)])
    text = json.dumps(as_json(run(), {}, shown_command(options)))
    assert "--model folder " in text
    assert not re.search(r"[\" ]/\w", text)
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text


def test_the_command_makes_the_same_run() -> None:
    options = parsed(["--quick", "--in-flight", "2", "4", "--side", "448", "--settings", '{"preprocess_workers": 3}'])
    words = shown_command(options).split(" -m bench ")[1]
    assert "--quick --in-flight 2 4 --side 448 --rounds 4 --requests 16 --repeats 1" in words
    assert words.endswith("""--settings '{"preprocess_workers": 3}'""")


def test_a_missed_target_is_named() -> None:
    assert run().missed() == []
    (line,) = run(ours_mib=701).missed()
    assert re.fullmatch(r"memory_ratio +0\.501 +at most 0\.5 +MISSED", line)


def test_the_tables_end_with_the_targets() -> None:
    *tables, throughput, latency, memory = lines(run())
    assert [line.split()[0] for line in (throughput, latency, memory)] == [
        "throughput_ratio",
        "latency_ratio",
        "memory_ratio",
    ]
    ours = tables.index("ours: 700 MiB unique (ec-producer serve 1: 700)")
    assert tables[ours + 1 : ours + 4] == [
        "      900 MiB with shares of the rest; ready after 9.0 s",
        "peer: 1400 MiB unique (vllm serve 3: 900, worker 4: 500)",
        "      1500 MiB with shares of the rest; ready after 17.0 s",
    ]
    assert tables[ours + 4] == "With shares of what several processes have mapped, the ratio of memory is 0.600."
    text = "\n".join(tables)
    assert re.search(r"4\.000  ec-producer serve 1, main thread", text)


def test_a_noisy_machine_is_said() -> None:
    noisy = run()
    assert "Other things" not in "\n".join(lines(noisy))
    noisy.closed[0] = dataclasses.replace(noisy.closed[0], other_cores=1.26)
    assert "Other things took up to 1.3 cores" in "\n".join(lines(noisy))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "bench.png", "title", run().closed, run().opened)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
