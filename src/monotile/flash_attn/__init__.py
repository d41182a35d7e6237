"""The functions of FlashAttention 2, with its signatures, layouts and conventions, by monotile's kernels.

from monotile.flash_attn import flash_attn_func

o = flash_attn_func(q, k, v, causal=True)  # (batch, length, heads, head size)

`install()` makes `import flash_attn` find these functions where FlashAttention itself is not installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

from .cache import flash_attn_with_kvcache
from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .ragged import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
VERSION = "2.8.0"  # whose signatures these are


def install() -> bool:
    """Make `import flash_attn` find these functions in this process. Where FlashAttention is installed nothing is
    changed, and the answer is False."""
    if "flash_attn" in sys.modules:
        return getattr(sys.modules["flash_attn"], "__doc__", None) == __doc__
    if importlib.util.find_spec("flash_attn") is not None:
        return False
    functions = {name: globals()[name] for name in __all__ if name != "install"}
    package, interface = types.ModuleType("flash_attn", __doc__), types.ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        vars(module).update(functions)
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=module is package)
        sys.modules[module.__name__] = module
    vars(package).update({"__version__": VERSION, "__path__": [], "flash_attn_interface": interface})
    return True
