"""A transport library whose state breaks: its `progress` raises once a read was posted.

It does not reproduce a transport: it moves no bytes, and no read ever ends well.
"""

from collections.abc import Mapping

from producer.memory.region import SharedRegion


class FailingBackend:
    def start(self, region: SharedRegion, options: Mapping[str, str]) -> tuple[str, bytes]:
        self._broken = False
        return "failing", b""

    def post(self, read_id: int, peer: str, peer_metadata: bytes, address: int, offset: int, num_bytes: int) -> None:
        self._broken = True

    def progress(self) -> list[tuple[int, str]]:
        if self._broken:
            raise RuntimeError("the library's state is broken")
        return []
