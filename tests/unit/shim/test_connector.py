"""What the connector makes of vLLM's configuration and requests; the rest is its parts', tested by themselves."""

import uuid
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from consumer_shim import plugin
from consumer_shim.connector import ECProducerConnector
from consumer_shim.side_channel import ask_reason, leave_tickets
from consumer_shim.tickets import PullTicket
from producer.wire.contract import TICKETS_PARAM
from tests.kit.ports import free_port

ADDRESS = f"127.0.0.1:{free_port()}"  # nobody listens there
WIDTH = 8
KEY = "ab" * 32
FIELDS = {"image": {"image_grid_thw"}, "video": {"video_grid_thw"}}


def config(*, levels: int = 0, ec_role: str = "ec_consumer", **settings: Any) -> Any:
    """vLLM's, as far as it is looked at, of a model with so many levels of DeepStack."""
    transfer = SimpleNamespace(
        ec_role=ec_role,
        is_ec_producer=False,
        is_ec_consumer=True,
        engine_id=f"engine-{uuid.uuid4()}",
        ec_connector_extra_config={"producers": [ADDRESS], "transport": "grpc", "region_bytes": 1 << 20, **settings},
    )
    vision = SimpleNamespace(deepstack_visual_indexes=list(range(levels)))
    model = SimpleNamespace(
        hf_config=SimpleNamespace(vision_config=vision),
        dtype=torch.bfloat16,
        get_inputs_embeds_size=lambda: WIDTH,
    )
    return SimpleNamespace(ec_transfer_config=transfer, model_config=model)


@pytest.fixture(autouse=True)
def _declared_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM would read from a model's data parser."""
    monkeypatch.setattr(PlaceholderMetadataResolver, "fields_for", lambda self, modality: FIELDS.get(modality, set()))


@pytest.fixture
def connectors() -> Iterator[list[ECProducerConnector]]:
    """Those put in here are shut down."""
    made: list[ECProducerConnector] = []
    yield made
    for connector in made:
        connector.shutdown()


def feature(modality: str = "image", **data: Any) -> SimpleNamespace:
    position = SimpleNamespace(offset=3, length=6)
    return SimpleNamespace(identifier="a", modality=modality, mm_position=position, data=data or None)


def pull_ticket(**changes: Any) -> PullTicket:
    """Of an image of 4 rows."""
    fields = {"key": KEY, "modality": "image", "num_rows": 4, "width": WIDTH, "dtype": "bfloat16"}
    fields |= {"epoch": "0" * 16, "lease_id": "1" * 32, "address": ADDRESS}
    return PullTicket(**(fields | changes))


def request(width: int, modality: str = "image", **changes: Any) -> Any:
    """One with an item of 4 rows and its ticket."""
    ticket = pull_ticket(width=width, modality=modality)
    fields = {"request_id": "r", "mm_features": [feature(modality)], "get_num_encoder_embeds": lambda index: 4}
    return SimpleNamespace(**(fields | {"ec_transfer_params": {TICKETS_PARAM: [asdict(ticket)]}} | changes))


# DeepStack


@pytest.mark.parametrize("role", list(ECConnectorRole))
def test_deepstack_needs_the_plugin(monkeypatch: pytest.MonkeyPatch, role: ECConnectorRole) -> None:
    monkeypatch.setattr(plugin, "_installed", False)
    with pytest.raises(ValueError, match=r"needs vLLM's plugin 'ec_producer'.* VLLM_PLUGINS leaves it out"):
        ECProducerConnector(config(levels=3), role)


@pytest.mark.parametrize(("levels", "is_installed"), [(0, False), (0, True), (3, True)])
@pytest.mark.parametrize("role", list(ECConnectorRole))
def test_it_starts(
    monkeypatch: pytest.MonkeyPatch,
    connectors: list[ECProducerConnector],
    role: ECConnectorRole,
    levels: int,
    is_installed: bool,
) -> None:
    monkeypatch.setattr(plugin, "_installed", is_installed)
    connectors.append(ECProducerConnector(config(levels=levels), role))


