"""Check results on a GPU: some rows of some heads against float64, and every element for being finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from ...kernels import reference
from ...library import registry
from ..rows import Array, Sample
from .rows import Inputs, Tensor

SAMPLED = 12  # rows of each head that is checked
TINY = 1e-30
ALLOCATORS = (("torch", "empty"), ("torch", "empty_like"), ("torch", "empty_strided"), ("Tensor", "new_empty"))
NEIGHBOURS = (-129, -1, 0, 63)  # around the middle row: the ends of blocks


def sample(inputs: Inputs) -> Sample:
    """Return the reference for rows of the first head of the first sequence and the last head of the last one."""
    (B, Hq, Nq, _), (_, Hkv, _, _) = inputs.q.shape, inputs.k.shape
    places = sorted({(0, 0), (B - 1, Hq - 1)})
    rows = _rows(Nq)
    exact, naive = [], []
    for b, h in places:
        g = h // (Hq // Hkv)
        parts = [numpy_of(x)[None, None] for x in (inputs.q[b, h][rows], inputs.k[b, g], inputs.v[b, g])]
        options = _options(inputs, h, rows)
        exact.append(reference.attention(*parts, **options)[0][0, 0])
        naive.append(_rounded(reference.attention(*parts, **options, compute=np.float32)[0][0, 0], inputs.q))

    def take(out: Tensor) -> Array:
        return np.stack([numpy_of(out[b, h][rows]) for b, h in places])

    return Sample(take, np.stack(exact), np.stack(naive))


def _rows(Nq: int) -> list[int]:
    spread = {round(n * (Nq - 1) / max(1, SAMPLED - 1)) for n in range(SAMPLED)}
    return sorted({row for row in spread | {Nq // 2 + n for n in NEIGHBOURS} if 0 <= row < Nq})


def _options(inputs: Inputs, h: int, rows: list[int]) -> dict[str, Any]:
    """Return the reference's options for these rows of one head."""
    found, given = {}, inputs.options
    Nq, Nk = inputs.q.shape[2], inputs.k.shape[2]
    seen = reference.visible(Nq, Nk, given.get("causal", False), given.get("window"), rows)[None, None]
    mask, mask_mod, score_mod = (given.get(name) for name in ("mask", "mask_mod", "score_mod"))
    if mask_mod is not None:  # its sequences are of one length
        seen = seen & numpy_of(mask_mod(0, 0, *_positions(inputs, rows)))
    if score_mod is not None:  # it adds something to a score
        mask = score_mod(0.0, 0, h, *_positions(inputs, rows))[None, None]
    elif mask is not None:
        mask = mask[:, :, rows]
    if mask is None:
        found["mask"] = seen
    else:
        part = numpy_of(mask)
        found["mask"] = seen & part if part.dtype == bool else np.where(seen, part, np.float32(-np.inf))
    if given.get("sinks") is not None:
        found["sinks"] = numpy_of(given["sinks"][h : h + 1])
    if given.get("softcap") is not None:
        found["softcap"] = given["softcap"]
    return found


def _positions(inputs: Inputs, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Positions of these queries and of all keys, as a mod gets them."""
    import torch

    device = inputs.q.device
    return torch.tensor(rows, device=device)[:, None], torch.arange(inputs.k.shape[2], device=device)[None, :]


def numpy_of(tensor: Tensor) -> Array:
    """Copy to the host, in a dtype that NumPy has and that holds every value."""
    if tensor.dtype.is_floating_point:
        tensor = tensor.float()
    return np.asarray(tensor.cpu().numpy())


def _rounded(array: Array, like: Tensor) -> Array:
    import torch

    return numpy_of(torch.from_numpy(np.ascontiguousarray(array)).to(like.dtype))


def check(name: str, run: Callable[[], Any], sample: Sample) -> dict[str, float]:
    """Raise unless the error is at most twice that of the formula in float32, rounded to the output's dtype."""
    with poisoned() as allocated:
        out = run()
    assert allocated, f"{name}: no output was poisoned"
    outputs = out if isinstance(out, tuple) else (out,)
    assert all(bool(x.isfinite().all()) for x in outputs), f"{name}: some elements were not written, or are not finite"
    verdict = registry.judge("out", sample.take(out), sample.exact, sample.naive)
    if not verdict.ok:
        raise AssertionError(f"{name}: the error is {verdict.error}, at most {verdict.allowed} is allowed")
    return {"error": verdict.error, "allowed": verdict.allowed}


def distance(sample: Sample, out: Any) -> float:
    """Return the largest error relative to the largest result."""
    off = np.abs(sample.take(out) - sample.exact).max()
    return float(off / max(float(np.abs(sample.exact).max()), TINY))


@contextlib.contextmanager
def poisoned() -> Iterator[list[None]]:
    """Fill what torch allocates with NaN or the largest integer: a kernel must overwrite all of it."""
    import torch

    allocated: list[None] = []

    def poisoning(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **words: Any) -> Tensor:
            found = plain(*args, **words)
            allocated.append(None)
            largest = 1 if found.dtype is torch.bool else 127
            return found.fill_(float("nan") if found.dtype.is_floating_point else largest)

        return empty

    with contextlib.ExitStack() as patches:
        for owner, name in ALLOCATORS:
            home = torch if owner == "torch" else torch.Tensor
            patches.enter_context(mock.patch.object(home, name, poisoning(getattr(home, name))))
        yield allocated
