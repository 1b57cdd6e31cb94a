"""What a log weight is differentiated with respect to, and what keeps its graph."""

from __future__ import annotations

import enum


class GradientMode(enum.Flag):
    """
    Which gradients of a log weight are needed; ``|`` joins them.

    * ``NONE``: none; graphs are kept where gradients are enabled around it.
    * ``COORDINATES``: at each evaluation, with respect to the coordinates, as kernels ask for.
    * ``FIRST``: the first draw keeps its graph, its latents detached from the guide, so that guide
      and model get gradients of their own; later evaluations keep none.
    * ``CHAIN``: every evaluation keeps its graph, back to the first draw.
    """

    NONE = 0
    COORDINATES = 1
    FIRST = 2
    CHAIN = 4

    @classmethod
    def of_kernel(cls, needs_gradient: bool) -> GradientMode:
        """What moves of a kernel need, whose chain nobody differentiates."""
        return cls.COORDINATES if needs_gradient else cls.NONE

    @property
    def keeps_graph(self) -> bool:
        """Whether some evaluation keeps its graph, for the gradient of a bound."""
        return bool(self & (GradientMode.FIRST | GradientMode.CHAIN))
