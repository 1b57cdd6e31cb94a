"""Closed-form M-steps of models with truncated posteriors, from all minibatches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_mcvae.ops.checks import check_positive
from pyro_mcvae.ops.compat import mask_of
from pyro_mcvae.ops.distributed import num_ranks, sum_over_ranks
from pyro_mcvae.programs.sites import bare, inner_scale, layers
from pyro_mcvae.programs.types import Site
from pyro_mcvae.truncated.posterior import StatePosterior

# Exact types, because a subclass may have another density.
_BERNOULLI = (dist.Bernoulli, torch.distributions.Bernoulli)
_NORMAL = (dist.Normal, torch.distributions.Normal)


class ClosedForm(ABC):
    """
    Base class of parameters that have a closed-form M-step.

    :param str site: the name of the site.
    :param ~torch.Tensor parameter: the model's parameter. It is changed in place.
    :ivar total: the sum of the statistic over the minibatches since the last update.
    :ivar count: the sum of the weights of its summands.
    :raises ValueError: if the parameter requires gradients.
    """

    def __init__(self, site: str, parameter: Tensor) -> None:
        if parameter.requires_grad:
            raise ValueError(
                f"the parameter of site '{site}' has a closed form and requires gradients: make it "
                f"a buffer, or call parameter.requires_grad_(False), so that no optimizer trains it"
            )
        self.site, self.parameter = site, parameter
        self.total: Tensor | None = None
        self.count: Tensor | None = None

    @torch.no_grad()
    def add(self, posterior: StatePosterior) -> None:
        """
        Add the statistics of a minibatch.

        Entries have the weights that they have in the free energy: the scale of
        ``poutine.scale``, and zero if they are masked. The factor N/B of a minibatch is left out.

        :param StatePosterior posterior: the posterior under the current parameters.
        :raises ValueError: for a site of another family, a site whose parameter has another value,
            a parameter with an entry per datum, and statistics that are not finite.
        """
        weights = posterior._padded(posterior._batched(posterior.weights))
        total, count = torch.zeros_like(self.parameter), torch.zeros_like(self.parameter)
        for i, run in enumerate(posterior.particles.runs):
            nodes = run.model_trace.nodes
            if self.site not in nodes or nodes[self.site]["type"] != "sample":
                raise ValueError(f"the model has no site '{self.site}'")
            site = nodes[self.site]
            value, parameter = self._statistic(site)
            self._check(posterior, site, parameter)
            own = weights if run.leading is not None else weights[i : i + 1]
            weight, exists = _weight_of(site)
            own = own.reshape(own.shape + (1,) * site["fn"].event_dim)
            # An impossible state has weight zero, and a statistic that may be NaN.
            exists = exists & (own > 0)
            shape = torch.broadcast_shapes(value.shape, weight.shape, exists.shape, own.shape)
            weight = torch.where(exists, own * weight, 0.0).to(total).expand(shape)
            value = torch.where(exists, value, 0.0).to(total)
            total += (weight * value).sum_to_size(self.parameter.shape)
            count += weight.sum_to_size(self.parameter.shape)
        if not bool(total.isfinite().all() and count.isfinite().all()):
            raise ValueError(
                f"the statistics of site '{self.site}' are not finite: check its observations, or "
                f"mask missing ones"
            )
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count

    @torch.no_grad()
    def update(self) -> None:
        """
        Set the parameter to the maximum of the free energy, and reset the statistics.

        Entries without observations keep their value. In a distributed run every rank must call
        it; the statistics are summed over the ranks.

        :raises ValueError: before any :meth:`add`.
        """
        if self.total is None or self.count is None:
            if num_ranks() == 1:
                raise ValueError(
                    f"site '{self.site}' has no statistics yet: call add(posterior) first"
                )
            self.total = self.count = torch.zeros_like(self.parameter)
        total, count = sum_over_ranks(self.total), sum_over_ranks(self.count)
        value = self._maximum(total / torch.where(count > 0, count, 1.0))
        self.parameter.copy_(torch.where(count > 0, value, self.parameter))
        self.total = self.count = None

    def state_dict(self) -> dict[str, Any]:
        """Return the parameter and the statistics, for :func:`save_checkpoint`."""
        return {"parameter": self.parameter, "total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state returned by :meth:`state_dict`."""
        with torch.no_grad():
            self.parameter.copy_(state["parameter"])
        self.total, self.count = (
            None if v is None else v.to(self.parameter) for v in (state["total"], state["count"])
        )

    @abstractmethod
    def _statistic(self, site: Site) -> tuple[Tensor, Tensor]:
        """Return the statistic of each entry, and the parameter in the site's distribution."""

    @abstractmethod
    def _maximum(self, mean: Tensor) -> Tensor:
        """Return the parameter from the mean of the statistic."""

    def _check(self, posterior: StatePosterior, site: Site, parameter: Tensor) -> None:
        own = self.parameter.to(parameter)
        try:
            same = bool(torch.isclose(parameter, own.expand(parameter.shape)).all())
        except RuntimeError:
            same = False
        if not same:
            raise ValueError(
                f"site '{self.site}' has a parameter of shape {tuple(parameter.shape)} with other "
                f"values than the one of {type(self).__name__}, of shape "
                f"{tuple(self.parameter.shape)}: the model must use this tensor itself, and "
                f"posterior(...) must be called after it has changed"
            )
        event_dim = site["fn"].event_dim
        for dim in posterior.particles.blocks[0].dims:
            at = event_dim - dim
            if at <= self.parameter.dim() and self.parameter.shape[-at] != 1:
                raise ValueError(
                    f"the parameter of site '{self.site}' has an entry for each datum, shape "
                    f"{tuple(self.parameter.shape)}: it must be shared by the data"
                )

    def _wrong_family(self, site: Site, expected: str) -> ValueError:
        return ValueError(
            f"site '{self.site}' is {type(bare(site['fn'])).__name__}, and not {expected}: "
            f"{type(self).__name__} has the closed form of that distribution only"
        )


