"""What `bench.gpu` has measured so far, as a tree of figures that is in its file at every moment."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Record:
    """Owns the file: each figure is written when it comes, since what comes next may take too long."""

    def __init__(self, path: Path, head: Mapping[str, object]) -> None:
        """Begins the file at `path`, whose folder is there, with `head`; what was in it is gone."""
        self._path = path
        self.tree: dict[str, Any] = dict(head)
        self._write()

    def put(self, place: str, value: object) -> None:
        """`value`, which JSON takes, at `place`: names with slashes between them."""
        *folders, name = place.split("/")
        node = self.tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
        self._write()

    def add(self, place: str, value: object) -> None:
        """`value` at the end of the list at `place`."""
        self.put(place, [*self.get(place, []), value])

    def get(self, place: str, default: Any = None) -> Any:
        """What is at `place`."""
        node: Any = self.tree
        for name in place.split("/"):
            if not isinstance(node, Mapping) or name not in node:
                return default
            node = node[name]
        return node

    def _write(self) -> None:
        """Whole or not at all: whoever ends this process does not ask when."""
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.tree, indent=1) + "\n")
        os.replace(draft, self._path)
