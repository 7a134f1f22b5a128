"""Runs the plan of a vision graph: images have many sizes, and each is read once, so that nothing stays bound."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..contract import ALIGNMENT, VisionContract
from ..engine import Engine, Step
from ..errors import EngineError
from .contexts import OpenedPlan


class SeeingEngine(Engine):
    """A vision graph, each step of which reads one image, of any size that the plan was compiled for."""

    def __init__(self, contract: VisionContract, device: str, plan: OpenedPlan, stream: Callable[[str], int]) -> None:
        self.device = device
        self._vision, self._plan, self._stream = contract, plan, stream
        self._context = plan.new_context()

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        sizes = self._vision.sizes({**inputs, **outputs})
        for name, (least, most) in self._plan.key.free.items():
            if not least <= sizes.get(name, least) <= most:
                raise EngineError(
                    f"an image has {sizes[name]:,} {name}, the plan of {self._plan.key.model} reads {least:,} to "
                    f"{most:,}; compile it again with trt-spec build"
                )

        def run() -> None:
            done = True
            for name, tensor in inputs.items():
                done = self._context.set_input_shape(name, tuple(tensor.shape)) and done
            size = self._context.update_device_memory_size_for_shapes()
            try:
                scratch = torch.empty(size, dtype=torch.uint8, device=self.device)  # what this image takes, no longer
            except RuntimeError as error:
                raise EngineError(
                    f"no memory for {size / 2**20:,.0f} MiB to read an image in; send smaller ones"
                ) from error
            self._context.set_device_memory(scratch.data_ptr(), scratch.numel())
            lie_well = {name: one.clone() if one.data_ptr() % ALIGNMENT else one for name, one in inputs.items()}
            for name, tensor in (lie_well | dict(outputs)).items():
                assert tensor.is_contiguous(), f"{name} must be contiguous"
                done = self._context.set_tensor_address(name, tensor.data_ptr()) and done
            if not (done and self._context.execute_async_v3(self._stream(self.device))):
                raise EngineError(f"{self._plan.key.engine} failed to read an image: {self._plan.reason()}")

        return Step(inputs, outputs, run)

    def close(self) -> None:
        self._context = None
        self._plan.close()
