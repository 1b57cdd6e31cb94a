"""Whether the gradients of a step are finite, where its loss is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_random, known_support

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
        found = [g for p in self._trained() if (g := p.grad) is not None]
        sums = [(g._values() if g.is_sparse else g).sum() for g in found]
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
        :raises ValueError: naming the parameters, and the latents that are near a boundary.
        """
        bad = [
            name
            for name, p in self._by_name().items()
            if p.grad is not None and not bool(_entries(p.grad).isfinite().all())
        ]
        if not bad:
            return  # their sum overflows
        names = ", ".join(f"'{n}'" for n in bad[:3]) + (" and others" if len(bad) > 3 else "")
        value = "finite" if loss is None else f"{loss:.6g}"
        near = "".join(f"\n  {line}" for line in self._near_boundaries())
        self.clear()
        raise ValueError(
            f"the gradient of {names} is not finite, though the loss is {value}: {_REMEDY}{near}"
        )

    def _trained(self) -> Iterator[Tensor]:
        return iter({id(p): p for p in self._by_name().values()}.values())

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

    def _near_boundaries(self) -> Iterator[str]:
        """A line for each latent of the guide whose values are rounded to an end, or nearly."""
        for name, site in self._runs[-1].guide_trace.nodes.items():
            if (
                site["type"] != "sample"
                or not is_random(site)
                or known_support(site["fn"]).is_discrete
            ):
                continue
            value, info = site["value"].detach(), torch.finfo(site["value"].dtype)
            # Jacobians of powers have squares and cubes of the values.
            small, large = value.abs() < info.tiny**0.5, value.abs() > info.max ** (1 / 3)
            near_one = (1 - value).abs() < 2 * info.eps
            count = int((small | near_one | large).sum())
            if count:
                kind = type(site["fn"]).__name__
                found = f"{count} of {value.numel()} entries are almost 0, 1 or infinite"
                yield f"site '{name}' of the guide ({kind}): {found}"


def _entries(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
