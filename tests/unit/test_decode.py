"""Decoding as vLLM's own server does it: files by its decoders, under the model's settings, and arrays as they are."""

import io
import os
import wave
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from producer.core import DecodedForm, MediaItem
from producer.item_checks import _check_decoded
from producer.wire.modality import modality_number
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.clips import sounds, videos
from tests.kit.hostile import cases
from tests.kit.photos import photos
from tests.unit.models import decoded_item, equal, file_item, inputs_of, model_config, pixels_of

MODALITIES = ("image", "video", "audio")


@pytest.fixture(scope="module")
def decoder() -> Any:
    return decoder_of()


def decoder_of(**media_io_kwargs: Any) -> Any:
    from producer.decode import Decoder

    return Decoder(model_config("qwen2_5_vl", media_io_kwargs=media_io_kwargs))


def processor_of(family: str) -> Any:
    from producer.stand_in import Processor

    return Processor(model_config(family))


def frames_of(data: bytes, tmp_path: Any) -> NDArray[np.uint8]:
    """All frames of a video, read by OpenCV alone."""
    (tmp_path / "video.mp4").write_bytes(data)
    capture = cv2.VideoCapture(str(tmp_path / "video.mp4"))
    frames = []
    while (read := capture.read())[0]:
        frames.append(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    capture.release()
    return np.stack(frames)


def samples_of(data: bytes) -> NDArray[np.float32]:
    """The samples of a WAV, read by Python alone."""
    with wave.open(io.BytesIO(data)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype("<f4") / 32768


def halves() -> bytes:
    """A PNG whose left half lets the background through, and whose right half is red."""
    picture = Image.new("RGBA", (112, 112), (255, 0, 0, 255))
    picture.paste((0, 0, 0, 0), (0, 0, 56, 112))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


# Files


@pytest.mark.parametrize("name", photos())
def test_an_image_file_becomes_its_pixels(decoder: Any, name: str) -> None:
    found = decoder.decode(file_item(photos()[name]))
    assert np.array_equal(np.asarray(found.media), pixels_of(photos()[name].data))


@pytest.mark.parametrize(("name", "rate_hz"), [("coffee-pan.mp4", 4.0), ("rocket-zoom.mp4", 8.0)])
def test_a_video_file_becomes_frames_and_what_they_are(decoder: Any, tmp_path: Any, name: str, rate_hz: float) -> None:
    frames, metadata = decoder.decode(file_item(videos()[name]))
    every = frames_of(videos()[name].data, tmp_path)
    assert metadata["fps"] == rate_hz
    assert metadata["total_num_frames"] == len(every)
    assert np.array_equal(frames, every[metadata["frames_indices"]])


@pytest.mark.parametrize("name", sounds())
def test_an_audio_file_becomes_its_samples(decoder: Any, name: str) -> None:
    samples, rate_hz = decoder.decode(file_item(sounds()[name]))
    assert rate_hz == 16000
    assert np.array_equal(samples, samples_of(sounds()[name].data))


# What a client decoded


def test_a_decoded_image_is_those_pixels(decoder: Any) -> None:
    pixels = pixels_of(photos()["rocket.jpg"].data)
    found = decoder.decode(decoded_item("image", pixels))
    assert (found.mode, found.size) == ("RGB", (pixels.shape[1], pixels.shape[0]))
    assert np.array_equal(np.asarray(found), pixels)


def test_a_decoded_video_is_those_frames_and_all_of_them(decoder: Any) -> None:
    pixels = np.arange(3 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 4, 5, 3)
    frames, metadata = decoder.decode(decoded_item("video", pixels, 2.5))
    assert np.array_equal(frames, pixels)
    assert frames.flags.writeable  # as those of a file are
    assert (metadata["fps"], metadata["duration"], metadata["total_num_frames"]) == (2.5, 1.2, 3)
    assert (metadata["frames_indices"], metadata["do_sample_frames"]) == ([0, 1, 2], False)


def test_decoded_audio_is_those_samples(decoder: Any) -> None:
    values = np.array([0.0, 0.5, -1.0, 1e-7], "<f4")
    samples, rate_hz = decoder.decode(decoded_item("audio", values, 8000.5))
    assert (samples.dtype, samples.shape, rate_hz) == (np.float32, (4,), 8000.5)
    assert np.array_equal(samples, values)
    assert samples.flags.writeable


def test_a_form_that_the_bytes_do_not_have_is_an_error(decoder: Any) -> None:
    """Admission has refused it long before."""
    for modality, shape in (("image", (2, 2, 3)), ("video", (1, 2, 2, 3)), ("audio", (4,))):
        with pytest.raises(ValueError, match=r"reshape|buffer size"):
            decoder.decode(MediaItem(modality=modality, data=bytes(9), decoded=DecodedForm(shape=shape, rate_hz=1)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "internvl"])
def test_an_image_decoded_by_its_client_gives_the_inputs_of_its_file(decoder: Any, family: str) -> None:
    processor = processor_of(family)
    for photo in photos().values():
        file, pixels = file_item(photo), decoded_item("image", pixels_of(photo.data))
        from_file, from_pixels = (inputs_of(processor, "image", decoder.decode(item)) for item in (file, pixels))
        assert equal(from_file, from_pixels), photo.name


def test_a_video_decoded_by_its_client_gives_the_inputs_of_its_file(tmp_path: Any) -> None:
    """Where the decoder takes every frame; which ones a client takes is its own affair."""
    every, processor = decoder_of(video={"fps": 8}), processor_of("qwen2_5_vl")
    for name, rate_hz in (("coffee-pan.mp4", 4.0), ("rocket-zoom.mp4", 8.0)):
        file = file_item(videos()[name])
        frames = decoded_item("video", frames_of(file.data, tmp_path), rate_hz)
        from_file, from_frames = (inputs_of(processor, "video", every.decode(item)) for item in (file, frames))
        assert equal(from_file, from_frames), name
        slower = decoded_item("video", frames_of(file.data, tmp_path), rate_hz / 2)
        assert not equal(from_file, inputs_of(processor, "video", every.decode(slower)))


def test_audio_decoded_by_its_client_gives_the_inputs_of_its_file(decoder: Any) -> None:
    processor = processor_of("qwen2_audio")
    for sound in sounds().values():
        samples = decoded_item("audio", samples_of(sound.data), 16000.0)
        from_file, from_samples = (
            inputs_of(processor, "audio", decoder.decode(item)) for item in (file_item(sound), samples)
        )
        assert equal(from_file, from_samples), sound.name


# Settings


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, (255, 255, 255)),
        ({"rgba_background_color": [0, 0, 255]}, (0, 0, 255)),
        ({"rgba_background_color": [0, 0, 255], "image_mode": "L"}, None),
    ],
    ids=str,
)
def test_settings_for_images_reach_the_decoder(settings: dict[str, Any], left: tuple[int, int, int] | None) -> None:
    picture = decoder_of(image=settings).decode(MediaItem(modality="image", data=halves())).media
    assert picture.mode == settings.get("image_mode", "RGB")
    if left is not None:
        assert (picture.getpixel((0, 0)), picture.getpixel((111, 111))) == (left, (255, 0, 0))


