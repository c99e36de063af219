"""The command: its arguments, the time of its parts, and what counts as a wrong answer of the service."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_service, gpu_ttft
from bench.gpu_record import Record
from bench.gpu_servers import FINE, PEERS, POWERS, weights_s


def test_parts_and_peers_are_lists_of_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    options = gpu.parsed(
        ["--out", "x", "--parts", "ttft,start", "--peers", "peer,peer-many", "--our-args", "--a 'b c'"]
    )
    assert (options.parts, options.peers, options.our_args) == (
        ["ttft", "start"],
        ["peer", "peer-many"],
        ["--a", "b c"],
    )
    assert gpu.parsed(["--out", "x"]).parts == ["step", "service", "start", "ttft"]
    assert gpu.parsed(["--out", "x", "--rehearse"]).parts == ["service", "start", "ttft"]
    for words, said in [
        (["--parts", "stop"], "'stop' is unknown; allowed are step,service,start,ttft"),
        (["--peers", "peer-best"], "peer must be one of them"),
    ]:
        with pytest.raises(SystemExit):
            gpu.parsed(["--out", "x", *words])
        assert said in capsys.readouterr().err


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json", {"failures": []})

    def stubborn() -> None:
        record.put("slow/figure", 1.0)
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    since_s = time.monotonic()
    assert not gpu.run_part(record, "slow", stubborn, 0.2)
    assert time.monotonic() - since_s < 30
    assert gpu.run_part(record, "quick", lambda: record.put("quick/figure", 2.0), 30)
    assert not gpu.run_part(record, "late", lambda: record.put("late/figure", 3.0), -1)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["slow"], found["quick"]) == ({"figure": 1.0}, {"figure": 2.0})
    assert "late" not in found
    assert found["failures"] == ["slow: TooLongError: not done after 0 s", "late: TooLongError: no time is left"]
    time.sleep(0.3)  # no alarm is left behind


def test_an_error_of_a_part_is_recorded(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json", {"failures": []})

    def broken() -> None:
        raise OSError("no room")

    assert not gpu.run_part(record, "start", broken, 30)
    assert record.get("failures") == ["start: OSError: no room"]
    assert record.get("part_seconds/start") >= 0


def test_the_ends_of_logs_are_kept(tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "out"
    logs.mkdir()
    out.mkdir()
    (logs / "ours.log").write_bytes(b"a" + b"b" * gpu.LOG_BYTES)
    gpu.keep_logs(logs, out)
    assert (out / "ours.log").read_bytes() == b"b" * gpu.LOG_BYTES


def check(**changed: Any) -> dict[str, Any]:
    return {"distance": 0.02, "error": 0.0180, "error_of_peer": 0.0178} | changed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"distance": 0.031}, "0.0310 apart; allowed is 0.03"),
        ({"distance": float("nan")}, "apart"),
        ({"distance": float("inf")}, "apart"),
        ({"error": 0.0182}, "allowed is 1.02 times that"),
        ({"error": float("nan")}, "allowed is 1.02 times that"),
    ],
)
def test_wrong_embeddings_of_the_service_are_a_failure(changed: dict[str, Any], said: str) -> None:
    assert gpu_service.wrong_embeddings(check()) == []
    assert gpu_service.wrong_embeddings(check(error=None)) == []
    (failure,) = gpu_service.wrong_embeddings(check(**changed))
    assert said in failure


def test_the_distance_of_other_shapes_is_infinite() -> None:
    one = torch.tensor([[3.0, 4.0]])
    assert gpu_service.distance([one], [torch.tensor([[3.0, 3.0]])]) == pytest.approx((1 / 18) ** 0.5)
    assert gpu_service.distance([one], [torch.zeros(2, 2)]) == float("inf")
    assert gpu_service.distance([one, one], [one]) == float("inf")
    assert gpu_service.distance([one], [one]) == 0.0


def test_stages_are_what_the_counts_grew_by() -> None:
    names = ("preprocess", "encode", "publish", "waiting", "items", "steps", *gpu_service.EXTRA)
    before = dict.fromkeys(names, 1.0)
    after = before | {"preprocess": 1.5, "encode": 3.0, "items": 101.0, "steps": 11.0, "graph_hits": 101.0}
    found = gpu_service.stages(before, after)["stages"]
    assert found["preprocess_ms_per_item"] == 5.0
    assert (found["step_ms"], found["items_per_step"], found["graph_hits"]) == (200.0, 10.0, 100)
    assert gpu_service.stages({}, {}) == {}
    assert gpu_service.stages(before, before) == {}


def test_pictures_of_two_loads_differ() -> None:
    one, other = gpu_service.pictures_of([(32, 3, 1, 1)] * 2)
    (third,) = gpu_service.pictures_of([(32, 3, 1, 1)], first=2)
    assert len({*one, *other, *third}) == 12


def test_what_loading_the_weights_took_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("(pid=1) INFO [default_loader.py:501] Loading weights took 1.25 seconds\nready\n")
    assert weights_s(log) == 1.25
    log.write_text("ready\n")
    assert weights_s(log) is None


def test_each_peer_has_graphs_that_its_budgets_allow() -> None:
    """vLLM refuses more items in a batch than its smallest budget has rows."""
    for flags in PEERS.values():
        graphs = json.loads(flags[flags.index("--compilation-config") + 1])
        assert graphs["encoder_cudagraph_token_budgets"] in ([*POWERS], [*FINE])
        assert graphs["encoder_cudagraph_max_vision_items_per_batch"] <= graphs["encoder_cudagraph_token_budgets"][0]
    for rows in (64, 256, 512, 1024, 1369, 2048, 4 * 1369):
        budget = min(one for one in FINE if one >= rows)
        assert budget - rows < 0.01 * rows, "the peer at its best wastes rows"


@pytest.mark.parametrize(
    ("line", "has_token"),
    [
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""},"token_ids":null}]}\n', False),
        (b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[5]}]}\n', True),
        (b'data: {"choices":[]}\n', False),
        (b"data: [DONE]\n", False),
        (b"\n", False),
    ],
)
def test_the_first_token_is_not_the_event_of_the_role(line: bytes, has_token: bool) -> None:
    assert gpu_ttft._has_token(line) is has_token


def test_a_stream_that_says_that_it_failed_has_no_token() -> None:
    with pytest.raises(ValueError, match="the embedding was lost"):
        gpu_ttft._has_token(b'data: {"error":{"message":"the embedding was lost"}}\n')
