"""Compute tiles the way round that dots read them: a dot of `x.T` reads x as its rows, so x is computed transposed.

A matrix unit takes its left operand from registers, but not transposed: a computed tile would go through shared memory.
So where dots read the transpose of a tile that is computed from other dots, these are transposed instead, `dot(a, b).T`
being `dot(b.T, a.T)`, with everything elementwise in between. In attention's backward pass that is the kernel that owns
keys: its scores are computed with keys as rows."""

from __future__ import annotations

from ...ir import ELEMENTWISE, Block, Kernel, Op, Type, Value, uses, walk
from ...ir.builder import Builder
from ...passes.pipeline import CLEAN

THROUGH = ELEMENTWISE | {"broadcast"}


def orient_dots(kernel: Kernel) -> None:
    """Transpose every chain of dots and elementwise ops whose result is only read transposed or reduced."""
    readers = uses(kernel.body)
    found = [chain for block in _blocks(kernel.body) for chain in _chains(block, readers)]
    for block, chain in found:
        _Transposer(block, chain)
    if found:
        for clean in CLEAN:
            clean(kernel)


def _blocks(block: Block) -> list[Block]:
    return [block, *(inner for op in walk(block) for inner in op.blocks)]


def _chains(block: Block, readers: dict[Value, list[Op]]) -> list[tuple[Block, set[Op]]]:
    """Return the ops of a block that depend on a dot and lead to a transposed left operand and nothing else."""
    transposes = [op for op in block.ops if op.kind == "trans" and _feeds_dots(op, readers)]
    chain: set[Op] = set()
    for op in transposes:
        chain |= _ancestors(op.operands[0], block)
    if not any(op.kind == "dot" for op in chain):
        return []
    inside = chain | set(transposes)
    readable = all(
        reader in inside or (reader.kind == "reduce" and reader in block.ops)
        for op in chain
        for reader in readers.get(op.result, ())
    )
    return [(block, chain)] if readable else []


def _feeds_dots(trans: Op, readers: dict[Value, list[Op]]) -> bool:
    """True for the transpose of a computed tile that is the left operand of dots."""
    read = readers.get(trans.result, [])
    return bool(read) and all(op.kind == "dot" and op.operands[0] is trans.result for op in read)


def _ancestors(value: Value, block: Block) -> set[Op]:
    """Return the ops of the block that a tile is computed by, from dots on; loads and positions are not among them."""
    here = {id(op) for op in block.ops}
    depends: dict[Value, bool] = {}
    found: set[Op] = set()

    def from_dot(value: Value) -> bool:
        if value not in depends:
            op, depends[value] = value.op, False
            if op is None or id(op) not in here or len(value.shape) != 2:
                return False
            depends[value] = op.kind == "dot" or (op.kind in THROUGH and any([from_dot(v) for v in op.operands]))
            if depends[value]:
                found.add(op)
        return depends[value]

    from_dot(value)
    return found


class _Transposer:
    """Writes the transposed ops of a chain where the ops were, and what reads them in terms of those. The ops
    themselves are dead then."""

    def __init__(self, block: Block, chain: set[Op]) -> None:
        self.chain = chain
        self.made: dict[Value, Value] = {}  # the transposed form of values
        turned = {v for op in chain if op.kind != "dot" for operand in op.operands for v in _loaded_tiles(operand)}
        ops, block.ops = block.ops, []
        self.builder = Builder(block)
        for op in ops:
            self.builder.loc = op.loc
            if op in chain:
                self.made[op.result] = self._transposed_op(op)
            elif op.kind == "reduce" and (op.operands[0].op in chain or op.operands[0] in turned):
                op.operands, op.attrs["axis"] = (self._transposed(op.operands[0]),), 1 - op.attrs["axis"]
            op.operands = tuple(self._untransposed(v) for v in op.operands)
            block.ops.append(op)

    def _untransposed(self, value: Value) -> Value:
        """A value, or the transposed form that it is the transpose of."""
        if value.op is not None and value.op.kind == "trans" and value.op.operands[0] in self.made:
            return self.made[value.op.operands[0]]
        return value

    def _transposed_op(self, op: Op) -> Value:
        operands = tuple(self._transposed(v, operand=op.kind == "dot") for v in op.operands)
        if op.kind == "dot":
            operands = operands[::-1]
        made = self.builder.emit(op.kind, operands, Type(op.result.dtype, op.result.shape[::-1]), **op.attrs).result
        made.hint = op.result.hint
        return made

    def _transposed(self, value: Value, *, operand: bool = False) -> Value:
        """The transposed form of a value: positions are computed the other way round, tiles from memory are transposed
        as they are loaded, but for operands of dots, which are read transposed as they are."""
        op = value.op
        if len(value.shape) < 2 or value in self.made:
            return self.made.get(value, value)
        if op is not None and op.kind == "trans":
            return op.operands[0]
        if op is not None and op.kind == "expand":
            made = self.builder.expand(op.operands[0], 1 - op.attrs["position"])
        elif op is not None and op.kind in THROUGH and not (operand and _from_memory(value)):
            return self._kept(value, self._transposed_op(op))
        else:
            made = self.builder.trans(value)
        return self._kept(value, made)

    def _kept(self, value: Value, made: Value) -> Value:
        made.hint = made.hint or value.hint
        self.made[value] = made
        return made


def _loaded_tiles(value: Value) -> set[Value]:
    """Return a tile and those that it is computed from, if it comes from a tile that is loaded."""
    if not _from_memory(value) or value.op is None or value.op.kind not in THROUGH:
        return {value} if _from_memory(value) else set()
    return {value, *(v for operand in value.op.operands for v in _loaded_tiles(operand))}


def _from_memory(value: Value) -> bool:
    """True if a tile is computed from a tile that is loaded, as one with some rows replaced by zero is."""
    op = value.op
    if op is None or len(value.shape) < 2 or op.kind == "expand":
        return False
    return op.kind in ("load", "gather") or any(_from_memory(v) for v in op.operands)
