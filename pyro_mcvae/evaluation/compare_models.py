"""Compare models by their log evidence of the same data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pyro_mcvae.evaluation.evidence import (
    LogEvidence,
    filled,
    fraction,
    guide_and_chains,
    has_light_tail,
    number,
    table,
)
from pyro_mcvae.evaluation.options import make_options, make_programs
from pyro_mcvae.ops.checks import each_once
from pyro_mcvae.programs.progress import Progress
from pyro_mcvae.programs.run import Programs

# Differences within so many standard errors are none.
_ERRORS = 2.0
# Share of the weights whose k-hat may be too high, so that chance alone explains it.
_FEW = 0.05


class ModelComparison(dict[str, LogEvidence]):
    """
    What :func:`compare_models` found, whose example shows one: a :class:`.LogEvidence` by name, the
    highest first.
    """

    def difference(self, name: str, other: str) -> tuple[float, float]:
        """
        Return the log Bayes factor of one model over another, in nats, and its standard error.
        """
        one, two = self[name], self[other]
        error = torch.hypot(one.total_standard_error, two.total_standard_error)
        return float(one.total - two.total), float(error)

    @property
    def probabilities(self) -> dict[str, float]:
        """
        Return the posterior probabilities of the models under equal prior probabilities. They use
        the estimated evidences, so they are meaningless where models are :attr:`doubtful`.
        """
        totals = torch.stack([e.total.double() for e in self.values()])
        return dict(zip(self, totals.softmax(0).tolist(), strict=True))

    @property
    def doubtful(self) -> list[str]:
        r"""
        Models whose :math:`\hat k` is above 0.7 somewhere, or within two of its errors for more
        than a twentieth of the weights; and those with exchangeable components whose labellings
        overlap: their evidence is underestimated, or may be.
        """
        return [n for n, e in self.items() if _is_doubtful(e)]

    @property
    def best(self) -> list[str]:
        """
        Return the model with the highest evidence, and all that may be as good: within two standard
        errors, or doubtful, since estimates with heavy tails are too low.
        """
        top, doubtful = next(iter(self)), self.doubtful
        return [n for n in self if self._within(top, n) or n in doubtful]

    def _within(self, top: str, name: str) -> bool:
        difference, error = self.difference(top, name)
        return difference <= _ERRORS * error

    @property
    def verdict(self) -> str:
        """Return which model the data favour and how reliable that is, in a few sentences."""
        top, doubtful = next(iter(self)), self.doubtful
        close = [n for n in self if self._within(top, n)]
        doubtful_others = [n for n in doubtful if n != top]
        said = []
        if len(close) > 1:
            said.append(f"{', '.join(close)} cannot be told apart: draw more particles.")
        elif not doubtful_others:
            said.append(f"{top} has the highest evidence.")
        if doubtful:
            said.append(
                f"The evidence of {', '.join(doubtful)} is a lower bound (Pareto k above 0.7, or "
                f"within its error; or labellings that are not drawn)"
                f"{', and may be the highest' if doubtful_others else ''}. Longer annealed chains "
                f"(schedule=), more draws or a better guide come closer."
            )
        said += [f"{n}: {e.labellings}." for n, e in self.items() if e.labellings is not None]
        return " ".join(said)

    def __str__(self) -> str:
        top = next(iter(self))
        rows = [["model", "log evidence", f"below {top}", "probability", "largest k"]]
        for name, evidence in self.items():
            rows.append(
                [
                    name,
                    number(float(evidence.total), float(evidence.total_standard_error)),
                    "" if name == top else number(*self.difference(top, name)),
                    "not known" if self.doubtful else f"{self.probabilities[name]:.3f}",
                    f"{float(evidence.pareto_k.max()):.2f}",
                ]
            )
        return "\n".join(["nats, all data", table(rows), filled(self.verdict)])


def _is_doubtful(evidence: LogEvidence) -> bool:
    if evidence.labellings is not None and evidence.labellings.added is None:
        return True
    near = ~has_light_tail(evidence, 0.7)
    return bool(evidence.unreliable.any()) or fraction(near) > _FEW


def compare_models(
    models: Mapping[str, tuple[Any, ...]],
    *args: object,
    model_kwargs: Mapping[str, object] | None = None,
    **options: Any,
) -> ModelComparison:
    r"""
    Compare models of the same data by their evidence: log Bayes factors with errors.

    .. math:: \log \frac{p(x \mid A)}{p(x \mid B)} = \log p_A(x) - \log p_B(x)

    Each model's evidence is estimated with its own guide, as :func:`log_evidence` does it: by
    importance sampling, or by chains with a ``schedule`` or a ``kernel``. Estimates are too low
    where a guide is too narrow: a model whose :math:`\hat k`, with its error, may be above 0.7 is
    never said to be worse. Parameters of a model that were fitted to the same data favour the
    larger model; let them be latent, with priors, or evaluate on held-out data. Models with
    exchangeable components, as mixtures, have K! equal modes, all of which count; see
    :class:`Labellings`.

    Guides that are modules of one class (two ``AutoNormal``) have parameters of the same names:
    call ``pyro.clear_param_store()`` before each is trained. Each is then evaluated with its own;
    a warning names parameters that two of them share.

    For predictive accuracy by ArviZ's ``compare``, see :func:`to_inference_data`.

    :param models: by name ``(model, guide)``; or ``(model, guide, args)``, with a tuple of the
        arguments of this pair, in place of ``args``.
    :param args: the programs' arguments.
    :param model_kwargs: their keyword arguments, in a dict.
    :param options: as in :func:`log_evidence`.
    :returns: a :class:`.ModelComparison`, to print.
    :raises ValueError: for what is no such dict; for subsampled plates; and as
        :func:`log_evidence`.

    Example::

        >>> def make(scale):
        ...     def model(x):
        ...         z = pyro.sample("z", dist.Normal(0.0, scale))
        ...         with pyro.plate("data", len(x)):
        ...             pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        ...     def guide(x):
        ...         precision = len(x) + scale**-2
        ...         pyro.sample("z", dist.Normal(x.sum() / precision, 1.2 * precision**-0.5))
        ...     return model, guide
        >>> x = torch.full((20,), 2.0)
        >>> found = compare_models({"narrow": make(0.1), "wide": make(3.0)}, x, seed=0)
        >>> print(found.verdict)
        wide has the highest evidence.
        >>> value, error = found.difference("wide", "narrow")
        >>> bool(abs(value - 30.6) < 0.1)
        True
    """
    settings = make_options("compare_models", options)
    pairs = _pairs(models, args, model_kwargs)
    evidences = {}
    with each_once(), Progress("models", settings.progress, "model") as bar:
        bar.expect(len(pairs))
        for name, programs in pairs.items():
            bar.describe(name)
            evidences[name] = guide_and_chains(programs, settings)[1]
            bar.step()
    _check_alike(evidences)
    return ModelComparison(sorted(evidences.items(), key=lambda item: -float(item[1].total)))


def _pairs(
    models: object, args: tuple[object, ...], kwargs: Mapping[str, object] | None
) -> dict[str, Programs]:
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ValueError(
            f"models must be a dict of two pairs or more by name, such as "
            f"{{'a': (model, guide), 'b': (other, its_guide)}}, got {models!r}"
        )
    programs = {}
    for name, pair in models.items():
        if not isinstance(name, str):
            raise ValueError(f"models must have strings for names, got {name!r}")
        if not isinstance(pair, tuple) or len(pair) not in (2, 3):
            raise ValueError(f"models[{name!r}] must be (model, guide) or (model, guide, args)")
        model, guide, model_args = pair if len(pair) == 3 else (*pair, args)
        if not isinstance(model_args, tuple):
            raise ValueError(
                f"the arguments in models[{name!r}] must be a tuple, got {model_args!r}"
            )
        programs[name] = make_programs(model, guide, model_args, kwargs)
    return programs


def _check_alike(evidences: Mapping[str, LogEvidence]) -> None:
    """
    Check that all evidences are of the same data.

    :raises ValueError: for evidences that are of other things.
    """
    for name, evidence in evidences.items():
        if evidence.fixed_latents:
            raise ValueError(
                f"the evidence of {name!r} is conditional on {', '.join(evidence.fixed_latents)}, "
                f"which the guide holds, and does not compare with others: let the guide draw "
                f"them, and leave joint=False out"
            )
        if bool((torch.as_tensor(evidence.scale) != 1).any()):
            raise ValueError(
                f"the evidence of {name!r} is that of a minibatch times N/B: which data it holds "
                f"is in no error, and every model that draws one has its own. Pass all data, in "
                f"plates that are not subsampled; or take log_evidence_loader(...).total for each "
                f"model"
            )
        if not math.isfinite(float(evidence.total)):
            raise ValueError(f"the log evidence of {name!r} is {float(evidence.total)}")