@pytest.mark.parametrize(("levels", "width"), [(0, WIDTH), (1, 2 * WIDTH), (3, 4 * WIDTH)])
def test_a_row_has_the_features_of_all_levels(
    monkeypatch: pytest.MonkeyPatch, connectors: list[ECProducerConnector], levels: int, width: int
) -> None:
    monkeypatch.setattr(plugin, "_installed", True)
    connector = ECProducerConnector(config(levels=levels), ECConnectorRole.SCHEDULER)
    connectors.append(connector)
    assert not connector.ensure_cache_available(request(width), 0)
    assert connector.take_unavailable_requests() == set()  # it waits
    assert not connector.ensure_cache_available(request(width + WIDTH, request_id="wider"), 0)
    assert connector.take_unavailable_requests() == {"wider"}


def test_sound_has_no_part_in_deepstack(monkeypatch: pytest.MonkeyPatch, connectors: list[ECProducerConnector]) -> None:
    monkeypatch.setattr(plugin, "_installed", True)
    connector = ECProducerConnector(config(levels=3), ECConnectorRole.SCHEDULER)
    connectors.append(connector)
    assert not connector.ensure_cache_available(request(WIDTH, "audio"), 0)
    assert connector.take_unavailable_requests() == set()  # it waits
    assert not connector.ensure_cache_available(request(4 * WIDTH, "audio", request_id="wider"), 0)
    assert connector.take_unavailable_requests() == {"wider"}


# What comes beside vLLM


def test_tickets_that_the_middleware_leaves(connectors: list[ECProducerConnector]) -> None:
    """For requests that vLLM makes itself, which go by a ticket's key and bring nothing."""
    vllm_config = config()
    engine_id = vllm_config.ec_transfer_config.engine_id
    connector = ECProducerConnector(vllm_config, ECConnectorRole.SCHEDULER)
    connectors.append(connector)
    item = feature()
    item.identifier = KEY
    bare = {"mm_features": [item], "ec_transfer_params": None}
    assert not connector.ensure_cache_available(request(WIDTH, request_id="before", **bare), 0)
    assert connector.take_unavailable_requests() == {"before"}
    assert leave_tickets(engine_id, [pull_ticket()])
    assert not connector.ensure_cache_available(request(WIDTH, request_id="after", **bare), 0)
    assert connector.take_unavailable_requests() == set()  # it waits for its embedding


def test_the_reason_of_a_failure(connectors: list[ECProducerConnector]) -> None:
    vllm_config = config()
    engine_id = vllm_config.ec_transfer_config.engine_id
    connector = ECProducerConnector(vllm_config, ECConnectorRole.SCHEDULER)
    connectors.append(connector)
    assert not connector.ensure_cache_available(request(2 * WIDTH), 0)
    failure = ask_reason(engine_id, ["1" * 32])
    assert failure is not None
    assert failure.http_status == 400
    assert "elements a row" in failure.message


# Settings


@pytest.mark.parametrize("ec_role", ["ec_producer", "ec_both"])
def test_another_role(ec_role: str) -> None:
    with pytest.raises(ValueError, match=f"ec_role is '{ec_role}'"):
        ECProducerConnector(config(ec_role=ec_role), ECConnectorRole.SCHEDULER)


def test_a_setting_that_is_none() -> None:
    with pytest.raises(ValueError, match="unknown colour"):
        ECProducerConnector(config(colour="red"), ECConnectorRole.WORKER)


# Which items bring their own tensor

GRID = {"image_grid_thw": 1}
PIXELS = {"pixel_values": 1}


@pytest.mark.parametrize(
    ("found", "is_in_band"),
    [
        (feature(), False),
        (feature(**GRID), False),
        (feature(**GRID, tgt_sizes=1), False),
        (feature("video", video_grid_thw=1, second_per_grid_ts=1), False),
        (feature(**GRID, **PIXELS), True),
        (feature(**GRID, second_per_grid_ts=1), True),
        (feature(image_embeds=1), True),
        (feature("audio"), False),
        (feature("audio", audio_embeds=1), True),
        (feature("audio", tgt_sizes=1), True),
    ],
)
def test_what_brings_its_own_tensor(
    connectors: list[ECProducerConnector], found: SimpleNamespace, is_in_band: bool
) -> None:
    """All that a model declares as metadata is none; of a modality for which it declares none, everything is."""
    connectors.append(ECProducerConnector(config(), ECConnectorRole.SCHEDULER))
    (item,), tickets = connectors[0]._describe(request(WIDTH, mm_features=[found]))
    assert item.is_in_band is is_in_band
    assert (item.identifier, item.modality, item.end, item.num_rows) == ("a", found.modality, 9, 4)
    assert len(tickets) == 1
