"""A kernel's IR as source of the kernel language, to read and to paste into a test."""

from __future__ import annotations

from monotile.ir import Block, Kernel, Op, Value, starts, view_of

UNARY = {"neg": "-{}", "not": "~{}"}
BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "bitand": "&",
    "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
CALLS = {"max": "maximum", "min": "minimum"}


def source(kernel: Kernel) -> str:
    """Return the source."""
    return _Writer(kernel).text()


class _Writer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.names, self.lines, self.count = kernel, dict[Value, str](), list[str](), 0

    def text(self) -> str:
        tensors = [f"{t.name}: Tensor[{' '.join(_dim(d) for d in t.dims)!r}]" for t in self.kernel.tensors]
        scalars = [f"{name}: {dtype.name.rstrip('3264') if dtype.name != 'int64' else 'int64'}"
                   for name, dtype in self.kernel.scalars]  # fmt: skip
        types = ", ".join(f"{t.name} {t.dtype} strides {t.strides}" for t in self.kernel.tensors)
        self.block(self.kernel.body, "    ")
        head = [f"# {types}", "@kernel", f"def fuzz({', '.join(tensors + scalars)}):"]
        return "\n".join([*head, *self.lines]) + "\n"

    def block(self, block: Block, indent: str) -> None:
        for op in block.ops[:-1]:
            self.op(op, indent)

    def op(self, op: Op, indent: str) -> None:
        if op.kind in ("for", "if"):
            (self.loop if op.kind == "for" else self.branch)(op, indent)
        elif op.kind in ("store", "scatter"):
            self.lines.append(f"{indent}{self.place(op)} = {self.value(op.operands[0])}")
        elif op.kind == "visible":
            self.lines.append(f"{indent}# visible: {self.value(op.operands[0])}")
        elif op.kind == "const":
            value, name = op.attrs["value"], op.result.dtype.name
            plain = name in ("float32", "int32", "bool")
            self.names[op.result] = repr(value) if plain else f"full((), {value!r}, {name})"
        else:
            text = self.expression(op)
            self.lines.append(f"{indent}{', '.join(self.name(r) for r in op.results)} = {text}")

    def expression(self, op: Op) -> str:
        kind, attrs, x = op.kind, op.attrs, [self.value(v) for v in op.operands]
        fixed = {
            "param": lambda: attrs["name"], "dim": lambda: f"{attrs['tensor'].name}.shape[{attrs['axis']}]",
            "arange": lambda: f"arange({op.result.shape[0]})", "trans": lambda: f"{x[0]}.T",
            "expand": lambda: f"{x[0]}{'[None, :]' if attrs['position'] == 0 else '[:, None]'}",
            "broadcast": lambda: f"{x[0]} + zeros({op.result.shape}, {op.result.dtype})",
            "cast": lambda: f"{x[0]}.astype({op.result.dtype})", "lookup": lambda: f"{attrs['table']}[{x[0]}]",
            "reduce": lambda: f"{attrs['fold']}({x[0]}, axis={attrs['axis']})",
            "scan": lambda: f"cumsum({x[0]}, axis={attrs['axis']})",
            "reshape": lambda: f"{x[0]}.reshape{op.result.shape}", "load": lambda: self.place(op),
            "gather": lambda: self.place(op),
        }  # fmt: skip
        if kind in fixed:
            return fixed[kind]()
        if kind in UNARY:
            return UNARY[kind].format(x[0])
        if kind in BINARY:
            return f"{x[0]} {BINARY[kind]} {x[1]}"
        return f"{CALLS.get(kind, kind)}({', '.join(x)})"

    def place(self, op: Op) -> str:
        """Return the subscript of an access."""
        texts = [self.value(v) for v in starts(op)]
        extents = op.attrs.get("extents", (None,) * len(texts))
        items = [t if e is None else f"{t} + arange({e})" for t, e in zip(texts, extents, strict=True)]
        views = [view_of(op, axis) for axis in range(len(texts))]
        spans = ["" if v is None else f"{self.value(v[0])} : {self.value(v[0])} + {self.value(v[1])}" for v in views]
        part = f"[{', '.join(span or ':' for span in spans)}]" if any(spans) else ""
        return f"{op.attrs['tensor'].name}{part}[{', '.join(items)}]"

    def loop(self, op: Op, indent: str) -> None:
        (body,), (low, high, *inits) = op.blocks, op.operands
        for init, param, result in zip(inits, body.params[1:], op.results, strict=True):
            self.lines.append(f"{indent}{self.name(param)} = {self.value(init)}")
            self.names[result] = self.names[param]
        bounds = f"{self.value(low)}, {self.value(high)}, {op.attrs['step']}"
        self.lines.append(f"{indent}for {self.name(body.params[0])} in range({bounds}):")
        self.inside(body, [self.names[p] for p in body.params[1:]], indent)

    def branch(self, op: Op, indent: str) -> None:
        names = [self.name(r) for r in op.results]
        for head, block in zip((f"if {self.value(op.operands[0])}:", "else:"), op.blocks, strict=True):
            self.lines.append(f"{indent}{head}")
            self.inside(block, names, indent)

    def inside(self, block: Block, names: list[str], indent: str) -> None:
        self.block(block, indent + "    ")
        ends = ", ".join(self.value(v) for v in block.terminator.operands)
        self.lines.append(f"{indent}    {', '.join(names)} = {ends}" if names else f"{indent}    pass")

    def name(self, value: Value) -> str:
        if value not in self.names:
            self.count += 1
            self.names[value] = f"v{self.count}"
        return self.names[value]

    def value(self, value: Value) -> str:
        return self.names[value]


def _dim(length: str | int) -> str:
    return str(length) if isinstance(length, int) else length.replace(".", "_")
