"""A picture, a video or a sound, as the file that a client would send."""

import base64
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    modality: ClassVar[str]
    """`image`, `video` or `audio`."""
    name: str
    """Subject and format, such as `coffee.jpg`."""
    mime: str
    data: bytes
    """The encoded file."""

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()

    @property
    def data_url(self) -> str:
        """The form in which an OpenAI chat request carries the bytes of a picture or a video."""
        return f"data:{self.mime};base64,{self.base64}"
