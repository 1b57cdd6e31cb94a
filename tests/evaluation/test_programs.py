"""The programs that every objective trains are evaluated too, looped and vectorised."""

import warnings

import pyro
import pytest
import torch

from pyro_mcvae import log_evidence, refine
from tests.cases import some_slow
from tests.estimates import called
from tests.zoo import EXAMPLES, GUIDES

PROGRAMS = {**EXAMPLES, **GUIDES}

# What importance weights are not, and the words of the refusal.
REFUSED = {
    "auto-delta": "a point mass",
    **dict.fromkeys(("scaled-and-masked", "subsampled", "minibatch"), "scaled by poutine.scale"),
}
# Minibatches with global latents.
SHARED = {"auto-normal-subsampled", "nested-subsampled", "subsampled-without-latents"}


QUICK = {"auto-delta", "auto-normal-subsampled", "mixture", "auto-normal"}


@pytest.mark.parametrize("name", some_slow(PROGRAMS, *(PROGRAMS.keys() - QUICK)))
def test_programs_are_judged_alike_looped_and_vectorized(name):
    pyro.set_rng_seed(3)
    example = PROGRAMS[name]()
    model, guide = example.model, example.guide
    called(guide)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            log_evidence(model, guide)
        return
    joint = None
    if name in SHARED:
        with pytest.raises(ValueError, match="joint=False"):
            log_evidence(model, guide)
        joint = False
    for vectorize in (True, False):
        count = 30 if vectorize else 5
        result = log_evidence(
            model, guide, num_particles=count, joint=joint, vectorize_particles=vectorize
        )
        assert torch.isfinite(result.log_evidence).all()
        assert torch.allclose(
            result.total, result.shared + (result.scale * result.log_evidence).sum()
        )
        draws = refined(model, guide, joint, vectorize)
        trace = pyro.poutine.trace(model).get_trace()
        for site, value in draws.items():
            assert value.shape[0] == 3
            if site in trace.nodes:
                assert value.shape[1:] == trace.nodes[site]["value"].shape, site
    if name in ("mixture",):
        return
    chains = log_evidence(model, guide, num_particles=4, schedule=2, warmup=1, joint=joint)
    assert torch.isfinite(chains.log_evidence).all()


def refined(model, guide, joint, vectorize):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the Pareto k")
        return refine(
            model,
            guide,
            num_samples=3,
            num_particles=2,
            joint=joint,
            vectorize_particles=vectorize,
        )
