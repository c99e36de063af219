"""`ec-producer` whose encoder replays graphs on a host without a GPU: those of `tests.kit.emulated`.

    python -m tests.kit.emulated_serve serve MODEL …

All else is the real service: what it batches, which graph a step replays, what misses and why, and what that pads. Not
reproduced are the capture and what graphs take of a device's memory, so it has no plan of that either.
"""

import sys
from typing import Any

from producer.cli import main
from tests.kit import emulated


def add_graphs() -> None:
    """To be called before a service starts: graphs are captured whatever the device is."""
    from producer.runner import engine

    def captured(encoder: Any, settings: engine.EngineSettings) -> tuple[Any, str]:
        graphs = encoder.graphs(settings.graph_rows, settings.graph_items, emulated.Recorder())
        graphs.rehearse()
        graphs.capture()
        return graphs, ""

    engine._graphs = captured


if __name__ == "__main__":
    add_graphs()
    with emulated.attention_that_leaves_tails():
        sys.exit(main(sys.argv[1:]))
