"""Changes that keep an input's structure, so that most of what they make passes the first parser.

Each is `(data, most, random, any_bytes) -> data`: at most `most` bytes, decided by `random`. `any_bytes` is libFuzzer's
own mutation of bytes.
"""

import copy
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

AnyBytes = Callable[[bytes, int], bytes]
Mutate = Callable[[bytes, int, random.Random, AnyBytes], bytes]

_NUMBERS = (*range(4), *(2**bits - odd for bits in (7, 8, 16, 31, 32, 53, 63, 64) for odd in (0, 1)), -1)
_ODD = (None, True, False, [], {}, "", "\ud800", "é\0", 1.5, -0.0, 1e308, float("nan"), float("inf"), *_NUMBERS)
_EMPTY = {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}
_DEPTHS = (1, 2, 50, *range(900, 1000, 7))


def with_kind(kinds: int, mutate: Sequence[Mutate] | Mutate) -> Mutate:
    """For an input whose first byte chooses what the rest is: that byte is changed now and then."""

    def changed(data: bytes, most: int, dice: random.Random, any_bytes: AnyBytes) -> bytes:
        kind = data[0] % kinds if data else 0
        if not data or dice.random() < 0.03:
            kind = dice.randrange(kinds)
        one = mutate if callable(mutate) else mutate[kind]
        return bytes([kind]) + one(data[1:], most - 1, dice, any_bytes)

    return changed


def plain(data: bytes, most: int, dice: random.Random, any_bytes: AnyBytes) -> bytes:
    """libFuzzer's own."""
    return any_bytes(data, most)


def json_text(words: Sequence[Any]) -> Mutate:
    """For JSON in which `words`, keys and values, mean something."""

    def changed(data: bytes, most: int, dice: random.Random, any_bytes: AnyBytes) -> bytes:
        if dice.random() < 0.15:
            return any_bytes(data, most)
        try:
            tree = [json.loads(data)]
            for _ in range(dice.choice((1, 1, 2, 4))):
                _change_node(tree, words, dice)
            made = json.dumps(tree[0]).encode()
        except (ValueError, RecursionError):
            return any_bytes(data, most)
        return made if len(made) <= most else any_bytes(data, most)

    return changed


def _change_node(tree: list[Any], words: Sequence[Any], dice: random.Random) -> None:
    """Changes one place of the tree; `tree` itself has its root."""
    places = [(tree, 0), *_places(tree[0])]
    parent, place = dice.choice(places)
    what = dice.randrange(7)
    word, odd = copy.deepcopy(dice.choice(words)), copy.deepcopy(dice.choice(_ODD))
    if what == 0:
        parent[place] = odd
    elif what == 1:
        parent[place] = word
    elif what == 2 and parent is not tree:
        del parent[place]
    elif what == 3:
        source, at = dice.choice(places)
        parent[place] = json.loads(json.dumps(source[at]))
    elif what == 4 and isinstance(parent[place], dict):
        parent[place][str(dice.choice(words))] = dice.choice((word, odd))
    elif what == 5 and isinstance(parent[place], list):
        parent[place].insert(dice.randint(0, len(parent[place])), word)
    elif what == 6:
        for _ in range(dice.choice(_DEPTHS) if dice.random() < 0.2 else 1):
            parent[place] = [parent[place]]


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    left = [tree]
    while left:
        node = left.pop()
        keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            yield node, key
            left.append(node[key])


def message(kind: type[Message], words: Sequence[str]) -> Mutate:
    """For a serialised message of `kind`, in whose text fields `words` mean something."""

    def changed(data: bytes, most: int, dice: random.Random, any_bytes: AnyBytes) -> bytes:
        if dice.random() < 0.1:
            return any_bytes(data, most)
        try:
            parsed = kind.FromString(data)
        except DecodeError:
            return any_bytes(data, most)
        for _ in range(dice.choice((1, 1, 2, 4))):
            _change_field(parsed, words, dice, any_bytes)
        made = parsed.SerializeToString()
        return made if len(made) <= most else any_bytes(data, most)

    return changed


def _change_field(parsed: Message, words: Sequence[str], dice: random.Random, any_bytes: AnyBytes) -> None:
    """Sets, clears or adds to one field of the message or of one inside it."""
    inside = parsed
    while True:
        nested = [one for field, value in inside.ListFields() for one in _messages(field, value)]
        if not nested or dice.random() < 0.35:
            break
        inside = dice.choice(nested)
    field = dice.choice(inside.DESCRIPTOR.fields)
    value = getattr(inside, field.name)
    if dice.random() < 0.15:
        inside.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
            value[dice.choice(words)] = dice.choice(words)
    elif field.is_repeated:
        _change_list(field, value, words, dice, any_bytes)
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(inside, field.name, _scalar(field, value, words, dice, any_bytes))


def _messages(field: FieldDescriptor, value: Any) -> Sequence[Message]:
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return ()
    return list(value) if field.is_repeated else (value,)


def _change_list(
    field: FieldDescriptor, value: Any, words: Sequence[str], dice: random.Random, any_bytes: AnyBytes
) -> None:
    if len(value) and dice.random() < 0.3:
        del value[dice.randrange(len(value))]
    elif field.message_type is None:
        last = value[-1] if len(value) else _EMPTY.get(field.type, 0)
        value.append(_scalar(field, last, words, dice, any_bytes))
    elif len(value) and dice.random() < 0.7:
        value.add().CopyFrom(dice.choice(list(value)))
    else:
        value.add()


def _scalar(field: FieldDescriptor, value: Any, words: Sequence[str], dice: random.Random, any_bytes: AnyBytes) -> Any:
    """Another value that the field can have."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return dice.choice((*words, "", "é", value + dice.choice(words), value[: len(value) // 2], "9" * 300))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return any_bytes(value or b"\0", len(value) + 16)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return dice.choice((0.0, -1.0, 1.0, 1000.5, 1e300, float("nan"), float("inf"), float("-inf")))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not value
    bits = 64 if field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64) else 32
    low, high = (0, 2**bits) if "UINT" in _type_name(field) else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return min(max(low, dice.choice((*_NUMBERS, -(2**63), dice.randrange(64), (value or 0) + 1))), high - 1)


def _type_name(field: FieldDescriptor) -> str:
    return "UINT" if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64) else "INT"


def media_file(data: bytes, most: int, dice: random.Random, any_bytes: AnyBytes) -> bytes:
    """For media files: numbers of their headers, their length, any bytes; a PNG's checksums are made right again."""
    what = dice.randrange(4)
    made = bytearray(data)
    if what == 0 and len(made) > 8:
        form = dice.choice((">H", "<H", ">I", "<I"))
        at = dice.randrange(min(len(made), dice.choice((64, 512, 1 << 20))) - 4)
        struct.pack_into(form, made, at, dice.choice(_NUMBERS) % (1 << 8 * struct.calcsize(form)))
    elif what == 1 and len(made) > 8:
        del made[dice.randrange(len(made)) :]
    else:
        made = bytearray(any_bytes(bytes(made), most))
    if made.startswith(b"\x89PNG") and dice.random() < 0.8:
        _repair_png(made)
    return bytes(made[:most])


def _repair_png(made: bytearray) -> None:
    at = 8
    while at + 12 <= len(made):
        (length,) = struct.unpack_from(">I", made, at)
        end = at + 8 + length
        if end + 4 > len(made):
            return
        struct.pack_into(">I", made, end, zlib.crc32(made[at + 4 : end]))
        at = end + 4
