"""Parts of towers that are fused on the host: what each computes, what it leaves to vLLM, and what it saves."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from producer.core import PreparedItem
from producer.metrics import Metrics
from tests.kit.engines import Engine, embeddings, engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")
NUM_HEADS, HEAD_DIM = 4, 16


def items(one: Engine) -> list[PreparedItem]:
    """Whole windows and parts of some, pictures that share a size, and a video."""
    side = 28 if one.family != "qwen3_vl" else 32
    sizes = [(8, 8), (9, 5), (8, 8), (2, 3), (1, 1)]
    pictures = [one.image(side * height, side * width, seed) for seed, (height, width) in enumerate(sizes)]
    return [*pictures, one.video(4, side * 4, side * 3, seed=9)]


def encoded(family: str, **settings: Any) -> torch.Tensor:
    with engine(family, capture=False, **settings) as one:
        return torch.cat(embeddings(one.eager.launch(items(one)).finish())).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_vllms_own_bit_for_bit(family: str) -> None:
    with mock.patch("producer.runner.fused.host.fuse_parts", side_effect=AssertionError("exact is the model's own")):
        own = encoded(family, fidelity="exact")
    assert torch.equal(encoded(family), own)


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with engine("qwen2_5_vl", capture=False) as made:
        yield made


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[Any]]:
    """The positional arguments of each call of `owner`'s function `name`."""
    calls: list[Any] = []
    own: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return own(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield calls


def test_a_step_of_equal_pictures_attends_once_a_block(one: Engine) -> None:
    step = [one.image(224, 224, seed) for seed in range(8)]
    with counted(F, "scaled_dot_product_attention") as calls:
        one.eager.launch(step).finish()
    assert [query.shape[:3] for query, *_ in calls] == [(32, NUM_HEADS, 64), (8, NUM_HEADS, 256)]


def test_a_step_attends_as_often_as_it_has_lengths_of_sequences(one: Engine) -> None:
    step = [one.image(252, 140, seed) for seed in range(6)]  # windows of 8, 8 and 2 by 8 and 2 patches
    with counted(F, "scaled_dot_product_attention") as calls:
        one.eager.launch(step).finish()
    assert sorted(query.shape[::2] for query, *_ in calls) == [(6, 4), (6, 180), (12, 64), (18, 16)]


def test_queries_and_keys_are_rotated_without_vllms_small_operators(one: Engine) -> None:
    rotary = one.encoder._model.visual.blocks[0].attn.apply_rotary_emb
    with counted(rotary, "forward") as calls:
        one.eager.launch([one.image(196, 84, seed=1)]).finish()
    assert calls == []


def test_what_is_known_of_a_layout_is_found_out_once(one: Engine) -> None:
    step = [one.image(168, 84, seed) for seed in range(2)]
    found = embeddings(one.eager.launch(step).finish())
    with counted(one.encoder._model.visual, "get_rope_by_thw") as calls:
        again = embeddings(one.eager.launch(step).finish())
        one.eager.launch(step[:1]).finish()
    assert len(calls) == 1
    assert all(map(torch.equal, found, again))


def test_of_a_large_step_nothing_is_kept() -> None:
    from producer.runner.fused.host import _MAX_REMEMBERED_ROWS, _remembering

    asked: list[Any] = []
    metadata = _remembering(lambda grids, **others: asked.append((grids, others)) or {"grids": grids})
    small, large = [[1, 2, 2], [1, 4, 2]], [[1, 2, _MAX_REMEMBERED_ROWS // 2], [1, 2, 2]]
    for grids, others in ((small, {}), (large, {}), (small, {"device": 1})):
        for _ in range(2):
            metadata(grids, **others)["grids"] = None  # which is the caller's own
        assert metadata(grids, **others)["grids"] == grids
    assert asked == [(small, {})] + 3 * [(large, {})] + 3 * [(small, {"device": 1})]


# Attention


def attention(num_kv_heads: int = NUM_HEADS) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import MMEncoderAttention

    from producer.runner.fused.host import fuse_parts

    with set_current_vllm_config(VllmConfig()):
        made = MMEncoderAttention(NUM_HEADS, HEAD_DIM, num_kv_heads=num_kv_heads)
    assert fuse_parts(torch.nn.ModuleList([made])) == (1, False)
    return made


def rows_of(num_rows: int, num_heads: int = NUM_HEADS) -> torch.Tensor:
    return torch.randn(1, num_rows, num_heads, HEAD_DIM)


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    parts = zip(*(one.split(list(lengths), 1) for one in (query, key, value)), strict=True)
    grouped = query.shape[2] != key.shape[2]
    found = [F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in part), enable_gqa=grouped) for part in parts]
    return torch.cat([x.transpose(1, 2) for x in found], 1)


@pytest.mark.parametrize(
    ("lengths", "num_calls"),
    [([7], 1), ([5, 5, 5], 1), ([5, 5, 9, 9, 9], 2), ([5, 9, 5, 9, 3, 5], 3), ([5, 0, 5, 0, 0], 1)],
    ids=str,
)
@pytest.mark.parametrize("num_kv_heads", [NUM_HEADS, 2])
def test_sequences_of_one_length_are_attended_to_in_one_call(
    lengths: list[int], num_calls: int, num_kv_heads: int
) -> None:
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    query, key, value = rows_of(sum(lengths)), *(rows_of(sum(lengths), num_kv_heads) for _ in range(2))
    want = one_by_one(query, key, value, lengths)
    layer = attention(num_kv_heads)
    with counted(F, "scaled_dot_product_attention") as calls:
        found = layer(query, key, value, cu_seqlens=ends)
    assert len(calls) == num_calls
    torch.testing.assert_close(found, want)


def test_attention_that_is_not_over_rows_side_by_side_is_vllms_own() -> None:
    query = torch.randn(3, 8, NUM_HEADS, HEAD_DIM)
    flat = query.flatten(2)
    want = one_by_one(query, query, query, [8])
    layer = attention()
    torch.testing.assert_close(layer(query, query, query), want)
    torch.testing.assert_close(layer(flat, flat, flat), want.flatten(2))


def test_rows_behind_the_last_sequence_are_left_to_vllms_own_code() -> None:
    query, layer = rows_of(8), attention()
    with pytest.raises(RuntimeError, match="split_with_sizes"):  # which does not take them
        layer(query, query, query, cu_seqlens=torch.tensor([0, 5]))


def test_layouts_are_forgotten_the_oldest_first() -> None:
    from producer.runner.fused.host import _MAX_PLANS, _plan

    for length in range(1, 2 * _MAX_PLANS):
        _plan((0, length))
    assert _plan.cache_info().currsize == _MAX_PLANS


# Pixels


def runner(one: Engine, *, takes_compact: bool) -> Any:
    from producer.runner.steps import StepRunner

    return StepRunner(
        decode=one.encoder.decode,
        embed=one.encoder.embed,
        ring=one.eager._ring,
        graphs=None,
        why_no_graphs="eager",
        exact=False,
        takes_compact=takes_compact,
        metrics=Metrics(),
    )


def test_compact_pixels_are_encoded_as_they_are(one: Engine) -> None:
    step = [one.image(112, 84, seed) for seed in range(2)]
    assert one.encoder.takes_compact
    (want, got), width = ([], []), 3 * 14 * 14
    for found, takes_compact in ((want, False), (got, True)):
        with counted(one.encoder._model.visual.input_norm, "forward") as calls:
            found += embeddings(runner(one, takes_compact=takes_compact).launch(step).finish())
        assert calls[0][0].shape == (96, width if takes_compact else 2 * width)
    assert all(map(torch.equal, got, want))


def test_the_engine_passes_them_on_as_the_encoder_takes_them(one: Engine) -> None:
    from producer.runner.engine import EngineSettings, start_engine

    values = dict.fromkeys(("graph_rows", "graph_items", "max_batch_rows", "max_item_rows", "device_memory_bytes"), 1)
    settings = EngineSettings(eager=True, require_graphs=False, num_slots=2, slot_bytes=1 << 20, **values)
    assert start_engine(one.encoder, [], settings, Metrics())._takes_compact
    exact: Any = SimpleNamespace(**{**vars(one.encoder), "takes_compact": False, "embed": None, "decode": None})
    assert not start_engine(exact, [], settings, Metrics())._takes_compact


@torch.inference_mode()
def test_pixels_that_are_no_bytes_go_through_vllms_own_norm(one: Engine) -> None:
    norm, pixels = one.encoder._model.visual.input_norm, torch.randint(0, 256, (600, 1176), dtype=torch.uint8)
    with counted(norm, "forward_native") as calls:
        found = norm(pixels, torch.bfloat16)
        assert calls == []
        assert torch.equal(found, norm(pixels.float(), torch.bfloat16))
    assert len(calls) == 1
