"""Media at URLs, fetched by vLLM's own connector and so under its rules: domains, local folder, timeouts."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import vllm.envs as envs
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaIO

from consumer_shim.rewrite import RequestError, data_of

_TIMEOUTS_S = {
    "image": lambda: envs.VLLM_IMAGE_FETCH_TIMEOUT,
    "video": lambda: envs.VLLM_VIDEO_FETCH_TIMEOUT,
    "audio": lambda: envs.VLLM_AUDIO_FETCH_TIMEOUT,
}


class _FileIO(MediaIO[bytes]):
    """The file as it is, since the producer decodes it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def get_max_bytes(self) -> int:
        return self._max_bytes

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return data_of(f"data:{media_type};base64,{data}")

    def load_file(self, filepath: Path) -> bytes:
        if filepath.stat().st_size > self._max_bytes:
            raise ValueError(f"the file has more than {self._max_bytes} bytes")
        return filepath.read_bytes()


class Fetcher:
    """Fetches for one server. For its event loop."""

    def __init__(self, model_config: Any, max_bytes: int) -> None:
        """Files of more than `max_bytes` are refused. `model_config` is vLLM's."""
        self._io = _FileIO(max_bytes)
        self._connector = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            media_io_kwargs=None,
            allowed_local_media_path=model_config.allowed_local_media_path,
            allowed_media_domains=model_config.allowed_media_domains,
        )

    async def __call__(self, url: str, modality: str) -> bytes:
        """The file at `url`.

        Raises:
            RequestError: vLLM does not fetch it, or it cannot be had.
        """
        timeout_s = _TIMEOUTS_S[modality]()
        try:
            data: bytes = await self._connector.load_from_url_async(url, self._io, fetch_timeout=timeout_s)
        except VLLMUnprocessableEntityError as error:
            raise RequestError(422, str(error)) from None
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise RequestError(502, f"the {modality} could not be fetched: {_said(error)}") from None
        except (VLLMValidationError, ValueError, RuntimeError, OSError) as error:  # not allowed, too large, absent
            raise RequestError(400, f"the {modality} is not fetched: {_said(error)}") from None
        return data


def _said(error: Exception) -> str:
    return f"{error}"[:300] or type(error).__name__
