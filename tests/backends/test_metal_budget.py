"""What a threadgroup takes of a core: the model's registers, and the schedules that keep them few."""

from __future__ import annotations

import re
from typing import Any

import pytest

import metal_budgets
from monotile.backends.metal.budget import OTHERS, REGISTERS, Budget, live_registers

CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("bfloat16", {"D": 64, "BR": 64, "BK": 64}, None),
    ("bfloat16", {"D": 64, "BR": 64, "BK": 64}, "float32"),
    ("bfloat16", {"D": 128, "BR": 64, "BK": 32}, "bool"),
    ("bfloat16", {"D": 128, "BR": 8, "BK": 64}, None),
    ("float32", {"D": 512, "BR": 32, "BK": 128}, None),
    ("bfloat16", {"D": 192, "BR": 96, "BK": 16}, "bool"),  # needed more threadgroup memory than there is
]


@pytest.mark.parametrize(("dtype", "values", "mask"), CASES)
def test_a_core_has_eight_simdgroups(dtype: str, values: dict[str, Any], mask: str | None) -> None:
    """Two threadgroups of four, or one of eight and more; a lane's registers suffice."""
    found = metal_budgets.rendered(dtype, values | {"packed": True}, mask).budget
    assert found.registers <= REGISTERS and metal_budgets.is_held(found), found


def test_the_budget_can_be_exceeded() -> None:
    wide = metal_budgets.rendered("float32", {"D": 512, "BR": 4, "BK": 64, "packed": True}).budget
    assert wide.registers > REGISTERS and not metal_budgets.is_held(wide)
    assert Budget(128, 128, 0).threadgroups_per_core == 3
    assert Budget(128, 128, 31 << 10).threadgroups_per_core == 1
    assert Budget(256, 105, 0).threadgroups_per_core == 1


TEXT = """  float m[2];
  simdgroup_float8x8 acc[2][4];
  const int uniform = 3;
  m[0] = acc[0][0];
  for (int j = 0; j < 8; ++j) {
    float late[32];
    half4 x;
    x = m[0];
    y[0] = x;
    UNROLL for (int i = 0; i < 2; ++i) {
      const float4 loaded = y[i];
      acc[i][0] = loaded;
    }
    bool seen[3];
    seen[0] = true;
  }
  y[1] = m[1];"""


def test_live_registers() -> None:
    """Arrays that the loop mentions live in all of it; x and the vector in turn; what is never mentioned is nothing."""
    assert live_registers(TEXT.split("\n")) == 2 + 16 + 32 + OTHERS  # at the declaration of `late`
    assert live_registers([line for line in TEXT.split("\n") if "late" not in line]) == 2 + 16 + 4 + OTHERS


def test_staging() -> None:
    """Trip counts are constants, a thread copies 16 bytes at a time, and values are loaded before the softmax."""
    text = metal_budgets.rendered("bfloat16", {"D": 128, "BR": 64, "BK": 32}).body
    assert not re.search(r"for \(int \w+ = tid", text)
    assert len(re.findall(r"UNROLL for \(int u = 0; u < 4; \+\+u\)", text)) == 8  # K and V, loads and stores, two loops
    assert "c = e % 16 * 8;" in text
    body = text[text.index("for (int j0") :]
    order = [body.index(mark) for mark in ("k_fetched[2 * u] =", "V_fetched[2 * u] =", "exp2(", "= V_fetched[2 * u]")]
    assert order == sorted(order)


def test_a_branch_overwrites_the_loops_state() -> None:
    """The sums of 64 rows of D 128 are half of a lane's registers: there is one copy of them."""
    text = metal_budgets.rendered("bfloat16", {"D": 128, "BR": 64, "BK": 32}, "bool").body
    assert len(re.findall(r"simdgroup_float8x8 \w+\[2\]\[16\];", text)) == 1