@pytest.mark.parametrize(
    ("settings", "num_frames"),
    [
        ({}, 8),  # the sampling that belongs to Qwen2.5-VL's processor: two frames a second
        ({"fps": 1}, 4),
        ({"fps": 4, "max_frames": 6}, 6),
        ({"video_backend": "opencv"}, 16),  # the general one
        ({"video_backend": "opencv", "num_frames": 5}, 5),
    ],
    ids=str,
)
def test_settings_for_videos_reach_the_decoder(settings: dict[str, Any], num_frames: int) -> None:
    frames, _ = decoder_of(video=settings).decode(file_item(videos()["coffee-pan.mp4"]))
    assert len(frames) == num_frames


def test_settings_for_audio_reach_the_decoder() -> None:
    with pytest.raises(ValueError, match="Unknown audio_backend 'nonsense'"):
        decoder_of(audio={"audio_backend": "nonsense"})


def test_settings_are_left_as_they_are() -> None:
    """They are part of the fingerprint, and compared with those of clients."""
    from producer.decode import Decoder

    settings = {"image": {"image_mode": "RGB"}, "video": {"fps": 1}}
    config = model_config("qwen2_5_vl", media_io_kwargs=settings)
    Decoder(config)
    assert config.multimodal_config.media_io_kwargs == {"image": {"image_mode": "RGB"}, "video": {"fps": 1}}


