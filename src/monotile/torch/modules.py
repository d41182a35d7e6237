"""A module of self-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HeadsDoNotDivide
from ..library.entry import attention


class Attention(nn.Module):  # type: ignore[misc]
    """Multi-head attention of a sequence to itself: x (B, N, width) in, the same shape out.

    `kv_heads` heads of keys and values are shared by groups of the `heads` query heads. Options are those of
    `monotile.attention`: `Attention(512, 8, kv_heads=2, causal=True, window=(1023, 0))`. A parameter among them (sinks)
    is one of the module's, another tensor is a buffer, and a module (a `score_mod`) belongs to it.
    """

    def __init__(
        self, width: int, heads: int, *, kv_heads: int | None = None, head_size: int | None = None, bias: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise HeadsDoNotDivide(f"{heads} query heads cannot share {kv_heads} KV heads; use a divisor of {heads}")
        if head_size is None and width % heads:
            raise HeadsDoNotDivide(f"a width of {width} does not divide into {heads} heads; pass head_size")
        self.heads, self.kv_heads = heads, kv_heads
        self.head_size = width // heads if head_size is None else head_size
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_size, bias=bias)
        self.out = nn.Linear(heads * self.head_size, width, bias=bias)
        self.registered = tuple(name for name, value in options.items() if isinstance(value, Tensor | nn.Module))
        self.options = {name: value for name, value in options.items() if name not in self.registered}
        for name in self.registered:
            self._register(name, options[name])

    def _register(self, name: str, value: Tensor | nn.Module) -> None:
        """Make a tensor or module among the options a parameter, a buffer or a module of this one."""
        if isinstance(value, nn.Module):
            self.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` broadcasts to (B, heads, N, N)."""
        parts = self.qkv(x).unflatten(-1, (-1, self.head_size)).transpose(-2, -3)
        q, k, v = torch.split(parts, [self.heads, self.kv_heads, self.kv_heads], dim=-3)
        registered = {name: getattr(self, name) for name in self.registered}
        o = attention(q, k, v, mask=mask, **self.options, **registered)
        found: Tensor = self.out(o.transpose(-2, -3).flatten(-2))
        return found
