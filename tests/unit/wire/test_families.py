"""What vLLM does not declare of its model families, on configurations of their forms."""

from types import SimpleNamespace
from typing import Any

import pytest

from producer.wire.families import EXTRA_FIELDS, embedding_width, num_deepstack_levels


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type="tiny", **fields)


def vision(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(depth=27, **fields)


WITHOUT = {
    "no vision at all": config(),
    "vision of another kind": config(vision_config=vision()),
    "none": config(vision_config=vision(deepstack_visual_indexes=None)),
    "no levels": config(vision_config=vision(deepstack_visual_indexes=[])),
    "no vision in a thinker": config(thinker_config=config()),
    "a thinker without": config(thinker_config=config(vision_config=vision())),
}
WITH = {
    "one level": (1, config(vision_config=vision(deepstack_visual_indexes=[3]))),
    "Qwen3-VL's": (3, config(vision_config=vision(deepstack_visual_indexes=[8, 16, 24]))),
    "in a tuple": (2, config(vision_config=vision(deepstack_visual_indexes=(0, 1)))),
    "in Qwen3-Omni's thinker": (
        3,
        config(thinker_config=config(vision_config=vision(deepstack_visual_indexes=[8, 16, 24]))),
    ),
    "in the thinker that is served, not beside it": (
        1,
        config(
            vision_config=vision(deepstack_visual_indexes=[8, 16, 24]),
            thinker_config=config(vision_config=vision(deepstack_visual_indexes=[8])),
        ),
    ),
}


def model_config(found: SimpleNamespace) -> SimpleNamespace:
    """vLLM's, of a language model whose first layer takes 2048 elements."""
    return SimpleNamespace(hf_config=found, get_inputs_embeds_size=lambda: 2048)


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize("found", WITHOUT.values(), ids=WITHOUT)
def test_a_row_is_as_wide_as_what_enters_the_language_model(found: SimpleNamespace, modality: str) -> None:
    assert num_deepstack_levels(found) == 0
    assert embedding_width(model_config(found), modality) == 2048


@pytest.mark.parametrize(("levels", "found"), WITH.values(), ids=WITH)
def test_deepstack_adds_a_width_a_level_to_what_is_seen(levels: int, found: SimpleNamespace) -> None:
    assert num_deepstack_levels(found) == levels
    assert embedding_width(model_config(found), "image") == 2048 * (1 + levels)
    assert embedding_width(model_config(found), "video") == 2048 * (1 + levels)
    assert embedding_width(model_config(found), "audio") == 2048


def test_extra_fields_are_of_modalities_that_are_served() -> None:
    assert set(EXTRA_FIELDS) <= {"image", "video", "audio"}
