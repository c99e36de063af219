"""DeepStack in a consumer: when a model is repaired, what it gets, and that vLLM finds the plugin."""

import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader import base_loader, utils
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

from consumer_shim import plugin

WIDTH, MAX_TOKENS = 8, 16


def config(vision: dict[str, Any] | None = None, *, is_ec_consumer: bool | None = True) -> SimpleNamespace:
    """vLLM's, of a model with DeepStack in three layers if not told otherwise; `None` for a server without EC."""
    vision = {"deepstack_visual_indexes": [3, 7, 11]} if vision is None else vision
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(vision_config=SimpleNamespace(**vision))),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
        ec_transfer_config=None if is_ec_consumer is None else SimpleNamespace(is_ec_consumer=is_ec_consumer),
    )


def without_tower() -> SimpleNamespace:
    """Qwen3-VL as vLLM leaves it where it loads no vision tower."""
    text_config = SimpleNamespace(hidden_size=WIDTH)
    return SimpleNamespace(
        use_deepstack=False,
        deepstack_num_level=0,
        visual_dim=WIDTH,
        multiscale_dim=0,
        config=SimpleNamespace(text_config=text_config),
    )


# What is repaired


def test_deepstack_stays_on() -> None:
    model = without_tower()
    plugin.keep_deepstack(model, config())
    assert model.use_deepstack
    assert (model.deepstack_num_level, model.multiscale_dim) == (3, 3 * WIDTH)
    assert [tuple(buffer.shape) for buffer in model.deepstack_input_embeds] == [(MAX_TOKENS, WIDTH)] * 3
    assert not any(buffer.any() for buffer in model.deepstack_input_embeds)
    assert model.deepstack_input_embeds_num_tokens == 0
    assert len({buffer.data_ptr() for buffer in model.deepstack_input_embeds}) == 3


def test_vllms_own_code_finds_what_it_needs() -> None:
    """It asks the model for these buffers by name. With more tokens than they have room for, it makes new ones."""
    model = without_tower()
    plugin.keep_deepstack(model, config())
    qwen = Qwen3VLForConditionalGeneration
    model._resize_deepstack_input_embeds = lambda num: qwen._resize_deepstack_input_embeds(model, num)
    for num_tokens in (5, MAX_TOKENS + 1):
        features = torch.rand(3, num_tokens, WIDTH)
        qwen._set_deepstack_input_embeds(model, features)
        found = qwen._get_deepstack_input_embeds(model, num_tokens)
        assert [found[f"deepstack_input_embeds_{level}"].equal(features[level]) for level in range(3)] == [True] * 3
        qwen._clear_deepstack_input_embeds(model, num_tokens)
        assert not any(buffer.any() for buffer in model.deepstack_input_embeds)


@pytest.mark.parametrize("vision", [{}, {"deepstack_visual_indexes": []}, {"deepstack_visual_indexes": None}])
def test_a_model_without_deepstack_stays(vision: dict[str, Any]) -> None:
    model = without_tower()
    plugin.keep_deepstack(model, config(vision))
    assert model == without_tower()


def test_a_model_with_its_tower_stays() -> None:
    model = without_tower()
    model.use_deepstack = True
    plugin.keep_deepstack(model, config())
    assert vars(model) == vars(without_tower()) | {"use_deepstack": True}


def test_a_model_that_knows_no_deepstack_stays() -> None:
    model = SimpleNamespace()
    plugin.keep_deepstack(model, config())
    assert vars(model) == {}


@pytest.mark.parametrize("more", [{}, {"deepstack_num_level": None}, {"deepstack_num_level": 3}])
def test_a_model_that_never_uses_deepstack_stays(more: dict[str, Any]) -> None:
    """It says so, whatever its configuration has; vLLM took nothing from it. Intern-S2's has no number of levels."""
    fields = {"use_deepstack": False, "visual_dim": WIDTH, **more}
    model = SimpleNamespace(**fields)
    plugin.keep_deepstack(model, config())
    assert vars(model) == fields


def test_a_model_without_vision_stays() -> None:
    model = without_tower()
    text_only = config()
    text_only.model_config.hf_config = SimpleNamespace()
    plugin.keep_deepstack(model, text_only)
    assert not model.use_deepstack


# How it comes into vLLM


class Loader:
    """Stands for vLLM's `initialize_model`. Makes models without a tower, which have no weights."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __call__(self, vllm_config: Any, **options: Any) -> SimpleNamespace:
        self.calls.append((vllm_config, options))
        return without_tower()


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    """In vLLM's place, until the test ends; the plugin is not installed at first."""
    loader = Loader()
    monkeypatch.setattr(utils, "initialize_model", loader)
    monkeypatch.setattr(base_loader, "initialize_model", loader)
    monkeypatch.setattr(plugin, "_installed", False)
    return loader


def test_registering_twice_wraps_once(loader: Loader) -> None:
    assert not plugin.is_installed()
    plugin.register()
    wrapped = utils.initialize_model
    plugin.register()
    assert plugin.is_installed()
    assert base_loader.initialize_model is utils.initialize_model is wrapped
    assert wrapped.__wrapped__ is loader


def test_every_loader_that_has_it_by_name_has_the_wrapped_one(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's tensorizer and cached loaders, which may have been imported before; others' functions stay."""

    def of_another() -> None:
        """Somebody else's, of the same name."""

    has_it, has_another, has_none = (ModuleType(f"tests.loader_{number}") for number in range(3))
    has_it.initialize_model, has_another.initialize_model = loader, of_another  # type: ignore[attr-defined]
    for module in (has_it, has_another, has_none):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    assert has_it.initialize_model is base_loader.initialize_model is not loader  # type: ignore[attr-defined]
    assert has_another.initialize_model is of_another  # type: ignore[attr-defined]
    assert not hasattr(has_none, "initialize_model")


@pytest.mark.parametrize(("is_ec_consumer", "is_repaired"), [(True, True), (False, False), (None, False)])
def test_only_a_consumers_models_are_repaired(loader: Loader, is_ec_consumer: bool | None, is_repaired: bool) -> None:
    plugin.register()
    vllm_config = config(is_ec_consumer=is_ec_consumer)
    model = base_loader.initialize_model(vllm_config=vllm_config, model_config=1, prefix="p")
    assert model.use_deepstack is is_repaired
    assert loader.calls == [(vllm_config, {"model_config": 1, "prefix": "p"})]


def test_vllm_finds_it() -> None:
    """VLLM_PLUGINS goes by its name."""
    (found,) = entry_points(group="vllm.general_plugins", name="ec_producer")
    assert found.load() is plugin.register


def test_vllm_loads_it(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import plugins

    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.setenv("VLLM_PLUGINS", "ec_producer")
    plugins.load_general_plugins()
    assert plugin.is_installed()
