"""Names and numbers of modalities."""

import pytest

from producer.wire.modality import modality_name, modality_number
from producer.wire.pb import encoder_cache_pb2 as pb


@pytest.mark.parametrize("name", ["image", "video", "audio"])
def test_names_round_trip(name: str) -> None:
    assert modality_name(modality_number(name)) == name
    assert pb.Modality.Name(modality_number(name)) == f"MODALITY_{name.upper()}"


@pytest.mark.parametrize("number", [0, 99, -1])
def test_a_number_without_a_name_shows(number: int) -> None:
    assert modality_name(number) == f"number {number}"


def test_every_number_but_the_unspecified_has_a_name() -> None:
    nameless = [number for number in pb.Modality.values() if modality_name(number) == f"number {number}"]
    assert nameless == [pb.MODALITY_UNSPECIFIED]
