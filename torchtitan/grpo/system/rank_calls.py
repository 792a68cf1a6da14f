# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets rank 0 call methods of objects on other ranks, over the ranks' channel.

A method that may be called is marked with :func:`operation` where it is written. From these
methods and their annotations, :func:`remote` makes an object for rank 0, and
:meth:`RankChannel.serve` the table of what a rank answers, so no operation is listed twice.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, get_type_hints

import msgspec

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "__is_operation__"


class CallFailed(RuntimeError):
    """A call to another rank failed on that rank. The message is that rank's own."""


class Call(msgspec.Struct):
    number: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct):
    """The answer to a call: the encoded result, or an error."""

    number: int
    result: bytes = b""
    error: str | None = None
    is_os_error: bool = False


class Served(Protocol):
    """An object whose operations a rank offers to rank 0."""

    async def close(self) -> None:
        """Ends what the object has started."""
        ...


class Caller(Protocol):
    """The part of :class:`RankChannel` that remote objects need."""

    async def call(
        self, rank: int, method: str, result_type: Any, timeout_seconds: float, *arguments: Any
    ) -> Any: ...


def operation(method: Method) -> Method:
    """Marks a coroutine method that rank 0 may call on another rank.

    The arguments must be positional, and msgspec must be able to encode them and the result.
    """
    setattr(method, _MARK, True)
    return method


def operations_of(interface: type) -> dict[str, Any]:
    """Returns the result type of each operation of a class, by method name."""
    methods = inspect.getmembers(interface, lambda member: hasattr(member, _MARK))
    return {name: get_type_hints(method)["return"] for name, method in methods}


class _Remote:
    def __init__(self, interface: type, channel: Caller, rank: int, timeout_seconds: float) -> None:
        self.rank = rank
        for name, result_type in operations_of(interface).items():
            call = functools.partial(channel.call, rank, name, result_type, timeout_seconds)
            setattr(self, name, call)


def remote(interface: type[T], channel: Caller, rank: int, timeout_seconds: float) -> T:
    """Returns rank 0's form of an object of another rank: its ``rank`` and its operations.

    Args:
        channel: Rank 0's end of the channel.
        rank: Rank on which the object lives.
        timeout_seconds: Maximum duration of a call. It must exceed the timeouts that the called
            methods apply themselves.
    """
    return cast(T, _Remote(interface, channel, rank, timeout_seconds))
