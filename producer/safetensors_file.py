"""One tensor as a safetensors file: the format is a length, a JSON header and the bytes; no library is needed."""

import json

from producer.wire.block import EmbeddingShape

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def pack(name: str, shape: EmbeddingShape, rows: bytes | memoryview) -> bytes:
    """The file of a tensor `name` [num_rows, width] with these rows."""
    entry = {"dtype": _DTYPES[shape.dtype], "shape": [shape.num_rows, shape.width], "data_offsets": [0, len(rows)]}
    header = json.dumps({name: entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + rows
