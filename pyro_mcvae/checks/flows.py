"""Flows whose density is not that of their draws."""

from __future__ import annotations

from pyro.distributions.transforms import BatchNorm, Sylvester

from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.transforms import parts_of, transforms_of
from pyro_mcvae.programs.types import Transform


def check_flows(run: Run) -> None:
    r"""
    Refuse flows of which Pyro's log determinant is not that of the map that draws.

    The map of ``Sylvester`` is :math:`y = x + \tanh(x S Q^\top + b) Q R`, and its log determinant
    that of :math:`Q R^\top` and :math:`S^\top Q^\top` in their place (van den Berg et al. 2018):
    with standard normal weights in five dims they are up to one nat apart, with larger ones up to
    five, where the map is not one to one any more. ``BatchNorm`` in training mode draws with its
    moving variance, and counts that of the batch.

    :raises ValueError: naming the site.
    """
    for term in run.terms:
        for transform in transforms_of(term.site["fn"]):
            for part in parts_of(transform):
                if (why := _fault(part, term)) is not None:
                    raise ValueError(f"site '{term.key.name}' of the {term.key.program} {why}")


def _fault(part: Transform, term: Term) -> str | None:
    if isinstance(part, Sylvester) and part.input_dim > 1:
        return (
            f"is a flow with Sylvester({part.input_dim}), of which Pyro's log determinant is not "
            f"that of its map, so that no bound holds: use planar, affine_autoregressive or "
            f"spline_coupling of pyro.distributions.transforms"
        )
    if isinstance(part, BatchNorm) and part.training and term.in_guide:
        return (
            f"is a flow with BatchNorm({part.input_dim}) in training mode, which draws with its "
            f"moving variance and has the density of the batch's: call eval() on it, or leave it "
            f"out of the guide"
        )
    return None
