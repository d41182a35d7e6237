"""What `monotile inspect` shows is what a call runs: the same kernels, constants and schedules."""

from __future__ import annotations

from typing import Any

import pytest

from monotile import backends, ir
from monotile.backends.base import Program
from monotile.dtypes import BY_NAME, bool_, float32
from monotile.launch.captures import NOTHING
from monotile.library import block_maps, dry_run, merging, ops
from monotile.library.calls import CallBuilder
from monotile.library.inputs import AttentionOptions
from monotile.runtime.tensors import View, dense

DEVICES = {"cpu": "cpu", "metal": "mps", "nvidia": "sm_90"}
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "few queries": {"Nq": 3},
    "one split": {"Nq": 1, "Nk": 100},
    "bool mask": {"mask": bool_},
    "additive mask, window, sinks": {"mask": float32, "window": (100, 0), "sinks": True},
    "softcap, lse": {"softcap": 30.0, "return_lse": True},
    "large heads": {"D": 512},
}


class Nothing(Program):
    """A program that is never launched."""

    def bind(self, words: Any, device: str = "cpu") -> None:
        return None

    def launch(self, *args: Any) -> None:
        pytest.fail("nothing is launched")


def tensor(device: str, dtype: Any, *shape: int) -> View:
    return View(dtype, shape, dense(shape), device)


def described(device: str, given: dict[str, Any]) -> tuple[dict[str, View], AttentionOptions]:
    """The arrays and options of a call."""
    Nq, Nk, D, dtype = given.get("Nq", 300), given.get("Nk", 3000), given.get("D", 128), BY_NAME["bfloat16"]
    inputs = {"q": tensor(device, dtype, 1, 8, Nq, D)}
    inputs |= {name: tensor(device, dtype, 1, 2, Nk, D) for name in "kv"}
    if "mask" in given:
        inputs["mask"] = tensor(device, given["mask"], 1, 1, Nq, Nk)
    if "sinks" in given:
        inputs["sinks"] = tensor(device, float32, 8)
    usual = {"causal": False, "negative": False, "return_lse": False, "backend": None}
    values = {**dict.fromkeys(AttentionOptions._fields), **usual}
    values |= {name: value for name, value in given.items() if name in values}
    return inputs, AttentionOptions(**values)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", DEVICES)
def test_a_call_compiles_what_is_shown(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "nvidia":
        pytest.importorskip("triton", reason="the choice of a path asks for Triton's version")
    compiled: list[tuple[str, Any]] = []

    def compile_as(self: Any, kernel: ir.Kernel, schedule: Any = None) -> Program:
        compiled.append((ir.show(kernel), schedule))
        return Nothing()

    kind = type(backends.get(backend))
    for method in ("compile", "compile_as"):
        monkeypatch.setattr(kind, method, compile_as)
    monkeypatch.setattr(kind, "identity", lambda self: None)  # nothing is found on disk
    monkeypatch.setattr(kind, "why_not", lambda self: None)
    monkeypatch.setattr(kind, "accepts", lambda self, device: True)
    for kernel in (ops.attention_kernel, merging.merge_kernel, block_maps.mask_blocks_kernel):
        monkeypatch.setattr(kernel, "_programs", {})
        monkeypatch.setattr(kernel, "_templates", {})
    inputs, options = described(DEVICES[backend], CALLS[name])
    builder = CallBuilder(inputs, NOTHING, options.backend, options.threads)
    ops.FUNCTIONS["attention"].plan(builder, options)
    shown = dry_run.launches("attention", inputs, options)
    assert compiled and [(ir.show(launch.form), launch.choice.schedule) for launch in shown] == compiled
