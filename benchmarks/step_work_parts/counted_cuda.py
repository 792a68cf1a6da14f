# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes fake tensors on CUDA train on a machine without a GPU, so that the CUDA paths are counted."""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SOURCE = Path(__file__).with_name("counted_cuda.cpp")
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "warp_size": 32,
    "max_threads_per_block": 1024, "shared_memory_per_block_optin": 232448,
    "total_memory": 80 * 2**30, "gcnArchName": "", "L2_cache_size": 50 * 2**20,
}  # fmt: skip
"""What an H100 says of itself, as far as torch reads it."""


def load() -> None:
    """Registers the device of `counted_cuda.cpp`. Torch must not have been imported yet.

    Raises:
        SystemExit: If there is no C++ compiler, or the library cannot be built.
    """
    assert "torch" not in sys.modules, "torch asks for its devices when it is imported"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    key = hashlib.sha256(_SOURCE.read_bytes() + str(torch).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"counted_cuda-{os.getuid()}-{key}.so")
    if not library.exists():
        built = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", str(_SOURCE)]
        command += ["-o", str(built), f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
        command.append(f"-Wl,-rpath,{torch}/lib")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except FileNotFoundError:
            raise SystemExit(
                "A C++ compiler must be installed to count a step, but g++ was not found."
            ) from None
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        built.rename(library)
    ctypes.CDLL(str(library))


_LIBRARY: list[Any] = []  # registrations last as long as their object


def _unreachable(*_: Any) -> Any:
    raise AssertionError("fake tensors have no memory to compute in")


class _Inert:
    """A stream or an event: everything that is queued has already happened."""

    device, cuda_stream, stream_id, device_index = None, 0, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *_: object) -> None: ...

    def record(self, *_: Any) -> "_Inert":
        return self

    record_event = record

    def wait_event(self, *_: Any) -> None: ...

    wait = wait_stream = synchronize = wait_event

    def query(self) -> bool:
        return True


def stand_in() -> None:
    """Gives ``torch.cuda`` what the training step asks of it, and torchtitan a CUDA device."""
    import torch
    import torch._dynamo.device_interface
    import torch._inductor.compile_fx
    import torch.distributed.tensor._dispatch
    import torch.utils._triton

    cuda: Any = torch.cuda
    stream = _Inert()
    properties = SimpleNamespace(**H100)
    cuda.Stream = cuda.Event = cuda.ExternalStream = _Inert
    cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # autocast asks it
    # Dynamo refuses one function under two names.
    cuda.current_stream, cuda.default_stream = lambda *_: stream, lambda *_: stream
    cuda.stream = lambda *_: stream
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    cuda.set_device, cuda.synchronize = lambda *_: None, lambda *_: None
    cuda._lazy_init = lambda *_: None
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: properties.name
    interface: Any = torch._dynamo.device_interface.CudaInterface
    interface.get_device_properties = staticmethod(lambda *_: properties)
    interface.Worker.get_device_properties = staticmethod(lambda *_: properties)
    interface.current_device = interface.Worker.current_device = staticmethod(lambda: 0)
    interface.is_available = staticmethod(lambda: True)
    interface.get_compute_capability = staticmethod(lambda *_: (9, 0))
    interface.is_bf16_supported = staticmethod(lambda *_, **__: True)
    interface.is_triton_capable = staticmethod(lambda *_: True)
    torch.utils._triton.triton_hash_with_backend = lambda: properties.name
    # With a kernel for CUDA, which no fake tensor reaches, the norm is one operation as on a GPU. A
    # build without CUDA has it in ten.
    _LIBRARY.append(torch.library.Library("aten", "IMPL"))
    _LIBRARY[0].impl("_fused_rms_norm", _unreachable, "CUDA")
    # There is no random generator, and the values of fake tensors do not matter.
    torch.distributed.tensor._dispatch.is_rng_supported_mesh = lambda _: False
    # Engine threads of a device would not see the modes under which the step is counted.
    torch.autograd.set_multithreading_enabled(False)
    # The caching allocator, which tensors that change streams are recorded with, does not exist.
    torch.Tensor.record_stream = lambda *_: None  # pyright: ignore
