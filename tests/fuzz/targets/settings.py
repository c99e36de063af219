"""Settings as text: flags of the command line, sizes, addresses, JSON objects, the shim's; and safetensors files."""

import argparse
import contextlib
import io
import json
import math
from random import Random
from typing import Any

import safetensors

from consumer_shim.config import ShimConfig
from producer import cli
from producer.config import ServeConfig, parse_bytes, parse_object, split_address
from producer.safetensors_file import pack
from producer.wire.block import EmbeddingShape
from producer.wire.contract import DTYPE_BYTES
from tests.fuzz.checks import check_said, expect
from tests.fuzz.mutate import AnyBytes, json_text, with_kind

_MAX_ERROR = 20_000
"""An error repeats the value, which the operator wrote, and choices."""


def _size(data: bytes) -> None:
    text = _text(data)
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        check_said(str(error), data, _MAX_ERROR)
        return
    expect(isinstance(num_bytes, int) and num_bytes >= 0, f"{text!r} is {num_bytes} bytes")
    again = parse_bytes(str(num_bytes)) if num_bytes < 2**53 else num_bytes
    expect(again == num_bytes, f"{text!r} is {num_bytes} bytes, then {again}")


def _object(data: bytes) -> None:
    try:
        value = parse_object(_text(data))
    except ValueError as error:
        check_said(str(error), data, _MAX_ERROR)
        return
    expect(isinstance(value, dict), "no object is accepted")


def _address(data: bytes) -> None:
    text = _text(data)
    try:
        host, port = split_address("listen", text)
    except ValueError as error:
        check_said(str(error), data, _MAX_ERROR)
        return
    expect(0 <= port <= 65535, f"{text!r} has port {port}")
    expect(host, f"{text!r} has no host")
    expect(split_address("listen", f"{host}:{port}") == (host, port), f"{text!r} is not the same twice")


def _flags(data: bytes) -> None:
    """Arguments as the kernel passes them: between zero bytes."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options = _PARSER.parse_args(_text(data).split("\0")[:64])
    except SystemExit as end:
        expect(end.code in (0, 2), f"a wrong flag ends with {end.code}")
        expect(said.getvalue(), "a wrong flag ends without a word")
        return
    values = {name: value for name, value in vars(options).items() if name not in ("command", "run")}
    if options.command == "encode":
        expect(0 < options.timeout_s <= 86400, f"a timeout of {options.timeout_s} s is accepted")
        return
    if "transport" in values:
        values["transport"] = tuple(values["transport"])
    try:
        config = ServeConfig(**values)
    except ValueError as error:
        check_said(str(error), data, _MAX_ERROR)
        return
    expect(math.isfinite(config.item_timeout_s) and config.transport_options, "a setting has no bound")
    expect(config.max_request_bytes < config.max_message_bytes < 1 << 31, "gRPC has no such limit")


def _parser() -> argparse.ArgumentParser:
    parser = cli._Parser(prog="ec-producer")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=cli._Parser)
    cli._add_serve(commands)
    cli._add_encode(commands)
    return parser


def _shim(data: bytes) -> None:
    try:
        extra = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(extra, dict):
        return  # vLLM's own check
    try:
        config = ShimConfig.from_extra_config(extra)
    except ValueError as error:
        check_said(str(error), data, _MAX_ERROR)
        return
    expect(config.producers and 1 <= config.max_pulls <= 256, "a setting out of range is accepted")
    expect(config.pull_timeout_s <= 3600 and config.transport_options, "a timeout out of range is accepted")


def _safetensors(data: bytes) -> None:
    """dtype, rows, width, then the tensor's name: what is packed is what the library reads."""
    if len(data) < 4:
        return
    dtype = tuple(DTYPE_BYTES)[data[0] % len(DTYPE_BYTES)]
    shape = EmbeddingShape(num_rows=1 + data[1] % 16, width=1 + data[2] % 16, dtype=dtype)
    name = data[3:].decode(errors="replace")
    if name == "__metadata__":
        return  # the format's own; ours is a constant
    rows = bytes(index % 251 for index in range(shape.payload_bytes))
    ((found, tensor),) = safetensors.deserialize(pack(name, shape, rows))
    expect(found == name, f"the tensor {name!r} is read as {found!r}")
    expect(tensor["shape"] == [shape.num_rows, shape.width], "the shape is read as another")
    expect(bytes(tensor["data"]) == rows, "the rows are read as others")


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


_PARSER = _parser()
_KINDS = (_size, _object, _address, _flags, _shim, _safetensors)


def target(data: bytes) -> None:
    """The first byte says what the rest is."""
    if data:
        _KINDS[data[0] % len(_KINDS)](data[1:])


def _change_flags(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
    arguments = data.split(b"\0")
    at = dice.randrange(len(arguments))
    what = dice.randrange(4)
    if what == 0:
        arguments[at] = any_bytes(arguments[at], max(1, min(most, 64)))
    elif what == 1:
        arguments.insert(at, dice.choice(_FLAGS))
    elif what == 2:
        arguments[at] = dice.choice(_VALUES)
    else:
        del arguments[at]
    return b"\0".join(arguments)[:most]


_FLAGS = [flag.encode() for flag in _PARSER._subparsers._group_actions[0].choices["serve"]._option_string_actions]  # type: ignore[union-attr, index]
_VALUES = [
    *(b"0", b"-1", b"1", b"nan", b"inf", b"1e400", b"9" * 40, b"1_000", b"0x10", b"1GiB", b"0.5MiB", b"{}", b"[]"),
    *(b'{"image": 1}', b"shm", b"nixl", b"mooncake", b"grpc", b"rdma", b"0.0.0.0:0", b"[::1]:50051", b"a:99999", b""),
    *(b"--", b"-", b"serve", b"encode", b"\xff", "é".encode(), b"\n"),
]
_SHIM_WORDS: tuple[Any, ...] = (
    *("producers", "transport", "nixl_devices", "mooncake_host", "mooncake_protocol", "region_bytes"),
    *("encode_timeout_s", "pull_timeout_s", "max_pulls", "max_body_bytes", "auto", "shm", "rdma", "tcp"),
    *(["a:1"], "a:1", "[::1]:65535", ":1", 1 << 30, 0.1, 3600.0),
)
_OBJECT_WORDS = ("image", "video", "num_frames", 32, {})


def _bytes(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
    return any_bytes(data, most)


mutate = with_kind(
    len(_KINDS), (_bytes, json_text(_OBJECT_WORDS), _bytes, _change_flags, json_text(_SHIM_WORDS), _bytes)
)


def seeds() -> dict[str, bytes]:
    shim = {"producers": ["127.0.0.1:50051"], "transport": "auto", "region_bytes": 1 << 30, "pull_timeout_s": 20.0}
    return {
        "size": b"\x001.5GiB",
        "object": b'\x01{"image": {"image_mode": "RGB"}}',
        "address": b"\x02[::1]:50051",
        "serve": b"\x03serve\0model\0--lease-s\x0060\0--pool-bytes\x001GiB\0--transport\0nixl",
        "encode": b"\x03encode\0photo.jpg\0--timeout-s\x005",
        "shim": b"\x04" + json.dumps(shim).encode(),
        "safetensors": b"\x05\x01\x02\x03embedding",
    }
