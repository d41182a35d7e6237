"""Block masks: a mask_mod with the block maps that its calls use, made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import backends
from ..dtypes import uint8
from ..errors import BadOption, MaskShape
from ..frontend.functions import is_function, name_of
from ..kernels.mask_blocks import mod_blocks as mod_blocks_kernel
from ..kernels.visibility import FULL, HIDDEN, PARTIAL
from ..launch.captures import captures, with_constants
from ..runtime import arrays, tensors
from ..runtime.tensors import View
from .block_maps import depends_on, map_shape
from .kept_maps import KeptMaps

SHOWN_BLOCK = 128  # rows and keys of the blocks whose shares a block mask shows
MAX_LENGTH = 2**31 - 1


class Shares(NamedTuple):
    """The shares of blocks of 128 x 128 scores that are hidden, partly visible and fully visible."""

    hidden: float
    partial: float
    full: float


class BlockMask:
    """A mask_mod for scores of given sides, which `attention(..., mask_mod=...)` takes. It keeps what the function
    hides, per block, in the block sizes of the calls it is used in."""

    def __init__(self, mask_mod: Callable[..., Any], B: int | None, H: int | None, Nq: int, Nk: int) -> None:
        if isinstance(mask_mod, BlockMask):
            mask_mod = mask_mod.mask_mod
        if not is_function(mask_mod):
            raise BadOption(f"mask_mod is a Python function, found {type(mask_mod).__name__}")
        self.mask_mod = mask_mod
        self.B, self.H = _side("B", B, optional=True), _side("H", H, optional=True)
        self.Nq, self.Nk = _side("Nq", Nq), _side("Nk", Nk)
        by_batch, by_head = with_constants((mask_mod,), lambda: depends_on(mask_mod))
        for name, side, depends in (("B", B, by_batch), ("H", H, by_head)):
            if depends and side is None:
                of = {"B": "batch", "H": "head"}[name]
                raise BadOption(f"{name} is None, but mask_mod depends on the {of}; give the number it is for")
        self._lead = self.B if by_batch else 1, self.H if by_head else 1
        self.maps = KeptMaps(promised=True)

    @property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the function refers to; those of MLX as NumPy arrays."""
        return tuple(captures((self.mask_mod,)).beside(()).arrays.values())

    def check(self, scores: tuple[int, ...]) -> None:
        """Raise MaskShape unless the mask fits scores (batch, query heads, queries, keys)."""
        own = self.B, self.H, self.Nq, self.Nk
        if any(side is not None and side != length for side, length in zip(own, scores, strict=True)):
            shown = ", ".join(map(str, own))
            raise MaskShape(
                f"the block mask is for ({shown}) (batch, query heads, queries, keys), the call has {scores};"
                " make one with block_mask(mask_mod, B, H, Nq, Nk) for these"
            )

    def shares(self) -> Shares:
        """Evaluate the function and return the shares of blocks that it hides, in part, and not at all."""
        shape = map_shape((self._lead[0] or 0, self._lead[1] or 0, self.Nq, self.Nk), SHOWN_BLOCK, SHOWN_BLOCK)
        if 0 in shape:
            return Shares(0.0, 0.0, 0.0)
        found = self.captured
        lib = arrays.library("mask_mod", found[0]) if found else arrays.Numpy()
        device = tensors.device(found[0]) if found else "cpu"
        block_map, _ = lib.allocate(lib.template(View(uint8, shape, tensors.dense(shape), device)))
        choice = backends.get(backends.resolve(None, device)).choices.mod_blocks(SHOWN_BLOCK, device)
        blocks: dict[str, Any] = {"BR": SHOWN_BLOCK, "BK": SHOWN_BLOCK, "packed": False, **choice.blocks}
        mod_blocks_kernel(block_map, self.Nq, self.Nq, self.Nk, mask_mod=self.mask_mod, **blocks)
        here = np.asarray(block_map.cpu() if hasattr(block_map, "cpu") else block_map)
        return Shares(*[float((here == case).mean()) for case in (HIDDEN, PARTIAL, FULL)])

    def __repr__(self) -> str:
        sides = f"B={self.B}, H={self.H}, Nq={self.Nq}, Nk={self.Nk}"
        shown = ", ".join(f"{share:.1%} {name}" for name, share in self.shares()._asdict().items())
        return f"BlockMask({name_of(self.mask_mod)}, {sides}: {shown})"


def block_mask(mask_mod: Callable[..., Any], B: int | None, H: int | None, Nq: int, Nk: int) -> BlockMask:
    """Return what a mask_mod hides, per block, to pass as `mask_mod` of many calls: it is computed once.

    Args:
        mask_mod: a Python function (b, h, q_idx, kv_idx) -> bool.
        B: batches, or None where the function does not depend on b.
        H: query heads, or None where it does not depend on h.
        Nq: queries.
        Nk: keys.

    Returns:
        A `BlockMask` for calls with these sides.

    Example:
        >>> blocks = monotile.block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, 128, 128)
        >>> q = np.ones((1, 2, 128, 64), np.float32)
        >>> monotile.attention(q, q, q, mask_mod=blocks).shape
        (1, 2, 128, 64)
    """
    return BlockMask(mask_mod, B, H, Nq, Nk)


def _side(name: str, side: Any, *, optional: bool = False) -> Any:
    if side is None and optional:
        return None
    if isinstance(side, bool) or not isinstance(side, int | np.integer) or not 0 <= side <= MAX_LENGTH:
        allowed = "a whole number from 0 up, or None" if optional else "a whole number from 0 up"
        raise BadOption(f"{name} must be {allowed}; found {side!r}")
    return int(side)


def unwrapped(mask_mod: Any) -> tuple[Any, BlockMask | None]:
    """A block mask as its function and itself."""
    return (mask_mod.mask_mod, mask_mod) if isinstance(mask_mod, BlockMask) else (mask_mod, None)
