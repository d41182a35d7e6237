"""Checks of torch tensors before torch's own operations read them. torch reads a tensor whose storage was freed at a
null address; kernels refuse it, but offsets, tables and what is appended or cast meet torch first."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentKind
from ..runtime import tensors
from . import torch_calls

Array = Any


def check_tensors(optional: Mapping[str, Array | None] | None = None, /, **given: Array) -> None:
    """Raise an error for an argument that is no torch tensor, or has no elements that can be read. Those of `optional`
    may be None."""
    for name, tensor in (optional or {}).items():
        if tensor is not None:
            given[name] = tensor
    _check_kinds(given)
    check_readable(**given)


def check_kinds(**given: Array) -> None:
    """Raise an error for an argument that is no torch tensor."""
    _check_kinds(given)


def _check_kinds(given: Mapping[str, Array]) -> None:
    torch = sys.modules["torch"]
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            cure = "pass a torch tensor" if tensor is None else f"pass a torch tensor, such as torch.as_tensor({name})"
            raise ArgumentKind(f"{name!r} must be a torch tensor, found {type(tensor).__name__}; {cure}")


def check_readable(**given: Array | None) -> None:
    """Raise an error for torch tensors without readable elements. A call in a trace, and one on meta or fake tensors
    alone, computes shapes and may pass."""
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling():
        return
    found = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    unreadable = {name: t for name, t in found.items() if not _is_readable(torch, t)}
    if unreadable and not _compute_shapes(list(found.values())):
        for name, tensor in unreadable.items():
            tensors.read(name, tensor)


def in_autocast(function: str, **given: Array) -> tuple[Array, ...]:
    """Return the arrays of a call in the dtype of an autocast region, if it is in one. Refuse tensors of torch.func's
    transforms, for functions that have no rule for them."""
    torch, first = sys.modules.get("torch"), next(iter(given.values()))
    if torch is None or not isinstance(first, torch.Tensor):
        return tuple(given.values())
    if torch.compiler.is_compiling():
        return torch_calls.in_autocast(*given.values())
    if torch._C._are_functorch_transforms_active() and any(map(is_transformed, given.values())):
        torch_calls.refuse_tangents(function, *given.values())
        cure = "call it outside of vmap and torch.func, with the batch as a dimension of the arrays"
        raise ArgumentKind(f"{function} has no rule for torch.vmap and torch.func; {cure}")
    if not torch._C._is_any_autocast_enabled():
        return tuple(given.values())
    check_readable(**given)
    return torch_calls.in_autocast(*given.values())


def check_before_autocast(**given: Array) -> None:
    """Raise an error for tensors that an autocast region would cast, and cannot read."""
    if sys.modules["torch"]._C._is_any_autocast_enabled():
        check_readable(**given)


def has_contents(tensor: Any) -> bool:
    """False in a trace, where only shapes are known."""
    return not sys.modules["torch"].compiler.is_compiling() and type(tensor).__name__ != "FakeTensor"


def is_transformed(array: Array) -> bool:
    """True for a tensor of a running vmap or gradient transform, which has no memory of its own."""
    torch = sys.modules["torch"]
    return isinstance(array, torch.Tensor) and bool(torch._C._functorch.is_functorch_wrapped_tensor(array))


def _is_readable(torch: Any, tensor: Any) -> bool:
    if is_transformed(tensor):
        return True
    if tensor.is_nested or tensor.layout is not torch.strided or type(tensor).__name__ == "FakeTensor":
        return False
    if type(tensor) is not torch.Tensor and torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return True  # of tensors that its operations read
    if tensor.device.type == "mps" or not tensor.numel():
        return True
    if not tensor.data_ptr():
        return False
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(end <= tensor.untyped_storage().nbytes())


def _compute_shapes(found: list[Any]) -> bool:
    """True for meta tensors alone, and for fake ones that the trace takes together with the others."""
    if any([t.is_nested for t in found]):
        return False
    traced = [t for t in found if type(t).__name__ == "FakeTensor"]
    if traced:
        return len(traced) == len(found) or bool(traced[0].fake_mode.allow_non_fake_inputs)
    return all([t.is_meta for t in found])
