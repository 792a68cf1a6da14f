# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The blocks of which models are made: a row for each kind, and a module that computes it.

A layer is a pair of blocks: attention, and the feed-forward or experts after it. `families.py` turns
`config.json` into a row (a dataclass of sizes) for each block. Nothing else knows what is inside a block.

| file | holds |
|---|---|
| `parts.py` | The rows: parts with their names on disk, mask, cost, kept bytes, how parts are divided, LoRA's targets |
| `attention.py` | Attention with groups of query heads |
| `experts.py` | A mixture of experts, and the exchange of its tokens |
| `layer.py` | The gated feed-forward, and a layer: which module computes which row |
| `rotary.py` | Rotary embeddings, from `config.json` to rotated heads |

Readers of the rows: `decoder.py` and `helix.py` (modules), `hf_names.py` (files, servers), `parallelize.py`
(layout), `packed_model.py` (masks), `lora.py`, `training/memory_estimate.py`, `data/cost.py` with utilization
and forecast, and the checks of layout and LoRA in `config_checks/`.
"""
