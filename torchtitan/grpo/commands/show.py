# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Prints a record of rollouts as JSON lines: the header, then a line for each batch."""

import argparse
import sys
from itertools import chain, islice

import msgspec

from torchtitan.grpo.data.record import RecordReader


def show(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-grpo show", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="what rollout.record has written")
    path = parser.parse_args(arguments).file
    reader = RecordReader(path, None, None, "show")
    batches = (batch for _, batch in reader)
    first = list(islice(batches, 1))  # the header is read with it
    for value in chain([reader.header], first, batches):
        # Numbers in float32 are printed as the float64 ones that equal them.
        line = msgspec.json.encode(value, enc_hook=lambda array: array.tolist())
        print(line.decode())
    if reader.was_cut_off:
        print(f"{path} is cut off behind its last complete batch", file=sys.stderr)
    return 0
