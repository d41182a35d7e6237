"""Reduce the rows of a report, of a CPU or a GPU, to what its pictures need: one `Entry` for each row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .report import shared_processor

Report = dict[str, Any]
PEERS = ("torch", "NumPy")
EVEN = 1.03  # times a peer's speed up to which neither counts as faster
WIDE = 0.1  # spread above which a row is doubtful
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ARITHMETIC = ("flop", "pair flop")
MOVED = ("read", "copy")


@dataclass(frozen=True)
class Peer:
    """The fastest of the libraries that computed the same: monotile is `ratio` times as fast."""

    name: str
    ratio: float

    @property
    def verdict(self) -> str:
        if max(self.ratio, 1 / self.ratio) <= EVEN:
            return "even"
        return "faster" if self.ratio > 1 else "slower"


@dataclass(frozen=True)
class RooflinePoint:
    """A place under the roofline: operations per byte, operations per second."""

    intensity: float
    rate: float


@dataclass(frozen=True)
class Entry:
    """A row of a report. `time_s` is what its ratios compare: the best time on a CPU, the median on a GPU."""

    name: str
    work: str
    dtype: str
    threads: int
    time_s: float
    spread: float
    peer: Peer | None
    share: float | None
    limit: str
    point: RooflinePoint | None
    notes: tuple[str, ...]
    doubts: tuple[str, ...]


def entries(report: Report) -> list[Entry]:
    """Return the entries of a report, in its order."""
    on_gpu = report.get("backend") == "nvidia"
    return [_entry(row, "median_s" if on_gpu else "best_s") for row in report["rows"]]


def _entry(row: Report, clock: str) -> Entry:
    mine, tags, limit = row["times"]["monotile"], row.get("tags", {}), row.get("limit")
    return Entry(
        name=row["name"],
        work=_work(row["name"], tags),
        dtype=_dtype(row["name"], tags),
        threads=row["threads"],
        time_s=mine[clock],
        spread=mine["spread"],
        peer=best_peer(row),
        share=None if limit is None else limit["share"],
        limit="" if limit is None else limit["kind"],
        point=_point(row, mine[clock]),
        notes=tuple(_notes(row)),
        doubts=tuple(_doubts(row)),
    )


def best_peer(row: Report) -> Peer | None:
    """Return the fastest of torch and NumPy, or None where neither computed the row."""
    ratios = {name: row["ratios"][name] for name in PEERS if name in row["ratios"]}
    if not ratios:
        return None
    name = min(ratios, key=lambda peer: ratios[peer])
    way = row.get("torch", {}).get("way") if name == "torch" else None
    return Peer(f"{name} ({way})" if way else name, ratios[name])


def against(found: list[Entry]) -> Iterator[str]:
    """Say how the rows stand against each peer, with the worst row: an average would hide it."""
    several = len({entry.threads for entry in found}) > 1
    for name in PEERS:
        rows = [(e.peer, e) for e in found if e.peer is not None and e.peer.name.startswith(name)]
        if rows:
            peer, worst = min(rows, key=lambda row: row[0].ratio)
            faster = sum(one.verdict == "faster" for one, _ in rows)
            where = f"{worst.name}{f', threads: {worst.threads}' if several else ''}"
            best = max(one.ratio for one, _ in rows)
            counted = f"{name} is the best peer of {len(rows)} rows: monotile is faster in {faster}"
            yield f"{counted}, {peer.ratio:.2f} to {best:.3g} times its speed (least: {where})"


def _work(name: str, tags: Report) -> str:
    """Name the kind of work: the op, and whether it has options such as masks."""
    op = "host time" if tags.get("op") == "host" else tags.get("op") or name.split()[0]
    return f"{op} with options" if tags.get("extra") else str(op)


def _dtype(name: str, tags: Report) -> str:
    return str(tags.get("dtype") or next((word for word in name.split() if word in ITEM_BYTES), ""))


def _notes(row: Report) -> Iterator[str]:
    if row.get("note"):
        yield row["note"]
    yield from (f"{ratio:.2f} x the speed of {name}" for name, ratio in row["ratios"].items() if name not in PEERS)


def _doubts(row: Report) -> Iterator[str]:
    spread, shared = row["times"]["monotile"]["spread"], shared_processor(row)
    if spread > WIDE:
        yield f"spread {spread:.0%}"
    if shared:
        yield f"took {shared:.1f} x its processor time"


# ---- the roofline ----------------------------------------------------------------------------------------------------


def _point(row: Report, seconds: float) -> RooflinePoint | None:
    """Return the row's operations per byte and per second, or None where its arithmetic is not counted."""
    limits = row.get("limits") or filter(None, [row.get("limit")])
    rates = {limit["kind"]: limit["rate_per_s"] for limit in limits}
    rate = next((rates[kind] for kind in ARITHMETIC if kind in rates), None)
    moved = next((rates[kind] * seconds for kind in MOVED if kind in rates), None)
    shape = _shape(row["name"])
    if rate is None and moved is not None and shape is not None and row["tags"].get("extra") == "":
        rate = shape.flops / seconds
    if moved is None and shape is not None:
        moved = shape.bytes
    return None if rate is None or not moved else RooflinePoint(rate * seconds / moved, rate)


@dataclass(frozen=True)
class _Shape:
    """Operations of a call without options, and the bytes of its inputs and results."""

    flops: float
    bytes: float


def _shape(name: str) -> _Shape | None:
    """Read the sizes of a call from the name of its row: attention's, or those of a matrix product."""
    if product := re.match(r"matmul.* (\d+)x(\d+)x(\d+) (\w+)", name):
        M, K, N = (int(size) for size in product.groups()[:3])
        return _Shape(2.0 * M * K * N, float(ITEM_BYTES[product[4]] * (M * K + K * N + M * N)))
    words = name.split()
    heads = re.search(r" (\d+)/(\d+) ", name)
    sizes = {m[1]: int(m[2]) for word in words if (m := re.fullmatch(r"(B|Nq|Dv|D|N)(\d+)", word))}
    dtype = _dtype(name, {})
    if words[0] != "attention" or heads is None or not dtype or not {"D", "N"} <= sizes.keys():
        return None
    Hq, Hkv, B, D, Nk = int(heads[1]), int(heads[2]), sizes.get("B", 1), sizes["D"], sizes["N"]
    Nq, Dv = sizes.get("Nq", 1 if "decode" in words else Nk), sizes.get("Dv", D)
    columns = D if "MLA" in words else D + Dv  # values that lie in the keys are read with them
    numbers = B * (Hq * Nq * (D + Dv) + Hkv * Nk * columns) * (2 if "backward" in name else 1)
    products = B * Hq * Nq * Nk * (D + Dv) * (0.5 if "causal" in words else 1.0)
    return _Shape(2.0 * products, float(ITEM_BYTES[dtype] * numbers))


def roofs(report: Report) -> dict[int, dict[str, float]]:
    """Return the measured limits of each number of threads, in operations or bytes per second."""
    found: dict[int, dict[str, float]] = {}
    if "limits" in report:  # of a GPU, once for all rows
        return {1: {kind: limit["best_per_s"] for kind, limit in report["limits"].items()}}
    for row in report["rows"]:
        for limit in row.get("limits", ()):
            found.setdefault(row["threads"], {})[limit["kind"]] = limit["best_per_s"]
    return found
