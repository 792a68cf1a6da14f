# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts SGLang's own server behind a guard, without changing a file of SGLang.

    python .../torchtitan/grpo/inference/sglang/server_main.py --model-path DIR --device cpu ...

Run it by path, with the interpreter of SGLang's environment and SGLang's own options. It adds:

- `access.RequestGuard` before SGLang's routes. SGLang itself gets no keys, because it would show them in its
  log and in ``/server_info``. This file adds the key to the requests that SGLang sends itself at the start.
- A file in memory as the workers' rendezvous, in place of a store that listens on all interfaces.
- On a CPU, stand-ins for two modules that do not load with a CPU build of torch. SGLang imports them
  but never calls them.
- The hooks of `adapter_updates.py`.

The stand-ins and the hooks reach the schedulers because a spawned process imports the main file again.
"""

import os
import runpy
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# A file that is run by path makes its folder importable, and modules in the folder would shadow
# other modules of the same name.
sys.path[:] = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]

_LIGHT_START = Path(__file__).resolve().parents[2] / "system" / "light_start.py"
_MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_KEY_OPTIONS = ("--api-key", "--admin-api-key")
# With these, SGLang serves in other processes or by another protocol, without this guard.
_UNGUARDED = (
    "--encoder-only",
    "--grpc-mode",
    "--grpc-port",
    "--smg-grpc-mode",
    "--tokenizer-worker-num",
    "--use-ray",
)
_OPEN = ("/health", "/ready")
# Routes that generate or only report. Everything else needs the admin key.
_GENERATION = (
    "/generate",
    "/get_model_info",
    "/get_server_info",
    "/health_generate",
    "/metrics",
    "/model_info",
    "/server_info",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/detokenize",
    "/v1/loads",
    "/v1/models",
    "/v1/responses",
    "/v1/tokenize",
)
_LIBRARIES: list[Any] = []
"""Kept alive, because schemas end with their library object."""


def install_stand_ins() -> None:
    """Declares torchvision's operators, and puts an empty module in place of ``vllm``."""
    import torch

    # torchvision's C extension, which declares the operators, needs the torch that it was built
    # with.
    torchvision = torch.library.Library("torchvision", "DEF")
    torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torchvision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(torchvision)
    # Without CUDA, SGLang imports a rotary embedding kernel from vLLM, which the attention
    # backend `torch_native` does not use.
    package = types.ModuleType("vllm")
    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None  # type: ignore[attr-defined]
    package._custom_ops = operators  # type: ignore[attr-defined]
    sys.modules["vllm"] = package
    sys.modules["vllm._custom_ops"] = operators


def option(arguments: list[str], name: str) -> str | None:
    found = None
    for index, argument in enumerate(arguments):
        given, equals, value = argument.partition("=")
        if given == name:
            found = value if equals else (arguments[index + 1 : index + 2] or [""])[0]
    return found


def refuse_unguarded(arguments: list[str]) -> None:
    """Ends the process if an option would make SGLang show the keys, or serve without the guard."""
    for name in _KEY_OPTIONS:
        if option(arguments, name) is not None:
            sys.exit(
                f"error: {name} must not be given here, because SGLang shows it in its log and in "
                "/server_info. Set TORCHTITAN_GRPO_API_KEY and TORCHTITAN_GRPO_ADMIN_KEY in the "
                "server's environment."
            )
    for name in _UNGUARDED:
        if option(arguments, name) is not None:
            sys.exit(
                f"error: {name} must not be given here, because the server would answer without "
                "asking for keys. Leave it out, or start SGLang by its own command."
            )


def guard_routes() -> None:
    runpy.run_path(str(_LIGHT_START))["install_bare_package"]()
    from torchtitan.grpo.inference.access import RequestGuard, keys_of_environment

    _load_plugins()
    from sglang.srt.entrypoints import http_server  # pyright: ignore[reportMissingImports]

    routes: dict[str, Any] = {"open_routes": _OPEN, "generation_routes": _GENERATION}
    http_server.app.add_middleware(RequestGuard, **routes)
    if not hasattr(http_server, "requests"):
        # A release whose requests to itself are made in another way: they would have no keys.
        sys.argv.append("--skip-server-warmup")
        return
    guard, keys = RequestGuard(http_server.app, **routes), keys_of_environment()
    http_server.requests = _KeyedRequests(
        http_server.requests, lambda path: keys.of(guard.level_of(path))
    )


class _KeyedRequests:
    """Stands in for the module ``requests`` where SGLang sends requests to itself, and adds the route's key."""

    def __init__(self, module: Any, key_of: Any) -> None:
        self._module, self._key_of = module, key_of

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._module, name)
        return partial(self._send, attribute) if name in ("get", "post") else attribute

    def _send(self, send: Any, url: str, **options: Any) -> Any:
        headers = dict(options.get("headers") or {})
        if key := self._key_of(urlsplit(url).path):
            headers["Authorization"] = f"Bearer {key}"
        return send(url, **{**options, "headers": headers, "allow_redirects": False})


def hook_adapters() -> None:
    runpy.run_path(str(_LIGHT_START))["install_bare_package"]()
    from torchtitan.grpo.inference.sglang.adapter_updates import register_hooks

    register_hooks()


def _load_plugins() -> None:
    """Loads SGLang's plugins if the release has any. Call it before SGLang's server is imported."""
    try:
        from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    load_plugins()


def meet_in_memory(arguments: list[str]) -> None:
    """Lets the workers of a server on one machine rendezvous through a file in this process's memory.

    Only the same user can open the file, through /proc, and the file disappears with this process.
    """
    is_alone = all(option(arguments, name) is None for name in ("--dist-init-addr", "--nnodes"))
    if is_alone and sys.platform == "linux" and _MEETING_VARIABLE not in os.environ:
        descriptor = os.memfd_create("sglang-meeting")
        os.environ[_MEETING_VARIABLE] = f"file:///proc/{os.getpid()}/fd/{descriptor}"


def main() -> None:
    arguments = sys.argv[1:]
    refuse_unguarded(arguments)
    meet_in_memory(arguments)
    guard_routes()
    sys.argv[0] = "sglang.launch_server"
    # Without alter_sys, so that this file stays the main module, which spawned children import.
    runpy.run_module("sglang.launch_server", run_name="__main__")


if option(sys.argv[1:], "--device") == "cpu":
    install_stand_ins()

if __name__ == "__mp_main__":  # a spawned process, perhaps a scheduler
    hook_adapters()

if __name__ == "__main__":
    main()
