"""How a serving process is set before its imports: threads, collector, allocator, and what it does not import.

Measured with vLLM 0.32 on two cores: 3 s of 12 s of start-up, and a third of the memory under load.
"""

import contextlib
import ctypes
import gc
import sys

_M_ARENA_MAX = -8
_ARENAS = 2
"""glibc would give each of some 60 threads an arena, up to eight a core, each of which keeps what its peak took."""
_SWITCH_S = 0.0005
"""After which a thread lets another run Python: the step loop asks for it at each operator, and 5 ms is long."""
_NOT_IMPORTED = ("rfc3987_syntax",)
"""What libraries do without if need be. With it, jsonschema compiles 38 grammars for formats that nobody checks."""


def before_imports() -> None:
    """To be called before vLLM is imported, and `freeze` after it."""
    sys.setswitchinterval(_SWITCH_S)
    gc.disable()  # a million objects come that stay, and would be looked through again and again
    for name in _NOT_IMPORTED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def freeze() -> None:
    """What there is now stays; the collector looks at what comes from here on. May be called again."""
    gc.freeze()
    gc.enable()
