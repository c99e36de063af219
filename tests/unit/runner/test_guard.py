"""The finite guard."""

import pytest
import torch

from producer.runner.guard import are_finite

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