class BernoulliPrior(ClosedForm):
    r"""
    The closed-form M-step of the probabilities of a Bernoulli site [1, eq. 5],

    .. math:: \pi_h = \frac{1}{N} \sum_n \langle z_{nh} \rangle_{q_n} .

    Call :meth:`add` with the posterior of each minibatch, and :meth:`update` after the last one.

    :param str site: a Bernoulli site that the truncated posterior searches.
    :param ~torch.Tensor parameter: the probabilities in the model, of a shape that broadcasts to
        the site's events. It is changed in place.
    :param float floor: keeps the probabilities between ``floor`` and ``1 - floor``.
    :ivar total: the sum of the posterior means since the last update.
    :ivar count: the sum of the weights of its summands.
    :raises ValueError: if the parameter requires gradients, and unless ``floor`` is between 0 and
        1/2.

    [1] Guiraud, Drefs, Lücke (2021), *Direct Evolutionary Optimization of Variational Autoencoders
    with Binary Latents*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import BernoulliPrior, TruncatedPosterior
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

    def __init__(self, site: str, parameter: Tensor, *, floor: float = 1e-4) -> None:
        super().__init__(site, parameter)
        if not 0.0 <= floor < 0.5:
            raise ValueError(f"floor must be at least 0 and less than 0.5, got {floor!r}")
        self.floor = floor

    def _statistic(self, site: Site) -> tuple[Tensor, Tensor]:
        fn = bare(site["fn"])
        if type(fn) not in _BERNOULLI:
            raise self._wrong_family(site, "Bernoulli")
        return site["value"], fn.probs

    def _maximum(self, mean: Tensor) -> Tensor:
        return mean.clamp(self.floor, 1 - self.floor)


class GaussianNoise(ClosedForm):
    r"""
    The closed-form M-step of the standard deviation of a Normal site [1, eq. 5],

    .. math:: \sigma^2 = \frac{1}{N D} \sum_{n, d} \langle (x_{nd} - \mu_d(z))^2 \rangle_{q_n} .

    Call :meth:`add` with the posterior of each minibatch, and :meth:`update` after the last one.
    Masked (missing) entries are neither summed nor counted.

    :param str site: an observed Normal site, possibly under ``to_event`` and ``mask``.
    :param ~torch.Tensor parameter: the standard deviation in the model, of a shape that broadcasts
        to the site's events. It is changed in place.
    :param float floor: the least standard deviation.
    :ivar total: the sum of the squared residuals since the last update.
    :ivar count: the sum of the weights of its summands.
    :raises ValueError: if the parameter requires gradients, and unless ``floor`` is positive.

    [1] Guiraud, Drefs, Lücke (2021), *Direct Evolutionary Optimization of Variational Autoencoders
    with Binary Latents*.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_mcvae import GaussianNoise, TruncatedPosterior
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

    def __init__(self, site: str, parameter: Tensor, *, floor: float = 1e-3) -> None:
        super().__init__(site, parameter)
        self.floor = check_positive("floor", floor)

    def _statistic(self, site: Site) -> tuple[Tensor, Tensor]:
        fn = bare(site["fn"])
        if type(fn) not in _NORMAL:
            raise self._wrong_family(site, "Normal")
        return (site["value"] - fn.loc).square(), fn.scale

    def _maximum(self, mean: Tensor) -> Tensor:
        return mean.sqrt().clamp_min(self.floor)


def _weight_of(site: Site) -> tuple[Tensor, Tensor]:
    """Return the scale and the mask of a site's entries, broadcast to ``[S, *batch, *event]``."""
    fn, value = site["fn"], site["value"]
    scale = torch.as_tensor(inner_scale(site), device=value.device)
    scale = scale.reshape(scale.shape + (1,) * fn.event_dim)
    # A mask has the batch dims of its level: event dims of the site may be batch dims of a base.
    masks = [(site["mask"], fn.event_dim)]
    masks += [(mask_of(m), m.event_dim) for m in layers(fn) if isinstance(m, MaskedDistribution)]
    exists = torch.ones((), dtype=torch.bool, device=value.device)
    for mask, events in masks:
        if mask is not None:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=value.device)
            exists = exists & mask.reshape(mask.shape + (1,) * events)
    return scale, exists
