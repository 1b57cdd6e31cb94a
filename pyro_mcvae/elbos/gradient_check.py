"""Whether the gradients of a step are finite, where its loss is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyro_mcvae.programs.run import Run

_REMEDY = (
    "their gradients are cleared, so that nothing is trained on them. Compute in double precision "
    "(torch.set_default_dtype(torch.float64)), keep latents and parameters off the ends of their "
    "supports, and keep square roots, norms and divisions off 0, also in the branch of "
    "torch.where that is not taken; torch.autograd.set_detect_anomaly(True) names the operation"
)


class GradientCheck:
    """
    Finds gradients that are not finite after a backward pass.

    :param runs: the executions of the step, whose parameters are checked.
    :param loss: the objective, whose own parameters are checked too.
    """

    def __init__(self, runs: list[Run], loss: object) -> None:
        self._runs, self._loss = runs, loss

    def total(self) -> Tensor | None:
        """A number that is finite only if all gradients are; None where there is none."""
        sums = [_entries(p.grad).sum() for p in self._trained() if p.grad is not None]
        if not sums:
            return None
        like = sums[0]
        return torch.stack([s if s.dtype == like.dtype else s.to(like) for s in sums]).sum()

    def clear(self) -> None:
        """Set the gradients to None."""
        for param in self._trained():
            param.grad = None

    def raise_if_not_finite(self, loss: float | None = None) -> None:
        """
        :raises ValueError: naming the parameters.
        """
        grads = {name: p.grad for name, p in self._by_name().items() if p.grad is not None}
        bad = [n for n, g in grads.items() if not bool(_entries(g).isfinite().all())]
        if not bad:
            return  # their sum overflows
        names = ", ".join(f"'{n}'" for n in bad[:3]) + (" and others" if len(bad) > 3 else "")
        value = "finite" if loss is None else f"{loss:.6g}"
        self.clear()
        raise ValueError(
            f"the gradient of {names} is not finite, though the loss is {value}: {_REMEDY}"
        )

    def _trained(self) -> list[Tensor]:
        return list({id(p): p for p in self._by_name().values()}.values())

    def _by_name(self) -> dict[str, Tensor]:
        """The parameters of the step by name: leaves of the graph, as an optimizer has them."""
        found: dict[str, Any] = {}
        traces = {id(t): t for run in self._runs for t in (run.guide_trace, run.model_trace)}
        for trace in traces.values():
            for name, site in trace.nodes.items():
                if site["type"] == "param" and name not in found:
                    own = getattr(site["value"], "unconstrained", None)
                    found[name] = site["value"] if own is None else own()
        if isinstance(self._loss, nn.Module):
            found.update(self._loss.named_parameters())
        return {n: p for n, p in found.items() if isinstance(p, Tensor) and p.is_leaf}


def _entries(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
