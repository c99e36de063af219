"""vLLM's names of modalities ↔ numbers of `ec_producer.v1.Modality`."""

from producer.wire.pb import encoder_cache_pb2 as pb

_NUMBERS = {"image": pb.MODALITY_IMAGE, "video": pb.MODALITY_VIDEO, "audio": pb.MODALITY_AUDIO}
_NAMES: dict[int, str] = {number: name for name, number in _NUMBERS.items()}


def modality_number(name: str) -> pb.Modality.ValueType:
    """The number of a modality that has one."""
    return _NUMBERS[name]


def modality_name(number: int) -> str:
    """vLLM's name of a modality; "number N" for one that has none here."""
    return _NAMES.get(number, f"number {number}")
