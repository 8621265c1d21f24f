"""What the machine says of itself."""

import ctypes
import subprocess
import sys

import pytest

CHILD = """
from mint.machine import give_back_memory, process_memory
held = [bytes(50_000) for _ in range(2000)]
full = process_memory()
last = held[-1]  # keeps the heap from being cut at its end
del held
before = process_memory()
give_back_memory()
print(full, before, process_memory())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps what was freed")
def test_memory_that_was_freed_between_other_memory_goes_back_to_the_system() -> None:
    told = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    full, before, after = map(int, told.split())
    assert full - before < 50_000_000, "the allocator kept it"
    assert full - after > 80_000_000
