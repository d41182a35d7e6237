"""Which kernels can be run by warps with jobs of their own: some fetch tiles, others compute.

Such a kernel has loops over blocks of memory, and products whose right operands are tiles of those blocks. A *group*
is a few programs that are neighbours in the grid, run together: each program has warps of its own and its own rows, and
all of them read the blocks that one more warp fetches. That needs

- products of 16-bit floats with M rows, 64 of them or 128, in loops that are not nested;
- right operands that are loads (or their transposes) with places that are the same for every program of a group; a
  load with some rows replaced by zero is cleaned into memory of the program's own first;
- left operands that are computed, or loads outside the loops;
- turns that do the same with every block, or choose by a chain of branches (arms.py);
- loops whose bounds are arithmetic of lengths, scalars and places in the grid, and whose first position is a multiple
  of the step, so that the programs of a group meet the same blocks.

In loops that choose, one more tile may be fetched for each program alone: its *own*. The room for it is the one in
which the program cleans other tiles, which it does after it has read its own.

`analyse` says what it found, or why the kernel is not of this kind. Nothing here is about attention: any kernel that
accumulates products over blocks fits."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....dtypes import bfloat16, float16
from ....ir import Block, Kernel, Op, Value, constant, walk
from ....passes.fold import is_zero
from ..triton.descriptors import Descriptors
from ..triton.padding import padded
from .block_cases import Arms, arms_of

SIDES = (16, 32, 64, 128, 256, 512)
ARM_BITS = 4  # of one program, in the number that says what each does with a block
SCALAR_ONLY = ("load", "gather", "for", "if", "reduce", "dot", "store")


@dataclass
class Ring:
    """Tiles of one tensor that are fetched block after block."""

    load: Op  # one of the loads that read it; the others are alike
    name: str


@dataclass
class Streams:
    """A kernel of this kind."""

    program: Op
    loops: list[Op]
    rings: dict[tuple[int, tuple[int | None, ...]], Ring] = field(default_factory=dict)
    resident: list[Op] = field(default_factory=list)  # loads outside the loops that products read
    shared: set[Value] = field(default_factory=set)  # tiles that stay in shared memory, transposed ones included
    cleaned: dict[Value, Op] = field(default_factory=dict)  # loads with rows replaced by zero: the load of each
    arms: dict[int, Arms] = field(default_factory=dict)  # of loops that choose, by the loop's id
    own: list[Op] = field(default_factory=list)  # loads of tiles that are fetched for one program; all alike
    rows: int = 0
    widths: list[int] = field(default_factory=list)  # of the products with their padding, in order

    def ring(self, op: Op) -> Ring:
        return self.rings[key(op)]

    @property
    def cleaned_rings(self) -> list[Ring]:
        keys = {key(load) for load in self.cleaned.values()}
        return [ring for place, ring in self.rings.items() if place in keys]

    @property
    def room(self) -> int:
        """Bytes in which a program cleans a tile or gets its own."""
        loads = [ring.load for ring in self.cleaned_rings] + self.own[:1]
        return max((tile_bytes(load) for load in loads), default=0)

    def own_place(self, which: str) -> str:
        """Which tile of the room of all programs is a program's own."""
        return _times(which, self.room // tile_bytes(self.own[0]))

    def clean_place(self, which: str) -> str:
        """Which tile of the room is where a program cleans."""
        return _times(which, self.room // tile_bytes(self.cleaned_rings[0].load) if self.own else 1)

    def fetched(self, right: Value) -> Op | None:
        """The load that a right operand comes from."""
        return self.cleaned.get(right) or loaded(right)


def _times(which: str, count: int) -> str:
    return which if count == 1 else f"{which} * {count}"


def tile_bytes(load: Op) -> int:
    """With its padding."""
    found = load.result.dtype.bytes
    for side in load.result.shape:
        found *= padded(side)
    return found


def key(load: Op) -> tuple[int, tuple[int | None, ...]]:
    return load.attrs["tensor"].index, load.attrs["extents"]


def analyse(kernel: Kernel, descriptors: Descriptors) -> Streams | str:
    """What is fetched and by which loops, or why this cannot be."""
    top = kernel.body.ops
    programs = [op for op in top if op.kind == "program_id"]
    loops = [op for op in top if op.kind == "for" and any(o.kind == "dot" for o in walk(op.blocks[0]))]
    if len(programs) != 1:
        return "The kernel does not call program_id exactly once."
    if not loops:
        return "The kernel has no loop over blocks with a dot in it."
    streams = Streams(programs[0], loops)
    for op in walk(kernel.body):
        if op.kind == "gather":
            return "The kernel gathers single elements of a tensor by index; the producer warp copies whole tiles."
        if op.kind == "reduce" and padded(side := op.operands[0].shape[op.attrs["axis"]]) != side:
            return (
                f"The kernel reduces along a side of {side}, padded to {padded(side)}; consumers have no mask for it."
            )
        if op.kind == "dot" and not any(op is o for loop in loops for o in walk(loop.blocks[0])):
            return "The kernel has a dot outside its loops over blocks."
    for loop in loops:
        found = _loop(streams, loop, descriptors)
        if found is not None:
            return found
    problem = _places(kernel, streams) or _tiles(kernel, streams)
    if problem is None:
        streams.arms = {id(loop): arms for loop in loops if (arms := arms_of(kernel, loop)) is not None}
        streams.own = _own(streams, descriptors)
    return problem or streams


def _own(streams: Streams, descriptors: Descriptors) -> list[Op]:
    """Loads of a tensor that arms read in tiles like their results, at most one in each: of the first such tensor."""
    found: list[Op] = []
    for arms in streams.arms.values():
        for body in arms.bodies:
            (inside,) = body.blocks
            for op in inside.ops:
                if op.kind == "load" and len(op.result.shape) == 2 and op.result not in streams.shared:
                    places = tuple(v for v in op.operands if v is not inside.params[0])
                    plain = descriptors.brings(op) and scalar_slice(places) is not None
                    alike = not found or key(found[0]) == key(op)
                    if not plain or not alike or op.result.shape[0] != streams.rows:
                        return []
                    found.append(op)
            if sum(op in found for op in inside.ops) > 1:
                return []
    return found if len(streams.cleaned_rings) <= 1 else []


def _loop(streams: Streams, loop: Op, descriptors: Descriptors) -> str | None:
    body = loop.blocks[0]
    inside = {id(op) for op in walk(body)}
    if any(op.kind == "for" for op in walk(body)):
        return "A loop with a dot contains another loop."
    met: dict[tuple[int, tuple[int | None, ...]], tuple[Value, ...]] = {}
    for op in walk(body):
        if op.kind != "dot":
            continue
        left, right = op.operands
        if left.dtype not in (float16, bfloat16) or right.dtype is not left.dtype:
            return f"A dot multiplies {left.dtype}; the consumers' wgmma multiplies float16 or bfloat16."
        rows, depth, width = left.shape[0], padded(left.shape[1]), padded(right.shape[1])
        if rows not in (64, 128) or width not in SIDES or depth not in SIDES or streams.rows not in (0, rows):
            form = "64 or 128 rows, the same in every dot, and sides that are powers of two from 16 to 512"
            return f"A dot of {rows} x {depth} x {width} does not fit wgmma: it needs {form}."
        streams.rows = rows
        streams.widths += [width] if width not in streams.widths else []
        load = loaded(right) or _cleaned(streams, right)
        if load is None or id(load) not in inside or not descriptors.fits(load):
            return "The right operand of a dot is not a tile of memory that TMA can copy in that loop."
        if met.setdefault(key(load), load.operands) != load.operands:
            return "One iteration of a loop reads two blocks of one tensor."
        streams.rings.setdefault(key(load), Ring(load, load.attrs["tensor"].name))
        streams.shared |= {right, load.result}
        own = loaded(left)
        if own is not None:
            if id(own) in inside or not descriptors.fits(own) or left is not own.result:
                return "The left operand of a dot is loaded inside the loop; it must be computed, or loaded before it."
            streams.resident += [own] if own not in streams.resident else []
            streams.shared.add(left)
    if len(met) != len(streams.rings):
        return "The loops over blocks read different tensors."
    return None


def _cleaned(streams: Streams, right: Value) -> Op | None:
    op = right.op
    if op is None or op.kind != "where" or not is_zero(op.operands[2]) or 1 not in op.operands[0].shape[1:]:
        return None
    load = op.operands[1].op
    if load is not None and load.kind == "load":
        streams.cleaned[right] = load
        return load
    return None


def loaded(value: Value) -> Op | None:
    """The load an operand is, or is the transpose of."""
    op = value.op
    if op is not None and op.kind == "trans":
        op = op.operands[0].op
    return op if op is not None and op.kind == "load" else None


def _places(kernel: Kernel, streams: Streams) -> str | None:
    """What is read where: blocks at the same places for all of a group, nothing else by a program that may not be."""
    last = streams.program.results[-1]
    for ring in streams.rings.values():
        if any(depends(v, last, streams) for v in ring.load.operands):
            return "The blocks that a loop reads depend on the last program_id, so that consumers cannot share them."
    for loop in streams.loops:
        low, high = loop.operands[:2]
        if scalar_slice((low, high)) is None or not is_multiple(low, loop.attrs["step"]):
            return (
                "A loop's bounds are not plain scalar arithmetic, or its first position is not a multiple of its step."
            )
    uses = [op for op in walk(kernel.body) for v in op.operands if v in streams.shared]
    if any(op.kind not in ("dot", "trans") and op.results[0] not in streams.cleaned for op in uses):
        return "A tile that a dot reads is also used by something other than a dot."
    for op in kernel.body.ops:
        own = op.kind == "load" and op not in streams.resident
        if own and any(depends(v, last, streams) for v in op.operands):
            return "The kernel loads something outside its loops at a position that depends on the last program_id."
    if any(scalar_slice(op.operands) is None for op in streams.resident):
        return "The position of an operand that is loaded before the loops is not plain scalar arithmetic."
    return None


def _tiles(kernel: Kernel, streams: Streams) -> str | None:
    """Everything computed lies as the products' results do: tiles have their rows and one of their widths."""
    loops = {id(op) for op in streams.loops}
    for op in walk(kernel.body):
        if op.kind == "for" and id(op) not in loops:
            return "The kernel has a loop without a dot."
        if op.kind == "trans" and op.operands[0] not in streams.shared:
            return "The kernel transposes a tile that it computed."
        for value in op.results:
            named = op.kind in ("expand", "broadcast", "trans")  # like the column of keys of a cleaned tile
            if len(value.shape) != 2 or named or value in streams.shared or value in streams.cleaned:
                continue
            rows, width = value.shape
            if rows not in (1, streams.rows) or (width != 1 and padded(width) not in streams.widths):
                return f"The kernel computes a tile of {rows} x {width}, which is not the shape of a dot's result."
    return None


def scalar_slice(values: tuple[Value, ...]) -> list[Op] | None:
    """The ops at the top of a kernel that scalars need, in no order; None when they need more than arithmetic. A
    block's parameter needs none."""
    found: dict[int, Op] = {}
    stack = list(values)
    while stack:
        op = stack.pop().op
        if op is None or id(op) in found:
            continue
        if op.kind in SCALAR_ONLY or any(v.shape for v in op.results):
            return None
        found[id(op)] = op
        stack += op.operands
    return list(found.values())


def depends(value: Value, on: Value, streams: Streams) -> bool:
    """Whether a scalar is computed from another; what memory or loops give is taken to be."""
    if value is on:
        return True
    op = value.op
    if op is None:
        return not isinstance(value.owner, Block) or value is not value.owner.params[0]
    if op is streams.program:
        return False
    return op.kind in SCALAR_ONLY or any(depends(v, on, streams) for v in op.operands)


def is_multiple(value: Value, step: int) -> bool:
    """Whether a position is a multiple of the step. An end of int32 counts: no loop that begins there has a turn."""
    known = constant(value)
    if known is not None:
        return known % step == 0 or known == 2**31 - 1
    op = value.op
    if op is None:
        return False
    if op.kind == "mul":
        return any(is_multiple(v, step) for v in op.operands)
    if op.kind in ("add", "sub", "max", "min"):
        return all(is_multiple(v, step) for v in op.operands)
    return op.kind == "cast" and op.operands[0].dtype.is_int and is_multiple(op.operands[0], step)
