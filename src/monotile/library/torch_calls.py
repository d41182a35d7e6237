"""What a call on torch tensors needs beside its arithmetic: autocast, gradients and traces. torch is not loaded here: a
call on NumPy arrays never needs it, and one on tensors has it already."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..errors import ArgumentKind, ArgumentRank, NoGradient
from ..runtime import tensors
from ..runtime.arrays import check_one_library

Array = Any
F = TypeVar("F", bound=Callable[..., Any])
CAPTURED_GRADIENT = (
    "score_mod or mask_mod reads a tensor that requires grad, and attention has no gradient for it; "
    "pass it detached (bias.detach()), or as an additive mask, which has one"
)


def is_tensor(array: Array) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_causal_bias(array: Array) -> bool:
    """True for a `torch.nn.attention.bias.CausalBias`: two lengths, and memory that holds nothing."""
    return type(array).__name__ == "CausalBias"


def is_plain(q: Array, k: Array, v: Array, mask: Array | None, sinks: Array | None) -> bool:
    """True if a call on tensors surely needs nothing but its arithmetic: the common case, in few questions. Others ask
    `refuse_tangents`, `in_autocast` and `needs_operator`."""
    torch = sys.modules["torch"]
    Tensor, state = torch.Tensor, torch._C
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor or torch.compiler.is_compiling():
        return False
    if state._are_functorch_transforms_active() or state._is_any_autocast_enabled() or q.is_meta:
        return False
    if state._len_torch_dispatch_stack() or state._is_tracing():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    return mask is sinks is None or not needs_operator(mask, sinks)


def is_traced(first: Array, *others: Array) -> bool:
    """True for tensors of a trace: in torch.compile, export and make_fx, fake or meta."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(first, torch.Tensor):
        return False
    if torch.compiler.is_compiling():
        return True
    if not first.is_meta and type(first).__name__ != "FakeTensor" and not _in_make_fx():
        return False
    return _are_alike([t for t in (first, *others) if isinstance(t, torch.Tensor)])


def is_recorded() -> bool:
    """True where a graph is recorded that outlives the call, by make_fx or torch.jit.trace."""
    return bool(sys.modules["torch"]._C._is_tracing()) or _in_make_fx()


def _in_make_fx() -> bool:
    if not sys.modules["torch"]._C._len_torch_dispatch_stack():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def in_autocast(*given: Array) -> tuple[Array, ...]:
    """Return tensors in the dtype of an autocast region, if the call is in one, as torch's own attention does."""
    torch, kind = sys.modules["torch"], given[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return given
    dtype = torch.get_autocast_dtype(kind)
    return tuple([t.to(dtype) if is_tensor(t) and t.is_floating_point() else t for t in given])


def needs_operator(*given: Array | None) -> bool:
    """True if a call on tensors has to be an operator of torch's: gradients, a trace, a dispatch mode, or tensors of a
    subclass."""
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        return True
    found = [t for t in given if isinstance(t, torch.Tensor)]
    if torch._C._len_torch_dispatch_stack():
        return _are_alike(found)
    if torch.is_grad_enabled() and any([t.requires_grad for t in found]):
        return _are_alike(found)
    if any([type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter for t in found]):
        return _are_alike(found)
    return all([t.is_meta for t in found])


def check_operator_arguments(**given: Array | None) -> None:
    """Raise an error unless an operator's arguments are tensors or left out. In a trace torch says it."""
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():
        return
    check_one_library(given.items())
    for name, array in given.items():
        if array is None and name in ("mask", "sinks"):
            continue
        if not isinstance(array, torch.Tensor):
            raise ArgumentKind(f"{name!r} must be an array, found {type(array).__name__}; pass a torch tensor")
        if array.dim() > 4 and torch._C._is_tracing():
            found = f"up to 4 dimensions, {name!r} has {array.dim()}"
            raise ArgumentRank(f"torch.jit.trace records attention of {found}; flatten the first, or use torch.export")


def _are_alike(given: list[Any]) -> bool:
    """True if an operator takes these tensors together; otherwise reading them will say what is wrong."""
    if any([t.is_nested for t in given]):
        return False
    traced = [t for t in given if type(t).__name__ == "FakeTensor"]
    alike = len({t.is_meta for t in given if not hasattr(t, "fake_mode")}) < 2
    return alike and (len(traced) in (0, len(given)) or traced[0].fake_mode.allow_non_fake_inputs)


USE_ATTENTION = "call it under torch.no_grad(), pass detached tensors, or use attention, which has one"


def refuse_gradients(function: str, *given: Array | None, cure: str = USE_ATTENTION) -> None:
    """Raise an error where gradients would be lost in silence."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    refuse_tangents(function, *given)
    if not torch.is_grad_enabled():
        return
    if any([getattr(t, "requires_grad", False) for t in given]):
        raise NoGradient(f"{function} has no gradient, and a tensor given to it requires grad; {cure}")


def refuse_captured_gradients(captured: Iterable[Array], *, computed: bool = False) -> None:
    """Raise an error where a mod reads a tensor with a gradient or a tangent: neither is computed. `computed`: the call
    is one with gradients, though torch tracks none here."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    refuse_tangents("a score_mod or mask_mod", *captured)
    if (computed or torch.is_grad_enabled()) and any([getattr(a, "requires_grad", False) for a in captured]):
        raise NoGradient(CAPTURED_GRADIENT)


def refuse_tangents(function: str, *given: Array | None) -> None:
    """Raise an error where a tangent of forward mode (torch.autograd.forward_ad, torch.func.jvp) would be lost in
    silence. Outside of a dual level this is one comparison."""
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0:
        return
    unpack = torch.autograd.forward_ad.unpack_dual
    if torch._C._is_fwd_grad_enabled() and any(
        [isinstance(t, torch.Tensor) and unpack(t).tangent is not None for t in given]
    ):
        raise no_forward_mode(function)


def no_forward_mode(function: str) -> NoGradient:
    return NoGradient(
        f"{function} has no forward-mode derivative, and a tensor given to it has a tangent; use reverse mode "
        "(requires_grad and backward, torch.func.grad, vjp or jacrev), which attention and attention_varlen have, or "
        "a formula of torch operations"
    )


def is_refused_by_class(error: TypeError) -> bool:
    """True for torch's error where no class of the arguments takes an operator."""
    return "__torch_dispatch__" in str(error)


def no_rule(function: str, given: Iterable[Any]) -> ArgumentKind:
    kinds = ", ".join(sorted({type(t).__name__ for t in given if is_tensor(t)}))
    return ArgumentKind(f"{function} has no rule for tensors of the classes {kinds}; pass plain ones")


def with_clear_errors(function: F) -> F:
    """A function under another library's name. What torch refuses to prepare (a view of a nested, sparse or freed
    tensor) gets the error that reading it gives."""

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return function(*args, **options)
        try:
            return function(*args, **options)
        except (RuntimeError, NotImplementedError):
            for name, given in inspect.signature(function).bind(*args, **options).arguments.items():
                if isinstance(given, torch.Tensor):
                    tensors.read(name, given)
            raise
        except TypeError as error:
            if not is_refused_by_class(error):
                raise
            raise no_rule(function.__name__, (*args, *options.values())) from error

    return checked  # type: ignore[return-value]
