"""Attention whose gradient can be differentiated again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.backends import cuda

# Each backend: whether it is enabled, how to enable it, and whether it has a second derivative.
_BACKENDS = (
    (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
)


@contextmanager
def math_attention() -> Iterator[None]:
    """
    ``scaled_dot_product_attention`` of plain operations, on any device.

    Fused kernels have no second derivative. This sets what
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` sets, without its 70 microseconds.
    """
    before = [enabled() for enabled, _, _ in _BACKENDS]
    for _, enable, twice in _BACKENDS:
        enable(twice)
    try:
        yield
    finally:
        for (_, enable, _), was in zip(_BACKENDS, before, strict=True):
            enable(was)
