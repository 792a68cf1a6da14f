# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An embedded server that the tests of a file share."""

from collections.abc import Iterator

import pytest
from embedded_process import Client, Server, make_model, save

from torchtitan.grpo.system.child import stop_children


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_model(1), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--max-running-requests", "8", "--dist-timeout", "30")
    made = Server(tmp_path_factory.mktemp("server"), model_path, *arguments)
    try:
        yield made.wait()
    finally:
        stop_children([made.process])


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url)
