# ruff: noqa: UP037  (a tensor annotation such as Tensor["N"] is a shape, not a forward reference)
"""Calls of a kernel: arguments that are refused before a launch, and how often a kernel is compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from monotile import backends, errors, ir
from monotile.backends.base import Backend, Program
from monotile.dtypes import float16, float32
from monotile.errors import MonotileError
from monotile.language import Const, Tensor, arange, cdiv, int64, kernel, program_id
from monotile.launch import kernel as launch
from monotile.launch.captures import NOTHING
from monotile.launch.kernel import Kernel
from monotile.runtime import tensors
from monotile.runtime.tensors import View

POISON = 7.0


class Recorder(Backend):
    """A backend that counts compilations and launches and computes nothing."""

    name = "recorder"

    def __init__(self) -> None:
        self.compiled: list[ir.Kernel] = []
        self.bound: list[Sequence[int]] = []
        self.launched: list[tuple[list[int], list[Any], int | None]] = []

    def why_not(self) -> str | None:
        return None

    def accepts(self, device: str) -> bool:
        return device == "cpu"

    def compile(self, kernel: ir.Kernel) -> Program:
        self.compiled.append(kernel)
        return Recorded(self)

    def stages(
        self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None
    ) -> dict[str, Callable[[], str]]:
        return {}


class Recorded(Program):
    def __init__(self, backend: Recorder) -> None:
        self.backend = backend

    def bind(self, words: Sequence[int], device: str = "cpu") -> Any:
        self.backend.bound.append(words)
        return len(self.backend.bound) - 1

    def launch(
        self,
        bound: Any,
        arrays: Sequence[Any],
        addresses: Sequence[int],
        scalars: Sequence[Any],
        threads: int | None,
    ) -> None:
        assert list(addresses) == [a.ctypes.data for a in arrays]
        self.backend.launched.append((list(addresses), list(scalars), threads))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Replace every backend. Kernels are new for each test, so none is found compiled."""
    found = Recorder()
    known = backends.get
    monkeypatch.setattr(backends, "get", lambda name: found if name == "cpu" else known(name))
    yield found


def add_kernel() -> Kernel:
    @kernel
    def add(x: Tensor["N"], y: Tensor["N"], out: Tensor["N"], *, B: Const = 4):
        rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
        out[rows] = x[rows] + y[rows]

    return add


def scale_kernel() -> Kernel:
    @kernel
    def scale(x: Tensor["N"], out: Tensor["N"], factor: float, shift: int, wide: int64, flag: bool, any_):
        out[arange(4)] = x[arange(4)] * factor

    return scale


def shaped_kernel() -> Kernel:
    @kernel
    def shaped(x: Tensor["M K"], y: Tensor["K 3"], out: Tensor["M _"], *, K: Const):
        out[0, arange(4)] = x[0, arange(4)]

    return shaped


def apply_kernel() -> Kernel:
    @kernel
    def apply(x: Tensor["N"], out: Tensor["N"], *, f: Const):
        out[arange(4)] = f(x[arange(4)])

    return apply


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype)


