"""Which module a kernel runs as, and what the backend says of it: stages, explanations and manifest entries."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from arrays import random
from kernel_calls import over_all_keys
from monotile import errors, ir
from monotile.kernels.attention import attention
from monotile.kernels.examples import matmul, row_softmax
from monotile.kernels.scores import Options
from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, program_id, zeros

pytest.importorskip("triton", reason="a Gluon module depends on Triton's version")
from monotile.backends.nvidia import build, measured, paths
from monotile.backends.nvidia.backend import BACKEND
from monotile.backends.nvidia.gluon import support
from monotile.backends.nvidia.gluon.module import pipeline_of
from monotile.backends.nvidia.program import NvidiaProgram
from monotile.backends.nvidia.schedule import Schedule

compiled = pytest.mark.skipif(build.interpreting(), reason="Triton's interpreter does not compile")
SM_90 = dict(measured.forward_table(False))[128]


def causal_attention(**blocks: int) -> ir.Kernel:
    q = random((1, 4, 256, 128), "bfloat16")
    return attention.ir(
        *over_all_keys(q, q[:, :2], q[:, 2:], q.copy()), options=Options("lower_right"), **(blocks or SM_90.blocks)
    )


@kernel
def products_of_rows(
    x: Tensor["M K"], y: Tensor["N K"], z: Tensor["M D"], *, BM: Const = 64, BN: Const = 64, K: Const, D: Const
):  # fmt: skip
    """A product with a right operand that is computed."""
    rows = program_id(cdiv(x.shape[0], BM)) * BM + arange(BM)
    X, total = x[rows], zeros((BM, D))
    for j in range(0, y.shape[0], BN):
        Y = y[j + arange(BN)]
        total += dot(X, (Y + Y).astype(Y.dtype).T)
    z[rows] = total


def user_kernel() -> ir.Kernel:
    x = random((256, 64), "bfloat16")
    return products_of_rows.ir(x, x.copy(), random((256, 64)))


@kernel
def running_products(x: Tensor["M K"], y: Tensor["K D"], z: Tensor["N D"], *, BM: Const = 64, K: Const, D: Const):
    """Products whose running sums are stored to every other row."""
    i, total = program_id(cdiv(x.shape[0], BM)), zeros((BM, D))
    for j in range(0, K, 64):
        total += dot(x[i * BM + arange(BM), j + arange(64)], y[j + arange(64)])
    z[2 * (i * BM + arange(BM))] = total.cumsum(axis=0)


@compiled
def test_stages_show_the_gluon_module() -> None:
    stages = BACKEND.stages(causal_attention(), SM_90.schedule, "sm_90")
    assert list(stages) == ["ir", "passes", "gluon", "ptx"]
    source = stages["gluon"]()
    assert "gl.warp_specialize(" in source
    ptx = stages["ptx"]()
    assert ".target sm_90a" in ptx and "wgmma" in ptx and "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize("schedule, device", [(None, None), (Schedule(8, 2), "sm_90"), (SM_90.schedule, "sm_80")])
def test_stages_show_the_plain_module(schedule: Schedule | None, device: str | None) -> None:
    stages = BACKEND.stages(causal_attention(), schedule, device)
    assert list(stages) == ["ir", "passes", "triton", "ptx"] and "@triton.jit" in stages["triton"]()


@compiled
def test_ptx_is_for_the_device() -> None:
    x = random((64, 64))
    assert ".target sm_80" in BACKEND.stages(row_softmax.ir(x, x.copy()), None, "sm_80")["ptx"]()
    with pytest.raises(errors.UnknownArchitecture, match="write it like sm_90"):
        BACKEND.stages(row_softmax.ir(x, x.copy()), None, "gfx90a")["ptx"]()


@compiled
def test_a_program_knows_its_path() -> None:
    program = NvidiaProgram(BACKEND.lower(causal_attention()), SM_90.schedule)
    assert program.path.name == "gluon" and program.why_plain == ""
    program = NvidiaProgram(BACKEND.lower(user_kernel()), SM_90.schedule)
    assert program.path.name == "triton" and program.why_plain.startswith("The right operand of a dot is not")


def test_a_kernel_that_cannot_use_gluon_says_why() -> None:
    schedule, path, why = BACKEND.explain(user_kernel(), SM_90.schedule)
    assert schedule == (
        "schedule: 2 consumers of 4 warps, 2 stages, 1 in masked loops, "
        "232 registers per consumer thread, one tile per consumer"
    )
    assert path.startswith("path: plain Triton for sm_90 with the rule's schedule: ")
    assert why == "why: The right operand of a dot is not a tile of memory that TMA can copy in that loop."


def test_explain_the_gluon_path() -> None:
    schedule, path, launch = BACKEND.explain(causal_attention(), SM_90.schedule, "sm_90")
    assert "2 consumers of 4 warps" in schedule
    assert path == "path: Gluon for sm_90, one producer warp and 2 consumers"
    assert "multiples of 16 bytes" in launch


def test_explain_the_rules_schedule() -> None:
    schedule, path, why, able = BACKEND.explain(causal_attention())
    assert schedule.endswith(", by the rule") and path == "path: plain Triton for sm_90"
    assert (
        "does not ask for producer and consumer warps" in why
        and able == "with consumers: The kernel could run as Gluon."
    )
    x = random((64, 64))
    *_, able = BACKEND.explain(matmul.ir(x, x.copy(), x.copy(), BM=32, BN=32, BK=32))
    assert able.startswith("with consumers: It would stay plain. A dot multiplies float32; the consumers' wgmma")


def test_other_architectures_and_other_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "wgmma, which sm_80 does not have" in BACKEND.explain(causal_attention(), SM_90.schedule, "sm_80")[2]
    monkeypatch.setattr(support, "triton_version", lambda: "3.9.1")
    assert "this is Triton 3.9.1" in BACKEND.explain(causal_attention(), SM_90.schedule)[2]
    monkeypatch.setattr(support, "triton_version", lambda: "")  # what is shown is for a machine that has it
    _, path, _, assumed = BACKEND.explain(causal_attention(), SM_90.schedule)
    assert path.startswith("path: Gluon for sm_90") and assumed.startswith("assumed: Triton 3.6 or 3.7")


def test_kernels_that_do_not_fit_say_why() -> None:
    x = random((64, 64))
    lowered = BACKEND.lower(row_softmax.ir(x, x.copy()))
    assert pipeline_of(lowered) == "The kernel has no loop over blocks with a dot in it."
    x = random((64, 64), "bfloat16")
    moving = pipeline_of(BACKEND.lower(running_products.ir(x, x.copy(), random((128, 64)))))
    assert isinstance(moving, str) and "moves elements between threads" in moving


# ---- manifests -------------------------------------------------------------------------------------------------------


def test_the_manifest_of_a_plain_module_says_why() -> None:
    entry = BACKEND.emit(user_kernel(), SM_90.schedule, "sm_90").entry
    assert entry["path"] == "triton" and entry["why"].startswith("The right operand of a dot is not")
    assert "does not ask" in BACKEND.emit(user_kernel()).entry["why"]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_manifest_of_a_gluon_module_describes_its_descriptors(persistent: bool) -> None:
    schedule = dict(measured.forward_table(persistent))[128].schedule
    made = BACKEND.emit(causal_attention(), schedule, "sm_90")
    entry = made.entry
    assert entry["path"] == "gluon" and entry["requires"]["architecture"] == "sm_90"
    (function,) = (
        n
        for n in ast.parse(made.files[entry["file"]]).body
        if isinstance(n, ast.FunctionDef) and n.name == entry["name"]
    )
    assert [a.arg for a in function.args.args] == [a["name"] for a in entry["arguments"]]
    tiles = {a["tensor"]: a for a in entry["arguments"] if a["meaning"] == "descriptor"}
    assert {name: tile["block"] for name, tile in tiles.items()} == {
        "q": [1, 1, 64, 128], "k": [1, 1, 128, 128], "v": [1, 1, 128, 128], "o": [1, 1, 64, 128],
    }  # fmt: skip
    assert all(tile["dtype"] == "bfloat16" for tile in tiles.values())
    assert tiles["q"]["layout"] == {"swizzle_bytes": 128, "element_bits": 16, "rank": 4}
    names: dict[str, Any] = {"B": 2, "H": 4, "R": 1000, "max": max, "min": min}
    names |= {a["name"]: 4 for a in entry["arguments"] if a["meaning"] == "tiles_per_cta"}
    assert eval(entry["grid"][0], names) == 2 * 4 * (2 if persistent else 8)


@compiled
def test_a_gluon_module_compiles_by_its_manifest(tmp_path: Any) -> None:
    import importlib.util

    triton = pytest.importorskip("triton")
    from triton.backends import compiler
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    made = BACKEND.emit(causal_attention(), SM_90.schedule, "sm_90")
    entry, path = made.entry, tmp_path / made.entry["file"]
    path.write_bytes(made.files[entry["file"]])
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    types = {"address": "*bf16", "length": "i32", "stride": "i64", "scalar": "fp32"}
    signature = {}
    for argument in entry["arguments"]:
        if argument["meaning"] == "descriptor":
            layout = NVMMASharedLayout(*argument["layout"].values())
            signature[argument["name"]] = f"tensordesc<bf16{argument['block']},{layout!r}>"
        else:
            signature[argument["name"]] = types[argument["meaning"]]
    source = GluonASTSource(getattr(module, entry["name"]), signature, {})
    target = compiler.GPUTarget("cuda", 90, 32)
    assert "wgmma" in triton.compile(source, target=target, options=entry["options"]).asm["ptx"]


def test_a_path_renders_what_a_launch_runs() -> None:
    lowered = BACKEND.lower(causal_attention())
    path = paths.select(lowered, SM_90.schedule)
    assert path.pipeline is not None and "def consume(" in path.render(lowered).text
    assert paths.select(lowered, SM_90.schedule, interpreted=True).why_plain.startswith("Triton's interpreter")
