# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import ctypes
import subprocess
import sys

import pytest

from torchtitan.grpo.system import process_tuning

# Prints the number of separately mapped blocks that a block of 256 KiB adds.
PROGRAM = """
import ctypes, runpy, sys

class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]

functions = runpy.run_path(sys.argv[1])
if sys.argv[2] == "set":
    functions["map_large_blocks"]()
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallocInfo
bytes(1 << 20)  # raises the threshold when it is freed, unless the threshold is set
before = mallinfo().hblks
block = bytes(256 << 10)
print(mallinfo().hblks - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="needs glibc 2.33 or newer",
)
def test_large_blocks_stay_out_of_the_heap_even_after_a_larger_one_was_freed():
    def mapped(choice: str) -> int:
        command = [sys.executable, "-c", PROGRAM, str(process_tuning.__file__), choice]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    assert mapped("unset") == 0
    assert mapped("set") == 1
