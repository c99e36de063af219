"""`ec-producer serve | encode | doctor`: the only reader of flags and environment."""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from producer import __version__, event_loop, logs, process_setup
from producer.config import ServeConfig, parse_bytes, parse_object, split_address
from producer.logs import LogSettings
from producer.wire.credential_files import CredentialFileError

_CHANNEL_FILES = {
    "tls_ca": "PEM file of those who sign the producer's certificate, which turns TLS on",
    "tls_cert": "PEM file of a certificate chain of one's own",
    "tls_key": "PEM file of that certificate's key",
    "token_file": "file with a bearer token",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2. Flags are written out: a new one makes no old one ambiguous."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0, 1 where it failed, 2 for a wrong flag or setting."""
    parser = _Parser(prog="ec-producer", description="The vision encoder of a multimodal model as a service.")
    parser.add_argument("--version", action="version", version=f"ec-producer {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="serve | encode | doctor", parser_class=_Parser
    )
    _add_serve(commands)
    _add_encode(commands)
    _add_doctor(commands)
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="serve a model's encoder", description="Serves a model's encoder.")
    serve.set_defaults(run=_serve)
    serve.add_argument("model", metavar="MODEL", help="folder or hub name of the model")
    _add_settings(serve)


def _add_settings(command: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(ServeConfig):
        if field.name != "model":
            command.add_argument(f"--{field.name.replace('_', '-')}", **_flag(field))


def _flag(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """argparse's view of a setting; without the flag, the setting's own default holds."""
    meta = field.metadata
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[operator]
    common = {"dest": field.name, "default": argparse.SUPPRESS, "help": f"{meta['help']} (default: {_shown(default)})"}
    if isinstance(default, bool):
        return {**common, "action": "store_true"}
    if isinstance(default, tuple):
        return {**common, "action": "append", "metavar": "|".join(meta["choices"])}
    if isinstance(default, dict):
        return {**common, "type": _named(parse_object), "metavar": "JSON"}
    convert = parse_bytes if meta["size"] else type(default)
    return {
        **common,
        "type": _named(convert),
        "metavar": "|".join(meta["choices"]) or field.name.rsplit("_")[-1].upper(),
    }


def _shown(default: Any) -> str:
    return " ".join(default) if isinstance(default, tuple) else str(default)


def _named(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            said = {int: f"{text!r} is not a whole number", float: f"{text!r} is not a number"}
            raise argparse.ArgumentTypeError(said.get(convert, str(error))) from None  # type: ignore[call-overload]

    return parse


def _serve(options: argparse.Namespace) -> int:
    try:
        config = _config(options)
    except ValueError as error:
        return _fail(error, 2)
    _configure_logging(config)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    process_setup.before_imports()
    try:
        from producer.app import serve
    except ImportError as error:
        return _fail(ImportError(f"{error}; serving needs pip install 'ec-producer[producer]' beside a vLLM"), 1)
    from producer.errors import UnsupportedModelError
    from producer.transport.base import TransportError, TransportUnavailableError
    from producer.wire.tracing import TracingUnavailableError

    known = (UnsupportedModelError, TransportUnavailableError, TransportError, TracingUnavailableError, OSError)
    try:
        event_loop.run(serve(config))
    except known as error:
        return _fail(error, 1)
    return 0


def _config(options: argparse.Namespace) -> ServeConfig:
    """Of a command that has the settings as flags. ValueError: they make no sense."""
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    values = {name: value for name, value in vars(options).items() if name in names}
    if "transport" in values:
        values["transport"] = tuple(values["transport"])
    return ServeConfig(**values)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine",
        description="Checks this machine for `serve` with the same flags: what is fine, what is not, and what to do."
        " Exit status 1 if something is wrong.",
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("model", metavar="MODEL", nargs="?", default="", help="folder or hub name of the model")
    doctor.add_argument("--json", action="store_true", help="print a JSON object instead of lines")
    _add_settings(doctor)


def _doctor(options: argparse.Namespace) -> int:
    from producer.doctor.report import run

    model, options.model = options.model, options.model or "none"  # a setting that may not be empty
    try:
        config = _config(options)
    except ValueError as error:
        return _fail(error, 2)
    return run(config, model, as_json=options.json)


def _add_encode(commands: Any) -> None:
    encode = commands.add_parser("encode", help="encode media files", description="Encodes media files at a producer.")
    encode.set_defaults(run=_encode)
    encode.add_argument("files", metavar="FILE", nargs="+", type=Path, help="image, video or audio to encode")
    encode.add_argument(
        "--address",
        type=_named(_address),
        default="127.0.0.1:50051",
        help="host:port of the producer (default: %(default)s)",
    )
    encode.add_argument("--out", type=Path, metavar="FOLDER", help="write each embedding there as KEY.safetensors")
    encode.add_argument(
        "--timeout-s", type=_named(_seconds), default=60.0, help="seconds for each call (default: %(default)s)"
    )
    for name, help in _CHANNEL_FILES.items():
        encode.add_argument(f"--{name.replace('_', '-')}", default="", metavar="FILE", help=f"{help}; none by default")
    encode.add_argument("--tls-server-name", default="", metavar="NAME", help="name that its certificate has")


def _address(text: str) -> str:
    split_address("address", text)
    return text


def _seconds(text: str) -> float:
    if not 0 < float(text) <= 86400:
        raise ValueError(f"{text!r} is no timeout; allowed are more than 0 to 86400 seconds")
    return float(text)


def _encode(options: argparse.Namespace) -> int:
    from consumer_shim.channel import ChannelSecurity
    from producer.encode_command import encode_files

    names = (*_CHANNEL_FILES, "tls_server_name")
    try:
        security = ChannelSecurity(**{name: getattr(options, name) for name in names})
    except ValueError as error:
        return _fail(error, 2)
    try:
        return encode_files(options.files, options.address, options.out, options.timeout_s, security)
    except CredentialFileError as error:
        return _fail(error, 1)


def _configure_logging(config: ServeConfig) -> None:
    logs.configure(LogSettings(format=config.log_format, level=config.log_level))


def _fail(error: Exception, status: int) -> int:
    if logs.is_json():
        logging.getLogger("producer").critical("%s", error)
    else:
        print(f"ec-producer: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
