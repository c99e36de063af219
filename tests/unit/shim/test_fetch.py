"""Media at URLs: fetched by vLLM's own connector from a real server on loopback, or refused by its rules."""

import base64
from pathlib import Path
from types import SimpleNamespace

import pytest

from consumer_shim.fetch import Fetcher
from consumer_shim.rewrite import RequestError
from tests.kit.ports import free_port
from tests.unit.shim.conftest import FileServer

MAX_BYTES = 1000


def fetcher(*, domains: list[str] | None = None, folder: Path | None = None) -> Fetcher:
    """As for a vLLM with these `--allowed-media-domains` and this `--allowed-local-media-path`."""
    settings = SimpleNamespace(allowed_media_domains=domains, allowed_local_media_path=str(folder or ""))
    return Fetcher(settings, MAX_BYTES)


async def refusal(fetch: Fetcher, url: str, modality: str = "image") -> RequestError:
    with pytest.raises(RequestError) as refused:
        await fetch(url, modality)
    return refused.value


# From the web


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize("size", [0, 1, MAX_BYTES])
async def test_the_file_as_it_is(file_server: FileServer, modality: str, size: int) -> None:
    file = file_server.files["/cat.png?x=1"] = (bytes(range(256)) * 4)[:size]
    assert await fetcher()(f"{file_server.url}/cat.png?x=1", modality) == file
    assert file_server.requests == ["/cat.png?x=1"]


async def test_an_allowed_domain(file_server: FileServer) -> None:
    file_server.files["/cat.png"] = b"cat"
    assert await fetcher(domains=["example.org", "127.0.0.1"])(f"{file_server.url}/cat.png", "image") == b"cat"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1@example.org", "LOCALHOST"])
async def test_another_domain_is_not_even_asked(file_server: FileServer, host: str) -> None:
    file_server.files["/cat.png"] = b"cat"
    url = file_server.url.replace("127.0.0.1", host) + "/cat.png"
    refused = await refusal(fetcher(domains=["allowed.example"]), url, "video")
    assert refused.status == 400
    assert str(refused).startswith("the video is not fetched: The URL must be from one of the allowed domains")
    assert "allowed.example" in str(refused)
    assert file_server.requests == []


@pytest.mark.parametrize(
    ("status", "expected", "sentence"),
    [
        (404, 422, "HTTP 404"),
        (403, 422, "HTTP 403"),
        (429, 502, "the image could not be fetched: 429"),
        (500, 502, "the image could not be fetched: 500"),
        (503, 502, "the image could not be fetched: 503"),
    ],
)
async def test_what_the_web_server_says(file_server: FileServer, status: int, expected: int, sentence: str) -> None:
    file_server.statuses["/cat.png"] = status
    refused = await refusal(fetcher(), f"{file_server.url}/cat.png")
    assert refused.status == expected
    assert sentence in str(refused)


async def test_nobody_there(file_server: FileServer) -> None:
    refused = await refusal(fetcher(), f"http://127.0.0.1:{free_port()}/cat.png", "audio")
    assert refused.status == 502
    assert str(refused).startswith("the audio could not be fetched: ")


@pytest.mark.usefixtures("file_server")
async def test_too_slow_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is vLLM's, of the modality; its error has no words of its own."""

    async def load(url: str, media_io: object, *, fetch_timeout: float) -> bytes:
        assert fetch_timeout == 7
        raise TimeoutError

    monkeypatch.setenv("VLLM_AUDIO_FETCH_TIMEOUT", "7")
    fetch = fetcher()
    monkeypatch.setattr(fetch._connector, "load_from_url_async", load)
    refused = await refusal(fetch, "http://127.0.0.1/cat.wav", "audio")
    assert (refused.status, str(refused)) == (502, "the audio could not be fetched: TimeoutError")


async def test_too_large_a_file(file_server: FileServer) -> None:
    file_server.files["/cat.png"] = b"x" * (MAX_BYTES + 1)
    refused = await refusal(fetcher(), f"{file_server.url}/cat.png")
    assert refused.status == 400
    assert str(refused).startswith("the image is not fetched: ")


