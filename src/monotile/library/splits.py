"""Into how many parts split decode cuts the keys."""

from __future__ import annotations

from ..backends.choices import KEYS_PER_SPLIT, cdiv
from ..errors import BadOption


def recommended_splits(n_kv: int, n_simds: int, device: str = "cpu") -> int:
    """Return into how many parts to cut the keys of a decode.

    Args:
        n_kv: keys.
        n_simds: rows that read them: query heads of a group times queries.
        device: "cpu" (measured: parts of 512 keys) or "m5_max" (the curve of MLX and MetalTile for that chip).

    Returns:
        The number of parts, at least 1.

    Example:
        >>> monotile.recommended_splits(4096, 4)
        8
    """
    for name, value in (("n_kv", n_kv), ("n_simds", n_simds)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadOption(f"{name} must be a whole number from 0 up, found {value!r}")
    if device == "cpu":
        return max(1, cdiv(n_kv, KEYS_PER_SPLIT))
    if device == "m5_max":
        if n_kv <= 1024 or n_simds <= 4:
            return 64
        return next((s for n, s in ((8192, 128), (32768, 256), (65536, 512)) if n_kv <= n), 1024)
    raise BadOption(
        f"no split curve is known for device {device!r}; known are 'cpu' and 'm5_max': pass splits yourself"
    )