def poisoned(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.full(shape, POISON, dtype)


def refused(recorder: Recorder, error: type[MonotileError], words: str, call: Callable[[], None]) -> None:
    """The call raises this error, with these words in it, and launches nothing."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    for word in words.split("|"):
        assert word in str(caught.value)
    assert not recorder.launched


# ---- arrays ----------------------------------------------------------------------------------------------------------


def unaligned() -> np.ndarray[Any, Any]:
    return np.zeros(8 * 4 + 1, np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize(
    "error, words, x",
    [
        (errors.ArgumentDType, "'x' has dtype float64|float32", array(8, dtype=np.float64)),
        (errors.ArgumentDType, "complex64", array(8, dtype=np.complex64)),
        (errors.ArgumentDType, "object", np.array([None] * 8)),
        (errors.ArgumentDType, ">f4", array(8, dtype=">f4")),
        (errors.ArgumentDType, "<U1", np.array(list("abcdefgh"))),
        (errors.ArgumentDType, "uint16", array(8, dtype=np.uint16)),
        (errors.ArgumentRank, "1 dimensions (N)|(8, 1)", array(8, 1)),
        (errors.ArgumentRank, "no dimensions|.item()", np.array(1.0, np.float32)),
        (errors.ArgumentAlignment, "not aligned|.copy()", unaligned()),
        (errors.ArgumentAlignment, "not aligned", np.zeros(8, "u1,f4")["f1"]),
        (errors.ArgumentKind, "must be an array, found list", [1.0] * 8),
        (errors.UnknownAttribute, "None has no 'shape'|left out", None),
        (errors.ArgumentKind, "found str", "abcdefgh"),
        (errors.ArgumentKind, "found float", 1.0),
        (errors.ArgumentKind, "found float32", np.float32(1)),
        (errors.ArgumentKind, "masked", np.ma.masked_array(np.ones(8, np.float32))),
        (errors.ArgumentShape, "y.shape[0] is 8, but 'N' is 9|x.shape[0]", array(9)),
    ],
)
def test_array_is_refused(recorder: Recorder, error: type[MonotileError], words: str, x: Any) -> None:
    out = poisoned(8)
    refused(recorder, error, words, lambda: add_kernel()(x, array(8), out))
    assert (out == POISON).all()
    assert not recorder.compiled


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_argument_count(recorder: Recorder, count: int) -> None:
    arrays = [poisoned(8) for _ in range(count)]
    refused(recorder, errors.ArgumentCount, f"add(x, y, out)|found {count}", lambda: add_kernel()(*arrays))


def test_element_type_the_kernel_refuses_is_its_own_error(recorder: Recorder) -> None:
    call = lambda: add_kernel()(array(8), array(8, dtype=np.bool_), poisoned(8))  # noqa: E731
    refused(recorder, errors.DTypeMismatch, "float32[4] and bool[4]", call)


def test_device(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tensors.describe
    place = {"x": "cuda:0", "y": "cpu", "out": "cpu"}

    def elsewhere(name: str, item: Any) -> tensors.View:
        view = real(name, item)
        return tensors.View(view.dtype, view.shape, view.strides, place[name])

    monkeypatch.setattr(tensors, "describe", elsewhere)
    arrays = array(8), array(8), poisoned(8)
    add = add_kernel()
    refused(recorder, errors.ArgumentDevice, "x on cuda:0, y on cpu", lambda: add(*arrays))
    place.update(y="cuda:0", out="cuda:0")
    refused(recorder, errors.ArgumentDevice, "cannot use arrays on 'cuda:0'", lambda: add(*arrays, backend="cpu"))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_overlapping_output(recorder: Recorder) -> None:
    memory = poisoned(32)
    add = add_kernel()
    x = array(8)
    for first, out in [
        (memory[:8], memory[4:12]),
        (memory[:8], memory[7:15]),
        (memory[:8], memory[7::-1]),
        (memory[:16:2], memory[2:18:2]),
        (memory[:24:3], memory[:16:2]),
        (np.broadcast_to(memory[3:4], 8), memory[:8]),
    ]:
        refused(recorder, errors.OverlappingOutput, "'out' shares memory with 'x'", lambda a=first, b=out: add(a, x, b))
    refused(recorder, errors.OverlappingOutput, "with 'y'", lambda: add(x, memory[1:9], memory[:8]))
    assert (memory == POISON).all()


def test_disjoint_views_are_accepted(recorder: Recorder) -> None:
    memory = poisoned(32)
    add = add_kernel()
    x = array(8)
    for first, out in [
        (memory[::4], memory[1::4]),
        (memory[:16:2], memory[1:16:2]),
        (memory[:8], memory[8:16]),
        (memory[7::-1], memory[8:16]),
        (memory[:0], memory[:0]),
    ]:
        add(first, x[: len(first)], out)
    add(memory[:8], memory[:8], memory[8:16])  # inputs may share memory
    assert len(recorder.launched) == 6


def test_overlap_is_checked_in_every_call(recorder: Recorder) -> None:
    memory = poisoned(16)
    add = add_kernel()
    add(memory[:8], array(8), memory[8:])
    recorder.launched.clear()
    refused(recorder, errors.OverlappingOutput, "shares memory", lambda: add(memory[:8], array(8), memory[1:9]))
    assert len(recorder.compiled) == 1


def test_alignment_and_writability_are_checked_in_every_call(recorder: Recorder) -> None:
    add = add_kernel()
    add(array(8), array(8), poisoned(8))
    recorder.launched.clear()
    out = poisoned(8)
    out.flags.writeable = False
    refused(recorder, errors.ArgumentAlignment, "'y'", lambda: add(array(8), unaligned(), poisoned(8)))
    refused(recorder, errors.ReadOnlyOutput, "'out'|read-only", lambda: add(array(8), array(8), out))
    assert len(recorder.compiled) == 1


def test_output_that_overlaps_itself(recorder: Recorder) -> None:
    out = np.lib.stride_tricks.as_strided(poisoned(8), (8,), (0,))
    refused(
        recorder, errors.OverlappingOutput, "elements share memory|copy", lambda: add_kernel()(array(8), array(8), out)
    )


def test_read_only_arrays(recorder: Recorder) -> None:
    x, out = array(8), poisoned(8)
    x.flags.writeable = out.flags.writeable = False
    refused(recorder, errors.ReadOnlyOutput, "'out'|read-only", lambda: add_kernel()(array(8), x, out))
    add_kernel()(x, x, poisoned(8))
    assert len(recorder.launched) == 1


def test_empty_arrays(recorder: Recorder) -> None:
    add = add_kernel()
    add(array(8), array(8), poisoned(8))
    add(array(0), array(0), poisoned(0))
    assert recorder.bound[1] == [0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert len(recorder.compiled) == 1


# ---- scalars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at, value, error, words",
    [
        (0, True, errors.ArgumentKind, "'factor' must be a number"),
        (0, np.True_, errors.ArgumentKind, "'factor' must be a number"),
        (0, "2", errors.ArgumentKind, "'factor' must be a float32 scalar, found str"),
        (0, None, errors.ArgumentKind, "found NoneType"),
        (0, 1j, errors.ArgumentKind, "found complex"),
        (0, array(8), errors.ArgumentKind, "found ndarray"),
        (0, np.array(1.0, np.float32), errors.ArgumentKind, "found ndarray"),
        (0, 1e300, errors.ScalarDoesNotFit, "'factor' does not fit float32"),
        (0, 10**400, errors.ScalarDoesNotFit, "'factor' does not fit float32"),
        (0, np.float64(1e300), errors.ScalarDoesNotFit, "'factor' does not fit float32"),
        (1, 2**31, errors.ScalarDoesNotFit, "'shift' does not fit int32|int64"),
        (1, -(2**31) - 1, errors.ScalarDoesNotFit, "'shift' does not fit int32"),
        (1, 2.0, errors.ArgumentKind, "'shift' must be a whole number, found float"),
        (1, True, errors.ArgumentKind, "'shift' must be a whole number, found bool"),
        (1, np.uint64(2**40), errors.ScalarDoesNotFit, "'shift'"),
        (2, 2**63, errors.ScalarDoesNotFit, "'wide' does not fit int64"),
        (3, 1, errors.ArgumentKind, "'flag' must be True or False"),
        (4, 2**31, errors.ScalarDoesNotFit, "'any_' does not fit int32"),
        (4, "text", errors.ArgumentKind, "'any_' must be an array, found str"),
    ],
)
def test_scalar_is_refused(recorder: Recorder, at: int, value: Any, error: type[MonotileError], words: str) -> None:
    scale = scale_kernel()
    scalars: list[Any] = [1.0, 1, 1, True, 1]
    good = [*scalars]
    scalars[at] = value
    out = poisoned(8)
    refused(recorder, error, words, lambda: scale(array(8), out, *scalars))
    scale(array(8), out, *good)  # also with a plan made
    recorder.launched.clear()
    refused(recorder, error, words, lambda: scale(array(8), out, *scalars))


def test_scalars_are_accepted(recorder: Recorder) -> None:
    scale = scale_kernel()
    numbers = [np.float32(0.5), np.int8(3), np.int64(2**40), np.True_, np.float64(2)]
    scale(array(8), poisoned(8), *numbers)
    assert recorder.launched[-1][1] == [0.5, 3, 2**40, 1, 2.0]
    scale(array(8), poisoned(8), float("inf"), 2**31 - 1, -(2**63), False, 3)
    assert recorder.launched[-1][1] == [float("inf"), 2**31 - 1, -(2**63), 0, 3]
    scale(array(8), poisoned(8), 3, -(2**31), 0, False, False)
    assert recorder.launched[-1][1] == [3.0, -(2**31), 0, 0, 0]
    assert [k.scalars[-1][1].name for k in recorder.compiled] == ["float32", "int32", "bool"]


# ---- constants and shapes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "consts, words",
    [
        ({"C": 1}, "no Const 'C'|B"),
        ({"B": float("nan")}, "NaN"),
        ({"B": [4]}, "found list"),
        ({"B": {}}, "found dict"),
        ({"B": (4, [1])}, "found list"),
        ({"B": array(2)}, "found ndarray"),
        ({"B": len}, "found builtin"),
    ],
)
def test_const_is_refused(recorder: Recorder, consts: dict[str, Any], words: str) -> None:
    refused(recorder, errors.ConstError, words, lambda: add_kernel()(array(8), array(8), poisoned(8), **consts))


def test_missing_const(recorder: Recorder) -> None:
    refused(recorder, errors.ConstError, "needs the Const f|f=", lambda: apply_kernel()(array(8), poisoned(8)))


def test_function_that_captures_a_list(recorder: Recorder) -> None:
    captured = [1.0]
    call = lambda: apply_kernel()(array(8), poisoned(8), f=lambda v: v * captured[0])  # noqa: E731
    refused(recorder, errors.ConstError, "'f' is a function that captures an unhashable type: 'list'", call)


def test_function_that_captures_itself(recorder: Recorder) -> None:
    def again(v: Any) -> Any:
        return again(v)

    refused(recorder, errors.TooDeep, "recursion", lambda: apply_kernel()(array(8), poisoned(8), f=again))


@pytest.mark.parametrize(
    "shapes, consts, error, words",
    [
        (((4, 5), (6, 3), (4, 2)), {}, errors.ArgumentShape, "y.shape[0] is 6, but 'K' is 5 (from x.shape[1])"),
        (((4, 5), (5, 2), (4, 2)), {}, errors.ArgumentShape, "y.shape[1] is 2, but 3 is 3 (from the signature)"),
        (((4, 5), (5, 3), (3, 2)), {}, errors.ArgumentShape, "out.shape[0] is 3, but 'M' is 4"),
        (((4, 5), (5, 3), (4, 2)), {"K": 6}, errors.ArgumentShape, "x.shape[1] is 5, but 'K' is 6 (from the call)"),
        (((4, 1), (1, 3), (4, 2)), {"K": True}, errors.ConstError, "'K' is a length, found bool"),
    ],
)
def test_shapes_that_contradict(
    recorder: Recorder, shapes: Any, consts: dict[str, Any], error: type[MonotileError], words: str
) -> None:
    out = poisoned(*shapes[2])
    refused(recorder, error, words, lambda: shaped_kernel()(array(*shapes[0]), array(*shapes[1]), out, **consts))


def test_lengths_bind_constants(recorder: Recorder) -> None:
    shaped = shaped_kernel()
    shaped(array(4, 5), array(5, 3), poisoned(4, 9))
    shaped(array(4, 5), array(5, 3), poisoned(4, 9), K=np.int64(5))
    assert [k.consts for k in recorder.compiled] == [{"K": 5}]
    assert recorder.compiled[0].tensors[0].dims == ("M", 5)


@pytest.mark.parametrize("name", ["gpu", "", 3, [], ("cpu",)])
def test_unknown_backend(recorder: Recorder, name: Any) -> None:
    call = lambda: add_kernel()(array(8), array(8), poisoned(8), backend=name)  # noqa: E731
    refused(recorder, errors.UnknownBackend, "backend", call)


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2"])
def test_bad_thread_count(recorder: Recorder, threads: Any) -> None:
    call = lambda: add_kernel()(array(8), array(8), poisoned(8), threads=threads)  # noqa: E731
    refused(recorder, errors.BadThreadCount, "positive whole number", call)


@pytest.mark.parametrize("schedule", [3, [], "fast"])
def test_schedule_for_a_backend_without(recorder: Recorder, schedule: Any) -> None:
    call = lambda: add_kernel()(array(8), array(8), poisoned(8), schedule=schedule)  # noqa: E731
    refused(recorder, errors.BadOption, "takes no schedule", call)


def test_word_outside_a_kernel() -> None:
    with pytest.raises(errors.OutsideKernel, match="arange"):
        arange(4)


# ---- how often something is compiled ---------------------------------------------------------------------------------


def test_new_lengths_make_plans_not_programs(recorder: Recorder) -> None:
    add = add_kernel()
    for n in (1, 8, 9, 1000):
        add(array(n), array(n), poisoned(n))
        add(array(n), array(n), poisoned(n))
    assert (len(recorder.compiled), len(recorder.bound), len(recorder.launched)) == (1, 4, 8)


def test_plans_of_known_layouts_are_those_of_the_full_check(recorder: Recorder) -> None:
    """Over all pairs of a few layouts: what one call leaves behind never changes the plan or the error of another."""
    shaped = shaped_kernel()
    xs = [View(float32, shape, strides, "cpu") for shape in ((2, 3), (5, 3), (2, 4), (1, 3), (2, 1), (0, 3))
          for strides in ((3, 1), (1, 5), (7, 1), (4, 1), (6, 2))]  # fmt: skip
    ys = [View(dtype, (n, 3), (3, 1), "cpu") for dtype in (float32, float16) for n in (1, 3, 4)]
    outs = [View(float32, (2, 9), (9, 1), "cpu"), View(float32, (2, 9), (0, 1), "cpu")]

    def planned(known: bool, *views: View) -> Any:
        if not known:
            shaped._templates.clear()
        try:
            plan = shaped.plan(views, NOTHING, {}, None)
        except MonotileError as error:
            return str(error)
        return plan.program, recorder.bound[plan.bound], plan.spans, plan.outputs, plan.alignment_masks

    every = [(x, y, out) for x in xs for y in ys for out in outs]
    apart = [planned(False, *views) for views in every]
    assert [planned(True, *views) for views in every] == apart == [planned(True, *views) for views in every]
    assert 0 < len(recorder.compiled) < len({str(found) for found in apart})


def test_what_compiles_apart(recorder: Recorder) -> None:
    add = add_kernel()
    add(array(8), array(8), poisoned(8))
    add(array(16)[::2], array(8), poisoned(8))
    add(array(8), array(8), poisoned(8), B=8)
    add(array(8, dtype=np.float16), array(8, dtype=np.float16), poisoned(8, dtype=np.float16))
    assert len(recorder.compiled) == 4


def test_functions_made_anew_do_not_recompile(recorder: Recorder) -> None:
    apply = apply_kernel()
    for factor in (2.0, 2.0, 3.0, 2.0, 0.0, -0.0):
        apply(array(8), poisoned(8), f=lambda v, extra=1.0: v * factor + extra)  # noqa: B023
    assert len(recorder.compiled) == 1  # a captured number is an argument, a default is a constant
    for factor in (2.0, 3.0):
        apply(array(8), poisoned(8), f=lambda v, extra=factor: v * 2.0 + extra)
    assert len(recorder.compiled) == 3
    for inner in (lambda v: v, lambda v: v * 2.0):
        apply(array(8), poisoned(8), f=lambda v: inner(v))  # noqa: B023
    assert len(recorder.compiled) == 5


FACTOR = 2.0


def helper(v: Any) -> Any:
    return v * FACTOR


def test_globals_that_change_are_compiled_again(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = apply_kernel()
    for _ in range(3):
        apply(array(8), poisoned(8), f=lambda v: helper(v))
    assert len(recorder.compiled) == 1
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    for _ in range(3):
        apply(array(8), poisoned(8), f=lambda v: helper(v))
    assert len(recorder.compiled) == 2
    apply(array(9), poisoned(9), f=lambda v: helper(v))
    assert len(recorder.compiled) == 3  # another place in the file: its errors would show another line
    monkeypatch.setitem(globals(), "helper", lambda v: v)
    apply(array(9), poisoned(9), f=lambda v: helper(v))
    assert "mul" in ir.show(recorder.compiled[2]) and "mul" not in ir.show(recorder.compiled[3])


def test_plans_are_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_PLANS", 8)
    add = add_kernel()
    for n in range(1, 40):
        add(array(n), array(n), poisoned(n))
        assert len(add._plans) <= 8
    assert len(recorder.compiled) == 1


def test_first_calls_from_many_threads(recorder: Recorder) -> None:
    add = add_kernel()
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def work(n: int) -> None:
        start.wait()
        try:
            for size in (8, n + 1):
                add(array(size), array(size), poisoned(size))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert (len(recorder.compiled), len(recorder.launched)) == (1, 16)


def test_failed_calls_are_not_remembered(recorder: Recorder) -> None:
    add = add_kernel()
    for _ in range(2):
        refused(recorder, errors.ArgumentDType, "float64", lambda: add(array(8), array(8), poisoned(8, dtype=float)))
    add(array(8), array(8), poisoned(8))
    assert len(recorder.launched) == 1


def test_interpreter_computes() -> None:
    out = poisoned(10)
    add_kernel()(array(10), array(10), out, backend="interpreter")
    assert (out == 2).all()


def test_kernel_in_a_function_sees_its_variables() -> None:
    offset = 3.0

    @kernel
    def shifted(x, out):
        out[arange(4)] = x[arange(4)] + offset

    out = poisoned(4)
    shifted(array(4), out, backend="interpreter")
    assert (out == 4).all()


def test_decorators_above_a_kernel() -> None:
    seen = []

    def note(item: Any) -> Any:
        seen.append(item)
        return item

    @note
    @kernel
    def noted(x, out):
        out[arange(4)] = x[arange(4)]

    out = poisoned(4)
    noted(array(4), out, backend="interpreter")
    assert seen == [noted] and (out == 1).all()


def test_a_decorator_with_parentheses() -> None:
    with pytest.raises(errors.BadSignature, match="write @kernel without parentheses"):
        kernel()  # type: ignore[call-arg]


def test_gradients_through_a_kernel_are_refused() -> None:
    """Of its arguments, and of what its functions read."""
    torch = pytest.importorskip("torch")

    @kernel
    def scaled(x: Tensor["N"], out: Tensor["N"], *, by: Const, N: Const):
        out[:] = by(x[:], arange(N))

    x, out, weights = torch.ones(4), torch.zeros(4), torch.full((4,), 3.0, requires_grad=True)
    for given, by in ((x, lambda a, i: a * weights[i]), (weights, lambda a, i: a * 1.0)):
        with pytest.raises(errors.NoGradient, match=r"'scaled' has no gradient.*detached"):
            scaled(given, out, by=by)
        assert not out.any()
        with torch.no_grad():
            scaled(given, out, by=by)
        assert (out == 3.0).all()
        out.zero_()
