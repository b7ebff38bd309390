"""Rotary position embedding, in float32 whatever the model's dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched: `linear` (all by `factor`), `llama3` (long wavelengths by `factor`, short ones
    not, a ramp between) or `factors` (each by its own, head_dim / 2 of them)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    factors: tuple[float, ...] = ()


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position turns each pair of dimensions: float32 [head_dim / 2]."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    wavelengths = 2 * math.pi / frequencies
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
    # 0 where a wavelength does not fit the original context, 1 where it fits often.
    ramp = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * frequencies / scaling.factor + ramp * frequencies


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for `rotate`: cosines and signed sines, float32 [rows, 1, head_dim]."""
    angles = positions.to(torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn `x` [rows, heads, head_dim]; dimension i pairs with i + head_dim / 2."""
    wide = x.to(torch.float32)
    half = x.shape[-1] // 2
    return torch.addcmul(wide * tables[0], wide.roll(half, -1), tables[1]).to(x.dtype)
