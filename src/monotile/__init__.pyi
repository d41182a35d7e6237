"""The types of the public functions. A result is of the kind of its first array: NumPy, torch, MLX or JAX."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload

from numpy.typing import NDArray

from .errors import MonotileError as MonotileError
from .library.ops import BlockMask as BlockMask
from .library.ops import block_mask as block_mask
from .library.ops import recommended_splits as recommended_splits
from .library.quantized import Quantized as Quantized

class Array(Protocol):
    """What every array has, whoever made it."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...

A = TypeVar("A", bound=Array)
Numpy = NDArray[Any]  # where a result has other dimensions or another dtype, both of which NumPy's types may carry
Keys = Array | Quantized
Window = tuple[int | None, int | None]
Mod = Callable[..., Any]

__version__: str
__all__ = [
    "BlockMask", "Gradients", "MonotileError", "Partials", "Quantized", "__version__", "attention",
    "attention_backward", "attention_paged", "attention_varlen", "attention_varlen_backward", "block_mask",
    "decode_partials", "mask_blocks", "merge", "merge_lse", "paged_append", "quantize", "recommended_splits",
]  # fmt: skip

class Partials(NamedTuple, Generic[A]):
    o: A
    m: A
    l: A

class Gradients(NamedTuple, Generic[A]):
    dq: A
    dk: A
    dv: A
    dsinks: A | None
    dmask: A | None

# fmt: off
@overload
def attention(
    q: A, k: Keys, v: Keys, *, causal: bool | str = ..., scale: float | None = ..., mask: Array | None = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ..., score_mod: Mod | None = ...,
    mask_mod: Mod | BlockMask | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
    threads: int | None = ...,
) -> A: ...
@overload
def attention(
    q: Numpy, k: Keys, v: Keys, *, causal: bool | str = ..., scale: float | None = ..., mask: Array | None = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ..., score_mod: Mod | None = ...,
    mask_mod: Mod | BlockMask | None = ..., return_lse: Literal[True], backend: str | None = ...,
    threads: int | None = ...,
) -> tuple[Numpy, Numpy]: ...
@overload
def attention(
    q: A, k: Keys, v: Keys, *, causal: bool | str = ..., scale: float | None = ..., mask: Array | None = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ..., score_mod: Mod | None = ...,
    mask_mod: Mod | BlockMask | None = ..., return_lse: Literal[True], backend: str | None = ...,
    threads: int | None = ...,
) -> tuple[A, A]: ...
@overload
def attention(
    q: A, k: Keys, v: Keys, *, causal: bool | str = ..., scale: float | None = ..., mask: Array | None = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ..., score_mod: Mod | None = ...,
    mask_mod: Mod | BlockMask | None = ..., return_lse: bool, backend: str | None = ..., threads: int | None = ...,
) -> A | tuple[A, A]: ...

@overload
def attention_paged(
    q: A, k_pages: Keys, v_pages: Keys, page_table: Array, lengths: Array, *, q_offsets: Array | None = ...,
    causal: bool | str = ..., scale: float | None = ..., window: Window | None = ..., softcap: float | None = ...,
    sinks: Array | None = ..., score_mod: Mod | None = ..., mask_mod: Mod | None = ...,
    return_lse: Literal[False] = ..., check: bool = ..., backend: str | None = ..., threads: int | None = ...,
) -> A: ...
@overload
def attention_paged(
    q: Numpy, k_pages: Keys, v_pages: Keys, page_table: Array, lengths: Array, *, q_offsets: Array | None = ...,
    causal: bool | str = ..., scale: float | None = ..., window: Window | None = ..., softcap: float | None = ...,
    sinks: Array | None = ..., score_mod: Mod | None = ..., mask_mod: Mod | None = ...,
    return_lse: Literal[True], check: bool = ..., backend: str | None = ..., threads: int | None = ...,
) -> tuple[Numpy, Numpy]: ...
@overload
def attention_paged(
    q: A, k_pages: Keys, v_pages: Keys, page_table: Array, lengths: Array, *, q_offsets: Array | None = ...,
    causal: bool | str = ..., scale: float | None = ..., window: Window | None = ..., softcap: float | None = ...,
    sinks: Array | None = ..., score_mod: Mod | None = ..., mask_mod: Mod | None = ...,
    return_lse: Literal[True], check: bool = ..., backend: str | None = ..., threads: int | None = ...,
) -> tuple[A, A]: ...
@overload
def attention_paged(
    q: A, k_pages: Keys, v_pages: Keys, page_table: Array, lengths: Array, *, q_offsets: Array | None = ...,
    causal: bool | str = ..., scale: float | None = ..., window: Window | None = ..., softcap: float | None = ...,
    sinks: Array | None = ..., score_mod: Mod | None = ..., mask_mod: Mod | None = ...,
    return_lse: bool, check: bool = ..., backend: str | None = ..., threads: int | None = ...,
) -> A | tuple[A, A]: ...

