"""monotile: attention kernels written once, on tiles, for every machine."""

from .errors import MonotileError

__version__ = "0.1.0"
__all__ = ["MonotileError", "__version__"]
