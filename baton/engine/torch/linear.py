"""One matrix product, with its weight in the layout that multiplies fastest where it runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_TYPES = (torch.bfloat16, torch.float32)


class Linear:
    """`x @ weight.T + bias`, for `weight` [out, in].

    On a CPU with oneDNN the weight is kept in oneDNN's blocked layout, chosen without a row count so that one copy
    serves decoding and prefill: half the time of `functional.linear` at 1 to 8 rows, in bf16 and in f32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.inputs = weight.shape[1]
        self.bias = bias
        self.bytes = weight.numel() * weight.element_size()
        self.packed = weight.device.type == "cpu" and weight.dtype in _PACKED_TYPES and torch._C._has_mkldnn
        if self.packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return product
        return functional.linear(x, self._weight, self.bias)
