# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The error of a configuration, for whoever reads or checks one."""

from torchtitan.grpo.errors import RunError


class ConfigError(RunError, ValueError):
    """A configuration that cannot be used. The message names the key and the remedy."""
