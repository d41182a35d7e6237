"""The cost model of Apple GPUs: clocks of a core by unit, and the least time on a chip."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from monotile.backends.metal.runner.cost_model import CHIPS, MEMORY_BYTES, Chip, core_clocks, least_us
from monotile.backends.metal.runner.report import Counters

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "metal_cost.md"
CHIP = Chip(cores=10, gigahertz=1.0, gigabytes=100.0)


def counters(**counts: int) -> Counters:
    return Counters(**{field.name: counts.get(field.name, 0) for field in fields(Counters)})


def test_clocks_by_unit() -> None:
    found = core_clocks(
        counters(multiplies=10, exponentials=64, device_bytes_read=640, threadgroup_bytes_read=640, barriers=3)
    )
    assert found["matrix products"] == 40 and found["exponentials"] == 2 and found["barriers"] == 96
    assert found["memory on the core"] == 20 and found["memory off the core"] == 20


def test_threadgroups_share_out_the_cores() -> None:
    """Of 11 threadgroups on 10 cores one core has two."""
    done = counters(multiplies=11000)  # 4000 clocks of each threadgroup
    assert least_us(done, CHIP, 11, 0) == pytest.approx(8.0)
    assert least_us(done, CHIP, 110, 0) == pytest.approx(4.4)
    assert least_us(done, CHIP, 1, 0) == pytest.approx(44.0)


def test_memory_bounds_the_time() -> None:
    done = counters(device_bytes_read=10_000_000, device_bytes_written=0)
    assert least_us(done, CHIP, 1000, 10_000_000) == pytest.approx(100.0)
    assert least_us(done, CHIP, 1000, 1_000_000) == pytest.approx(31.25)  # read again from caches


def test_chips_of_the_page() -> None:
    """The page has the table of the model, and a core's share of memory is about what blocks are chosen by."""
    rows = re.findall(r"\| (M\d(?: \w+)?) \| (\d+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \|", PAGE.read_text())
    assert {name: Chip(int(cores), float(clock), float(rate)) for name, cores, clock, rate, _ in rows} == CHIPS
    for name, chip in CHIPS.items():
        assert f"{chip.memory_bytes:.1f}" == next(share for found, *_, share in rows if found == name)
        assert 0.7 * MEMORY_BYTES <= chip.memory_bytes <= 1.3 * MEMORY_BYTES
