"""Closed-form updates of parameters under truncated posteriors, from an epoch's statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_mcvae.ops.distributed import num_ranks, sum_over_ranks
from pyro_mcvae.programs.sites import bare, inner_scale, layers
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.posterior import StatePosterior

# Subclasses may have another density.
_BERNOULLI = (dist.Bernoulli, torch.distributions.Bernoulli)
_NORMAL = (dist.Normal, torch.distributions.Normal)


class ClosedForm(ABC):
    """
    A parameter that is set to its optimum given the posteriors of an epoch.

    Call :meth:`add` with the posterior of each minibatch, and :meth:`update` at the epoch's end.

    :param str site: the name of the site.
    :param ~torch.Tensor parameter: the model's parameter, changed in place; it must not be trained
        by an optimizer as well.
    :ivar total: the sum over the minibatches of this epoch so far.
    :ivar count: the number of its summands.
    :raises ValueError: if the parameter requires gradients.
    """

    def __init__(self, site: str, parameter: Tensor) -> None:
        if parameter.requires_grad:
            raise ValueError(
                f"the parameter of site '{site}' has a closed form and requires gradients: exclude "
                f"it from the optimizer, as a buffer or by parameter.requires_grad_(False)"
            )
        self.site, self.parameter = site, parameter
        self.total: Tensor | float = 0.0
        self.count: Tensor | float = 0.0

    def add(self, posterior: StatePosterior) -> None:
        """Add the finite statistics of a minibatch."""
        total, count = self._statistics(posterior)
        usable = total.isfinite()
        self.total = self.total + torch.where(usable, total, 0.0)
        self.count = self.count + torch.where(usable, count, 0.0)

    def update(self) -> None:
        """
        Set the parameter, and begin another epoch.

        In a distributed run the statistics are those of all ranks, and every rank must call it.

        :raises ValueError: before any :meth:`add`.
        """
        with torch.no_grad():
            total, count = self.over_ranks()
            # Entries without observations keep their value.
            value = self._value(total / count.clamp_min(1e-12))
            self.parameter.copy_(torch.where(count > 0, value, self.parameter))
        self.total = self.count = 0.0

    def over_ranks(self) -> tuple[Tensor, Tensor]:
        """Return the sum and the number of the statistics over all ranks of a distributed run."""
        if num_ranks() == 1 and not isinstance(self.count, Tensor):
            raise ValueError(f"site '{self.site}' has no statistics yet: call add(posterior) first")
        # A rank may have had no data of this site.
        zero = torch.zeros_like(self.parameter)
        return sum_over_ranks(zero + self.total), sum_over_ranks(zero + self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameter, and the statistics of the epoch so far."""
        return {"parameter": self.parameter, "total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Set the parameter and the statistics.

        :raises ValueError: for a parameter of another shape; then nothing is changed.
        """
        if state["parameter"].shape != self.parameter.shape:
            raise ValueError(
                f"the parameter of site '{self.site}' has shape {tuple(self.parameter.shape)}, "
                f"and was saved with {tuple(state['parameter'].shape)}"
            )
        with torch.no_grad():
            self.parameter.copy_(state["parameter"])
        statistics = state["total"], state["count"]
        self.total, self.count = (
            v.to(self.parameter) if isinstance(v, Tensor) else v for v in statistics
        )

    @abstractmethod
    def _statistics(self, posterior: StatePosterior) -> tuple[Tensor, Tensor]:
        """Return the sum and the number of the statistics, in the parameter's shape."""

    def _sums(self, posterior: StatePosterior, site: Site, value: Tensor) -> tuple[Tensor, Tensor]:
        """
        Sum over the dims that the parameter does not have.

        Like the site's density in the free energy, the sum has the user's scale, and no masked
        entries.

        :param value: broadcast to ``[S, *batch, *event]``.
        """
        weight = torch.as_tensor(inner_scale(site), dtype=value.dtype, device=value.device)
        weight = weight.reshape(weight.shape + (1,) * site["fn"].event_dim)
        exists = _existing_entries(site)
        if exists is not None:
            weight, value = weight * exists, torch.where(exists, value, 0.0)
        shape = torch.broadcast_shapes(site["value"].shape, value.shape, weight.shape)
        total = posterior._mean_at(site, (weight * value).expand(shape))
        count = posterior._mean_at(site, weight.expand(shape))
        return total.sum_to_size(self.parameter.shape), count.sum_to_size(self.parameter.shape)

    def _wrong_type(self, site: Site, expected: str) -> ValueError:
        return ValueError(
            f"site '{self.site}' is {type(bare(site['fn'])).__name__}, and not {expected}: this "
            f"closed form holds only for that distribution"
        )

    def _value(self, mean: Tensor) -> Tensor:
        return mean


class BernoulliPrior(ClosedForm):
    r"""
    :math:`\pi = \frac{1}{N} \sum_n \langle z_n \rangle`, the probabilities of a Bernoulli site.

    :param str site: a Bernoulli site that the truncated posterior searches.
    :param ~torch.Tensor parameter: the probabilities, of the site's event shape (or a scalar for
        all entries).
    :param float floor: keeps the probabilities between ``floor`` and ``1 - floor``.
    :raises ValueError: if the parameter requires gradients.

    Example::

        >>> pi = torch.full((4,), 0.5)
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(pi).to_event(1))
        ...         pyro.sample("x", dist.Normal(z, 0.1).to_event(1), obs=x)
        >>> x = torch.eye(4)[:2]
        >>> guide = TruncatedPosterior(model, num_states=16)
        >>> prior = BernoulliPrior("z", pi, floor=0.01)
        >>> prior.add(guide.posterior(x))
        >>> prior.update()
        >>> pi
        tensor([0.5000, 0.5000, 0.0100, 0.0100])
    """

    def __init__(self, site: str, parameter: Tensor, floor: float = 1e-4) -> None:
        super().__init__(site, parameter)
        self.floor = floor

    def _statistics(self, posterior: StatePosterior) -> tuple[Tensor, Tensor]:
        site = posterior._site(self.site)
        if type(bare(site["fn"])) not in _BERNOULLI or self.site not in posterior.values:
            raise self._wrong_type(site, "a Bernoulli site that the truncated posterior searches")
        return self._sums(posterior, site, posterior.values[self.site])

    def _value(self, mean: Tensor) -> Tensor:
        return mean.clamp(self.floor, 1 - self.floor)


class GaussianNoise(ClosedForm):
    r"""
    :math:`\sigma^2 = \langle (x - \mu(z))^2 \rangle`, averaged over data and observed entries.

    Masked (missing) entries are neither summed nor counted.

    :param str site: an observed Normal site, possibly under ``to_event`` and ``mask``.
    :param ~torch.Tensor parameter: the standard deviation, a scalar or of the site's event shape.
    :param float floor: the least standard deviation.
    :raises ValueError: if the parameter requires gradients; by ``add``, for a site that is not
        Normal.

    Example::

        >>> sigma = torch.tensor(1.0)
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Bernoulli(0.5))
        ...         pyro.sample("x", dist.Normal(10 * z, sigma), obs=x)
        >>> x = torch.tensor([10.5, 9.5, -0.5, 0.5])
        >>> noise = GaussianNoise("x", sigma)
        >>> noise.add(TruncatedPosterior(model, num_states=2).posterior(x))
        >>> noise.update()
        >>> sigma
        tensor(0.5000)
    """

    def __init__(self, site: str, parameter: Tensor, floor: float = 1e-3) -> None:
        super().__init__(site, parameter)
        self.floor = floor

    def _statistics(self, posterior: StatePosterior) -> tuple[Tensor, Tensor]:
        site = posterior._site(self.site)
        fn = bare(site["fn"])
        if type(fn) not in _NORMAL:
            raise self._wrong_type(site, "Normal")
        return self._sums(posterior, site, (site["value"] - fn.loc).square())

    def _value(self, mean: Tensor) -> Tensor:
        return mean.sqrt().clamp_min(self.floor)


def _existing_entries(site: Site) -> Tensor | None:
    """Return the mask of a site's entries, broadcast to its values; None if all exist."""
    fn, value = site["fn"], site["value"]
    # Batch-shaped at the mask's level: event dims of the site may be batch dims of a base.
    masks = [(site["mask"], fn.event_dim)]
    masks += [(m._mask, m.event_dim) for m in layers(fn) if isinstance(m, MaskedDistribution)]
    exists = None
    for mask, events in masks:
        if mask is not None and mask is not True:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=value.device)
            mask = mask.reshape(mask.shape + (1,) * events)
            exists = mask if exists is None else exists & mask
    if exists is None:
        return None
    return exists.expand(torch.broadcast_shapes(exists.shape, value.shape))
