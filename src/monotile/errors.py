"""One exception class per mistake. A message says what was found and the cure; one in a kernel also shows the line."""

from __future__ import annotations

import unicodedata
from typing import Any, NamedTuple

MAX_WIDTH = 160  # longer source lines are shown in part
MAX_CALLS = 3  # of the helper calls that led to a mistake, shown in the message


class Loc(NamedTuple):
    """A place in the author's source."""

    file: str
    line: int
    column: int
    end: int  # one past the last column of the place, on the same line
    text: str = ""


class MonotileError(Exception):
    """Everything monotile raises on purpose."""


class InternalError(MonotileError):
    """A fault of monotile itself, never of the caller."""


# ---- mistakes in a kernel's source -----------------------------------------------------------------------------------


class KernelError(MonotileError):
    """A mistake in a kernel: what was found, the line with a caret under it, and the cure."""

    def __init__(self, found: str, cure: str, loc: Loc | None = None) -> None:
        super().__init__(found)
        self.found, self.cure, self.loc = found, cure, loc
        self.calls: list[Loc] = []  # the calls of helpers that led here, innermost first

    def __str__(self) -> str:
        lines = [self.found]
        if self.loc is not None:
            lines += [f"  {self.loc.file}, line {self.loc.line}:", *underline(self.loc)]
        for call in self.calls[:MAX_CALLS]:
            lines.append(f"  called from {call.file}, line {call.line}: {call.text.strip()[:MAX_WIDTH]}")
        if len(self.calls) > MAX_CALLS:
            lines.append(f"  and {len(self.calls) - MAX_CALLS} calls further out")
        return "\n".join([*lines, f"  cure: {self.cure}"])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.found, self.cure, self.loc), {"calls": self.calls}


