"""Calls with another number of keys than an earlier one: those that are made of its plan, and those made ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monotile
from kernels.cases import qkv
from monotile import errors
from monotile.kernels import reference
from monotile.library import calls, ops
from monotile.library.growth import AHEAD, Families, GrowingCall


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Attention, of which nothing was called yet."""
    found = ops.FUNCTIONS["attention"]
    monkeypatch.setattr(found, "families", Families(8))
    monkeypatch.setattr(found, "calls", {})
    return found


def test_another_number_of_keys_is_another_plan(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of decoding has one key more: where the choice of blocks stays, the call is made of an earlier one. It
    is as exact, with keys that grow, with a part of an allocated cache, and with splits; mistakes are still found."""
    planned: list[int] = []
    monkeypatch.setattr(calls.CallBuilder, "__init__", _counting(planned, calls.CallBuilder.__init__))
    q, k, v = qkv(1, 1100, Hq=4, Hkv=2)
    kinds: list[dict[str, Any]] = [
        {},
        {"window": (40, 0), "return_lse": True},
        {"threads": 1, "sinks": np.ones(4, np.float32)},
    ]
    for options in kinds:
        planned.clear()
        for Nk in (5, 6, 64, 65, 1000, 1099, 1100):
            scoring = {name: options[name] for name in ("window", "sinks") if name in options}
            expected, _ = reference.attention(q, k[:, :, :Nk], v[:, :, :Nk], **scoring)
            for grown in (np.ascontiguousarray, lambda a: a):
                keys, values = grown(k[:, :, :Nk]), grown(v[:, :, :Nk])
                found = monotile.attention(q, keys, values, **options)
                close(found[0] if options.get("return_lse") else found, expected)
        assert 2 <= len(planned) <= 9  # of 13 different calls
    with pytest.raises(errors.LengthsDiffer, match="positions"):
        monotile.attention(q, k[:, :, :7], v[:, :, :8])


def _counting(planned: list[int], plain: Any) -> Any:
    def counted(self: Any, *args: Any) -> None:
        planned.append(1)
        plain(self, *args)

    return counted


# Caches of n keys, of an array (2, 4, keys, D).
LAYOUTS: dict[str, Callable[[Any, int], Any]] = {
    "contiguous": lambda whole, n: np.ascontiguousarray(whole[:, :2, :n]),
    "slice": lambda whole, n: whole[:, :2, :n],
    "every other head": lambda whole, n: whole[:, ::2, :n],
    "transposed": lambda whole, n: np.ascontiguousarray(whole[:, :2, :n].swapaxes(1, 2)).swapaxes(1, 2),
    "repeated": lambda whole, n: np.broadcast_to(whole[:1, :1, :n], (2, 2, n, whole.shape[3])),
    "backwards": lambda whole, n: whole[:, :2, whole.shape[2] - n :][:, :, ::-1],
    "every other key": lambda whole, n: whole[:, :2, : 2 * n : 2],
    "one head": lambda whole, n: np.ascontiguousarray(whole[:1, :1, :n]),
    "all heads": lambda whole, n: whole[:, :, :n],
}


def queries(rng: Any, k: Any) -> Any:
    return rng.standard_normal((k.shape[0], 2 * k.shape[1], 1, 24), dtype=np.float32)


def test_grown_calls_are_those_that_a_plan_makes(function: Any) -> None:
    """By layouts of caches: their own memory, the beginning of a larger one, transposed, repeated, and backwards."""
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((2, 4, 300, 24), dtype=np.float32)
    for layout in LAYOUTS.values():
        for options in ({}, {"causal": True}, {"window": (40, 0)}):
            function.families.clear()
            function.calls.clear()
            q = queries(rng, layout(whole, 2))
            for n in (2, 3, 127, 128, 129, 130, 140):
                k, v = layout(whole, n), layout(whole, n)[..., ::1]
                found = monotile.attention(q, k, v, **options)
                close(found, reference.attention(q, k, v, **options)[0])


@pytest.mark.parametrize(("window", "threads", "in_keys"), [(None, None, False), ((40, 0), 1, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_made_ahead_are_those_that_a_plan_makes(
    function: Any, layout: str, window: Any, threads: int | None, in_keys: bool
) -> None:
    """Where a cache grows by a key at a time: up to the end of the memory it is a part of, where its strides become
    those of a contiguous array, and where keys begin to be split. Values have a size of their own, or are in the
    keys."""
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((2, 4, 530, size), dtype=np.float32) for size in (24, 16))
    parts = LAYOUTS[layout]
    q = queries(rng, parts(keys, 2))

    def call(n: int) -> tuple[Any, Any, Any]:
        k = parts(keys, n)
        v = k[..., :16] if in_keys else parts(values, n)
        return k, v, monotile.attention(q, k, v, window=window, threads=threads)

    lengths = [n for n in (*range(2, 40), *range(500, 531)) if parts(keys, n).shape[2] == n]
    for n in lengths:
        k, v, found = call(n)
        close(found, reference.attention(q, k, v, window=window)[0])
    grown = dict(function.calls)
    function.calls.clear()
    for n in lengths:
        function.families.clear()
        call(n)
    assert function.calls.keys() <= grown.keys() and len(grown) < len(function.calls) + 3 * (AHEAD + 1)
    for key, planned in function.calls.items():
        assert _facts(planned) == _facts(grown[key])


def _facts(call: Any) -> Any:
    """What a call launches."""
    return [(s.launch, s.bound, s.pick(range(99)), s.scalars, s.numbers, s.threads) for s in call.steps]


def test_caches_that_take_turns_are_planned_once(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side of the number of keys from which on they are split."""
    planned: list[int] = []
    monkeypatch.setattr(calls.CallBuilder, "__init__", _counting(planned, calls.CallBuilder.__init__))
    q, k, v = qkv(1, 730, Hq=4, Hkv=2)
    for n in range(490, 510):
        for keys in (n, n + 200):
            found = monotile.attention(q, k[:, :, :keys], v[:, :, :keys])
            close(found, reference.attention(q, k[:, :, :keys], v[:, :, :keys])[0])
    assert len(planned) == 2


def test_few_steps_make_calls(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two caches that grow in turns, one in seventeen; of caches of any length, each makes one call."""
    made: list[int] = []
    plain = GrowingCall.with_keys

    def counted(self: Any, keys: int, *words: Any) -> Any:
        made.append(keys)
        return plain(self, keys, *words)

    monkeypatch.setattr(GrowingCall, "with_keys", counted)
    q, k, v = qkv(1, 300, Hq=4, Hkv=2)

    def call(n: int) -> None:
        monotile.attention(q, np.ascontiguousarray(k[:, :, :n]), np.ascontiguousarray(v[:, :, :n]))

    for n in range(20, 22 + AHEAD):
        call(n)
        call(n + 100)
    assert made == [120, *range(21, 22 + AHEAD), *range(121, 122 + AHEAD)]
    made.clear()
    for n in (200, 210, 205):
        call(n)
    assert made == [200, 210, 205]
