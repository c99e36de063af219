"""The command line: what reaches the settings, and what a wrong flag gets. Nothing is started."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from consumer_shim.channel import PLAIN, ChannelSecurity
from producer import __version__, cli
from producer.config import ServeConfig
from producer.errors import UnsupportedModelError
from producer.logs import LogSettings
from producer.transport.base import TransportUnavailableError
from producer.wire.tracing import TracingUnavailableError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The settings that `serve` was called with, instead of serving."""
    configs: list[ServeConfig] = []

    async def serve(config: ServeConfig) -> None:
        configs.append(config)

    monkeypatch.setattr("producer.app.serve", serve)
    monkeypatch.setattr(cli, "_configure_logging", lambda config: None)
    return configs


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a wrong command line prints: one line, with exit status 2 and nothing on stdout."""
    try:
        status: Any = cli.main(arguments)
    except SystemExit as exit:
        status = exit.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


# serve


def test_defaults_are_the_settings_own(served: list[ServeConfig]) -> None:
    assert cli.main(["serve", "some/model"]) == 0
    assert served == [ServeConfig(model="some/model")]


def test_every_setting_has_a_flag(served: list[ServeConfig]) -> None:
    flags = {
        "--listen": "0.0.0.0:1",
        "--metrics-listen": "0.0.0.0:2",
        "--advertise": "host:3",
        "--tls-cert": "tls.crt",
        "--tls-key": "tls.key",
        "--tls-client-ca": "ca.crt",
        "--token-file": "tokens",
        "--transport": "nixl",
        "--nixl-devices": "mlx5_0:1",
        "--mooncake-host": "10.0.0.4",
        "--mooncake-protocol": "rdma",
        "--dtype": "float32",
        "--mm-encoder-attn-backend": "TORCH_SDPA",
        "--fidelity": "exact",
        "--graph-rows": "2048",
        "--graph-items": "16",
        "--steps-in-flight": "3",
        "--slots": "5",
        "--slot-bytes": "15MiB",
        "--device-memory-bytes": "17GiB",
        "--revision": "main",
        "--mm-processor-kwargs": '{"max_pixels": 4}',
        "--media-io-kwargs": '{"image": {"image_mode": "RGB"}}',
        "--publish-files": "files",
        "--publish-files-bytes": "2MiB",
        "--publish-files-age-s": "5",
        "--pool-bytes": "2MiB",
        "--lease-s": "1.5",
        "--max-leases": "6",
        "--max-queue-items": "7",
        "--max-queue-bytes": "7MiB",
        "--max-client-items": "75",
        "--item-timeout-s": "7.5",
        "--max-streams": "71",
        "--stream-idle-s": "74",
        "--max-request-bytes": "72MiB",
        "--stall-s": "7.25",
        "--stall-exit-s": "73",
        "--max-items-per-request": "8",
        "--max-item-bytes": "9KiB",
        "--max-item-pixels": "101",
        "--max-video-pixels": "102",
        "--max-video-frames": "103",
        "--max-audio-s": "104",
        "--max-item-rows": "10",
        "--max-batch-rows": "11",
        "--max-batch-items": "12",
        "--preprocess-workers": "13",
        "--preprocess-timeout-s": "131",
        "--preprocess-memory-bytes": "1320MiB",
        "--drain-s": "14",
        "--log-format": "json",
        "--log-level": "debug",
        "--otlp-traces-endpoint": "http://collector:4317",
        "--trace-sample-ratio": "0.25",
    }
    arguments = [part for flag in flags.items() for part in flag]
    assert cli.main(["serve", "m", "--trust-remote-code", "--eager", "--require-graphs", *arguments]) == 0
    changed = dataclasses.asdict(served[0])
    assert changed == {
        "model": "m",
        "listen": "0.0.0.0:1",
        "metrics_listen": "0.0.0.0:2",
        "advertise": "host:3",
        "tls_cert": "tls.crt",
        "tls_key": "tls.key",
        "tls_client_ca": "ca.crt",
        "token_file": "tokens",
        "transport": ("nixl",),
        "nixl_devices": "mlx5_0:1",
        "mooncake_host": "10.0.0.4",
        "mooncake_protocol": "rdma",
        "dtype": "float32",
        "mm_encoder_attn_backend": "TORCH_SDPA",
        "fidelity": "exact",
        "eager": True,
        "require_graphs": True,
        "graph_rows": 2048,
        "graph_items": 16,
        "compile_mm_encoder": False,  # not if 'exact'
        "steps_in_flight": 3,
        "slots": 5,
        "slot_bytes": 15 << 20,
        "device_memory_bytes": 17 << 30,
        "trust_remote_code": True,
        "revision": "main",
        "mm_processor_kwargs": {"max_pixels": 4},
        "media_io_kwargs": {"image": {"image_mode": "RGB"}},
        "pool_bytes": 2 << 20,
        "lease_s": 1.5,
        "max_leases": 6,
        "max_queue_items": 7,
        "max_queue_bytes": 7 << 20,
        "max_client_items": 75,
        "item_timeout_s": 7.5,
        "max_streams": 71,
        "stream_idle_s": 74.0,
        "max_request_bytes": 72 << 20,
        "stall_s": 7.25,
        "stall_exit_s": 73.0,
        "max_items_per_request": 8,
        "max_item_bytes": 9 << 10,
        "max_item_pixels": 101,
        "max_video_pixels": 102,
        "max_video_frames": 103,
        "max_audio_s": 104.0,
        "max_item_rows": 10,
        "max_batch_rows": 11,
        "max_batch_items": 12,
        "preprocess_workers": 13,
        "preprocess_timeout_s": 131.0,
        "preprocess_memory_bytes": 1320 << 20,
        "publish_files": "files",
        "publish_files_bytes": 2 << 20,
        "publish_files_age_s": 5.0,
        "drain_s": 14.0,
        "log_format": "json",
        "log_level": "debug",
        "otlp_traces_endpoint": "http://collector:4317",
        "trace_sample_ratio": 0.25,
    }


def test_compiling_is_a_switch(served: list[ServeConfig]) -> None:
    assert cli.main(["serve", "m", "--compile-mm-encoder"]) == 0
    assert served == [ServeConfig(model="m", compile_mm_encoder=True)]


def test_transports_add_up(served: list[ServeConfig]) -> None:
    cli.main(["serve", "m", "--transport", "grpc", "--transport", "nixl"])
    assert served[0].transports == ("shm", "nixl", "grpc")


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["serve", "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(ServeConfig):
        assert field.name == "model" or f"--{field.name.replace('_', '-')}" in text
    assert "(default: 127.0.0.1:50051)" in " ".join(text.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-leases", "many"], ["--max-leases", "'many'", "number"]),
        (["--max-leases", "0"], ["max_leases is 0", "1 to 10000000"]),
        (["--max-leases", "1.5"], ["--max-leases", "'1.5'", "whole number"]),
        (["--lease-s", "soon"], ["--lease-s", "'soon'", "not a number"]),
        (["--lease-s", "nan"], ["lease_s is nan", "1 to 3600"]),
        (["--pool-bytes", "1GB"], ["--pool-bytes", "'1GB'", "KiB, MiB, GiB or TiB"]),
        (["--pool-bytes", "1KiB"], ["pool_bytes is 1024", "1048576 to 70368744177664"]),
        (["--dtype", "float8"], ["dtype is 'float8'", "auto, bfloat16, float16, float32"]),
        (["--fidelity", "best"], ["fidelity is 'best'", "fast, exact"]),
        (["--graph-rows", "0"], ["graph_rows is 0", "1 to 1048576"]),
        (["--slots", "1"], ["slots is 1", "0 and 2 or more"]),
        (["--compile-mm-encoder", "--fidelity", "exact"], ["compile_mm_encoder is set", "fidelity is 'exact'"]),
        (["--transport", "telepathy"], ["transport is 'telepathy'", "shm, nixl, mooncake, grpc"]),
        (["--listen", "nowhere"], ["listen is 'nowhere'", "host:port"]),
        (["--metrics-listen", "host:99999"], ["metrics_listen is 'host:99999'", "0 to 65535"]),
        (["--mm-processor-kwargs", "[1]"], ["--mm-processor-kwargs", "'[1]'", "JSON object"]),
        (["--media-io-kwargs", "{"], ["--media-io-kwargs", "'{'", "JSON object"]),
        (["--nonsense", "1"], ["--nonsense"]),
        (["--max-leases"], ["--max-leases", "expected one argument"]),
    ],
)
def test_a_wrong_setting_gets_one_line(
    flags: list[str], said: list[str], served: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(["serve", "m", *flags], capsys)
    assert [words for words in said if words not in line] == [], line
    assert served == []


def test_an_abbreviated_flag_is_unknown(served: list[ServeConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-queue" in refusal(["serve", "m", "--max-queue", "5"], capsys)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve"], ["encode"], ["serve", "m", "other"]])
def test_a_wrong_command_gets_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(arguments, capsys).startswith("ec-producer")


def test_an_empty_model_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model is empty" in refusal(["serve", ""], capsys)


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedModelError("model m: no encoder"),
        TransportUnavailableError("NIXL is not installed"),
        TracingUnavailableError("OpenTelemetry is not installed"),
        OSError("listen is taken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failed_start_gets_one_line_and_exit_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, served: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(config: ServeConfig) -> None:
        raise error

    monkeypatch.setattr("producer.app.serve", serve)
    assert cli.main(["serve", "m"]) == 1
    assert capsys.readouterr().err == f"ec-producer: {error}\n"


def test_in_a_json_log_a_failed_start_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
    served: list[ServeConfig],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(config: ServeConfig) -> None:
        raise OSError("listen is taken")

    monkeypatch.setattr("producer.app.serve", serve)
    monkeypatch.setattr("producer.logs._settings", LogSettings(format="json"))
    assert cli.main(["serve", "m", "--log-format", "json"]) == 1
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("CRITICAL", "listen is taken")]
    assert capsys.readouterr().err == ""


def test_an_interrupt_exits_as_the_shell_expects(monkeypatch: pytest.MonkeyPatch, served: list[ServeConfig]) -> None:
    async def serve(config: ServeConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("producer.app.serve", serve)
    assert cli.main(["serve", "m"]) == 130


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"ec-producer {__version__}\n"


# encode


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `encode_files` was called with, instead of calling a producer."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("producer.encode_command.encode_files", lambda *call: calls.append(call) or 0)
    return calls


def test_encode_takes_files_and_flags(encoded: list[tuple[Any, ...]]) -> None:
    assert cli.main(["encode", "a.png", "b.jpg", "--address", "host:1", "--out", "to", "--timeout-s", "2.5"]) == 0
    assert encoded == [([Path("a.png"), Path("b.jpg")], "host:1", Path("to"), 2.5, PLAIN)]


def test_encode_has_defaults(encoded: list[tuple[Any, ...]]) -> None:
    assert cli.main(["encode", "a.png"]) == 0
    assert encoded == [([Path("a.png")], "127.0.0.1:50051", None, 60.0, PLAIN)]


def test_encode_reaches_a_producer_with_tls_and_a_token(encoded: list[tuple[Any, ...]]) -> None:
    flags = {"--tls-ca": "a", "--tls-cert": "c", "--tls-key": "k", "--tls-server-name": "n", "--token-file": "t"}
    assert cli.main(["encode", "a.png", *(part for flag in flags.items() for part in flag)]) == 0
    security = ChannelSecurity(tls_ca="a", tls_cert="c", tls_key="k", tls_server_name="n", token_file="t")
    assert encoded[0][-1] == security


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--tls-cert", "c", "--tls-key", "k"], 2, "tls_cert is 'c'; it needs tls_ca"),
        (["--tls-ca", "none"], 1, "tls_ca none: No such file or directory"),
        (["--token-file", "none"], 1, "token_file none: No such file or directory"),
    ],
)
def test_files_of_encode_that_cannot_be_used(
    flags: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["encode", "a.png", *flags]) == status
    assert capsys.readouterr() == ("", f"ec-producer: {said}\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--timeout-s", "soon"], ["--timeout-s", "'soon'"]),
        (["--timeout-s", "-1"], ["timeout", "-1"]),
        (["--timeout-s", "nan"], ["timeout", "nan"]),
        (["--address", "nowhere"], ["address", "'nowhere'", "host:port"]),
    ],
)
def test_a_wrong_flag_of_encode_gets_one_line(
    flags: list[str], said: list[str], encoded: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(["encode", "a.png", *flags], capsys)
    assert [words for words in said if words not in line] == [], line
    assert encoded == []


# doctor


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServeConfig, str, bool]]:
    """What the doctor was asked, instead of asking this machine."""
    calls: list[tuple[ServeConfig, str, bool]] = []

    def run(config: ServeConfig, model: str, *, as_json: bool) -> int:
        calls.append((config, model, as_json))
        return 1

    monkeypatch.setattr("producer.doctor.report.run", run)
    return calls


def test_doctor_takes_what_serve_takes(examined: list[tuple[ServeConfig, str, bool]]) -> None:
    assert cli.main(["doctor", "m", "--listen", "0.0.0.0:1", "--transport", "nixl", "--json"]) == 1
    assert examined == [(ServeConfig(model="m", listen="0.0.0.0:1", transport=("nixl",)), "m", True)]


def test_doctor_needs_no_model(examined: list[tuple[ServeConfig, str, bool]]) -> None:
    assert cli.main(["doctor"]) == 1
    ((config, model, as_json),) = examined
    assert (config.listen, model, as_json) == ("127.0.0.1:50051", "", False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pool-bytes", "1KiB"], "pool_bytes is 1024"),
        (["--nonsense"], "--nonsense"),
        (["other"], "unrecognized arguments: other"),
    ],
)
def test_a_wrong_flag_of_doctor_gets_one_line(
    flags: list[str], said: str, examined: list[tuple[ServeConfig, str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(["doctor", "m", *flags], capsys)
    assert examined == []
