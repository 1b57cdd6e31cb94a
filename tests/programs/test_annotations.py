"""Options of a site in ``infer={"mcvae": {...}}``: checked by name, apart from notes."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    LeaveOneOut,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    log_evidence,
)
from pyro_mcvae.discrete.site_slots import SiteOptions
from pyro_mcvae.programs.types import SLOT_OPTIONS
from tests.tally import Tally

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def programs(in_guide=None, in_model=None, at_data=None):
    def model():
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Bernoulli(0.3), infer=in_model)
            pyro.sample("x", dist.Normal(2 * y, 1.0), obs=X, infer=at_data)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Bernoulli(torch.tensor([0.2, 0.1, 0.7])), infer=in_guide)

    return model, guide


OBJECTIVES = [TraceSGVB_ELBO, lambda: TraceIWAE_ELBO(3), TraceRaoBlackwell_ELBO]


def refused(match, *pair):
    for make in OBJECTIVES:
        with pytest.raises(ValueError, match=match):
            make().loss(*pair)
    with pytest.raises(ValueError, match=match):
        log_evidence(*pair, num_particles=5)


def test_known_options_are_those_of_the_slots():
    assert set(SiteOptions.__dataclass_fields__) == SLOT_OPTIONS


@pytest.mark.parametrize("name", ["num_categorys", "log_prob", "score_function", "outside"])
def test_unknown_option_is_refused_with_the_valid_ones(name):
    match = rf"site 'y' of the guide has the unknown option '{name}'.*baseline, budget, .*samples"
    refused(match, *programs({"mcvae": {name: torch.zeros(3)}}))


def test_options_that_are_no_dict_are_refused():
    refused(r"infer\['mcvae'\] of site 'y' of the guide must be a dict", *programs({"mcvae": 3}))


def test_options_without_effect_are_refused():
    options = {"mcvae": {"num_categories": 1}}
    match = r"site 'y' of the model has no effect.*pass it to pyro.sample\('y', ...\) of the guide"
    refused(match, *programs(in_model=options))
    refused(r"site 'x' of the model is observed, .* no effect", *programs(at_data=options))


def test_options_at_an_enumerated_site_of_the_model_are_refused():
    model, _ = programs(in_model={"enumerate": "parallel", "mcvae": {"num_categories": 1}})
    with pytest.raises(ValueError, match="site 'y' of the model has no effect"):
        TraceSGVB_ELBO().loss(model, lambda: None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"baseline": "loo"}, "baseline must be a Baseline, .* got 'loo'"),
        ({"exact_entropy": "yes"}, "exact_entropy must be True or False, got 'yes'"),
    ],
)
def test_values_of_options_are_checked(options, match):
    with pytest.raises(ValueError, match=f"guide site 'y', .*{match}"):
        TraceRaoBlackwell_ELBO().loss(*programs({"mcvae": options}))


def test_a_function_that_is_model_and_guide_may_have_options_in_both():
    options = {"mcvae": {"num_samples": 2, "baseline": LeaveOneOut()}}
    pyro.set_rng_seed(0)
    both = TraceRaoBlackwell_ELBO().loss(*programs(options, dict(options)))
    pyro.set_rng_seed(0)
    assert both == TraceRaoBlackwell_ELBO().loss(*programs(options))


@pytest.mark.parametrize("coordinates", ["noise", "latent"])
def test_annotations_of_a_site_survive_moves(coordinates):
    """Chains replay a guide's draws: what the user says of a site stays."""
    seen = Tally()

    class See(pyro.poutine.messenger.Messenger):
        def _pyro_post_sample(self, msg):
            if msg["name"] == "z":
                seen.add(msg["infer"].get("mine"))

    def model():
        with See(), pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(X / 2, 0.7), infer={"mine": 7})

    TraceSIS_ELBO(3, coordinates=coordinates).loss(model, guide)
    counts = seen.take()
    assert counts[7] > 2
    assert set(counts) == {7}