@pytest.mark.parametrize("num_frames", [0, -1, "-1", -2.5])
def test_a_video_without_a_bound_is_refused(num_frames: Any) -> None:
    with pytest.raises(ValueError, match=f"video.num_frames is {num_frames}; a video needs a bound"):
        decoder_of(video={"num_frames": num_frames})


@pytest.mark.parametrize("num_frames", [1, 4096])
def test_a_video_with_a_bound_is_fine(num_frames: int) -> None:
    decoder_of(video={"num_frames": num_frames})


@pytest.mark.parametrize("color", [[1], [0, 0, 256], "red"], ids=str)
def test_a_color_that_is_none_is_refused(color: Any) -> None:
    with pytest.raises(ValueError, match="rgba_background_color"):
        decoder_of(image={"rgba_background_color": color})


@pytest.mark.parametrize("video", [{"num_frames": None}, {"num_frames": []}, {"video_backend": "nonsense"}], ids=str)
def test_settings_that_are_none_are_a_users_mistake(video: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_frames|nonsense"):
        decoder_of(video=video)


# Limits


def limited(**limits: Any) -> Any:
    from producer.decode import Decoder
    from producer.media_limits import MediaLimits

    return Decoder(model_config("qwen2_5_vl"), MediaLimits(**limits))


def refusal(decoder: Any, modality: str, data: bytes) -> Exception:
    with pytest.raises(ValueError, match=r"\S") as caught:
        decoder.decode(MediaItem(modality=modality, data=data))
    return caught.value


def plain_png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_an_image_may_have_as_many_pixels_as_the_limit_says() -> None:
    from producer.media_limits import MediaTooLargeError

    decoder = limited(max_pixels=100)
    assert decoder.decode(MediaItem(modality="image", data=plain_png(20, 5))).media.size == (20, 5)
    for width in (21, 50, 200):  # Pillow alone warns of the first, and takes them
        error = refusal(decoder, "image", plain_png(width, 5))
        assert isinstance(error, MediaTooLargeError)
        assert str(error) == f"it has {width * 5} pixels; at most 100 are allowed"


def test_pillows_own_limit_is_left_as_it_was() -> None:
    before = Image.MAX_IMAGE_PIXELS
    refusal(limited(max_pixels=100), "image", plain_png(50, 50))
    assert before == Image.MAX_IMAGE_PIXELS


def test_a_jpeg_may_go_over_its_pixels_so_often() -> None:
    from producer.media_limits import MediaTooLargeError

    data = cases()["image/jpeg-2000-scans"].data
    num_scans = data.count(b"\xff\xda")
    enough = num_scans * 4_000_000 // 32
    assert limited(max_pixels=enough).decode(MediaItem(modality="image", data=data)).media.size == (2000, 2000)
    error = refusal(limited(max_pixels=enough - 1), "image", data)
    assert isinstance(error, MediaTooLargeError)
    assert str(error) == f"its 4000000 pixels are coded in {num_scans} scans"


def test_a_video_may_have_as_many_pixels_and_frames_as_the_limits_say() -> None:
    from producer.media_limits import MediaTooLargeError

    video = videos()["coffee-pan.mp4"].data  # 16 frames of 112 by 112, of which 8 are taken
    fits = limited(max_video_pixels=8 * 112 * 112, max_video_frames=16)
    assert fits.decode(MediaItem(modality="video", data=video))[0].shape == (8, 112, 112, 3)
    for limits, said in (
        ({"max_video_pixels": 8 * 112 * 112 - 1}, "8 frames of 112 by 112 pixels are taken of it; at most 100351"),
        ({"max_video_frames": 15}, "it has 16 frames; at most 15 are allowed"),
    ):
        error = refusal(limited(**limits), "video", video)
        assert isinstance(error, MediaTooLargeError)
        assert str(error).startswith(said)


def test_frames_that_a_video_has_and_does_not_declare_are_counted() -> None:
    """A header that says too much is not believed; what vLLM counts then is."""
    case = cases()["video/avi-says-2147483647-frames"]
    assert limited(max_video_frames=8).decode(MediaItem(modality="video", data=case.data))[0].shape[0] == 4
    assert "it has 8 frames; at most 7" in str(refusal(limited(max_video_frames=7), "video", case.data))


def test_a_sound_may_last_as_long_as_the_limit_says() -> None:
    from producer.media_limits import MediaTooLargeError

    data = sounds()["chirp.wav"].data  # a second
    assert len(limited(max_audio_s=1).decode(MediaItem(modality="audio", data=data))[0]) == 16000
    error = refusal(limited(max_audio_s=0.9), "audio", data)
    assert isinstance(error, MediaTooLargeError)
    assert str(error) == "it lasts 1.0 s; at most 0.9 are allowed"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.1e9, -1e38])
