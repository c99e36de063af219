"""The peer's encoder steps: vLLM's own encoder and its own graphs, outside of its engine."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from bench.gpu_servers import FINE, FUSED, POWERS, graphs
from bench.gpu_timing import Reference, are_all_finite, device_ms, jpegs, relative_error, wall_ms

PEERS: dict[str, dict[str, Any]] = {
    "peer": {"compilation_config": graphs(POWERS)},
    "peer-best": {"compilation_config": graphs(FINE, 16), "kernel_config": {"ir_op_priority": FUSED}},
    "peer-compiled": {"compilation_config": graphs(FINE, 16) | {"compile_mm_encoder": True}},
}
"""What vLLM is told: as installed; its own fused kernels and budgets for these very pictures; its tower compiled."""


class Peer:
    """vLLM's encoder and its own manager of graphs, configured as its worker configures them."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        import vllm.ir
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model
        from vllm.v1.worker.workspace import init_workspace_manager

        from producer.decode import Decoder
        from producer.stand_in import Processor

        self._config = EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_batched_tokens=16384,
            seed=0,
            mm_encoder_only=True,
            mm_encoder_attn_backend="FLASH_ATTN",
            limit_mm_per_prompt={"image": 16, "video": 0},
            **settings,
        ).create_engine_config()
        self._priority = self._config.kernel_config.ir_op_priority
        self._priority.set_default()
        vllm.ir.set_default_torch_wrap(self._config.compilation_config.ir_enable_torch_wrap)
        self._device = torch.device("cuda:0")
        torch.cuda.set_device(self._device)
        init_workspace_manager(self._device)
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ec-step-"))
        self._stack.enter_context(set_current_vllm_config(self._config))
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "nccl")
        initialize_model_parallel(1, 1)
        self._model = get_model(vllm_config=self._config)
        self._decoder, self._processor = Decoder(self._config.model_config), Processor(self._config.model_config)

    def capture(self) -> dict[str, object]:
        """What it is, once its graphs are captured."""
        from vllm.distributed.parallel_state import graph_capture
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        since_s, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self._manager = EncoderCudaGraphManager(self._config, self._device, torch.bfloat16, self._model)
        with torch.inference_mode():
            if self._config.compilation_config.compile_mm_encoder:  # it compiles at the first call
                self._model.embed_multimodal(**self._batch(jpegs(448, 1)))
            with graph_capture(device=self._device):
                self._manager.capture(torch.cuda.graph_pool_handle())
        torch.cuda.synchronize()
        return {
            "budgets": list(self._manager.token_budgets),
            "ir_op_priority": {name: list(getattr(self._priority, name)) for name in FUSED},
            "capture_s": time.perf_counter() - since_s,
            "capture_mib": (free - torch.cuda.mem_get_info()[0]) / 2**20,
        }

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def measure(self, side: int, number: int, reference: Reference) -> dict[str, object]:
        """`execute_ms` is the device's time for vLLM's whole call, with its copies; `error` is that of the graph."""
        kwargs = self._batch(jpegs(side, number))
        hits = self._manager.graph_hits
        embeddings = list(self._manager.execute(dict(kwargs)))
        hits = self._manager.graph_hits - hits
        eager = [one.clone() for one in self._model.embed_multimodal(**kwargs)]
        rows = sum(map(len, embeddings))
        budget = next(one for one in self._manager.token_budgets if one >= rows)
        graph = self._manager.budget_graphs["default"][budget].graph
        return {
            "rows": rows,
            "budget": budget,
            "graph_hits": hits,
            "replay_ms": device_ms(graph.replay),
            "execute_ms": device_ms(lambda: self._manager.execute(dict(kwargs))),
            "step_ms": wall_ms(lambda: [one.cpu() for one in self._manager.execute(dict(kwargs))]),
            "eager_ms": device_ms(lambda: self._model.embed_multimodal(**kwargs)),
            "error": relative_error(embeddings, side, reference),
            "error_of_eager": relative_error(eager, side, reference),
            "is_finite": are_all_finite(embeddings),
        }

    def _batch(self, images: Sequence[bytes]) -> dict[str, Any]:
        """The model's keyword arguments, as vLLM's own processor makes them, pixels on the device."""
        from vllm.multimodal.utils import group_and_batch_mm_kwargs

        from producer.core import MediaItem

        media = [self._decoder.decode(MediaItem(modality="image", data=image)) for image in images]
        items = [("image", self._processor.process("image", one).kwargs) for one in media]
        ((_, number, kwargs),) = group_and_batch_mm_kwargs(items, device=self._device)
        assert number == len(images), (number, len(images))
        return dict(kwargs)

    def close(self) -> None:
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
        self._stack.close()