@overload
def attention_varlen(
    q: A, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = ...,
    scale: float | None = ..., window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ...,
    score_mod: Mod | None = ..., mask_mod: Mod | None = ..., return_lse: Literal[False] = ..., check: bool = ...,
    backend: str | None = ..., threads: int | None = ...,
) -> A: ...
@overload
def attention_varlen(
    q: Numpy, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = ...,
    scale: float | None = ..., window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ...,
    score_mod: Mod | None = ..., mask_mod: Mod | None = ..., return_lse: Literal[True], check: bool = ...,
    backend: str | None = ..., threads: int | None = ...,
) -> tuple[Numpy, Numpy]: ...
@overload
def attention_varlen(
    q: A, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = ...,
    scale: float | None = ..., window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ...,
    score_mod: Mod | None = ..., mask_mod: Mod | None = ..., return_lse: Literal[True], check: bool = ...,
    backend: str | None = ..., threads: int | None = ...,
) -> tuple[A, A]: ...
@overload
def attention_varlen(
    q: A, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = ...,
    scale: float | None = ..., window: Window | None = ..., softcap: float | None = ..., sinks: Array | None = ...,
    score_mod: Mod | None = ..., mask_mod: Mod | None = ..., return_lse: bool, check: bool = ...,
    backend: str | None = ..., threads: int | None = ...,
) -> A | tuple[A, A]: ...

def attention_backward(
    do: A, q: A, k: A, v: A, o: A, lse: Array, *, dlse: Array | None = ..., mask_grad: bool = ...,
    causal: bool | str = ..., scale: float | None = ..., mask: Array | None = ..., window: Window | None = ...,
    softcap: float | None = ..., sinks: Array | None = ..., score_mod: Mod | None = ...,
    mask_mod: Mod | BlockMask | None = ..., deterministic: bool = ..., backend: str | None = ...,
    threads: int | None = ...,
) -> Gradients[A]: ...
def attention_varlen_backward(
    do: A, q: A, k: A, v: A, o: A, lse: Array, q_offsets: Array, k_offsets: Array, *, dlse: Array | None = ...,
    causal: bool | str = ..., scale: float | None = ..., window: Window | None = ..., softcap: float | None = ...,
    sinks: Array | None = ..., score_mod: Mod | None = ..., mask_mod: Mod | None = ...,
    deterministic: bool = ..., check: bool = ..., backend: str | None = ..., threads: int | None = ...,
) -> Gradients[A]: ...
@overload
def decode_partials(
    q: Numpy, k: Keys, v: Keys, *, splits: int | None = ..., causal: bool | str = ..., scale: float | None = ...,
    mask: Array | None = ..., window: Window | None = ..., softcap: float | None = ..., score_mod: Mod | None = ...,
    mask_mod: Mod | BlockMask | None = ..., backend: str | None = ..., threads: int | None = ...,
) -> Partials[Numpy]: ...
@overload
def decode_partials(
    q: A, k: Keys, v: Keys, *, splits: int | None = ..., causal: bool | str = ..., scale: float | None = ...,
    mask: Array | None = ..., window: Window | None = ..., softcap: float | None = ..., score_mod: Mod | None = ...,
    mask_mod: Mod | BlockMask | None = ..., backend: str | None = ..., threads: int | None = ...,
) -> Partials[A]: ...
@overload
def mask_blocks(
    mask: Numpy, block_q: int, block_k: int, *, backend: str | None = ..., threads: int | None = ...
) -> Numpy: ...
@overload
def mask_blocks(
    mask: A, block_q: int, block_k: int, *, backend: str | None = ..., threads: int | None = ...
) -> A: ...
@overload
def merge(
    o: Numpy, m: Array, l: Array, *, dtype: Any = ..., backend: str | None = ..., threads: int | None = ...
) -> tuple[Numpy, Numpy]: ...
@overload
def merge(
    o: A, m: Array, l: Array, *, dtype: Any = ..., backend: str | None = ..., threads: int | None = ...
) -> tuple[A, A]: ...
@overload
def merge_lse(
    outs: Numpy | Sequence[Numpy], lses: Array | Sequence[Array], *, backend: str | None = ...,
    threads: int | None = ...,
) -> tuple[Numpy, Numpy]: ...
@overload
def merge_lse(
    outs: A | Sequence[A], lses: Array | Sequence[Array], *, backend: str | None = ..., threads: int | None = ...
) -> tuple[A, A]: ...
def paged_append(
    k_pages: Keys, v_pages: Keys, page_table: Array, lengths: Array, k_new: Array, v_new: Array, *,
    check: bool = ..., backend: str | None = ..., threads: int | None = ...,
) -> None: ...
def quantize(x: Array, format: str, *, group: int | None = ..., check: bool = ...) -> Quantized: ...
