"""Random calls of the library for `monotile check --sweep`: each between poisoned neighbours (guarded.py), its results
against float64.

Calls come in families. A family fixes what kernels are compiled for (element type, head sizes, options, kinds of
lengths and of strides), so that its calls share them: compiling takes a GPU seconds, a call microseconds. A call
follows from the sweep's seed, the number of its family and its own number, and can be repeated alone."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import backends, dtypes
from . import ops, registry
from .formats import FORMATS
from .guarded import GuardedArray, Placement, guarded_results, with_captured
from .quantized import Quantized, quantize
from .registry import Inputs, Results, Sizes, Verdict

DTYPES = ("float32", "float16", "bfloat16")
HEAD_SIZES = (1, 7, 16, 17, 32, 33, 40, 48, 64, 64, 72, 80, 96, 100, 112, 128, 128, 160, 192, 256, 320, 512, 576)
PAGED = ("attention_paged", "attention_paged_rows")
SEQUENCES = ("attention_varlen", "attention_varlen_backward", *PAGED)  # of their own lengths
OPS = (
    *("attention",) * 11, "attention_varlen_backward", "attention_paged_rows",
    *("attention_backward", "attention_varlen", "attention_paged", "quantize") * 2,
    *("decode_partials",) * 2, "merge", "merge_lse", "mask_blocks",
)  # fmt: skip
MASKS = (None, None, None, "bool", "bool", "padding", "additive", "additive of the element type")
WINDOWS = (None, None, None, (0, 0), (3, 2), (40, 0), (100, None), (None, 17))
QUERIES = ((1, 1), (2, 8), (9, 40), (41, 90), (91, 300))  # least and most of a family
KEYS = ("one", "few", "any", "any", "multiple of 16")
VIEWS = ("dense", "dense", "even", "odd")  # even: every stride and address is a multiple of 16 bytes, as TMA needs
VIEWS_PER_FAMILY = 3  # ways in which the arrays of its calls lie
MOST_SCORES = 2**18  # of a call: the reference is plain NumPy
MOST_KEYS = 3000
MOST_PARTS = 200  # that a merge takes
UNIT = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # float32: rounding of products and exponentials


@dataclass(frozen=True)
class Family:
    """What the calls of a family have in common."""

    op: str
    dtype: str
    D: int
    Dv: int
    heads: tuple[int, int, int]  # batch, query heads, KV heads
    queries: tuple[int, int]
    keys: str
    views: str
    options: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None
    made: tuple[str, ...] = ()  # names in registry.MAKERS
    formats: tuple[str, str] | None = None  # of quantised keys and values
    lse: bool = True
    values_in_keys: bool = False

    def __str__(self) -> str:
        sides = f"D {self.D}" + (f" Dv {self.Dv}" if self.Dv != self.D else "")
        words = [f"{self.op} {self.dtype}", sides, *(f"{n} {v}".removesuffix(" True") for n, v in self.options.items())]
        words += [f"mask {self.mask}"] if self.mask else []
        words += [f"{' and '.join(self.formats)}"] if self.formats else []
        words += [*self.made, *(["values in keys"] if self.values_in_keys else []), *([] if self.lse else ["no lse"])]
        return ", ".join(words)


@dataclass(frozen=True)
class CallOutcome:
    """One call: what it was, and what is wrong with it, if anything is."""

    family: int
    case: int
    name: str
    problem: str = ""
    fault: bool = False  # the process cannot go on


def draw_family(seed: int, number: int) -> Family:
    rng = np.random.default_rng([seed, number])

    def pick(items: Sequence[Any]) -> Any:
        return items[int(rng.integers(len(items)))]

    def maybe(chance: float) -> bool:
        return bool(rng.random() < chance)

    op, dtype, D = pick(OPS), pick(DTYPES), pick(HEAD_SIZES)
    Dv = D if maybe(0.5) else pick(HEAD_SIZES)
    Hkv = pick((1, 1, 2, 3))
    heads = pick((1, 1, 2, 3)), Hkv * pick((1, 1, 2, 3, 4, 8)), Hkv
    common = {"heads": heads, "queries": pick(QUERIES), "keys": pick(KEYS), "views": pick(VIEWS)}
    if op in ("merge", "merge_lse", "mask_blocks"):
        return Family(op, dtype, D, Dv, **common, mask="bool" if maybe(0.5) else "additive")
    options: dict[str, Any] = {"causal": pick((False, False, True, "upper_left")), "window": pick(WINDOWS)}
    options |= {"softcap": 20.0} if maybe(0.15) else {}
    options |= {"scale": -0.1} if maybe(0.05) else {}
    made = [name for name in ("sinks", "alibi", "early keys" if op in SEQUENCES else "documents") if maybe(0.12)]
    in_keys = op == "attention" and Dv <= D and maybe(0.2)
    if op == "decode_partials":
        made = [name for name in made if name != "sinks"]
    keeps_false = op in PAGED  # whose default is causal
    options = {name: value for name, value in options.items() if value is not None and (value or keeps_false)}
    return Family(
        op, dtype, D, Dv, **common, options=options, mask=None if op in SEQUENCES else pick(MASKS), made=tuple(made),
        formats=(pick(FORMATS), pick(FORMATS)) if op == "quantize" else None,
        lse=op != "attention" or maybe(0.5), values_in_keys=in_keys,
    )  # fmt: skip


def draw_sizes(family: Family, rng: np.random.Generator) -> Sizes:
    B, Hq, Hkv = family.heads
    low, high = family.queries
    Nq = int(rng.integers(low, high + 1))
    most = max(1, min(MOST_KEYS, MOST_SCORES // (B * Hq * Nq)))
    if family.keys == "one":
        Nk = 1
    elif family.keys == "few":
        Nk = int(rng.integers(2, 41))
    else:
        Nk = int(rng.integers(1, most + 1)) if rng.random() < 0.5 else int(rng.integers(1, min(most, 300) + 1))
        Nk = -(-Nk // 16) * 16 if family.keys == "multiple of 16" else Nk
    return Sizes(B, Hq, Hkv, Nq, Nk, family.D, family.Dv)


def draw_layout(views: str, shape: Sequence[int], size: int, rng: np.random.Generator) -> Placement:
    """How an array lies: dense; with strides and an address that are multiples of 16 bytes; or anyhow."""
    rank = len(shape)
    if views == "dense" or rank < 2 or rng.random() < 0.2:
        return Placement()
    unit = 16 // size if views == "even" else 1
    order, spread = tuple(range(rank)), [1] * rank
    repeated: tuple[int, ...] = ()
    if rank == 4 and rng.random() < 0.4:
        order = (0, 2, 1, 3)
    if rng.random() < 0.3:
        spread[-2] = 2
    if views == "odd" and rng.random() < 0.1:
        spread[-1] = 2
    if rank == 4 and rng.random() < 0.15:
        repeated = (0,)
    padding = unit * int(rng.integers(0, 4))
    if views == "even":  # rows that are no multiple of 16 bytes become so
        padding += -shape[-1] % unit
    return Placement(order, tuple(spread), padding, repeated, unit * int(rng.integers(0, 4)))


def make_inputs(family: Family, sizes: Sizes, rng: np.random.Generator, views: np.random.Generator) -> Inputs:
    """The arguments of a call as plain arrays; `views` draws along which axes a mask has one value."""
    dtype = dtypes.to_numpy(dtypes.BY_NAME[family.dtype])
    if family.op == "mask_blocks":
        kind = np.dtype(bool) if family.mask == "bool" else np.dtype(np.float32)
        blocks = {"block_q": int(rng.integers(1, 70)), "block_k": int(rng.integers(1, 130))}
        return registry.OPS["mask_blocks"].make(rng, sizes, kind) | blocks
    if family.op in ("merge", "merge_lse"):
        return registry.OPS[family.op].make(rng, replace(sizes, Nk=min(sizes.Nk, MOST_PARTS)), dtype)
    found = registry.OPS[family.op].make(rng, sizes, dtype)
    if family.formats is not None:
        found |= {name: quantize(found[name], format) for name, format in zip("kv", family.formats, strict=True)}
    if family.mask is not None:
        maker = {"bool": "bool mask", "padding": "padding mask"}.get(family.mask, "additive mask")
        mask = registry.MAKERS[maker](rng, sizes)["mask"]
        mask = mask.astype(dtype) if "element" in family.mask else mask
        for axis in range(4):  # may broadcast
            if views.random() < 0.3:
                mask = mask[(slice(None),) * axis + (slice(0, 1),)]
        found["mask"] = mask
        if family.op == "attention_backward" and mask.dtype != bool:
            found["mask_grad"] = True
    for maker in family.made:
        found |= registry.MAKERS[maker](rng, sizes)
    if family.op == "decode_partials":
        found["splits"] = int(rng.integers(1, 9))
    return found | family.options


def run_case(seed: int, family: int, case: int, backend: str) -> CallOutcome:
    """Make one call and judge it. An error of monotile is the call's problem; another is a fault."""
    drawn = draw_family(seed, family)
    rng = np.random.default_rng([seed, family, case])
    sizes = draw_sizes(drawn, rng)
    views = np.random.default_rng([seed, family, 2**20 + case % VIEWS_PER_FAMILY])
    plain = make_inputs(drawn, sizes, rng, views)
    on_gpu = backend == "nvidia" and not backends.get("nvidia").accepts("cpu")
    guards: list[GuardedArray] = []

    def guarded(name: str, values: Any, layout: Placement) -> GuardedArray:
        guards.append(GuardedArray.make(name, values, layout, on_gpu=on_gpu))
        return guards[-1]

    def placed(name: str, value: np.ndarray[Any, Any]) -> GuardedArray:
        layout = draw_layout(drawn.views, value.shape, value.dtype.itemsize, views)
        if name.endswith("_pages") and layout != Placement():  # their rows are contiguous, and not all are NaN
            layout = replace(layout, spread=(*layout.spread[:-1], 1), repeated=())
        said.append(f"{name} {value.shape} {layout}") if layout != Placement() or name == "mask" else None
        return guarded(name, value, layout)

    host, given, said = dict(plain), dict(plain), [str(sizes)]
    for name, value in plain.items():
        if isinstance(value, np.ndarray):
            array = placed(name, value)
            host[name], given[name] = array.host, array.given
        elif isinstance(value, Quantized):
            fields = {field: placed(f"{name} {field}", x) for field, x in value.fields().items()}
            host[name] = value.with_fields({field: x.host for field, x in fields.items()})
            given[name] = value.with_fields({field: x.given for field, x in fields.items()})
        elif isinstance(value, types.FunctionType):
            cells = [c.cell_contents for c in value.__closure__ or ()]
            captured = [guarded(name, c, Placement()).given for c in cells if isinstance(c, np.ndarray)]
            given[name] = with_captured(value, captured)
    if drawn.values_in_keys:
        host["v"], given["v"] = host["k"][..., : drawn.Dv], given["k"][..., : drawn.Dv]
    with guarded_results() as results:
        found = _run(drawn, given, backend)
    found = {name: registry.from_device(value) for name, value in found.items()}
    problems = [f"{g.name} or its neighbourhood was written" for g in guards if g.changed()]
    problems += ["memory beside a result was written"] if results.written_outside() else []
    problems += [
        f"{v.output} is off by {v.error:.2g} of {v.allowed:.2g}" for v in _judge(drawn, found, host) if not v.ok
    ]
    return CallOutcome(family, case, f"{drawn}; {'; '.join(said)}", "; ".join(problems))


