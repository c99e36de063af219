"""The finite guard."""

import pytest
import torch

from producer.runner.guard import is_finite

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_finite_to_the_largest(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert is_finite(torch.tensor([[0.0, limits.max, limits.min, limits.tiny]], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 7)])
def test_one_bad_element_is_found(dtype: torch.dtype, bad: float, place: tuple[int, int]) -> None:
    embedding = torch.ones(4, 8, dtype=dtype)
    embedding[place] = bad
    assert not is_finite(embedding)


def test_a_view_is_looked_at_whole() -> None:
    embedding = torch.ones(8, 8)
    embedding[5, 5] = float("nan")
    assert is_finite(embedding[:5])
    assert not is_finite(embedding.t()[::5])
