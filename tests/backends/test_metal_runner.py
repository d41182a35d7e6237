"""The Metal runner: every language feature it supports, and every kind of mistake it finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from monotile import metal

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
BF16 = ml_dtypes.bfloat16
DTYPES = {"float": np.float32, "half": np.float16, "bfloat": BF16}


def run(body: str, arrays: dict[str, Any], threads: int = 32, grid: int = 1, **options: Any) -> metal.Report:
    """Run a kernel whose parameters are the arrays, in order; names of inputs end in `_in`."""
    kinds = {np.dtype(np.float32): "float", np.dtype(np.float16): "half", np.dtype(BF16): "bfloat"}
    kinds |= {np.dtype(np.int32): "int", np.dtype(np.uint32): "uint", np.dtype(np.uint8): "uchar"}
    parameters = [
        f"device {'const ' if name.endswith('_in') else ''}{kinds[array.dtype]} *{name} [[buffer({i})]]"
        for i, (name, array) in enumerate(arrays.items())
    ]
    parameters += ["uint i [[thread_index_in_threadgroup]]", "uint lane [[thread_index_in_simdgroup]]"]
    parameters += ["uint sg [[simdgroup_index_in_threadgroup]]", "uint g [[threadgroup_position_in_grid]]"]
    source = f"{HEAD}kernel void test({', '.join(parameters)}) {{\n{body}\n}}\n"  # the body starts on line 4
    return metal.run(source, "test", arrays, grid, threads, **options)


def kinds(report: metal.Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# ---- language features -----------------------------------------------------------------------------------------------


def test_vectors_swizzles_and_literals() -> None:
    x, y = floats(32, 4), metal.poisoned((32, 4), np.float32)
    body = """device const float4 *from = (device const float4 *)x_in;
    float4 v = from[i];
    v.xy = v.yx * 2.0;
    half2 h = half2(1.5h, 2.0h);
    bfloat4 b = bfloat4(v);
    ((device float4 *)y)[i] = float4(v.xy, float2(h)) + float4(b).w * select(float4(0), float4(1), v > 100.0f);"""
    report = run(body, {"x_in": x, "y": y})
    assert report.clean, report
    np.testing.assert_array_equal(y[:, 0], x[:, 1] * 2)
    np.testing.assert_array_equal(y[:, 2:], np.broadcast_to([1.5, 2.0], (32, 2)))
    assert (report.counters.device_bytes_read, report.counters.device_bytes_written) == (x.nbytes, y.nbytes)


@pytest.mark.parametrize("order", metal.ORDERS)
def test_simdgroup_operations(order: str) -> None:
    x, y = floats(64), metal.poisoned((64, 8), np.float32)
    body = """float v = x_in[i];
    y[i * 8 + 0] = simd_sum(v);
    y[i * 8 + 1] = simd_max(v);
    y[i * 8 + 2] = simd_min(v);
    y[i * 8 + 3] = simd_shuffle_xor(v, 5);
    y[i * 8 + 4] = simd_broadcast(v, 7);
    y[i * 8 + 5] = simd_prefix_exclusive_sum(1.0f);
    y[i * 8 + 6] = simd_shuffle_down(v, 1);
    y[i * 8 + 7] = simd_any(v > 100.0f) + 2.0f * popcount(uint(simd_vote::vote_t(simd_ballot(lane < 3))));"""
    report = run(body, {"x_in": x, "y": y}, threads=64, order=order)
    assert report.clean, report
    lanes = np.arange(64)
    groups = x.reshape(2, 32)
    np.testing.assert_allclose(y[:, 0], np.repeat(groups.sum(1), 32), rtol=1e-5)
    np.testing.assert_array_equal(y[:, 1], np.repeat(groups.max(1), 32))
    np.testing.assert_array_equal(y[:, 2], np.repeat(groups.min(1), 32))
    np.testing.assert_array_equal(y[:, 3], x[lanes ^ 5])
    np.testing.assert_array_equal(y[:, 4], x[lanes // 32 * 32 + 7])
    np.testing.assert_array_equal(y[:, 5], lanes % 32)
    np.testing.assert_array_equal(y[:31, 6], x[1:32])
    assert np.isnan(y[31, 6])  # no lane there: a value that a kernel may not use
    np.testing.assert_array_equal(y[:, 7], 6)
    assert (report.counters.shuffles, report.counters.reductions) == (6, 12)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("transposed", ["false", "true"])
def test_simdgroup_matrices(kind: str, transposed: str) -> None:
    a, b = (floats(8, 8, seed=seed).astype(DTYPES[kind]) for seed in (1, 2))
    c = metal.poisoned((8, 8), np.float32)
    body = f"""simdgroup_matrix<{kind}, 8, 8> A, B;
    simdgroup_float8x8 C = make_filled_simdgroup_matrix<float, 8>(1.0f);
    simdgroup_load(A, a_in, 8);
    simdgroup_load(B, b_in, 8, ulong2(0), {transposed});
    simdgroup_multiply_accumulate(C, A, B, C);
    simdgroup_store(C, c, 8);"""
    report = run(body, {"a_in": a, "b_in": b, "c": c})
    assert report.clean, report
    right = b.T if transposed == "true" else b
    np.testing.assert_allclose(c, a.astype(np.float64) @ right.astype(np.float64) + 1, rtol=1e-5, atol=1e-5)
    assert report.counters.multiplies == 1
    assert report.counters.device_bytes_read == a.nbytes + b.nbytes


def test_half_and_bfloat_round_like_numpy() -> None:
    spread = floats(1000) * 10.0 ** np.random.default_rng(3).integers(-9, 6, 1000)
    x = np.resize(np.concatenate([spread, [65519, 65520, 6e-8, np.inf]]), 1024).astype(np.float32)
    h, b = metal.poisoned(1024, np.float16), metal.poisoned(1024, BF16)
    report = run("h[i] = half(x_in[i]); b[i] = bfloat(x_in[i]);", {"x_in": x, "h": h, "b": b}, threads=1024)
    assert report.clean, report
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(h, x.astype(np.float16))
    np.testing.assert_array_equal(b.astype(np.float32), x.astype(BF16).astype(np.float32))


def test_function_constants_templates_and_arguments() -> None:
    source = (
        HEAD
        + """constant bool twice [[function_constant(3)]];
