"""The shim's lines in vLLM's log: in vLLM's form, with the request's id and its trace's behind them."""

import logging
from collections.abc import MutableMapping
from typing import Any

from producer.wire.log_text import clean
from producer.wire.origin import current

_ROOT = "consumer_shim"


class ShimLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from Python 3.11 on
    """Keeps each line one line, without whole content keys, and says whom it is about."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            text = clean(str(msg) % args if args else str(msg))
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.logger.log(level, "%s%s", text, _ids(), **kwargs)


def join_vllm() -> None:
    """Has the shim's lines go where vLLM's go, unless whoever runs this process has chosen a place for all lines."""
    ours, vllm = logging.getLogger(_ROOT), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers or not vllm.handlers:
        return
    ours.setLevel(vllm.level)
    for handler in vllm.handlers:
        ours.addHandler(handler)


def _ids() -> str:
    origin = current()
    known = {"request_id": origin.request_id, "trace_id": origin.trace_id}
    said = " ".join(f"{name}={value}" for name, value in known.items() if value)
    return f" [{said}]" if said else ""
