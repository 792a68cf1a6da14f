# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``/healthz`` and ``/metrics``: a request computes nothing on a device, and waits for nobody."""
