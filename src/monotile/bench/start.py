"""How long a first call takes, in a new process: `python -m monotile.bench.start KERNEL` prints the seconds."""

from __future__ import annotations

import sys
import time

from .. import inspection
from ..kernels import examples
from ..launch import Kernel

KERNELS = [name for name, item in vars(examples).items() if isinstance(item, Kernel)]

# Nothing a user has not asked for may be loaded by `import monotile`.
FORBIDDEN = ("torch", "triton", "llvmlite", "typer", "rich", "mlx")
IMPORT = f"""
import sys, time
begin = time.perf_counter()
import monotile
seconds = time.perf_counter() - begin
loaded = [name for name in {FORBIDDEN} if name in sys.modules]
assert not loaded, f"import monotile loads {{loaded}}"
print(seconds)
"""


def main() -> None:
    kernel = getattr(examples, sys.argv[1])
    args, consts = inspection.arguments(kernel, inspection.Request())
    for array in args:
        if not isinstance(array, float | int):
            array.fill(0)
    begin = time.perf_counter()
    kernel(*args, **consts)
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    main()
