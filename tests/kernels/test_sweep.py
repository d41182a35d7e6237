"""`monotile check --sweep`: random calls between poisoned neighbours, and what is found where one goes wrong."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from monotile import MonotileError, dtypes
from monotile.library import registry, sweep, sweep_processes
from monotile.library.guarded import GUARD, GuardedArray, Placement, guarded_results
from monotile.library.sweep import CallOutcome
from monotile.library.sweep_processes import Runner, Sweep
from monotile.runtime import arrays
from usable import ON_GPU

SEED = 11


@pytest.mark.parametrize("family", range(3))
def test_calls_hold(family: int) -> None:
    for case in range(2):
        assert sweep.run_case(SEED, family, case, "cpu").problem == ""


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
def test_calls_hold_on_a_gpu() -> None:
    console = Console(file=io.StringIO(), width=200)
    assert sweep_processes.run(console, Sweep(200, SEED, "nvidia", processes=8)), console.file.getvalue()


def test_a_call_can_be_repeated_alone() -> None:
    names = [sweep.run_case(SEED, 2, 1, "cpu").name for _ in range(2)]
    assert names[0] == names[1] != sweep.run_case(SEED, 2, 0, "cpu").name
    assert Sweep(5, per_family=2).families() == [(0, 0, 2), (1, 0, 2), (2, 0, 1)]
    assert Sweep(1, first=(12, 3)).families() == [(12, 3, 4)]


def test_some_families_alone() -> None:
    found = Sweep(9, SEED, per_family=4, only="BACKWARD").families()
    assert [end - start for _, start, end in found] == [4, 4, 1]
    assert all("backward" in sweep.draw_family(SEED, n).op for n, _, _ in found)
    with pytest.raises(MonotileError, match="no family's name holds 'abacus'"):
        Sweep(1, only="abacus").families()


LAYOUTS = {
    "dense": Placement(),
    "heads between positions": Placement((0, 2, 1, 3)),
    "every second position": Placement(spread=(1, 1, 2, 1)),
    "longer rows, offset": Placement(padding=3, offset=5),
    "repeated": Placement(repeated=(0,)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bool])
def test_layouts(name: str, dtype: Any) -> None:
    """The array has its values, everything else in the block is poison, and every byte is watched."""
    layout = LAYOUTS[name]
    values = (np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) % 7).astype(dtype)
    array = GuardedArray.make("q", values, layout, on_gpu=False)
    kept = values[:1] if layout.repeated else values
    np.testing.assert_array_equal(array.host, np.broadcast_to(kept, values.shape))
    element = values.dtype.itemsize
    assert array.host.strides == tuple(s * element for s in layout.strides(values.shape))
    assert (array.block == 0xFF).sum() == array.block.size - kept.size * element
    assert not array.changed()
    for at in (GUARD // 2, array.block.size // 2, array.block.size - 1):
        array.whole[at] ^= 1
        assert array.changed()
        array.whole[at] ^= 1


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int32"])
def test_layouts_on_a_gpu(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors on the CPU in place of those on a GPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    kind = dtypes.to_numpy(dtypes.BY_NAME[dtype])
    values = (np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) % 7).astype(kind)
    array = GuardedArray.make("q", values, LAYOUTS[name], on_gpu=True)
    assert str(array.given.dtype) == f"torch.{dtype}" and array.given.stride() == LAYOUTS[name].strides(values.shape)
    np.testing.assert_array_equal(registry.from_device(array.given), array.host)
    assert not array.changed()
    array.whole[GUARD // 2] = 0
    assert array.changed()


def wrong_call(monkeypatch: pytest.MonkeyPatch, change: Any) -> str:
    """What is said of a call with a kernel that does more than it should."""
    plain = sweep._run

    def run(family: Any, given: Any, backend: str) -> Any:
        found = plain(family, given, backend)
        change(given, found)
        return found

    monkeypatch.setattr(sweep, "_run", run)
    family = next(n for n in range(99) if sweep.draw_family(SEED, n).op == "attention")
    return sweep.run_case(SEED, family, 0, "cpu").problem


def beside(array: Any, elements: int) -> Any:
    """The element that lies so many elements from an array's first one."""
    return np.lib.stride_tricks.as_strided(array, (elements + 1,), (array.dtype.itemsize,))[elements:]


def test_what_is_written_outside_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def past_the_result(given: Any, found: Any) -> None:
        beside(found["out"], found["out"].size + 3)[...] = 1.0

    assert "memory beside a result was written" in wrong_call(monkeypatch, past_the_result)


def test_a_changed_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def into_k(given: Any, found: Any) -> None:
        given["k"][0, 0, 0, 0] += 1

    assert "k or its neighbourhood was written" in wrong_call(monkeypatch, into_k)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(given: Any, found: Any) -> None:
        found["out"][0, 0, 0, 0] += found["out"].dtype.type(0.25)

    assert "out is off by 0.25" in wrong_call(monkeypatch, off)


def test_results_and_temporaries_are_poisoned() -> None:
    with guarded_results() as results:
        made, _ = arrays.Numpy().allocate(((2, 3), np.dtype(np.float32)))
        assert np.isnan(made).all() and not results.written_outside()
        made[...] = 1.0
        assert not results.written_outside()
        beside(made, 6)[...] = 2.0
        assert results.written_outside()
    assert not np.shares_memory(arrays.Numpy().allocate(((2, 3), np.dtype(np.float32)))[0], made)


def broken_work(pipe: Any, seed: int, backend: str) -> None:
    """A process that dies in the second call of the first family, and finds a problem in the second family."""
    while True:
        try:
            family, start, end = pipe.recv()
        except EOFError:
            return
        for case in range(start, end):
            if (family, case) == (0, 1):
                os._exit(7)
            pipe.send(CallOutcome(family, case, "a call", "wrong" if family == 1 else ""))


def test_a_process_that_dies_is_replaced() -> None:
    told: list[CallOutcome] = []
    runner = Runner(Sweep(12, SEED, per_family=4, processes=2), told.append, broken_work)
    runner.run()
    assert len(runner.outcomes) == 12 and runner.not_run == 0 and told == runner.outcomes
    (fault,) = (o for o in runner.outcomes if o.fault)
    assert (fault.family, fault.case) == (0, 1) and "exit code 7" in fault.problem
    assert {o.family for o in runner.outcomes if o.problem and not o.fault} == {1}


def test_time_may_run_out() -> None:
    runner = Runner(Sweep(12, SEED, per_family=4, seconds=-1.0), lambda outcome: None, broken_work)
    runner.run()
    assert not runner.outcomes and runner.not_run == 12