def test_samples_that_no_device_records_are_refused(decoder: Any, value: float) -> None:
    with pytest.raises(ValueError, match="not finite, or beyond all loudness"):
        decoder.decode(decoded_item("audio", np.array([0, value, 0], "<f4"), 16000.0))


def test_a_list_of_addresses_is_not_followed(decoder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """FFmpeg would open a file of this name in the working directory, or these sockets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.mp4").write_bytes(videos()["coffee-pan.mp4"].data)
    listed = b"ffconcat version 1.0\nfile a.mp4\n"
    assert cv2.VideoCapture(io.BytesIO(listed), cv2.CAP_FFMPEG, []).isOpened()  # type: ignore[call-overload]
    for modality in ("video", "audio"):
        for data in (listed, b"v=0\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n"):
            assert "of which nothing is fetched" in str(refusal(decoder, modality, data))


def test_opencv_opens_nothing_but_what_it_is_handed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Also where a list is one that we do not know."""
    from producer import media_limits

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", "rtsp_transport;tcp")
    (tmp_path / "a.mp4").write_bytes(videos()["coffee-pan.mp4"].data)
    listed = b"ffconcat version 1.0\nfile a.mp4\n"
    with media_limits.no_protocols():
        assert not cv2.VideoCapture(io.BytesIO(listed), cv2.CAP_FFMPEG, []).isOpened()  # type: ignore[call-overload]
        assert os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] == "rtsp_transport;tcp|protocol_whitelist;none"
    assert os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] == "rtsp_transport;tcp"


@pytest.mark.parametrize("name", ["image/png-bomb", "image/html", "video/mp4-1-frame", "audio/flac-cut-at-50%"])
def test_an_error_is_not_its_own_cause(decoder: Any, name: str) -> None:
    error: BaseException | None = refusal(decoder, cases()[name].modality, cases()[name].data)
    for _ in range(9):
        error = error and (error.__cause__ or error.__context__)
    assert error is None


# Samples


@pytest.mark.parametrize("modality", MODALITIES)
def test_a_sample_decodes(decoder: Any, modality: str) -> None:
    from producer.decode import sample

    assert sample(modality) == sample(modality)
    item = sample(modality)
    if item.decoded is not None:
        _check_decoded(item, item.decoded)
    media = decoder.decode(item)
    if modality == "image":
        assert media.mode == "RGB"
        assert min(media.size) > 100
        assert media.width != media.height  # so that a mix-up of the two shows
    elif modality == "video":
        frames, metadata = media
        num_frames, height, width, channels = frames.shape
        assert (metadata["total_num_frames"], channels) == (num_frames, 3)
        assert num_frames > 1
        assert height != width
    else:
        samples, rate_hz = media
        assert samples.dtype == np.float32
        assert len(samples) / rate_hz == 1.0
        assert np.abs(samples).max() > 0  # some models take no silence


def test_there_is_a_sample_of_each_modality_that_the_wire_knows() -> None:
    from producer import decode

    assert [decode.sample(modality).modality for modality in decode.MODALITIES] == list(MODALITIES)
    assert len({modality_number(modality) for modality in decode.MODALITIES}) == len(pb.Modality.values()) - 1


def test_inputs_are_compared_bit_for_bit() -> None:
    """What the tests above lean on."""
    one = {"a": torch.zeros(2)}
    assert equal(one, {"a": torch.zeros(2)})
    assert not equal(one, {"a": torch.zeros(2, dtype=torch.bfloat16)})
    assert not equal(one, {"a": torch.ones(2)})
    assert not equal(one, {"a": torch.zeros(2), "b": torch.zeros(2)})
