"""Print a kernel's IR."""

from __future__ import annotations

from typing import Any

from .ops import Block, Kernel, Tensor, Value


def show(kernel: Kernel) -> str:
    """Print the kernel, one op a line. Equal kernels print equally: the text is part of the cache key."""
    names: dict[Value, str] = {}
    taken: dict[str, int] = {}

    def name(value: Value) -> str:
        if value not in names:
            stem = value.hint or "v"
            taken[stem] = taken.get(stem, -1) + 1
            names[value] = f"%{stem}.{taken[stem]}" if taken[stem] or not value.hint else f"%{stem}"
        return names[value]

    def attr(item: Any) -> str:
        return f"@{item.name}" if isinstance(item, Tensor) else str(item)

    lines = []

    def emit(block: Block, indent: str) -> None:
        for op in block.ops:
            left = ", ".join(name(r) for r in op.results)
            left = f"{left} = " if left else ""
            right = ", ".join(name(v) for v in op.operands)
            attrs = " ".join(f"{k}={attr(v)}" for k, v in sorted(op.attrs.items()))
            types = ", ".join(str(r.type) for r in op.results)
            line = (
                f"{indent}{left}{op.kind}({right})" + (f" {attrs}" if attrs else "") + (f" : {types}" if types else "")
            )
            lines.append(line)
            for inner in op.blocks:
                params = ", ".join(f"{name(p)}: {p.type}" for p in inner.params)
                lines.append(f"{indent}  ({params}) {{")
                emit(inner, indent + "    ")
                lines.append(f"{indent}  }}")

    tensors = ", ".join(_show_tensor(t) for t in kernel.tensors)
    scalars = ", ".join(f"{n}: {d}" for n, d in kernel.scalars)
    lines.append(f"kernel {kernel.name}({', '.join(filter(None, (tensors, scalars)))})")
    emit(kernel.body, "  ")
    return "\n".join(lines) + "\n"


def _show_tensor(tensor: Tensor) -> str:
    dims = " ".join(map(str, tensor.dims))
    strides = " ".join("?" if s is None else str(s) for s in tensor.strides)
    return f"@{tensor.name}: {tensor.dtype}[{dims}] strides=[{strides}] unit={tensor.unit}"
