"""`ec-producer encode` against a real port: what people read, and the files that it writes."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from producer.encode_command import encode_files
from producer.wire.content_key import content_key
from tests.integration.rig import FINGERPRINT, WIDTH, Rig, embedding_of
from tests.kit.ports import free_port

Capture = pytest.CaptureFixture[str]


async def encode(address: str, folder: Path | None, *files: Path) -> int:
    return await asyncio.to_thread(encode_files, list(files), address, folder, 60.0)


async def test_a_line_a_file(rig: Rig, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.png").write_bytes(b"photo")
    assert await encode(rig.address, None, tmp_path / "a.png") == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["rows", "width", "dtype", "ms"]
    rows, width, dtype, _, key, file = line.split()
    assert (rows, width, dtype) == ("5", str(WIDTH), "float32")
    assert (key, file) == (content_key(FINGERPRINT, "image", b"photo"), str(tmp_path / "a.png"))
    assert rig.pool.num_leases == 0


async def test_the_embedding_is_written(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"photo")
    assert await encode(rig.address, tmp_path / "out", tmp_path / "a.png") == 0
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == f"{content_key(FINGERPRINT, 'image', b'photo')}.safetensors"
    assert torch.equal(load_file(file)["embedding"], embedding_of(b"photo"))
    assert rig.pool.num_leases == 0


async def test_a_bad_file_fails_the_command_and_voids_no_other(rig: Rig, tmp_path: Path, capsys: Capture) -> None:
    bad, absent, fine = tmp_path / "bad.png", tmp_path / "absent.png", tmp_path / "fine.png"
    bad.write_bytes(b"bad")
    fine.write_bytes(b"fine")
    assert await encode(rig.address, None, bad, absent, fine) == 1
    printed = capsys.readouterr()
    assert str(fine) in printed.out
    errors = printed.err.splitlines()
    assert errors[0] == f"{bad}: the image cannot be decoded"
    assert errors[1].startswith(f"{absent}: ")
    assert len(errors) == 2


async def test_a_files_name_says_its_modality(tmp_path: Path, capsys: Capture) -> None:
    files = {"a.png": "image", "b.mp4": "video", "c.wav": "audio", "d.bin": "image"}
    for name in files:
        (tmp_path / name).write_bytes(b"file")
    async with Rig(modalities=("image", "video", "audio")) as rig:
        assert await encode(rig.address, None, *(tmp_path / name for name in files)) == 0
    keys = [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert keys == [content_key(FINGERPRINT, modality, b"file") for modality in files.values()]


async def test_a_modality_that_is_not_served_is_said(rig: Rig, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "b.mp4").write_bytes(b"film")
    assert await encode(rig.address, None, tmp_path / "b.mp4") == 1
    assert capsys.readouterr().err == f"{tmp_path / 'b.mp4'}: modality video is not served; image is\n"


async def test_no_producer_is_said_not_hung(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.png").write_bytes(b"photo")
    assert await encode(f"127.0.0.1:{free_port()}", None, tmp_path / "a.png") == 1
    assert "a.png: " in capsys.readouterr().err