async def test_larger_than_vllm_ever_downloads(file_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    file_server.files["/cat.png"] = b"x" * ((1 << 20) + 1)
    settings = SimpleNamespace(allowed_media_domains=None, allowed_local_media_path="")
    refused = await refusal(Fetcher(settings, 1 << 30), f"{file_server.url}/cat.png")
    assert refused.status == 422
    assert "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB=1" in str(refused)


# From the disk


async def test_a_file_in_the_allowed_folder(tmp_path: Path) -> None:
    (tmp_path / "a cat.png").write_bytes(b"cat")
    assert await fetcher(folder=tmp_path)(f"file://{tmp_path}/a%20cat.png", "image") == b"cat"


async def test_no_folder_is_allowed_by_default(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    refused = await refusal(fetcher(), f"file://{tmp_path}/cat.png")
    assert refused.status == 400
    assert "--allowed-local-media-path" in str(refused)


@pytest.mark.parametrize("path", ["secret", "allowed/../secret", "allowed/link", "allowed/%2e%2e/secret", "%00"])
async def test_a_file_elsewhere(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "secret")
    assert (await refusal(fetcher(folder=tmp_path / "allowed"), f"file://{tmp_path}/{path}")).status == 400


async def test_too_large_a_file_on_disk(tmp_path: Path) -> None:
    (tmp_path / "fits").write_bytes(b"x" * MAX_BYTES)
    (tmp_path / "larger").write_bytes(b"x" * (MAX_BYTES + 1))
    fetch = fetcher(folder=tmp_path)
    assert len(await fetch(f"file://{tmp_path}/fits", "image")) == MAX_BYTES
    refused = await refusal(fetch, f"file://{tmp_path}/larger")
    assert (refused.status, str(refused)) == (
        400,
        f"the image is not fetched: the file has more than {MAX_BYTES} bytes",
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("absent.png", "No such file"), ("cat.png/x", "Not a directory"), ("x" * 1000, "name too long")],
)
async def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, sentence: str) -> None:
    """The client named it; nothing behind this server is at fault."""
    (tmp_path / "cat.png").write_bytes(b"cat")
    refused = await refusal(fetcher(folder=tmp_path), f"file://{tmp_path}/{name}")
    assert refused.status == 400
    assert str(refused).startswith("the image is not fetched: ")
    assert sentence in str(refused)


async def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from a stand-in for the disk: whoever runs the tests may be allowed to read everything."""

    def read_bytes(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "cat.png").write_bytes(b"cat")
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    refused = await refusal(fetcher(folder=tmp_path), f"file://{tmp_path}/cat.png")
    assert refused.status == 400
    assert "Permission denied" in str(refused)


# Other URLs


@pytest.mark.parametrize(
    "url",
    ["ftp://127.0.0.1/cat.png", "cat.png", "http://[", "gopher://x", "s3://x/y", "//127.0.0.1/x", "\x00", "http"],
)
@pytest.mark.usefixtures("file_server")
async def test_what_is_not_fetched(url: str) -> None:
    refused = await refusal(fetcher(), url)
    assert refused.status == 400
    assert str(refused).startswith("the image is not fetched: ")


@pytest.mark.parametrize("url", ["http://", "httpx://127.0.0.1/", "http://exa mple/"])
@pytest.mark.usefixtures("file_server")
async def test_http_urls_that_are_none(url: str) -> None:
    assert 400 <= (await refusal(fetcher(), url)).status < 500


async def test_a_data_url_in_capitals() -> None:
    """One in the usual form never comes here."""
    fetch = fetcher()
    data = base64.b64encode(b"cat").decode()
    assert await fetch(f"DATA:image/png;base64,{data}", "image") == b"cat"
    for url in (
        "DATA:image/png,cat",
        "DATA:image/png;base64",
        "DATA:image/png;base64,A",
        "DATA:video/jpeg;base64,AA==",
    ):
        assert (await refusal(fetch, url)).status == 400


async def test_what_is_said_has_a_bound(file_server: FileServer) -> None:
    refused = await refusal(fetcher(domains=["x" * 10_000]), f"{file_server.url}/cat.png")
    assert len(str(refused)) < 400


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--allowed-local-media-path"):
        fetcher(folder=tmp_path / "absent")