def underline(loc: Loc) -> tuple[str, str]:
    """Return the source line and the line of carets under it, indented for a message."""
    text = loc.text.rstrip()
    start = min(loc.column, len(text))
    end = max(start + 1, min(loc.end, len(text)))
    first = len(text) - len(text.lstrip())
    before, after = "", ""
    if len(text) - first > MAX_WIDTH:
        first = max(first, start - MAX_WIDTH // 4)
        before = "... " if text[:first].strip() else ""
        after = " ..." if len(text) > first + MAX_WIDTH else ""
        end = max(start + 1, min(end, first + MAX_WIDTH))
    shown = text[first : first + MAX_WIDTH] if after else text[first:]
    gap = "".join(c if c == "\t" else " " * _width(c) for c in text[first:start])
    carets = "^" * max(1, sum(_width(c) for c in text[start:end]))
    return f"    {before}{shown}{after}", f"    {' ' * len(before)}{gap}{carets}"


def _width(character: str) -> int:
    """Return the number of columns a character takes on a terminal."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class UnknownName(KernelError):
    """A name that nothing defines."""


class NameOutOfScope(KernelError):
    """A name made inside a run-time loop or in one branch of an if, read where it may not exist."""


class UnknownAttribute(KernelError):
    """Something after a dot that tensors, tiles or modules do not have."""


class UnsupportedPython(KernelError):
    """Python that the kernel language does not have."""


class WrongCall(KernelError):
    """A word or helper called with arguments it does not take."""


class NotCallable(KernelError):
    """A call of something that is not a word, a helper or a plain Python function."""


class BadOperand(KernelError):
    """A tensor, None, string or the like where a tile or a number is needed."""


class ConstantFailed(KernelError):
    """Arithmetic or a call on compile-time values that Python itself refuses."""


class AssertionFailed(KernelError):
    """The kernel's own assert does not hold for these constants."""


class RaceBetweenPrograms(KernelError):
    """An element that one program writes and another one reads or writes; the interpreter finds it."""


class ShapeMismatch(KernelError):
    """Tiles whose shapes do not fit together."""


class ShapeNotConstant(KernelError):
    """A tile side, step, axis or tuple position that is only known at run time."""


class BadSide(KernelError):
    """A tile side that is not a positive integer."""


class BadAxis(KernelError):
    """An axis that the tile does not have."""


class BadStep(KernelError):
    """A loop that does not count upwards, or is too long to be unrolled."""


class BadGrid(KernelError):
    """A program_id that does not describe one grid for the whole kernel."""


class RankTooHigh(KernelError):
    """A tile of more than two dimensions."""


class DTypeMismatch(KernelError):
    """Element types that do not promote to a common one; the author must cast."""


class UndefinedForDType(KernelError):
    """An operation that an element type does not have."""


class NumberDoesNotFit(KernelError):
    """A number outside the range of the element type it meets."""


class CarriedTypeChanged(KernelError):
    """A variable that leaves a loop or branch with another type than it entered."""


class ReturnedValue(KernelError):
    """A kernel that returns something; kernels write to tensors."""


class EarlyReturn(KernelError):
    """A return inside a loop or branch that is decided at run time."""


class NotIterable(KernelError):
    """A for over something that is not a range, blocks or a tuple."""


class BadIndex(KernelError):
    """A subscript that is not a slice, position or tile of positions."""


class NotAssignable(KernelError):
    """An assignment to something that cannot be written, or of something that cannot be stored."""


class UnpackMismatch(KernelError):
    """More or fewer names than values in an assignment."""


class TruthOfTile(KernelError):
    """A tile or tensor used as a condition."""


class BadSignature(KernelError):
    """A kernel's parameter list that cannot be understood."""


class NoSource(KernelError):
    """A function whose Python source cannot be read."""


class NotElementwise(KernelError):
    """A function that is called for each element alone, such as a score_mod, mixes elements of a tile."""


class NotDifferentiable(KernelError):
    """A function whose derivative is asked for but that is not elementwise, or an argument that is not a float."""


class TooDeep(KernelError):
    """Helper functions that call each other without end, or expressions nested too deeply."""


# ---- mistakes in a call ----------------------------------------------------------------------------------------------


class CallError(MonotileError):
    """A mistake in a call; nothing was launched and nothing was written."""


class OutsideKernel(CallError):
    """A word of the kernel language called from ordinary Python."""


class ArgumentCount(CallError):
    """Too few or too many arguments."""


class ConstError(CallError):
    """A compile-time parameter that is missing, unknown or of a kind that cannot be one."""


class ArgumentKind(CallError):
    """An argument that is not an array, or a scalar that is not a number of its type."""


class ScalarDoesNotFit(CallError):
    """A scalar argument outside the range of its type."""


class ArgumentDType(CallError):
    """An array of an element type the language does not have."""


class ArgumentRank(CallError):
    """An array with the wrong number of dimensions."""


class ArgumentShape(CallError):
    """Arrays whose lengths contradict the kernel's signature or each other."""


class ArgumentAlignment(CallError):
    """An array whose elements do not lie at multiples of their size."""


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


# ---- limits of a device ----------------------------------------------------------------------------------------------


class DeviceLimit(MonotileError):
    """A program that exceeds the device's resources, or that its compiler rejects."""


class UnknownArchitecture(MonotileError):
    """A GPU that the compiler behind a backend does not know."""


class OutOfDeviceMemory(MonotileError):
    """Memory of a device that is used up."""


class LaunchFailed(MonotileError):
    """A launch that the device's driver refused, or an earlier one that failed while it ran."""


# ---- mistakes in a call of the attention library ---------------------------------------------------------------------


class HeadsDoNotDivide(CallError):
    """Query heads that are not a multiple of the key-value heads."""


class HeadSize(CallError):
    """A head size that is out of range, or differs between queries and keys."""


class LengthsDiffer(CallError):
    """Batch sizes, heads or lengths of q, k and v that do not belong together."""


class MixedDTypes(CallError):
    """Arrays of different element types where one is needed, or of a type attention does not compute in."""


class MaskShape(CallError):
    """A mask that does not broadcast to the scores."""


class BadOffsets(CallError):
    """Offsets of sequences that fall, or that do not begin at 0 and end at the number of rows."""


class BadPages(CallError):
    """Lengths that are negative or above what a page table holds, or an entry in use that is no page."""


class BadOption(CallError):
    """An option with an invalid value."""


class NoGradient(CallError):
    """A gradient that monotile does not compute, where leaving it out would lose it in silence."""


class CapturedChanged(CallError):
    """Something that a score_mod or mask_mod reads and that was changed between a call and its gradients."""


# ---- mistakes between ranks ------------------------------------------------------------------------------------------


class RanksDiffer(CallError):
    """Ranks of a group that make different calls: shapes or options are not the same, or one of them refused."""


class RankLost(MonotileError):
    """A rank that does not answer: it died, or the group's timeout ended."""
