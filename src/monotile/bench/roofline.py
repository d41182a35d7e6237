"""Draw a roofline as SVG: rates of rows over operations per byte, under the measured limits of the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from .entries import Entry, RooflinePoint

WIDTH, HEIGHT = 640.0, 420.0
LEFT, RIGHT, TOP, BOTTOM = 74.0, 14.0, 30.0, 62.0
CEILINGS = {"flop": "arithmetic", "pair flop": "bfloat16 pairs"}
ON_GPU = {"flop": "matrix product"}


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis from `low` to `high` on the page's coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round numbers on the axis: the finest series that has at most `most` of them."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        twos = range(math.floor(math.log2(self.low)), math.ceil(math.log2(self.high)) + 1)
        series = [
            [2.0**n for n in twos if self.high < 1000],
            [4.0 ** (n // 2) for n in twos if n % 2 == 0 and self.high < 1000],
            [float(digit) * 10.0**n for n in decades for digit in (1, 2, 5)],
            [10.0**n for n in decades],
            [100.0**n for n in range(decades[0] // 2, decades[-1] // 2 + 1)],
        ]
        found = [[value for value in values if self.low <= value <= self.high] for values in series]
        return next((values for values in found if 1 < len(values) <= most), found[-1])


def draw(entries: list[tuple[int, Entry]], limits: dict[str, float], *, on_gpu: bool) -> str:
    """Return the SVG of numbered entries under the limits of their thread count; empty where none has a place."""
    points = [(number, entry, entry.point) for number, entry in entries if entry.point is not None]
    ceilings = {kind: limits[kind] for kind in CEILINGS if kind in limits}
    if not points or not ceilings or "read" not in limits:
        return ""
    x, y = _axes([point for _, _, point in points], ceilings, limits["read"])
    names = CEILINGS | (ON_GPU if on_gpu else {})
    parts = [*_grid(x, y), *_roofs(x, y, ceilings, limits["read"], names)]
    parts += [_dot(x, y, number, entry, point) for number, entry, point in points]
    label = f"roofline of {len(points)} rows"
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axes(points: list[RooflinePoint], ceilings: dict[str, float], read: float) -> tuple[LogAxis, LogAxis]:
    ridge = max(ceilings.values()) / read
    intensities = [point.intensity for point in points] + [ridge]
    rates = [point.rate for point in points] + list(ceilings.values())
    x = LogAxis(min(intensities) / 2, max(intensities) * 2, LEFT, WIDTH - RIGHT)
    return x, LogAxis(min(rates) / 1.6, max(rates) * 1.6, HEIGHT - BOTTOM, TOP)


def _grid(x: LogAxis, y: LogAxis) -> list[str]:
    parts = []
    for value in x.ticks():
        at = x.at(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="tick middle" x="{at:.1f}" y="{HEIGHT - BOTTOM + 22}">{value:g}</text>')
    for value in y.ticks(5):
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{at + 5:.1f}">{_count(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick middle" x="{middle:.0f}" y="{HEIGHT - 8:.0f}">operations per byte</text>')
    parts.append(f'<text class="tick" x="4" y="{TOP - 12:.0f}">operations per second</text>')
    return parts


def _roofs(x: LogAxis, y: LogAxis, ceilings: dict[str, float], read: float, names: dict[str, str]) -> list[str]:
    low, ridge = max(x.low, y.low / read), max(ceilings.values()) / read
    parts = [_line("roof", (x.at(low), y.at(read * low)), (x.at(ridge), y.at(read * ridge)))]
    for kind, rate in ceilings.items():
        start = max(rate / read, x.low)
        parts.append(_line("roof" if kind == "flop" else "roof other", (x.at(start), y.at(rate)), (x.end, y.at(rate))))
        label = f"{names[kind]}, {count(rate, 'FLOP/s')}"
        parts.append(f'<text class="roof-name end" x="{x.end:.0f}" y="{y.at(rate) - 6:.1f}">{label}</text>')
    angle = math.degrees(math.atan2(y.at(read * ridge) - y.at(read * low), x.at(ridge) - x.at(low)))
    place = f"translate({x.at(low):.1f} {y.at(read * low):.1f}) rotate({angle:.1f})"
    parts.append(f'<text class="roof-name" x="14" y="-8" transform="{place}">read, {count(read, "B/s")}</text>')
    return parts


def _line(kind: str, first: tuple[float, float], last: tuple[float, float]) -> str:
    places = f'x1="{first[0]:.1f}" y1="{first[1]:.1f}" x2="{last[0]:.1f}" y2="{last[1]:.1f}"'
    return f'<line class="{kind}" {places}/>'


def _dot(x: LogAxis, y: LogAxis, number: int, entry: Entry, point: RooflinePoint) -> str:
    share = "" if entry.share is None else f", {entry.share:.0%} of its limit"
    title = f"{entry.name}: {count(point.rate, 'FLOP/s')}{share}"
    place = f'cx="{x.at(point.intensity):.1f}" cy="{y.at(point.rate):.1f}"'
    kind = entry.dtype or "other"
    return f'<circle class="dot {kind}" data-id="{number}" {place} r="4.5"><title>{escape(title)}</title></circle>'


def count(value: float, unit: str) -> str:
    """Format a rate with a prefix: 35.2 GB/s."""
    number, prefix = _scaled(value)
    return f"{number:.3g} {prefix}{unit}"


def _count(value: float) -> str:
    number, prefix = _scaled(value)
    return f"{number:.3g}{prefix}"


def _scaled(value: float) -> tuple[float, str]:
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return value / size, prefix
    return value, ""
