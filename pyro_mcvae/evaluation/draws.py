"""Posterior draws, with what was seen on the way to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyro_mcvae.checks.masks import is_transported
from pyro_mcvae.particles.weighted import WeightedParticles
from pyro_mcvae.programs.minibatch import Minibatch
from pyro_mcvae.programs.plates import plate_frames
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.sites import is_factor, is_latent
from pyro_mcvae.programs.terms import Term
from pyro_mcvae.programs.types import Site


class PosteriorDraws(dict[str, Tensor]):
    """
    Draws of every latent of the model, by site, in its own space: shape ``[num_samples,
    *site_shape]``, as ``pyro.infer.Predictive(model, posterior_samples=draws)`` takes them.

    Made by :func:`refine`, whose example shows them.

    :ivar log_weight: of the candidate or chain that each draw is, shape ``[num_samples, *plates]``.
    :ivar pareto_k: the tail of all candidates' weights, shape ``[*plates]``.
    :ivar acceptance: of chains, the mean acceptance on the way to each draw, shaped as
        ``log_weight``; None without chains.
    :ivar step_size: of chains; None without.
    :ivar log_likelihood: by observed site (and ``pyro.factor``), log p(x | z) of each datum, shape
        ``[num_samples, *batch_shape]``; 0 where it is masked.
    :ivar observed: the observations, by site.
    :ivar plates: the names of the plates of ``log_weight``.
    :ivar dims: by site, the names of the plates of its batch dims, leftmost first.
    :ivar coords: by plate, the indices of its data.
    """

    log_weight: Tensor
    pareto_k: Tensor
    acceptance: Tensor | None
    step_size: Tensor | None
    log_likelihood: dict[str, Tensor]
    observed: dict[str, Tensor]
    plates: tuple[str, ...]
    dims: dict[str, tuple[str, ...]]
    coords: Minibatch

    @property
    def num_samples(self) -> int:
        """How many draws there are."""
        return len(self.log_weight)


def site_draws(
    sample: WeightedParticles, log_weight: Tensor, acceptance: Tensor | None
) -> PosteriorDraws:
    """
    What a sample's runs drew, in the shapes of a run without particles.

    :raises ValueError: if its runs have different sites.
    """
    found, first = PosteriorDraws(), sample.runs[0]
    found.log_weight, found.acceptance = log_weight, acceptance
    found.plates = sample.plate_names
    found.log_likelihood, found.observed, found.dims = {}, {}, {}
    found.coords = Minibatch()
    for name, site in _latents(first):
        found[name] = site_values(sample, name, site)
        found.dims[name] = site_dims(site)
    for term in _observed(first):
        name = term.key.name
        found.log_likelihood[name] = _stack(
            sample, name, term.site, 0, lambda run, n: _term(run, n).log_prob
        )
        found.dims[name] = site_dims(term.site)
        if not is_factor(term.site["fn"]):  # whose value is empty
            found.observed[name] = _in_full(term.site, len(found.dims[name]))
    sites = [t.site for t in first.terms if not t.in_guide]
    for name, size in _plate_sizes(sites).items():
        index = sample.subsamples.get(name)
        floats = isinstance(index, Tensor) and index.is_floating_point()  # which are no indices
        if not isinstance(index, Tensor) or floats or len(index) != size:
            index = torch.arange(size)
        found.coords[name] = index
        found.coords.sizes[name] = sample.subsamples.sizes.get(name, size)
    return found


def site_values(sample: WeightedParticles, name: str, site: Site) -> Tensor:
    """The values of a model's latent, with the draws in front: ``[K, *site_shape]``."""
    depth = site["fn"].event_dim
    return _stack(sample, name, site, depth, lambda run, n: run.model_trace.nodes[n]["value"])


def _in_full(site: Site, depth: int) -> Tensor:
    """An observed value with all of its plates' dims, over which it may broadcast."""
    shape, value = site["fn"].shape(), torch.as_tensor(site["value"])
    shape = shape[max(0, len(shape) - depth - site["fn"].event_dim) :]
    return value.expand(torch.broadcast_shapes(shape, value.shape))


def _plate_sizes(sites: list[Site]) -> dict[str, int]:
    """By plate, how many data it has; one that was made without a size does not say."""
    sizes: dict[str, int] = {}
    for site in sites:
        shape = site["fn"].batch_shape
        for frame in plate_frames(site):
            if frame.dim is not None:
                here = shape[frame.dim] if -frame.dim <= len(shape) else 1
                size = frame.size if frame.size >= 0 else here
                sizes[frame.name] = max(size, sizes.get(frame.name, 1))
    return sizes


def _latents(run: Run) -> Iterator[tuple[str, Site]]:
    return ((n, s) for n, s in run.model_trace.nodes.items() if is_latent(s))


def _observed(run: Run) -> Iterator[Term]:
    sites = (t for t in run.terms if not t.in_guide and t.site["is_observed"])
    return (t for t in sites if not is_transported(t.site))


def _term(run: Run, name: str) -> Term:
    return next(t for t in run.terms if not t.in_guide and t.key.name == name)


def site_dims(site: Site) -> tuple[str, ...]:
    """The names of a site's batch dims: of its plates, leftmost first."""
    names = {f.dim: f.name for f in plate_frames(site) if f.dim is not None}
    depth = max((-d for d in names), default=0)
    # Dims between plates, of size one, get names of their own.
    return tuple(names.get(d, f"{site['name']}_batch_{-d}") for d in range(-depth, 0))


def _stack(
    sample: WeightedParticles,
    name: str,
    site: Site,
    event_dim: int,
    pick: Callable[[Run, str], Tensor],
) -> Tensor:
    parts = []
    for run in sample.runs:
        if name not in run.model_trace.nodes:
            raise ValueError(
                f"site '{name}' is in some draws of the model and not in others, so that their "
                f"values have no common shape: refine programs whose sites do not depend on latents"
            )
        parts.append(_leading(run, pick(run, name), len(site_dims(site)), event_dim))
    shape = parts[0].shape[1:]
    if any(p.shape[1:] != shape for p in parts):
        raise ValueError(
            f"site '{name}' has another shape in each draw of the model, such as {tuple(shape)}: "
            f"refine programs whose plates do not depend on latents"
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _leading(run: Run, value: Tensor, depth: int, event_dim: int) -> Tensor:
    """``[lead, *natural shape]`` of a value that may have ones between, or no leading dim."""
    begin = max(0, value.dim() - event_dim - depth)
    if run.leading is None:  # dims to the left that lie in no plate
        begin = next((i for i, n in enumerate(value.shape[:begin]) if n != 1), begin)
    inner = value.shape[begin:]
    batch = value.dim() - event_dim
    if run.leading is None or batch <= run.nesting:
        value = value.reshape(inner).unsqueeze(0)
        return value.expand(run.leading or 1, *inner)
    return value.expand(run.leading, *value.shape[1:]).reshape(run.leading, *inner)
