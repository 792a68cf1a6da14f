# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

# vLLM has its own environment, which the type checker does not see.
# pyright: reportMissingImports=false

"""The weight transfer engine of one vLLM worker, which connects vLLM to `updates.py`.

vLLM calls the engine from its routes, such as ``/start_weight_update``. New weights are loaded with
vLLM's layerwise reload, which accepts tensors in the layout of the checkpoint.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from torchtitan.grpo.inference.vllm.updates import (
    UpdateRequest,
    WorkerUpdates,
    must_stage_on_host,
    staging_needs,
)
from torchtitan.grpo.system.host_memory import available_bytes
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

logger = logging.getLogger(__name__)


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """A :class:`WeightGroupInfo`. With ``probe``, joins no group, and only checks for room to stage updates."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_seconds: float
    deltas: bool = False
    piece_bytes: int = 0
    probe: bool = False

    def group(self) -> WeightGroupInfo:
        return msgspec.convert(vars(self), WeightGroupInfo)


@dataclass
class BucketUpdateInfo(UpdateRequest, WeightTransferUpdateInfo):
    """The body of ``/update_weights``."""


class TorchGroupWeightEngine(WeightTransferEngine[GroupInitInfo, BucketUpdateInfo]):
    """Receives each bucket as one uint8 broadcast from rank 0 of a torch process group."""

    init_info_cls = GroupInitInfo
    update_info_cls = BucketUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._updates = WorkerUpdates(_ReloadedModel(self), self.device)

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        if init_info.probe:
            self._choose_place(init_info.deltas)
        else:
            self._updates.join(init_info.group(), self.parallel_config.rank)

    def start_weight_update(self) -> None:
        self._updates.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Carries out one request. On failure, no layer is left without weights."""
        try:
            parsed = self.parse_update_info(update_info)
        except BaseException:
            self._updates.abandon()
            raise
        self.receive_weights(parsed)

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        self._updates.update(update_info)

    def finish_weight_update(self) -> None:
        self._updates.finish()

    def shutdown(self) -> None:
        self._updates.leave()

    def _choose_place(self, deltas: bool) -> None:
        """Decides where updates are staged. Raises RuntimeError if there is no room for the whole model."""
        if self.device.type != "cuda":
            return  # received on the host, whose memory the operator has chosen
        parallel = self.parallel_config
        num_workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        # Workers hold equal parts of the model.
        model_bytes = num_workers * sum(p.nbytes for p in self.model.parameters())
        needs = staging_needs(model_bytes, num_workers, deltas=deltas)
        free, _ = torch.cuda.mem_get_info(self.device)
        # Memory that torch holds for later allocations, for instance since an earlier update.
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        # What this worker and the others hold of earlier versions is for the next one.
        free_on_host = available_bytes() + num_workers * self._updates.session.buffers.host_bytes
        is_on_host = must_stage_on_host(needs, self.device, free, free_on_host)
        if is_on_host:
            logger.warning(
                "Weights are staged in host memory, because %s has no room for a second copy.",
                self.device,
            )
        self._updates.stage_on_host(is_on_host)


class _ReloadedModel:
    """The engine's current target model; see :class:`LoadableModel`."""

    def __init__(self, engine: TorchGroupWeightEngine) -> None:
        # The engine, not its model: vLLM may set another target for an update.
        self._engine = engine

    def tensors(self) -> list[torch.Tensor]:
        model = self._engine.model
        return [
            tensor
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.layout is torch.strided and tensor.device.type != "meta"
        ]

    def checkpoint_folder(self) -> str:
        return self._engine.model_config.model

    def begin_load(self) -> None:
        initialize_layerwise_reload(self._engine.model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._engine.model.load_weights(weights)

    def finish_load(self) -> None:
        finalize_layerwise_reload(self._engine.model, self._engine.model_config)
        _pack_output_again(self._engine.model)

    def restore(self) -> None:
        # vLLM keeps what was loaded of a layer apart from the layer's own weights until it is complete.
        # This is so in 0.32 and 0.33; vLLM may change it, so other releases need this checked.
        for layer in self._engine.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # vLLM would fill the missing part with uninitialized memory.
                info.loaded_weights.clear()
                info.load_numel = 0
        self.finish_load()


def _pack_output_again(model: torch.nn.Module) -> None:
    """Makes the output layer on a CPU use the weights that its parameter now has.

    On a CPU, vLLM multiplies by a packed copy of the weights. A reload renews the copy only for layers whose
    weights were sent by name, but no weight is sent for an output layer that is tied to the embedding.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)
