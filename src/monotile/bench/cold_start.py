"""Scripts that print how long a first call, or `import monotile`, takes in a new process.

They import what a user's program would and nothing of the benchmark, so that everything the call itself loads is timed.
"""

from __future__ import annotations

from ..kernels import examples
from ..launch.kernel import Kernel

LENGTH = 64  # of every side
KERNELS = [name for name, item in vars(examples).items() if isinstance(item, Kernel)]

# `import monotile` must not load these.
FORBIDDEN = ("torch", "transformers", "triton", "llvmlite", "typer", "rich", "mlx")
IMPORT = f"""
import sys, time
begin = time.perf_counter()
import monotile
seconds = time.perf_counter() - begin
loaded = [name for name in {FORBIDDEN} if name in sys.modules]
assert not loaded, f"import monotile loads {{loaded}}"
print(seconds)
"""
FIRST_CALL = """
import time
import numpy as np
import monotile
from monotile.kernels.examples import {kernel}
arguments = [{arguments}]
begin = time.perf_counter()
{kernel}(*arguments)
print(time.perf_counter() - begin)
"""


def first_call(kernel: str) -> str:
    """Return the script that calls an example kernel once."""
    parameters = getattr(examples, kernel).parameters
    arguments = [f"np.zeros({(LENGTH,) * len(p.dims)}, np.float32)" if p.dims else "1.0" for p in parameters]
    return FIRST_CALL.format(kernel=kernel, arguments=", ".join(arguments))