constant int extra [[function_constant(2 + 2)]];
constant float offset = is_function_constant_defined(extra) ? 0.5f : 0.25f;
struct Params { uint n; float scale; };
template <typename T> struct pointee {};
template <typename T> struct pointee<device T *> { using type = T; };
template <typename T> struct pointee<threadgroup T *> { using type = T; };
#define instance(name, T) template [[host_name(name)]] [[kernel]] decltype(scale_all<T>) scale_all<T>;
template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void scale_all(
    const device T *x [[buffer(0)]], device T *y [[buffer(1)]], constant Params &p [[buffer(2)]],
    threadgroup float *shared [[threadgroup(0)]], uint2 at [[thread_position_in_grid]],
    ushort width [[threads_per_simdgroup]]) {
  using U = typename pointee<device T *>::type;
  shared[at.x] = float(x[at.x]) * p.scale * (twice ? 2.0f : 1.0f);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (at.x < p.n) y[at.x] = U(shared[p.n - 1 - at.x] + offset + extra + width);
}
instance("scale_half", half)
instance("scale_float", float)
"""
    )
    params = np.array([(32, 3.0)], [("n", "u4"), ("scale", "f4")])
    for name, dtype in (("scale_half", np.float16), ("scale_float", np.float32)):
        x, y = np.arange(32, dtype=dtype), metal.poisoned(32, dtype)
        buffers = {"x": x, 1: y, "p": params}
        report = metal.run(source, name, buffers, 1, 32, constants={3: True, 4: 7}, threadgroup_memory={"shared": 128})
        assert report.clean, report
        np.testing.assert_array_equal(y, (x[::-1].astype(np.float32) * 6 + 39.5).astype(dtype))
        assert report.counters.threadgroup_memory_bytes == 128


def test_atomics_do_not_race() -> None:
    total = np.zeros(1, np.uint32)
    body = "atomic_fetch_add_explicit((device atomic_uint *)total, i, memory_order_relaxed);"
    report = run(body, {"total": total}, threads=64, grid=3)
    assert report.clean and total[0] == 3 * 2016 and report.counters.atomics == 192


def test_counters_of_barriers_and_exponentials() -> None:
    body = "for (int k = 0; k < 5; ++k) { threadgroup_barrier(mem_flags::mem_none); y[i] = exp(float(k)); }"
    report = run(body, {"y": metal.poisoned(64, np.float32)}, threads=64)
    assert (report.counters.barriers, report.counters.exponentials) == (5, 320)


# ---- findings --------------------------------------------------------------------------------------------------------

EXCHANGE = """threadgroup float s[64];
    s[i] = x_in[i];
    {barrier}
    y[i] = s[{other}];"""


def exchange(barrier: str, other: str = "63 - i", **options: Any) -> metal.Report:
    y = metal.poisoned(64, np.float32)
    return run(EXCHANGE.format(barrier=barrier, other=other), {"x_in": floats(64), "y": y}, threads=64, **options)


@pytest.mark.parametrize("order", metal.ORDERS)
def test_a_removed_barrier_is_a_race_between_two_lines(order: str) -> None:
    assert exchange("threadgroup_barrier(mem_flags::mem_threadgroup);", order=order).clean
    report = exchange("", order=order)
    races = [finding for finding in report.findings if finding.kind == "race"]
    assert races and {races[0].line, races[0].other_line} == {5, 7}
    assert "threadgroup memory s" in races[0].place


def test_a_barrier_without_a_fence_orders_nothing() -> None:
    assert "race" in kinds(exchange("threadgroup_barrier(mem_flags::mem_none);"))
    assert "race" in kinds(exchange("threadgroup_barrier(mem_flags::mem_device);"))


def test_lockstep_is_not_a_barrier() -> None:
    """Lanes of one simdgroup need a fence too; a simdgroup barrier is enough for them, but not across simdgroups."""
    within = "i ^ 1"
    assert "race" in kinds(exchange("", within))
    assert exchange("simdgroup_barrier(mem_flags::mem_threadgroup);", within).clean
    assert "race" in kinds(exchange("simdgroup_barrier(mem_flags::mem_threadgroup);", "63 - i"))


def test_races_in_device_memory() -> None:
    y = metal.poisoned(64, np.float32)
    assert "race" in kinds(run("y[i / 2] = 1.0f;", {"y": y}))
    assert "race" in kinds(run("y[i] = float(g);", {"y": y}, grid=2))  # nothing orders two groups
    assert run("y[i + 32 * g] = float(g);", {"y": y}, grid=2).clean
    assert run("y[i / 2] = 1.0f;", {"y": y}, check_races=False).clean


def test_reads_and_writes_outside_a_buffer() -> None:
    x, y = floats(32), metal.poisoned(32, np.float32)
    [past] = run("y[i] = x_in[i + 1];", {"x_in": x, "y": y}).findings
    assert (past.kind, past.line) == ("out of bounds", 4) and "thread 31" in past.message
    assert past.place == "buffer 0 (x_in)" and "byte 128" in past.message and "which has 128" in past.message
    [before] = run("y[int(i) - 1] = 0.0f;", {"y": y}).findings
    assert before.kind == "out of bounds" and "before the start of buffer 0 (y)" in before.message
    [far] = run("y[i] = x_in[i + 4000000];", {"x_in": x, "y": y}).findings
    assert far.kind == "out of bounds"
    past_the_end = exchange(
        "threadgroup_barrier(mem_flags::mem_threadgroup); threadgroup float *p = s;", "0] + p[i + 1"
    )
    assert kinds(past_the_end) == {"out of bounds"} and "threadgroup memory s" in past_the_end.findings[0].message


def test_a_wild_pointer_is_reported_and_not_fatal() -> None:
    y = metal.poisoned(32, np.float32)
    report = run("device float *p = (device float *)(ulong(i) * 8 + 64);\n*p = 1.0f;", {"y": y})
    assert kinds(report) == {"fault"} and report.findings[0].line == 5


def test_divergence_is_reported_by_line() -> None:
    y = metal.poisoned(64, np.float32)
    some = "if (i < 48)\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = 0.0f;"
    [barrier] = run(some, {"y": y}, threads=64).findings
    assert (barrier.kind, barrier.line) == ("divergence", 5) and "returned" in barrier.message
    [lines] = run("if (lane < 9)\ny[i] = simd_sum(1.0f);\nelse\ny[i] = simd_sum(2.0f);", {"y": y}).findings
    assert (lines.kind, lines.line, lines.other_line) == ("divergence", 5, 7)
    [loop] = run("for (uint k = 0; k < lane; ++k)\nsimdgroup_barrier(mem_flags::mem_none);", {"y": y}).findings
    assert (loop.kind, loop.line) == ("divergence", 5)


def test_lanes_that_returned_take_no_part() -> None:
    y = metal.poisoned(32, np.float32)
    report = run("if (lane >= 20) return;\ny[i] = simd_sum(1.0f);", {"y": y})
    assert report.clean and (y[:20] == 20).all()
    assert kinds(run("if (lane >= 20) return;\ny[i] = simd_shuffle(1.0f, 25);", {"y": y})) == {"inactive lane"}


def test_other_mistakes() -> None:
    x, y = floats(64), metal.poisoned(64, np.float32)
    arrays = {"x_in": x, "y": y}
    cases = {
        "unwritten": "threadgroup float s[64];\nif (i) s[i] = 0.0f;\ny[i] = s[i];",
        "misaligned": "y[i] = ((device const float4 *)(x_in + 1))[0].x;",
        "array bounds": "float r[4]; for (uint k = 0; k < 2 + g + i; ++k) r[k] = x_in[k];\ny[i] = r[g];",
        "division by zero": "y[i] = float(7 / (int(i) - 3));",
        "read-only": "((device float *)x_in)[i] = 1.0f;",
        "threadgroup memory": "threadgroup float4 s[2049];\ns[i] = float4(0);\ny[i] = s[i].x;",
    }
    for kind, body in cases.items():
        assert kinds(run(body, arrays)) == {kind}, kind
    with pytest.raises(metal.KernelFault, match="division by zero: line 4"):
        run(cases["division by zero"], arrays).check()


def test_the_manual_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "metal_runner.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(example, {})
    with pytest.raises(AssertionError, match="race: line 8"):
        exec(example.replace("  threadgroup_barrier(mem_flags::mem_threadgroup);\n", ""), {})


# ---- errors of a call ------------------------------------------------------------------------------------------------


def test_a_shader_that_does_not_compile_says_where() -> None:
    with pytest.raises(metal.ShaderError, match=r"shader.metal:5:\d+: error: .*'missing'"):
        run("\ny[i] = missing;", {"y": metal.poisoned(32, np.float32)})
    with pytest.raises(metal.ShaderError, match="no kernel 'absent'; its kernels are: test"):
        metal.run(HEAD + "kernel void test(uint i [[thread_position_in_grid]]) {}", "absent", {}, 1, 1)


def test_launches_that_make_no_sense() -> None:
    y = metal.poisoned(32, np.float32)
    for options in ({"order": "random"}, {"threads": 1025}, {"grid": (1, 2, 3, 4)}, {"threads": 0}):
        with pytest.raises(metal.LaunchError):
            run("y[i] = 0.0f;", {"y": y}, **options)  # type: ignore[arg-type]
    with pytest.raises(metal.LaunchError, match="not contiguous"):
        run("y[i] = 0.0f;", {"y": y[::2]})
    with pytest.raises(metal.LaunchError, match="has no size: pass threadgroup_memory"):
        metal.run(HEAD + "kernel void test(threadgroup float *s [[threadgroup(0)]]) {}", "test", {}, 1, 32)
