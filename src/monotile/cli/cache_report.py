"""`monotile cache`: where compiled kernels are kept, how many there are, how much they take."""

from __future__ import annotations

import time

from rich.console import Console

from ..runtime import cache, cache_limit


def run(console: Console, *, limit: str | None, clear: bool) -> None:
    """Clear the cache or set its limit if asked to, then say what is in it."""
    root = str(cache.directory())
    if clear:
        print(f"removed {cache_limit.clear(root)} files")
    if limit is not None:
        cache_limit.set_limit(root, limit)
    found = cache_limit.files(root)
    kernels = sum(file.kind in cache_limit.KERNEL_KINDS for file in found)
    size = sum(file.size for file in found)
    lines = [
        f"folder   {root}",
        f"kernels  {kernels}, in {len(found)} files",
        f"size     {_bytes(size)} of {_bytes(cache_limit.limit(root))}: beyond, what was used longest ago is removed",
    ]
    if found:
        lines.append(f"oldest   last used {time.strftime('%Y-%m-%d %H:%M', time.localtime(found[0].used))}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _bytes(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"
