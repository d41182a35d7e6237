"""monotile in JAX: attention inside `jit`, `grad` and `vmap`, on the CPU.

import monotile.jax

o = jax.jit(monotile.jax.attention)(q, k, v)
"""

from __future__ import annotations

from .custom_call import attention

__all__ = ["attention"]
