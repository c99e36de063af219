"""The finite guard."""

from typing import Any

import pytest
import torch

from producer.runner.guard import are_finite, clear_tails

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_finite_to_the_largest(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert are_finite([torch.tensor([[0.0, limits.max, limits.min, limits.tiny]], dtype=dtype)]).tolist() == [True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 7)])
def test_one_bad_element_is_found_and_its_item_told(dtype: torch.dtype, bad: float, place: tuple[int, int]) -> None:
    first, second, third = torch.ones(2, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype), torch.ones(64, 8, dtype=dtype)
    second[place] = bad
    assert are_finite([first, second, third]).tolist() == [True, False, True]


def test_a_view_is_looked_at_whole() -> None:
    embedding = torch.ones(8, 8)
    embedding[5, 5] = float("nan")
    assert are_finite([embedding[:5], embedding.t()[::5]]).tolist() == [True, False]


# Behind the last sequence

NUM_ROWS, NUM_TAIL = 7, 5


@pytest.fixture(scope="module")
def attention() -> Any:
    """A model of one attention, cleared: it returns its query, with NaN behind `NUM_ROWS` as kernels may leave it."""
    from vllm.model_executor.layers.attention import MMEncoderAttention  # here, since it takes seconds

    class Attention(MMEncoderAttention):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, query: torch.Tensor, **lengths: Any) -> torch.Tensor:
            output = query.clone()
            output[:, NUM_ROWS:] = float("nan")
            return output

    model = torch.nn.Sequential(torch.nn.ModuleDict({"attention": Attention()}))
    clear_tails(model)
    return model[0]["attention"]


LENGTHS = {
    "ends": {"cu_seqlens": torch.tensor([0, 3, 7])},
    "ends, with empty sequences behind": {"cu_seqlens": torch.tensor([0, 3, 7, 7, 7, 7])},
    "ends of FlashInfer, in elements": {
        "cu_seqlens": torch.tensor([0, 3, 7, 7, 0, 3, 7, 7]) * 48,
        "sequence_lengths": torch.tensor([3, 4, 0]),
    },
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["flat", "by head"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_attention_leaves_behind_the_last_sequence_is_cleared(
    attention: Any, lengths: dict[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    query = torch.rand(1, NUM_ROWS + NUM_TAIL, *shape, dtype=dtype)
    found = attention(query, max_seqlen=torch.tensor(4), **lengths)
    assert torch.equal(found[:, :NUM_ROWS], query[:, :NUM_ROWS])
    assert not found[:, NUM_ROWS:].any()


def test_sequences_that_fill_all_rows_are_left_alone(attention: Any) -> None:
    query = torch.rand(1, NUM_ROWS, 6)
    assert torch.equal(attention(query, cu_seqlens=torch.tensor([0, NUM_ROWS])), query)


def test_attention_without_sequences_has_no_tail(attention: Any) -> None:
    """As of models whose pictures are all of one size: each is a row of the batch."""
    query = torch.rand(2, NUM_ROWS + NUM_TAIL, 6)
    found = attention(query)
    assert torch.equal(found[:, :NUM_ROWS], query[:, :NUM_ROWS])
    assert found[:, NUM_ROWS:].isnan().all()


def test_only_attention_is_touched() -> None:
    other = torch.nn.Linear(2, 2)
    clear_tails(torch.nn.Sequential(other))
    assert not other._forward_hooks
