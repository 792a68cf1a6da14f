# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A stand-in for CUDA that computes on the CPU and checks the order of what would run at once.

Within :meth:`Recorder.recording`, ``torch.cuda`` has streams and events, tensors may be created on
``cuda`` and ``dist.broadcast`` works on groups made by :class:`Channel`. Everything is executed at
once, in the order in which it is queued, except copies behind a transfer, so results are right.
What the recorder checks is whether the order was guaranteed (see `clocks.py`). It reports:

    race              two accesses to memory, one of them a write, that nothing orders
    freed in use      memory that goes back to a stream's pool while another stream may use it
    training stalls   the training stream, or the training thread, comes to wait for a server, or
                      the training thread for a stream
    no device         a thread uses streams, events or pinned memory before it has chosen its GPU,
                      which makes a context on the first one
    wrong stream      a background thread queues work on, or takes memory from, the training stream
    one for another   a transfer to a server is queued behind the transfer to another server

The allocator is modeled as torch's is: a tensor belongs to the pool of the stream that is current
when it is created, and its memory may be handed out again on that stream as soon as it is freed.
Streams are modeled as torch's are: ``torch.cuda.Stream()`` hands out 32 streams of a process in turn.
"""

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from clocks import Clock, Clocks, merge, traced_threads
from intercepted import Devices, Operations
from recorded import Access, Event, Group, Memory, Stream, Token, Work
from torch.utils._pytree import tree_leaves

from torchtitan.grpo.system import device
from torchtitan.grpo.weight_wire import device_lanes, receiving

_PATIENCE_SECONDS = 10.0
_POOL_SIZE = 32
_SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
_INDEXING = ("index", "index_put_", "_index_put_impl_")  # a list is a tensor by then
_UNINITIALIZED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Recorder:
    """See the module's docstring. The thread that makes it is the training thread."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.num_waits = self.num_uploads = 0
        self.clocks = Clocks()
        self._training_thread = threading.get_ident()
        self._local = threading.local()
        self._lock = threading.RLock()
        self._blocks: dict[int, Memory] = {}
        self._pinned: list[Memory] = []
        self._streams: list[Stream] = []
        self._defaults: dict[str, Stream] = {}
        self._pools: dict[str, deque[Stream]] = {}

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Replaces CUDA for the duration of the block, on all threads that are started in it."""
        cudart = SimpleNamespace(cudaHostRegister=self._pin)
        cuda: dict[str, Any] = {
            "Stream": lambda device=None, **how: self._pool_stream(),
            "ExternalStream": lambda handle, device=None: self._new_stream("own"),
            "Event": lambda **how: Event(self),
            "current_stream": lambda device=None: self.current_stream(),
            "stream": self._use_stream,
            "set_device": self._set_device,
            "synchronize": lambda device=None: self._device_synchronizes(),
            "cudart": lambda: cudart,
        }
        with ExitStack() as stack:
            for name, value in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(mock.patch.object(dist, "broadcast", self._broadcast))
            stack.enter_context(mock.patch.object(device, "_create_stream", lambda device: 0))
            stack.enter_context(mock.patch.object(device_lanes, "_lanes", _OfProcess(self)))
            # What is kept beyond a test would be asked for events that no longer exist.
            stack.enter_context(mock.patch.object(receiving, "_written", []))
            stack.enter_context(
                mock.patch.object(torch.accelerator, "synchronize", cuda["synchronize"])
            )
            stack.enter_context(traced_threads(self.clocks, lambda: self._process, self._on_thread))
            stack.enter_context(Devices(self))
            stack.enter_context(Operations(self))
            yield self

    @contextmanager
    def process(self, name: str) -> Iterator[None]:
        """Runs the block, and the threads that are started in it, as another process."""
        former, self._local.process = self._process, name
        try:
            yield
        finally:
            self._local.process = former

    # -- what streams and events use -----------------------------------------------------

    def current_stream(self) -> Stream:
        stack = getattr(self._local, "streams", ())
        return stack[-1] if stack else self._default(self._process)

    def order(self, stream: Stream, clock: Clock, depends: set[Token]) -> None:
        """Orders what ``stream`` does next after ``clock``."""
        self.clocks.tick(stream.actor, self.clocks.release(), clock)
        self._add_dependence(stream, {token for token in depends if not token.is_done})

    def host_waits(self, event: Event, what: str) -> None:
        self.num_waits += 1
        if threading.get_ident() == self._training_thread:
            self._report(f"training stalls: the training thread waits for {what}")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not event.query():
            if time.monotonic() > deadline:
                self._report(f"stuck: {self.clocks.thread()} waits for {what} without end")
                return
            time.sleep(0.001)

    # -- memory ---------------------------------------------------------------------------

    def is_behind(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Queues a copy behind a transfer that is queued on the stream; False if there is none."""
        stream = self.current_stream()
        if stream.last is None or stream.last.is_done:
            return False
        if not (self.is_on_device(target) or self.is_on_device(source)):
            return False
        assert target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
        where = target.data_ptr(), source.data_ptr(), target.nbytes
        stream.queue(lambda: ctypes.memmove(*where))
        return True

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return torch.device("cuda", 0) if self.is_on_device(tensor) else torch.device("cpu")

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._blocks

    def put_on_device(self, tensor: torch.Tensor) -> None:
        """Makes a new tensor one of the device, from the pool of the current stream."""
        if not tensor.nbytes:
            return
        pool = self.current_stream()
        if pool is self._defaults.get("trainer") and not self._is_training_thread():
            self._report(
                f"wrong stream: {self.clocks.thread()} takes memory of the training stream's pool"
            )
        begin = tensor.untyped_storage().data_ptr()
        with self._lock:
            end = begin + tensor.untyped_storage().nbytes()
            memory = self._blocks[begin] = Memory(begin, end, pool)
        # The allocator may have taken it from whatever the pool's stream was given before.
        count = self.clocks.now(pool.actor).get(pool.actor, 0)
        if count:
            memory.add(Access(begin, end, True, pool.actor, count, "its last use"))
        weakref.finalize(tensor, self._free, memory)

    def filled(self, tensor: torch.Tensor, what: str) -> None:
        stream = self._queue_on_stream(what)
        self._access(tensor, True, stream.actor, self.clocks.now(stream.actor), what)

    def _free(self, memory: Memory) -> None:
        assert memory.pool is not None
        clock = self.clocks.now(memory.pool.actor)
        merge(clock, self.clocks.release())
        with self._lock:
            for access in tuple(memory.accesses.values()):
                if access.actor != memory.pool.actor and clock.get(access.actor, 0) < access.count:
                    self._report(
                        f"freed in use: memory of {memory.pool.actor}'s pool, while "
                        f"{access.what} on {access.actor} may not be over"
                    )
                    break
            if self._blocks.get(memory.begin) is memory:
                del self._blocks[memory.begin]

    def put_in_pinned_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pin(tensor.data_ptr(), tensor.nbytes, 0)
        weakref.finalize(tensor, self._pinned.remove, self._pinned[-1])
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(m.begin <= tensor.data_ptr() < m.end for m in self._pinned)

    def _pin(self, address: int, num_bytes: int, flags: int) -> int:
        with self._lock:
            self._pinned.append(Memory(address, address + num_bytes, None))
        return 0

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is not None:
            return block
        address = tensor.data_ptr()
        return next((m for m in self._pinned if m.begin <= address < m.end), None)

    def _access(self, tensor: torch.Tensor, is_write: bool, actor: str, clock: Clock, what: str):
        memory = self._memory_of(tensor)
        if memory is None:
            return
        with self._lock:
            for begin, end in _runs(tensor):
                new = Access(begin, end, is_write, actor, clock[actor], what)
                for old in memory.accesses.values():
                    is_known = clock.get(old.actor, 0) >= old.count
                    overlaps = old.begin < end and begin < old.end
                    if overlaps and (old.is_write or is_write) and not is_known:
                        self._report(
                            f"race: {what} on {actor}, and {old.what} on {old.actor}, with "
                            "nothing that orders them"
                        )
                        return
                memory.add(new)

    # -- operations -----------------------------------------------------------------------

    def ran(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        ):
            return  # a view touches no memory
        reads, writes = _operands(func, args, kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        new = [t for t in outputs if all(t is not w for w in writes)]
        on_device = [t for t in (*reads, *writes) if self.is_on_device(t)]
        if not on_device:
            clock = self.clocks.tick(self.clocks.thread())
            self._touch(reads, writes, self.clocks.thread(), clock, name)
            return
        is_copy = name in ("copy_", "_foreach_copy_")
        if not is_copy and len(on_device) < len(reads) + len(writes):
            # Indices alone may lie on the host, and are uploaded.
            uploaded = tree_leaves(args[1]) if name in _INDEXING else ()
            on_host = [t for t in (*reads, *writes) if all(t is not i for i in uploaded)]
            self._refuse_mixed(name, [t for t in on_host if not self.is_on_device(t)])
        for tensor in new:
            self.put_on_device(tensor)
        stream = self._queue_on_stream(name)
        clock = self.clocks.now(stream.actor)
        written = [*writes, *(() if name in _UNINITIALIZED else new)]
        self._touch(reads, written, stream.actor, clock, name)
        is_mixed = len(on_device) < len(reads) + len(writes)
        uploads_index = name in _INDEXING and is_mixed
        if uploads_index or (is_copy and any(not self.is_on_device(t) for t in reads)):
            self.num_uploads += 1
        copy_waits = is_copy and self._copy_waits(reads, writes, args, kwargs)
        if name in _SYNCHRONIZING or uploads_index or copy_waits:
            stream.synchronize()

    def _queue_on_stream(self, what: str) -> Stream:
        stream = self.current_stream()
        if stream is self._defaults.get("trainer") and not self._is_training_thread():
            self._report(
                f"wrong stream: {self.clocks.thread()} queues {what} on the training stream"
            )
        self.clocks.tick(stream.actor, self.clocks.release())
        return stream

    def _touch(self, reads: Any, writes: Any, actor: str, clock: Clock, what: str) -> None:
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._access(tensor, is_write, actor, clock, what)

    def _copy_waits(self, reads: Any, writes: Any, args: Any, kwargs: Any) -> bool:
        """Whether torch blocks the host until a copy between host and device is over."""
        if all(self.is_on_device(t) for t in (*reads, *writes)):
            return False
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        host = [t for t in (*reads, *writes) if not self.is_on_device(t)]
        is_direct = all(t.is_contiguous() and self._memory_of(t) is not None for t in host)
        return not (non_blocking and is_direct)

    def _refuse_mixed(self, name: str, on_host: list[torch.Tensor]) -> None:
        if any(tensor.dim() for tensor in on_host):
            raise RuntimeError(f"Expected all tensors to be on the same device in {name}.")

    def _broadcast(self, tensor: Any, src: int, group: Any, async_op: bool = False) -> Any:
        assert isinstance(group, Group) and src == 0
        stream = self._queue_on_stream("broadcast")
        clock = self.clocks.now(stream.actor)
        what = "the broadcast to a server" if group.rank == 0 else "the broadcast from the trainer"
        self._access(tensor, group.rank != 0, stream.actor, clock, what)
        token = Token(what, group.channel)
        if any(not t.is_done and t.group is not group.channel for t in stream.depends):
            self._report(f"one for another: {what} is queued behind one to another")
        token.clock = dict(clock)
        # NCCL's kernel waits on its own stream, for which the current one waits unless async_op.
        event = Event(self)
        event.clock, event.depends = dict(clock), {token}
        where = tensor.data_ptr(), tensor.nbytes
        stream.queue(lambda: group.channel.post(group.rank, *where, token))
        stream.last = token
        if async_op:
            return Work(event)
        self._add_dependence(stream, {token})
        return None

    # -- rules ----------------------------------------------------------------------------

    def _add_dependence(self, stream: Stream, tokens: set[Token]) -> None:
        stream.depends = {t for t in stream.depends if not t.is_done} | tokens
        if tokens and stream in self._defaults.values():
            whose = "training" if stream.process == "trainer" else "generating"
            what = min(token.what for token in tokens)
            self._report(f"training stalls: the {whose} stream waits for {what}")

    def _device_synchronizes(self) -> None:
        for stream in [s for s in self._streams if s.process == self._process]:
            stream.synchronize()

    def _report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    # -- threads and streams --------------------------------------------------------------

    @property
    def _process(self) -> str:
        return getattr(self._local, "process", "trainer")

    def _is_training_thread(self) -> bool:
        return threading.get_ident() == self._training_thread

    def _default(self, process: str) -> Stream:
        with self._lock:
            if process not in self._defaults:
                self._defaults[process] = Stream(self, process, "default")
                self._streams.append(self._defaults[process])
            return self._defaults[process]

    def _new_stream(self, kind: str) -> Stream:
        with self._lock:
            stream = Stream(self, self._process, f"{kind} {len(self._streams)}")
            self._streams.append(stream)
            return stream

    def _pool_stream(self) -> Stream:
        """Returns the next of the process's 32 streams, as torch and its NCCL groups take them."""
        with self._lock:
            pool = self._pools.setdefault(self._process, deque())
            if len(pool) < _POOL_SIZE:
                pool.append(self._new_stream("pooled"))
            else:
                pool.rotate(-1)
            return pool[-1]

    @contextmanager
    def _use_stream(self, stream: Stream) -> Iterator[None]:
        self.needs_device("a stream")
        stack = self._local.__dict__.setdefault("streams", [])
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def _set_device(self, device: torch.device) -> None:
        if device.index is None:  # as torch does
            raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")
        self._local.has_device = True

    def needs_device(self, what: str) -> None:
        if not (self._is_training_thread() or getattr(self._local, "has_device", False)):
            self._report(f"no device: {threading.current_thread().name} uses {what}")

    def _on_thread(self, process: str, call: Callable[[], None]) -> None:
        self._local.process = process
        with Devices(self), Operations(self):
            call()


class _OfProcess(MutableMapping[Any, Any]):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._of: dict[str, dict[Any, Any]] = {}

    def _own(self) -> dict[Any, Any]:
        return self._of.setdefault(self._recorder._process, {})

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._own()))

    def __len__(self) -> int:
        return len(self._own())


def _operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]):
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_write else reads).extend(tensors)
    return reads, writes


def _runs(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the addresses of a tensor's bytes, as contiguous runs."""
    if not tensor.numel():
        return []
    begin, itemsize = tensor.data_ptr(), tensor.element_size()
    dims = sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: -dim[1])
    length = 1
    while dims and (dims[-1][1] == length or dims[-1][0] == 1):
        length *= dims.pop()[0]
    offsets = [0]
    for size, stride in dims:
        offsets = [offset + index * stride for offset in offsets for index in range(size)]
    return [(begin + o * itemsize, begin + (o + length) * itemsize) for o in sorted(set(offsets))]