def _run(family: Family, given: Inputs, backend: str) -> Results:
    if family.op == "attention":
        made = ops.attention(**given, return_lse=family.lse, backend=backend)
        return dict(zip(("out", "lse"), made if family.lse else (made,), strict=False))
    return registry.OPS[family.op].run(given, backend=backend)


def _judge(family: Family, found: Results, inputs: Inputs) -> list[Verdict]:
    """Compare with float64 by the registry's rule, or, where arrays are so small that the plain formula happens to be
    exact, with what rounding may cost."""
    op = registry.OPS[family.op]
    exact, naive = op.exact(inputs), op.naive(inputs)
    verdicts = []
    for name in found:
        verdict = registry.judge(name, found[name], exact[name], naive[name])
        kept = verdict.error == np.inf or name == "block_map"
        allowed = verdict.allowed if kept else max(verdict.allowed, _rounding(family, name, exact, inputs))
        verdicts.append(Verdict(name, verdict.error, allowed))
    return verdicts


def _rounding(family: Family, name: str, exact: Results, inputs: Inputs) -> float:
    """Return what rounding may cost: of weights and results to the element type; of scores, whose functions the plain
    formula computes in float64; of quantised keys and the queries rotated for them, before their product; of the output
    that gradients are computed from."""
    largest = _largest(exact[name])
    if name == "lse":
        products = _score_rounding(family, inputs) if family.formats else 0.0
        return max(4 * registry.LSE * max(1.0, largest), products)
    if name == "out" and "m" not in inputs and "lses" not in inputs:
        values = inputs.get("v", inputs.get("v_pages"))
        largest = _largest(_numbers(values))
    of_scores = 2.0**-24 * _largest(exact["lse"]) if "alibi" in family.made and "lse" in exact else 0.0
    of_output = _output_rounding(family, inputs) if name == "dq" else 0.0
    return 2 * max(UNIT[family.dtype], of_scores) * largest + of_output


def _output_rounding(family: Family, inputs: Inputs) -> float:
    """Return what the rounded output costs dq. The sum of do * o of a row, whose terms are rounded independently, is
    subtracted from the gradients of all its weights, which sum to 1: dq is off by it times a mean of the keys."""
    forward = registry.OPS[family.op.removesuffix("_backward")]
    products = _numbers(inputs["do"]) * forward.exact(registry.forward_inputs(inputs))["out"]
    error = UNIT[family.dtype] * np.linalg.norm(products, axis=-1).max(initial=0.0)
    return float(error * abs(family.options.get("scale", family.D**-0.5)) * _largest(_numbers(inputs["k"])))


def _score_rounding(family: Family, inputs: Inputs) -> float:
    """Return twice the error of a product of the longest query and key whose terms are rounded independently."""
    q, k = (np.linalg.norm(_numbers(inputs[name]), axis=-1).max(initial=0.0) for name in "qk")
    return float(2 * UNIT[family.dtype] * abs(family.options.get("scale", family.D**-0.5)) * q * k / family.D**0.5)


def _numbers(array: Any) -> Any:
    return np.asarray(array.dequantize() if isinstance(array, Quantized) else array, np.float64)


def _largest(array: Any) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
