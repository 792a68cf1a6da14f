# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The JSON of a weight update's chunk, as SGLang writes it, with this project's own fields."""

from collections.abc import Mapping
from typing import Any

from torchtitan.grpo.inference.embedded.generate_json import body_field
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec


def parse_chunk(body: Mapping[str, Any]) -> tuple[BucketSpec, dict[str, Any]]:
    """Returns the bucket of a chunk, and the further arguments of ``WeightUpdater.announce``."""
    load_format = body.get("load_format")
    if load_format not in (None, "flattened_bucket"):
        raise ValueError(f"load_format must be null or 'flattened_bucket', got {load_format!r}.")
    names, dtypes, shapes = (body_field(body, key, list) for key in ("names", "dtypes", "shapes"))
    if not all(type(entry) is str for entry in (*names, *dtypes)):
        raise ValueError("names and dtypes must be lists of strings.")
    if not all(type(s) is list and all(type(dim) is int for dim in s) for s in shapes):
        raise ValueError("shapes must be a list of lists of integers.")
    checksums, num_changed = (_integers(body, key) for key in ("checksums", "num_changed"))
    if num_changed is not None and load_format is None:
        raise ValueError(
            "num_changed can be given only with load_format 'flattened_bucket', which deltas need."
        )
    bucket = BucketSpec(
        tuple(names),
        tuple(dtypes),
        tuple(tuple(s) for s in shapes),
        checksums,
        num_changed,
        body_field(body, "base_version", int, None),
        body_field(body, "lora_scale", float, None),
        body_field(body, "lora_base", str, None),
    )
    return bucket, {
        "group_name": body_field(body, "group_name", str, "weight_update_group"),
        "flattened": load_format is not None,
        "sequence": body_field(body, "sequence", int, None),
        "version": body_field(body, "weight_version", str, None),
        "abort_all": body_field(body, "abort_all_requests", bool, False),
    }


def _integers(body: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    values = body_field(body, key, list, None)
    if values is not None and not all(type(value) is int for value in values):
        raise ValueError(f"{key} must be a list of integers.")
    return None if values is None else tuple(values)
