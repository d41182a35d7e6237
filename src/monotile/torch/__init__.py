"""monotile in torch models: torch's own `scaled_dot_product_attention`, a module, and a way to put it under models.

import monotile.torch

o = monotile.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
with monotile.torch.sdpa():
    model(x)  # every F.scaled_dot_product_attention in it is monotile's
"""

from __future__ import annotations

from .modules import Attention
from .sdpa import scaled_dot_product_attention, sdpa

__all__ = ["Attention", "scaled_dot_product_attention", "sdpa"]
