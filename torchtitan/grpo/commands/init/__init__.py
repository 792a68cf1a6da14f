# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo init``: writes a configuration for a model and a data set.

In reading order: `command` (options and the whole way), `columns` (of prompts and answers), `reward_choice`,
`prompt_form` (what the model sees), `settings` (values from lengths and machine), `toml_file` (the text).
"""
