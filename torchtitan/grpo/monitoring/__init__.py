# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``/healthz`` and Prometheus' ``/metrics`` of the processes of a run.

A request computes nothing on a device, waits for nobody, and changes nothing.
"""
