"""How much memory a call takes beside its arrays: what its threads work in, whatever the length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRATCH = 4 << 20  # bytes: a few tiles for each of two threads, and what Python itself moves about

CALL = """
import sys
import numpy as np
import monotile

def most():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

N = int(sys.argv[1])
q = np.random.default_rng(0).standard_normal((1, 1, N, 64), dtype=np.float32)
k, v = q.copy(), q.copy()
run = {"causal": True, "window": (256, 0), "backend": "cpu", "threads": 2}
parts = {"splits": 8, "backend": "cpu", "threads": 2}
monotile.attention(q[:, :, :512], k, v, **run)  # compiling takes memory of its own
monotile.decode_partials(q[:, :, :1], k[:, :, :512], v[:, :, :512], **parts)
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
before = most()
out = monotile.attention(q, k, v, **run)
during = most()
monotile.decode_partials(q[:, :, :1], k, v, **parts)
print(during - before - out.nbytes, most() - during)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a process")
def test_memory_of_a_call_does_not_grow_with_its_length() -> None:
    for N in (16384, 65536):
        found = subprocess.run([sys.executable, "-c", CALL, str(N)], capture_output=True, text=True, check=True)
        prefill, decode = map(int, found.stdout.split())
        assert prefill < SCRATCH
        assert decode < SCRATCH


BACKWARD = """
import sys
import numpy as np
import monotile

def most():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

N, H = int(sys.argv[1]), int(sys.argv[2])
q = np.random.default_rng(0).standard_normal((1, H, N, 64), dtype=np.float32)
run = {"causal": True, "window": (256, 0), "backend": "cpu", "threads": 2}
o, lse = monotile.attention(q, q, q, return_lse=True, **run)
short = [x[:, :, :512] for x in (q, q, q, q, o)]
monotile.attention_backward(*short, lse[:, :, :512], **run)  # compiling takes memory of its own
open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
before = most()
found = monotile.attention_backward(q, q, q, q, o, lse, **run)
print(most() - before - 3 * q.nbytes - lse.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a process")
def test_memory_of_gradients_does_not_grow_with_the_scores() -> None:
    """By one kernel (two heads on two processors) and by two: beside the gradients, a number for each row."""
    for N, H in ((16384, 2), (65536, 1)):
        found = subprocess.run(
            [sys.executable, "-c", BACKWARD, str(N), str(H)], capture_output=True, text=True, check=True
        )
        assert int(found.stdout) < SCRATCH
