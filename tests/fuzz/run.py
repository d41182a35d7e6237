"""Random kernels on every backend: python tests/fuzz/run.py [--count 200] [--first SEED] [--backends cpu,metal,nvidia]

Without --first the seeds are fresh ones. A finding is made smaller while it fails, and printed as source. nvidia runs
in Triton's interpreter, metal in the runner. On a machine with an NVIDIA GPU there is the backend gpu, too, alone or
with cpu. The suite runs a small sample on the cpu (test_fuzz.py); docs/internals/fuzz.md says what was run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=None)
    parser.add_argument("--backends", default="cpu,metal,nvidia")
    options = parser.parse_args(words)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if "gpu" not in options.backends:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from fuzz.backends import runners
    from fuzz.harness import Finding, find
    from fuzz.minimise import minimise
    from fuzz.programs import program
    from fuzz.source import source

    first = random.SystemRandom().randrange(1 << 40) if options.first is None else options.first
    chosen, findings, began = runners(options.backends.split(",")), 0, time.monotonic()
    ran: Counter[str] = Counter()
    for seed in range(first, first + options.count):
        made = program(random.Random(seed))
        found = find(made, chosen, ran)
        if found is not None:
            findings += 1
            only = {found.stage: chosen[found.stage]} if found.stage in chosen else {}

            def fails(smaller: object, found: Finding = found, only: dict[str, object] = only) -> bool:
                again = find(smaller, only)  # type: ignore[arg-type]
                return again is not None and (again.stage, again.kind) == (found.stage, found.kind)

            small = minimise(made, fails)
            last = find(small, only) or found
            print(f"seed {seed}, {last.stage}: {last.kind}: {last.message}\n\n{source(small.kernel)}", flush=True)
    seconds = time.monotonic() - began
    print(f"{options.count} kernels from seed {first}: {findings} findings, {seconds:.0f} s")
    for name in chosen:
        print(f"  {name}: {ran[name]} ran and agreed with the interpreter")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
