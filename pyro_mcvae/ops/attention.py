"""Attention whose gradient can be differentiated again."""

from __future__ import annotations

from torch.backends import cuda

__all__ = ["MathAttention"]

_FUSED = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
_MATH = cuda.math_sdp_enabled, cuda.enable_math_sdp


class MathAttention:
    """
    ``scaled_dot_product_attention`` of plain operations, on any device.

    Fused kernels have no second derivative. This sets what
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` sets, without its 70 microseconds.
    """

    def __enter__(self) -> None:
        self._before = [enabled() for enabled, _ in (*_FUSED, _MATH)]
        _MATH[1](True)
        for _, enable in _FUSED:
            enable(False)

    def __exit__(self, *error: object) -> None:
        for (_, enable), before in zip((*_FUSED, _MATH), self._before, strict=True):
            enable(before)
