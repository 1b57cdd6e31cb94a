"""The programs that every objective trains are evaluated too, looped and vectorised."""

import warnings

import pyro
import pytest
import torch
from pyro.distributions.transforms import affine_coupling

from pyro_mcvae import log_evidence, refine
from tests.cases import some_slow
from tests.elbos.test_programs import FLOW, PROGRAMS
from tests.estimates import called

# What importance weights are not, and the words of the refusal.
REFUSED = {
    "auto-delta": "a point mass",
}
# Minibatches with global latents.
SHARED = {"hierarchy-subsampled", "hierarchy-loader", "auto-normal-subsampled"}


QUICK = {"auto-delta", "hierarchy-loader", "mixture", "auto-normal"}


@pytest.mark.parametrize("name", some_slow(PROGRAMS, *(PROGRAMS.keys() - QUICK)))
def test_programs_are_judged_alike_looped_and_vectorized(name):
    pyro.set_rng_seed(3)
    FLOW[torch.get_default_dtype()] = affine_coupling(2, [8])
    model, guide = PROGRAMS[name]()
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
