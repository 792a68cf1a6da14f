# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets rank 0 call methods of objects on other ranks, over the ranks' channel.

The methods are marked with :func:`operation` where they are defined. :func:`remote` and
:meth:`RankChannel.serve` read these marks and the methods' annotations, so nothing is listed twice.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, cast, get_type_hints

import msgspec

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

_MARK = "__is_operation__"


class RankCallFailed(RuntimeError):
    """A call failed on another rank. The message says on which one, and names its error."""


class Call(msgspec.Struct):
    number: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct):
    number: int
    result: bytes = b""
    error: str | None = None
    is_os_error: bool = False


class Served(Protocol):
    """An object whose operations a rank offers to rank 0."""

    async def close(self) -> None: ...


def operation(method: Method) -> Method:
    """Marks a coroutine method that rank 0 may call. Arguments are positional, and encoded by msgspec."""
    setattr(method, _MARK, True)
    return method


def operations_of(interface: type) -> dict[str, Any]:
    methods = inspect.getmembers(interface, lambda member: hasattr(member, _MARK))
    return {name: get_type_hints(method)["return"] for name, method in methods}


def remote(
    interface: type[T], call: Callable[..., Awaitable[Any]], rank: int, timeout_seconds: float
) -> T:
    """Returns rank 0's proxy of an object on another rank. It has the operations, and the ``rank``.

    ``timeout_seconds`` bounds each call, and must exceed the timeouts that the methods apply themselves.
    """
    calls = {
        name: functools.partial(call, rank, name, result_type, timeout_seconds)
        for name, result_type in operations_of(interface).items()
    }
    return cast(T, SimpleNamespace(rank=rank, **calls))
