"""Which kernels can run as a producer/consumer pipeline, and what the producer has to fetch for them.

Such a kernel has loops over blocks of memory, and dots whose right operands are tiles of those blocks. A CTA runs a few
neighbouring programs of the kernel's grid, one on each *consumer*: a consumer has warps and rows of its own, and all
consumers read the blocks that one *producer* warp copies to shared memory. That needs

- dots of 16-bit floats with 64 or 128 rows, in loops that are not nested, or that lie in one other loop whose bounds
  are the same for every consumer;
- right operands that are loads (or their transposes) at positions that are the same for every consumer of a CTA; a load
  with some rows replaced by zero is first copied to a scratch tile of the consumer, with those rows zeroed, and rows of
  a tile that are past the end of a view are zeroed where they are;
- left operands that are computed, or loads outside the loops;
- loop bodies that do the same with every block, or choose by a chain of branches (block_cases.py);
- loops whose bounds are arithmetic of lengths, scalars, places in the grid and elements of tables, and whose first
  position is a multiple of the step, so that the consumers of a CTA read the same blocks.

In loops with block cases, one more tile may be fetched for each consumer alone: its *private tile*. It lies in the
memory of the scratch tile, which the consumer overwrites after it has read its private tile. A case that has none to
read, but overwrites that memory, gets one all the same: the next may not arrive before its dots are done.

`analyse` returns the pipeline, or a sentence that says why there is none. Nothing here is about attention: any kernel
that accumulates dots over blocks fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from ....dtypes import bfloat16, float16
from ....ir import MOVES, WRITES, Block, Kernel, Op, Value, constant, walk
from ....ir.matchers import untransposed
from ....passes.fold import is_zero
from ..triton.descriptors import Descriptors
from ..triton.padding import padded
from .block_cases import BlockCases, find_cases
from .overlap import split
from .scalars import is_multiple, scalar_slice, sharing

SIDES = (16, 32, 64, 128, 256, 512)
CASE_BITS = 4  # of one consumer, in the number that holds the cases of all consumers
# A tensor's number, the extents of its tiles, and where they start in dimensions along which they stay.
TileKey = tuple[int, tuple[int | None, ...], tuple[int | float | None, ...]]


@dataclass
class Ring:
    """A ring buffer in shared memory for tiles of a tensor: one for each column range that is read."""

    load: Op  # one of the loads that read it; the others are alike
    name: str
    barriers: str  # the name of the first ring of its tensor: all of them are filled and released together


@dataclass
class Pipeline:
    """The parts of a kernel that producer and consumers share."""

    program_id: Op
    loops: list[Op]
    outer: Op | None = None  # the loop that contains them, if there is one
    tensors: frozenset[str] = frozenset()  # names of the kernel's tensors
    sharing: int = 0  # how many neighbouring programs read the same blocks, from a multiple of it on; 0: all
    rings: dict[TileKey, Ring] = field(default_factory=dict)
    resident: list[Op] = field(default_factory=list)  # loads outside the loops that dots read
    shared: set[Value] = field(default_factory=set)  # tiles that stay in shared memory, transposed ones included
    zeroed: dict[Value, Op] = field(default_factory=dict)  # tiles with masked rows replaced by zero: the load of each
    cases: dict[int, BlockCases] = field(default_factory=dict)  # of loops with block cases, by the loop's id
    private: list[Op] = field(default_factory=list)  # loads of private tiles; all alike
    rows: int = 0
    widths: list[int] = field(default_factory=list)  # of the dots' results with their padding, in order
    names: dict[TileKey, str] = field(default_factory=dict)  # of the tiles that the producer copies

    @property
    def outer_index(self) -> str:
        """Write the counter of the loop that contains the loops over blocks."""
        return "0" if self.outer is None else "gl.cast(outer_index, gl.int32)"

    def ring(self, op: Op) -> Ring:
        return self.rings[tile_key(op)]

    def add_ring(self, load: Op) -> None:
        if tile_key(load) not in self.rings:
            tensor, name = load.attrs["tensor"], self.name(load)
            barriers = [ring.barriers for ring in self.rings.values() if ring.load.attrs["tensor"] is tensor]
            self.rings[tile_key(load)] = Ring(load, name, barriers[0] if barriers else name)

    @property
    def ring_groups(self) -> dict[str, list[Ring]]:
        """The rings that share barriers, by the name of those."""
        groups: dict[str, list[Ring]] = {}
        for ring in self.rings.values():
            groups.setdefault(ring.barriers, []).append(ring)
        return groups

    def name(self, load: Op) -> str:
        """Name the tiles of a load or store: by their tensor, and by a number after the first of one tensor."""
        key, tensor = tile_key(load), load.attrs["tensor"].name
        if key not in self.names:
            taken = {*self.names.values(), *(self.tensors - {tensor})}
            candidates = (tensor, *(f"{tensor}_tile_{n}" for n in range(2, 3 + len(taken))))
            self.names[key] = next(name for name in candidates if name not in taken)
        return self.names[key]

    @property
    def fetched(self) -> list[Op]:
        """One load of each tile that the producer copies."""
        return [*self.resident, *(ring.load for ring in self.rings.values()), *self.private[:1]]

    @property
    def zeroed_rings(self) -> list[Ring]:
        keys = {tile_key(load) for load in self.zeroed.values()}
        return [ring for key, ring in self.rings.items() if key in keys]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of a consumer's scratch tile of the first zeroed ring, which is also where its private tile lies."""
        loads = [ring.load for ring in self.zeroed_rings[:1]] + self.private[:1]
        return max((tile_bytes(load) for load in loads), default=0)

    def private_tile_index(self, consumer: str) -> str:
        """Index a consumer's private tile in the scratch memory of all consumers."""
        return _times(consumer, self.scratch_bytes // tile_bytes(self.private[0]))

    def holds_private(self, ring: Ring) -> bool:
        """True if the private tile lies in the scratch tile of a ring."""
        return bool(self.private) and ring is self.zeroed_rings[0]

    def takes_private(self, body: Op) -> bool:
        """True if a case reads its private tile, or overwrites the memory that it lies in."""
        ops = body.blocks[0].ops
        zeroed = [self.ring(load) for op in ops for v in op.results if (load := self.zeroed.get(v)) is not None]
        return any(op in self.private for op in ops) or any(self.holds_private(ring) for ring in zeroed)

    def scratch_tiles(self, ring: Ring) -> int:
        """How many tiles of a zeroed ring a consumer's scratch memory for it has room for."""
        return self.scratch_bytes // tile_bytes(ring.load) if self.holds_private(ring) else 1

    def scratch_tile_index(self, ring: Ring, consumer: str) -> str:
        """Index a consumer's scratch tile."""
        return _times(consumer, self.scratch_tiles(ring))

    def ring_load(self, right: Value) -> Op | None:
        """Return the load that a right operand comes from."""
        return self.zeroed.get(untransposed(right)[0]) or load_of(right)


def _times(index: str, count: int) -> str:
    return index if count == 1 else f"{index} * {count}"


def tile_bytes(load: Op) -> int:
    """Return the bytes of a tile with its padding."""
    found = load.result.dtype.bytes
    for side in load.result.shape:
        found *= padded(side)
    return found


def tile_block(op: Op) -> tuple[int, ...]:
    """Return the shape of a tile's copy by TMA: a side for each dimension of the tensor."""
    return tuple(padded(extent or 1) for extent in op.attrs["extents"])


def tile_key(load: Op) -> TileKey:
    """Return what tells the tiles of one load or store from those of another, in the same iteration of a loop."""
    positions = load.operands[load.kind in WRITES :]
    return load.attrs["tensor"].index, load.attrs["extents"], tuple(constant(v) for v in positions)


def analyse(kernel: Kernel, descriptors: Descriptors) -> Pipeline | str:
    """Return what is fetched and by which loops, or a sentence that says why this cannot be."""
    top = kernel.body.ops
    program_ids = [op for op in top if op.kind == "program_id"]
    loops, outer = _loops_with_dots(kernel.body), None
    if len(program_ids) != 1:
        return "The kernel does not call program_id exactly once."
    if not loops:
        return "The kernel has no loop over blocks with a dot in it."
    if len(loops) == 1 and (inner := _loops_with_dots(loops[0].blocks[0])):
        (outer,), loops = loops, inner
    pipeline = Pipeline(program_ids[0], loops, outer, frozenset(tensor.name for tensor in kernel.tensors))
    for op in walk(kernel.body):
        if op.kind == "gather" and not op.result.shape:
            return "The kernel gathers a single element of a tensor by index."
        if "spread" in op.attrs:
            return "The kernel loads a tile that repeats elements of memory; consumers have no text for it."
        if op.kind == "scatter" or op.kind in MOVES:
            return f"The kernel has {op.kind!r}, which moves elements between threads; consumers have no text for it."
        if op.kind == "reduce" and padded(side := op.operands[0].shape[op.attrs["axis"]]) != side:
            return (
                f"The kernel reduces along a side of {side}, padded to {padded(side)}; consumers have no mask for it."
            )
        if op.kind == "dot" and not any(op is o for loop in loops for o in walk(loop.blocks[0])):
            return "The kernel has a dot outside its loops over blocks."
    for loop in loops:
        problem = _add_loop(pipeline, loop, descriptors)
        if problem is not None:
            return problem
    problem = _position_problem(kernel, pipeline)
    if problem is None:
        pipeline.cases = {id(loop): cases for loop in loops if (cases := find_cases(kernel, loop)) is not None}
        pipeline.private = _private_loads(kernel, pipeline, descriptors)
        problem = _tile_problem(kernel, pipeline)
        _share_barriers(pipeline)
    return problem or pipeline


def _share_barriers(pipeline: Pipeline) -> None:
    """Let rings that both early and late dots read (overlap.py) share barriers: they are released together."""
    for loop in pipeline.loops:
        if (parts := split(loop)) is not None:
            early, late = ({id(_ring(pipeline, item.dot)) for item in items} for items in (parts.early, parts.late))
            both = [ring for ring in pipeline.rings.values() if id(ring) in early & late]
            for ring in both:
                ring.barriers = both[0].barriers


def _ring(pipeline: Pipeline, dot: Op) -> Ring | None:
    load = pipeline.ring_load(dot.operands[1])
    return pipeline.ring(load) if load is not None else None


def _loops_with_dots(block: Block) -> list[Op]:
    return [op for op in block.ops if op.kind == "for" and any(o.kind == "dot" for o in walk(op.blocks[0]))]


def _private_loads(kernel: Kernel, pipeline: Pipeline, descriptors: Descriptors) -> list[Op]:
    """Return the loads of a tensor that block cases read in tiles of the shape of their scores, at most one in each:
    those of the first such tensor."""
    found: list[Op] = []
    if any(id(loop) not in pipeline.cases for loop in pipeline.loops):
        return found
    for cases in pipeline.cases.values():
        for body in cases.bodies:
            (inside,) = body.blocks
            for op in inside.ops:
                if op.kind == "load" and len(op.result.shape) == 2 and op.result not in pipeline.shared:
                    positions = tuple(v for v in op.operands if v is not inside.params[0])
                    plain = "view" not in op.attrs and scalar_slice(kernel, positions) is not None
                    plain = plain and descriptors.can_copy(op)
                    alike = not found or tile_key(found[0]) == tile_key(op)
                    turned = any(reader.kind == "trans" for reader in descriptors.uses.get(op.result, ()))
                    if not plain or not alike or op.result.shape[turned] != pipeline.rows:
                        return []
                    found.append(op)
            if sum(op in found for op in inside.ops) > 1:
                return []
    return found


def _add_loop(pipeline: Pipeline, loop: Op, descriptors: Descriptors) -> str | None:
    """Add the operands of a loop's dots; return the problem if there is one."""
    body = loop.blocks[0]
    inside = {id(op) for op in walk(body)}
    if any(op.kind == "for" for op in walk(body)):
        return "A loop with a dot contains another loop."
    read: dict[TileKey, tuple[Value, ...]] = {}
    for op in walk(body):
        if op.kind != "dot":
            continue
        left, right = op.operands
        if left.dtype not in (float16, bfloat16) or right.dtype is not left.dtype:
            return f"A dot multiplies {left.dtype}; the consumers' wgmma multiplies float16 or bfloat16."
        rows, depth, width = left.shape[0], padded(left.shape[1]), padded(right.shape[1])
        if rows not in (64, 128) or width not in SIDES or depth not in SIDES or pipeline.rows not in (0, rows):
            form = "64 or 128 rows, the same in every dot, and sides that are powers of two from 16 to 512"
            return f"A dot of {rows} x {depth} x {width} does not fit wgmma: it needs {form}."
        pipeline.rows = rows
        pipeline.widths += [width] if width not in pipeline.widths else []
        load = load_of(right) or _zeroed_load(pipeline, right)
        if load is None or id(load) not in inside or not descriptors.feeds_dot(load):
            return "The right operand of a dot is not a tile of memory that TMA can copy in that loop."
        if read.setdefault(tile_key(load), load.operands) != load.operands:
            return "One iteration of a loop reads two blocks of one tensor."
        pipeline.add_ring(load)
        pipeline.shared |= {right, load.result}
        resident = load_of(left)
        if resident is not None:
            if id(resident) in inside or not descriptors.feeds_dot(resident) or left is not resident.result:
                return "The left operand of a dot is loaded inside the loop; it must be computed, or loaded before it."
            pipeline.resident += [resident] if resident not in pipeline.resident else []
            pipeline.shared.add(left)
    if len(read) != len(pipeline.rings):
        return "The loops over blocks read different tensors."
    return None


def _zeroed_load(pipeline: Pipeline, right: Value) -> Op | None:
    """Return the load of a tile that has rows replaced by zero."""
    right, _ = untransposed(right)
    op = right.op
    if op is None or op.kind != "where" or not is_zero(op.operands[2]) or 1 not in op.operands[0].shape[1:]:
        return None
    load = op.operands[1].op
    if load is not None and load.kind == "load":
        pipeline.zeroed[right] = load
        return load
    return None


def load_of(value: Value) -> Op | None:
    """Return the load that an operand is, or is the transpose of."""
    op = untransposed(value)[0].op
    return op if op is not None and op.kind == "load" else None


def _position_problem(kernel: Kernel, pipeline: Pipeline) -> str | None:
    """Check where tiles are read, and find which programs read the same blocks."""
    shared = [v for ring in pipeline.rings.values() for v in ring.load.operands]
    if any(scalar_slice(kernel, (v,)) is None for v in shared):
        return "The position of a block that a loop reads is not plain scalar arithmetic."
    if pipeline.outer is not None:
        shared += pipeline.outer.operands[:2]
        if scalar_slice(kernel, pipeline.outer.operands[:2]) is None:
            return "The bounds of the loop around the loops over blocks are not plain scalar arithmetic."
        inside = {id(op) for op in walk(pipeline.outer.blocks[0])}
        counter = pipeline.outer.blocks[0].params[0]
        for loop in pipeline.loops:
            slice_ = scalar_slice(kernel, loop.operands[:2])
            if slice_ is None or any(id(op) in inside for op in slice_) or counter in loop.operands[:2]:
                return "The bounds of a loop over blocks change from one iteration of the loop around it to the next."
    for loop in pipeline.loops:
        low, high = loop.operands[:2]
        if scalar_slice(kernel, (low, high)) is None or not is_multiple(low, loop.attrs["step"]):
            return (
                "A loop's bounds are not plain scalar arithmetic, or its first position is not a multiple of its step."
            )
    pipeline.sharing = gcd(*(sharing(v, pipeline.program_id) for v in shared))
    uses = [op for op in walk(kernel.body) for v in op.operands if v in pipeline.shared]
    if any(op.kind not in ("dot", "trans") and op.results[0] not in pipeline.zeroed for op in uses):
        return "A tile that a dot reads is also used by something other than a dot."
    if any(scalar_slice(kernel, op.operands) is None for op in pipeline.resident):
        return "The position of an operand that is loaded before the loops is not plain scalar arithmetic."
    return None


def _tile_problem(kernel: Kernel, pipeline: Pipeline) -> str | None:
    """Check that everything computed has the layout of the dots' results: their rows and one of their widths."""
    loops = {id(op) for op in pipeline.loops}
    zeroing = _conditions(pipeline)
    fetched = {*pipeline.shared, *pipeline.zeroed, *(load.result for load in pipeline.private)}
    for op in walk(kernel.body):
        if op.kind == "for" and id(op) not in loops and op is not pipeline.outer:
            return "The kernel has a loop without a dot."
        if op.kind == "trans" and op.operands[0] not in fetched:
            return "The kernel transposes a tile that it computed."
        for value in op.results:
            renamed = op.kind in ("expand", "broadcast", "trans")  # like the column of keys of a zeroed tile
            if len(value.shape) != 2 or renamed or value in pipeline.shared or value in pipeline.zeroed:
                continue
            rows, width = value.shape
            if width == 1 and value in zeroing:
                continue
            if rows not in (1, pipeline.rows) or (width != 1 and padded(width) not in pipeline.widths):
                return f"The kernel computes a tile of {rows} x {width}, which is not the shape of a dot's result."
    return None


def _conditions(pipeline: Pipeline) -> set[Value]:
    """Return the values that say which rows of tiles are replaced by zero."""
    found = set[Value]()
    stack = [where.op.operands[0] for where in pipeline.zeroed if where.op is not None]
    while stack:
        value = stack.pop()
        if value not in found and value.shape:
            found.add(value)
            stack += value.op.operands if value.op is not None else ()
    return found
