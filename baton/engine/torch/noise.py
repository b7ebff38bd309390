"""The noise of sampling: a function of (seed, choice, output index, token), equal in every process, on every device.

A BLAKE2b hash of the counters is the key of one draw; the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable
pseudorandom number generators, 2014) spreads it over the tokens.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

_COUNTER = struct.Struct("<QQQ")
_KEY = struct.Struct("<q")
_MASK = (1 << 64) - 1
_BITS = 52


def uniforms(seed: int, choice: int, index: int, token_ids: Tensor) -> Tensor:
    """A float64 in (0, 1) for each of `token_ids` (int64, any shape), for output token `index` of `choice`.

    A seed counts modulo 2**64.
    """
    counter = _COUNTER.pack(seed & _MASK, choice, index)
    (key,) = _KEY.unpack(hashlib.blake2b(counter, digest_size=8, person=b"baton-noise").digest())
    z = (token_ids * _signed(0x9E3779B97F4A7C15)).add_(key)
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(0x94D049BB133111EB))
    z.bitwise_xor_(_shifted(z, 31))
    return _shifted(z, 64 - _BITS).to(torch.float64).add_(0.5).mul_(2.0**-_BITS)


def _signed(number: int) -> int:
    """The int64 of the same 64 bits: torch multiplies and adds those modulo 2**64."""
    return number - (1 << 64)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, as unsigned."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
