"""A guide's verdict in one call: how good it is, where it is worst, and what to try next."""

from __future__ import annotations

from pyro_mcvae.evaluation.escalation import climb, is_sure
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate
from pyro_mcvae.evaluation.options import Options, judge
from pyro_mcvae.evaluation.prior_look import look_from_prior
from pyro_mcvae.evaluation.state_weights import StateWeights
from pyro_mcvae.evaluation.trained_loss import trained_loss
from pyro_mcvae.evaluation.verdict import Report
from pyro_mcvae.evaluation.weights_of import weights_of
from pyro_mcvae.ops.checks import check_flag
from pyro_mcvae.programs.execution import Programs

__all__ = ["report"]


@judge()
def report(
    programs: Programs,
    options: Options,
    *,
    loss: object = None,
    look: bool | None = None,
    escalate: bool | None = None,
) -> Report:
    r"""
    Judge a guide: its bound, the evidence, the gap between them, how heavy the weights' tails are,
    which data it serves worst, and what to try next.

    The guide's own weights are always looked at. Where these leave doubt (:math:`\hat k` plus two
    of its errors above 0.5, or fewer than 500 draws, for more than a twentieth of the weights),
    annealed chains look as well, and the evidence is theirs: of ten steps, and of 40, if the first
    leave doubt too. Where these do as well, and the two do not closely agree, chains in white
    coordinates look (see :func:`log_evidence`). Chains of your own, by a ``schedule`` or a
    ``kernel``, take their place. ``found.trusted`` says whether the evidence is then known about
    as well as its error says.

    **What no number here sees**: :math:`\hat k` and the effective sample size tell of the draws
    that were made. A mode of the posterior where the guide draws nothing shows in neither. So a few
    chains *look* from elsewhere: 50 to 200 of them, in ten steps from draws of the model's prior
    to the posterior. Where they find more evidence than the guide's weights, the guide misses
    something, and the report says so. They find less where the prior is far from the posterior,
    as with many latents: then nothing is known, which it says as well. The look takes about 100
    gradients of the programs, of at most 200 particles each. Discrete latents are drawn from the
    prior and weighed.

    The gap of a :class:`TruncatedPosterior` is the posterior outside of its states, in nats, as
    draws near them find it.

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: their arguments; keyword arguments likewise, see ``model_kwargs``.
    :param loss: the loss that the guide was trained by: its bound is shown, and it is not advised
        again.
    :param bool look: let chains look from the prior; None does so unless
        ``vectorize_particles=False``, where each chain is a run of its own.
    :param bool escalate: let chains look where the guide's weights leave doubt; None does so unless
        ``vectorize_particles=False``.
    {options}
    :returns: a :class:`Report`, to print or to :meth:`~Report.plot`.
    :raises ValueError: as :func:`log_evidence`.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 1.2))
        >>> found = report(model, guide, torch.linspace(-2, 2, 50))
        >>> print(found.advice)
        The guide covers the posterior, but not closely: TraceIWAE_ELBO(num_particles=10) gains
        most of the gap.
    """
    check_flag("look", look, or_none=True)
    check_flag("escalate", escalate, or_none=True)
    annealing = options.annealing()
    loops = options.vectorize_particles is False
    no_chains = _unasked("escalate", escalate, loops)
    prior: LogEvidence | str = _unasked("look", look, loops)
    with weights_of(programs, options) as weights:
        plain = estimate(weights, options.num_particles)
        chains: tuple[LogEvidence, ...] = ()
        states: int | None = None
        if isinstance(weights, StateWeights):
            states, no_chains = weights.guide.num_states, "no chain moves discrete states"
        if annealing is not None:
            chains, no_chains = (estimate(weights.annealed(annealing), options.num_particles),), ""
        elif not no_chains and not is_sure(plain):
            chains, no_chains = climb(weights, options)
        evidence = chains[-1] if chains else plain
        prior = prior or look_from_prior(weights, options.num_particles)
        trained = None if loss is None else trained_loss(weights, loss)
        discrete = weights.discrete
        return Report(evidence, plain, discrete, prior, chains, no_chains, trained, states)


def _unasked(name: str, asked: bool | None, loops: bool) -> str:
    """Why chains do not look, if they shall not."""
    if asked is False:
        return f"{name}=False"
    return f"particles are looped over: {name}=True" if loops and asked is None else ""
