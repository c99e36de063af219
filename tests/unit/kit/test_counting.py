"""What counts work counts all of it, and the same each time."""

import math
import threading
from pathlib import Path

import torch

from tests.kit.counting import count_lines, count_operators, counted_calls


@torch.library.custom_op("ec_producer_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """A model's own operator, which is Python."""
    return (x + x).clone()


def test_an_operator_that_computes_is_a_launch_and_takes_memory() -> None:
    x = torch.ones(4)
    found = count_operators(lambda: x + x)
    assert (found.launches, found.allocations, found.copies, found.views) == ({"add": 1}, {"add": 1}, {}, {})


def test_one_in_place_takes_no_memory() -> None:
    x = torch.ones(4)
    found = count_operators(lambda: x.add_(1))
    assert (found.launches, found.allocations) == ({"add_": 1}, {})


def test_a_view_is_no_launch() -> None:
    x = torch.ones(4, 4)
    found = count_operators(lambda: x[1:].t())
    assert (found.launches.total(), found.allocations.total(), found.views.total()) == (0, 0, 2)


def test_a_copy_is_found_where_an_operator_hides_it() -> None:
    x = torch.ones(4, 4).t()
    assert count_operators(x.contiguous).copies == {"clone": 1}
    assert count_operators(lambda: x.reshape(16)).copies.total() == 1
    assert count_operators(lambda: x.to(torch.float64)).copies == {"_to_copy": 1}


@torch.inference_mode()
def test_it_counts_the_same_without_gradients() -> None:
    x = torch.ones(4, 4).t()
    assert count_operators(lambda: x.reshape(16)).copies.total() == 1


def test_memory_that_is_only_taken_is_an_allocation() -> None:
    found = count_operators(lambda: torch.empty(4))
    assert (found.launches, found.allocations) == ({}, {"empty": 1})


def test_the_operators_within_a_models_own_are_counted() -> None:
    x = torch.ones(4)
    found = count_operators(lambda: twice(x))
    assert (found.launches, found.copies) == ({"add": 1, "clone": 1}, {"clone": 1})


def test_calls_are_counted_those_of_c_and_of_threads_too() -> None:
    def called() -> float:
        return math.sqrt(4.0)

    with counted_calls() as calls:
        called()
        thread = threading.Thread(target=called)
        thread.start()
        thread.join()
    called()
    file = "tests/unit/kit/test_counting.py"
    assert calls.named("called").total() == 2
    assert calls.by_function[f"{file}:sqrt"] == 2
    assert calls.by_file[file] == 4


def test_a_loop_counts_as_often_as_it_turns() -> None:
    def search(number: int) -> None:
        for one in range(number):
            if one == -1:
                break

    few, many = (count_lines(lambda number=number: search(number), [Path(__file__).name]) for number in (10, 1010))
    assert many - few == 2 * 1000
