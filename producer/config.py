"""Settings of `ec-producer serve`: one frozen record, validated when it is made. Every field is a flag of that name."""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from producer.logs import FORMATS, LEVELS
from producer.transport.registry import LIBRARY_TRANSPORTS, MOONCAKE_PROTOCOLS
from producer.wire.contract import GRPC_TRANSPORT, SHM_TRANSPORT
from producer.wire.tracing import check_settings as check_tracing

TRANSPORTS = (SHM_TRANSPORT, *LIBRARY_TRANSPORTS, GRPC_TRANSPORT)
_ANY_ADDRESS = ("", "0.0.0.0", "::")
DTYPES = ("auto", "bfloat16", "float16", "float32")
FIDELITIES = ("fast", "exact")
ATTENTION_BACKENDS = ("auto", "TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_SDPA")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes from "512MiB", "2GiB" or a plain number.

    Raises:
        ValueError: not such a size.
    """
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?) ?(KiB|MiB|GiB|TiB|)", text.strip(), re.ASCII)
    if not match:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object from text.

    Raises:
        ValueError: not such an object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    size: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field: its default (or a function that makes it), a sentence with the unit, and what is allowed."""
    metadata = {"help": help, "low": low, "high": high, "size": size, "choices": choices}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """All settings of one producer. `ValueError` names the field, its value and what is allowed."""

    model: str
    """Folder or hub name of the model whose encoder is served."""
    listen: str = _setting("127.0.0.1:50051", "host:port of the gRPC API; port 0 takes a free one")
    metrics_listen: str = _setting(
        "127.0.0.1:9464", "host:port of /metrics, the status page and /healthz; port 0 takes a free one"
    )
    advertise: str = _setting("", "host:port that tickets name, where it differs from --listen")
    tls_cert: str = _setting(
        "", "PEM file of the server's certificate chain; plaintext by default. Changes are noticed"
    )
    tls_key: str = _setting("", "PEM file of that certificate's key")
    tls_client_ca: str = _setting("", "PEM file of those who sign clients' certificates; clients need none by default")
    token_file: str = _setting(
        "",
        "file of bearer tokens, one a line, 'token' or 'name:token'; clients need none by default. Changes are noticed",
    )
    transport: tuple[str, ...] = _setting(
        (GRPC_TRANSPORT,), "transport to offer; repeat for several ('shm' and 'grpc' are always on)", choices=TRANSPORTS
    )
    nixl_devices: str = _setting("", "network devices that NIXL may use, as UCX_NET_DEVICES takes them; all by default")
    mooncake_host: str = _setting(
        "", "address that Mooncake announces; the host of --advertise or --listen by default. It listens on all of them"
    )
    mooncake_protocol: str = _setting("tcp", "what Mooncake reads go over", choices=MOONCAKE_PROTOCOLS)
    dtype: str = _setting("auto", "element type of weights and embeddings; 'auto' is the checkpoint's", choices=DTYPES)
    mm_encoder_attn_backend: str = _setting(
        "auto", "attention of the encoder; 'auto' is vLLM's choice for the device", choices=ATTENTION_BACKENDS
    )
    fidelity: str = _setting(
        "fast",
        "'exact' gives what the model's own code gives for each item alone, bit for bit; 'fast' what is as near to the"
        " model, sooner",
        choices=FIDELITIES,
    )
    eager: bool = _setting(False, "capture no graphs of the encoder")
    require_graphs: bool = _setting(False, "do not start without graphs where they cannot be captured")
    graph_rows: int = _setting(4096, "embedding rows of the largest captured graph", low=1, high=1 << 20)
    graph_items: int = _setting(32, "images, or frames of videos, that a captured graph takes", low=1, high=1024)
    compile_mm_encoder: bool = _setting(False, "compile the encoder, as vLLM's setting of that name; not if 'exact'")
    steps_in_flight: int = _setting(2, "encoder steps that a GPU is given at once", low=1, high=8)
    slots: int = _setting(
        0, "slots of pinned memory for steps' inputs; 0 for one more than --steps-in-flight", low=0, high=64
    )
    slot_bytes: int = _setting(
        32 << 20, "size of such a slot; it grows for a larger step", low=1 << 12, high=1 << 40, size=True
    )
    device_memory_bytes: int = _setting(
        0, "device memory that this process may take; 0 for all that there is", low=0, high=1 << 46, size=True
    )
    trust_remote_code: bool = _setting(False, "let the model's repository bring Python code")
    revision: str = _setting("", "revision of a hub model")
    mm_processor_kwargs: dict[str, Any] = _setting(dict, "JSON object for the model's processor, as vLLM takes it")
    media_io_kwargs: dict[str, Any] = _setting(dict, "JSON object by modality for media decoding, as vLLM takes it")
    pool_bytes: int = _setting(
        1 << 30, "size of the embedding pool in host memory", low=1 << 20, high=1 << 46, size=True
    )
    lease_s: float = _setting(60.0, "seconds that a lease keeps an embedding in the pool", low=1, high=3600)
    max_leases: int = _setting(100_000, "leases at once", low=1, high=10_000_000)
    max_queue_items: int = _setting(256, "items admitted and not finished", low=1, high=100_000)
    max_queue_bytes: int = _setting(
        1 << 30, "bytes of media that wait, over all clients", low=1 << 12, high=1 << 46, size=True
    )
    max_client_items: int = _setting(
        0,
        "items in hand at once for each client (certificate, named token or host); 0 for no limit",
        low=0,
        high=100_000,
    )
    item_timeout_s: float = _setting(
        120.0, "seconds that one item may take, whatever its call's deadline", low=0.1, high=3600
    )
    max_streams: int = _setting(64, "EncodeStream calls open at once", low=1, high=10_000)
    stream_idle_s: float = _setting(300.0, "seconds without a request that end an EncodeStream", low=1, high=86400)
    max_request_bytes: int = _setting(256 << 20, "size of all media in one Encode", low=1, high=2000 << 20, size=True)
    max_items_per_request: int = _setting(64, "items in one Encode", low=1, high=1024)
    max_item_bytes: int = _setting(32 << 20, "size of one media file", low=1, high=1 << 30, size=True)
    max_item_pixels: int = _setting(100_000_000, "pixels of an image", low=1, high=1 << 34)
    max_video_pixels: int = _setting(300_000_000, "pixels of all frames that are taken of a video", low=1, high=1 << 36)
    max_video_frames: int = _setting(100_000, "frames of a video's file, taken or not", low=1, high=1 << 24)
    max_audio_s: float = _setting(600.0, "seconds of a sound", low=0.1, high=86400)
    max_item_rows: int = _setting(16384, "rows of one item's embedding", low=1, high=1 << 20)
    max_batch_rows: int = _setting(
        0,
        "embedding rows in one encoder step; a larger item has its own; 0 for 2048 on a GPU, 512 on a CPU",
        low=0,
        high=1 << 22,
    )
    max_batch_items: int = _setting(32, "items in one encoder step", low=1, high=1024)
    preprocess_workers: int = _setting(
        lambda: max(1, (os.cpu_count() or 2) // 2), "processes that decode and preprocess media", low=1, high=256
    )
    preprocess_timeout_s: float = _setting(
        30.0, "seconds that decoding and preprocessing one item may take", low=0.1, high=3600
    )
    preprocess_memory_bytes: int = _setting(
        4 << 30, "memory that decoding and preprocessing one item may take", low=256 << 20, high=1 << 46, size=True
    )
    publish_files: str = _setting("", "folder for files that vLLM's own ECExampleConnector reads; none by default")
    publish_files_bytes: int = _setting(4 << 30, "most bytes of such files", low=1, high=1 << 50, size=True)
    publish_files_age_s: float = _setting(3600.0, "seconds that one is kept unused", low=1, high=1e9)
    drain_s: float = _setting(
        20.0,
        "seconds that work in hand and leases may take after SIGTERM; a second signal exits at once",
        low=0,
        high=3600,
    )
    stall_s: float = _setting(
        8.0, "seconds without progress of a step after which the service is not healthy", low=1, high=3600
    )
    stall_exit_s: float = _setting(
        60.0, "seconds without progress of a step after which the process exits with 1", low=1, high=86400
    )
    log_format: str = _setting(
        "console", "form of the log on stderr: for people, or a JSON object a line", choices=FORMATS
    )
    log_level: str = _setting(
        "info", "least severity that is logged; other packages' lines are never logged below info", choices=LEVELS
    )
    otlp_traces_endpoint: str = _setting(
        "",
        "host:port, http://host:port or https://host:port that spans are sent to with OTLP over gRPC; off by default",
    )
    trace_sample_ratio: float = _setting(
        1.0, "share of the traces that begin here; of one that a caller began, the caller decides", low=0, high=1
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model is empty; name a folder or a hub model")
        for name in ("listen", "metrics_listen") + (("advertise",) if self.advertise else ()):
            split_address(name, getattr(self, name))
        if self.advertise.endswith(":0"):
            raise ValueError(f"advertise is {self.advertise!r}; clients need a port of 1 to 65535")
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        check_tracing(self.otlp_traces_endpoint, self.trace_sample_ratio)
        if 0 < self.max_client_items < self.max_items_per_request:
            raise ValueError(
                f"max_client_items is {self.max_client_items}; allowed are 0 and max_items_per_request,"
                f" {self.max_items_per_request}, or more"
            )
        if self.slots == 1:
            raise ValueError("slots is 1; allowed are 0 and 2 or more")
        if self.compile_mm_encoder and self.fidelity == "exact":
            raise ValueError("compile_mm_encoder is set and fidelity is 'exact'; compiling changes the last bits")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"tls_cert is {self.tls_cert!r} and tls_key {self.tls_key!r}; one needs the other")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError(f"tls_client_ca is {self.tls_client_ca!r}; it needs tls_cert and tls_key")
        if "mooncake" in self.transport and self.transport_options["mooncake"]["host"] in _ANY_ADDRESS:
            raise ValueError(f"mooncake_host is {self.mooncake_host!r} and listen {self.listen}; name one address")

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports on offer, most capable first; gRPC is always the last."""
        return (SHM_TRANSPORT, *(name for name in LIBRARY_TRANSPORTS if name in self.transport), GRPC_TRANSPORT)

    @property
    def num_slots(self) -> int:
        """Slots of the ring."""
        return self.slots or self.steps_in_flight + 1

    @property
    def transport_options(self) -> dict[str, dict[str, str]]:
        """What each transport with a library is told, by its name."""
        address, _ = split_address("advertise", self.advertise or self.listen)
        mooncake = {"host": self.mooncake_host or address, "protocol": self.mooncake_protocol}
        return {"nixl": {"devices": self.nixl_devices}, "mooncake": mooncake}

    @property
    def media_settings(self) -> dict[str, dict[str, Any]]:
        """What decides how media are decoded and processed; both ends of a deployment need the same."""
        return {"mm_processor_kwargs": self.mm_processor_kwargs, "media_io_kwargs": self.media_io_kwargs}

    @property
    def max_message_bytes(self) -> int:
        """Largest gRPC message that the limits allow."""
        return self.max_request_bytes + (1 << 16)


def split_address(name: str, value: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port".

    Raises:
        ValueError: names `name`, the value and the form.
    """
    host, _, port = value.rpartition(":")
    host = host.strip("[]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{name} is {value!r}; expected host:port with a port of 0 to 65535")
    return host, int(port)


def _check(field: "dataclasses.Field[Any]", value: Any) -> None:
    meta = field.metadata
    low, high, choices = meta.get("low"), meta.get("high"), meta.get("choices") or ()
    if low is not None and high is not None and not low <= value <= high:
        raise ValueError(f"{field.name} is {value}; allowed are {low} to {high}")
    values = value if isinstance(value, tuple) else (value,)
    for one in values if choices else ():
        if one not in choices:
            raise ValueError(f"{field.name} is {one!r}; allowed are {', '.join(choices)}")
