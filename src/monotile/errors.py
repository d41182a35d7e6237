"""One class per mistake. Each says what was found and what to do; mistakes in a kernel also show the author's line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ir import Loc


class MonotileError(Exception):
    """Everything monotile raises on purpose."""


class InternalError(MonotileError):
    """A fault of monotile itself, never of the caller."""


# ---- mistakes in a kernel's source -------------------------------------------------------------------------------------


class KernelError(MonotileError):
    """A mistake in a kernel: what was found, the line with a caret under it, and the cure."""

    def __init__(self, found: str, cure: str, loc: Loc | None = None) -> None:
        self.found, self.cure, self.loc = found, cure, loc
        super().__init__(self.render())

    def render(self) -> str:
        if self.loc is None:
            return f"{self.found}\n  cure: {self.cure}"
        text = self.loc.text.rstrip()
        stripped = text.lstrip()
        start = self.loc.column - (len(text) - len(stripped))
        carets = "^" * max(1, min(self.loc.end, len(text)) - self.loc.column)
        return (
            f"{self.found}\n  {self.loc.file}, line {self.loc.line}:\n    {stripped}\n    {' ' * start}{carets}\n"
            f"  cure: {self.cure}"
        )


class UnknownName(KernelError):
    """A name that nothing defines where it is read."""


class UnsupportedPython(KernelError):
    """Python that the kernel language does not have."""


class WrongCall(KernelError):
    """A word or helper called with arguments it does not take."""


class ShapeMismatch(KernelError):
    """Tiles whose shapes do not fit together."""


class ShapeNotConstant(KernelError):
    """A tile side, step or axis that is only known at run time."""


class RankTooHigh(KernelError):
    """A tile of more than two dimensions."""


class DTypeMismatch(KernelError):
    """Element types that do not promote to a common one, or an operation a type does not have."""


class CarriedTypeChanged(KernelError):
    """A variable that leaves a loop or branch with another type than it entered."""


class ReturnedValue(KernelError):
    """A kernel that returns something; kernels write to tensors."""


class BadIndex(KernelError):
    """A subscript that is not a slice, position or tile of positions."""


class NotAssignable(KernelError):
    """An assignment to something that cannot be written."""


class TruthOfTile(KernelError):
    """A tile used where one true or false is needed."""


class BadSignature(KernelError):
    """A kernel's parameter list that cannot be understood."""


class NoSource(KernelError):
    """A function whose Python source cannot be read."""


class TooDeep(KernelError):
    """Helper functions that call each other without end."""


# ---- mistakes in a call ------------------------------------------------------------------------------------------------


class CallError(MonotileError):
    """A mistake in a call; nothing was launched and nothing was written."""


class OutsideKernel(CallError):
    """A word of the kernel language called from ordinary Python."""


class ArgumentCount(CallError):
    """Too few or too many arguments."""


class ConstError(CallError):
    """A compile-time parameter that is missing, unknown or of a kind that cannot be one."""


class ArgumentKind(CallError):
    """An argument that is not an array, or a scalar that does not fit its type."""


class ArgumentDType(CallError):
    """An array of an element type the language does not have."""


class ArgumentRank(CallError):
    """An array with the wrong number of dimensions."""


class ArgumentShape(CallError):
    """Arrays whose lengths contradict the kernel's signature or each other."""


class ArgumentDevice(CallError):
    """Arrays on different devices, or on one the backend cannot reach."""


class ReadOnlyOutput(CallError):
    """An output array that may not be written."""


class OverlappingOutput(CallError):
    """An output array that shares memory with another argument or with itself."""


class UnknownBackend(CallError):
    """A backend that does not exist or cannot run here."""


class BadThreadCount(CallError):
    """A thread count that is not a positive whole number."""
