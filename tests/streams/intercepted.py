# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What torch is asked to do while `recorder.py` records, on any thread."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from recorder import Recorder


class Operations(TorchDispatchMode):
    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and self._recorder.is_behind(args[0], args[1]):
            out = args[0]
        else:
            out = func(*args, **kwargs)
        self._recorder.ran(func, args, kwargs, out)
        return out


class Devices(TorchFunctionMode):
    """Creates tensors of the device on the CPU, and answers questions about their device."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        recorder = self._recorder
        if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return recorder.device_of(args[0])
        if func == torch.Tensor.is_cuda.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return recorder.is_on_device(args[0])
        if func == torch.Tensor.is_pinned:
            return recorder.is_pinned(args[0])
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._to(func, args[0], args[1:], kwargs)
        if func == torch.Tensor.tolist and recorder.is_on_device(args[0]):
            return self._to(torch.Tensor.cpu, args[0], (), {}).tolist()
        if kwargs.pop("pin_memory", False):
            return recorder.put_in_pinned_memory(func(*args, **kwargs))
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cpu" and func == torch.empty_like:
            return torch.empty(
                args[0].shape, dtype=args[0].dtype
            )  # it is not like a tensor on CUDA
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        out = func(*args, **(kwargs | {"device": "cpu"}))
        recorder.put_on_device(out)
        if not func.__name__.startswith("empty"):
            recorder.filled(out, func.__name__)
        if func == torch.tensor:  # torch copies the numbers from pageable memory
            recorder.num_uploads += 1
            recorder.current_stream().synchronize()
        return out

    def _to(self, func: Any, tensor: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]):
        named = {torch.Tensor.cpu: "cpu", torch.Tensor.cuda: "cuda"}.get(func)
        given = [a for a in (*args, kwargs.get("device")) if isinstance(a, str | torch.device)]
        target = named or (given[0] if given else None)
        source_type = self._recorder.device_of(tensor).type
        if target is None or torch.device(target).type == source_type:
            rest = [a for a in args if not isinstance(a, str | torch.device)]
            kwargs.pop("device", None)
            return tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        dtypes = [a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)]
        dtype = dtypes[0] if dtypes else tensor.dtype
        out = torch.empty(tensor.shape, dtype=dtype)
        if torch.device(target).type == "cuda":
            self._recorder.put_on_device(out)
        return out.copy_(tensor, non_blocking=bool(kwargs.get("non_blocking", False)))
