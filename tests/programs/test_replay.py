"""Models run again at other latents: the shortcut shows what a run in full does."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace

from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.messengers import LeadingDims, ParticlePlate, Substitutes
from pyro_mcvae.programs.run import Programs, Run, replay_model, run_model, terms_of, with_changes

X = torch.tensor([0.0, 1.0, 1.0, 0.0])


def model(x):
    with pyro.plate("data", len(x)), poutine.mask(mask=x > -1), poutine.scale(scale=0.5):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.deterministic("twice", 2 * z)
        pyro.sample("x", dist.Bernoulli(logits=z), obs=x)


def guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(0.3, 0.7))


def both(model, vectorised, x=X):
    """A further run in the two ways: at other latents."""
    sampler = ParticleSampler(3 if vectorised else 1, vectorised, max_plate_nesting=1)
    programs = Programs(model, guide, (x,), {})
    run = sampler.sample(programs).runs[0]
    changes = {"z": {"value": run.guide_trace.nodes["z"]["value"] + 0.1}}
    leading = (
        LeadingDims(model=ParticlePlate(3, -2)) if vectorised else LeadingDims(),
        LeadingDims(model=ParticlePlate(3, -2)) if vectorised else LeadingDims(),
    )
    ours, same = replay_model(programs, run, changes, leading[0])
    changed = with_changes(run.guide_trace, changes)
    trace = run_model(programs, changed, Substitutes(run.subsamples), leading[1])
    return ours, same, Run(changed, trace, terms_of(changed, trace), run.nesting, run.leading)


@pytest.mark.parametrize("vectorised", [False, True])
def test_the_same_terms_as_in_full(vectorised):
    ours, same, full = both(model, vectorised)
    assert same
    assert [t.key for t in ours.terms] == [t.key for t in full.terms]
    for a, b in zip(ours.terms, full.terms, strict=True):
        torch.testing.assert_close(a.log_prob, b.log_prob, rtol=0, atol=0)
        assert a.plate_scale == b.plate_scale
    assert isinstance(ours.model_trace, Trace)
    assert "twice" in ours.model_trace.nodes


def of_the_latent(x):
    """A model whose sites depend on how often it has run."""
    of_the_latent.runs += 1
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if of_the_latent.runs % 2 == of_the_latent.odd:
            pyro.factor("more", z)
        pyro.sample("x", dist.Bernoulli(logits=z), obs=x)


@pytest.mark.parametrize("odd", [0, 1])
def test_other_sites_are_noticed(odd):
    of_the_latent.runs, of_the_latent.odd = 0, odd
    programs = Programs(of_the_latent, guide, (X,), {})
    run = ParticleSampler(1, False, max_plate_nesting=1).sample(programs).runs[0]
    of_the_latent.runs = 1  # that was the first; others looked at the programs' structure
    ours, same = replay_model(programs, run, {"z": {"value": torch.zeros(4)}})
    assert not same
    assert ("more" in {t.key.name for t in ours.terms}) != (
        "more" in {t.key.name for t in run.terms}
    )


def test_other_plates_are_noticed():
    def model(x):
        z = guide_draw(x)
        with pyro.plate("pixels", 2 if z.sum() < 0 else 3, dim=-2):
            pyro.sample("y", dist.Normal(0.0, 1.0))

    def guide_draw(x):
        with pyro.plate("data", len(x)):
            return pyro.sample("z", dist.Normal(0.0, 1.0))

    def guide(x):
        z = guide_draw(x)
        with pyro.plate("pixels", 2 if z.sum() < 0 else 3, dim=-2):
            pyro.sample("y", dist.Normal(0.0, 1.0))

    programs = Programs(model, guide, (X,), {})
    run = ParticleSampler(1, False, max_plate_nesting=2).sample(programs).runs[0]
    sign = 1.0 if run.guide_trace.nodes["z"]["value"].sum() < 0 else -1.0
    other = {"z": {"value": torch.full((4,), sign)}}
    with pytest.raises(ValueError, match=r"site 'y' of the model.*value of shape"):
        replay_model(programs, run, other)


def check_again(model, guide, *, moved):
    log_weight = LogWeight(
        ParticleSampler(1, False, max_plate_nesting=1), Programs(model, guide, (X,), {}), "noise"
    )
    return log_weight(torch.full_like(log_weight.coordinates, moved))


def test_latents_out_of_the_support_are_still_refused():
    def positive(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Exponential(1.0))
            pyro.sample("x", dist.Bernoulli(logits=z), obs=x)

    def narrow(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(9.0, 1.0))

    assert check_again(positive, narrow, moved=0.0).log_weight.isfinite().all()
    with pytest.raises(ValueError, match="site 'z' of the model"):
        check_again(positive, narrow, moved=-20.0)


def test_bad_parameters_are_still_refused():
    def scaled(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(9.0, 1.0))
            pyro.sample("x", dist.Normal(0.0, z), obs=x)

    def narrow(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(9.0, 1.0))

    with pytest.raises(ValueError, match="scale"):
        check_again(scaled, narrow, moved=-20.0)


def test_observations_out_of_a_support_that_moves_are_refused():
    def moving(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(9.0, 1.0))
            pyro.sample("x", dist.Uniform(z - 20.0, z + 20.0), obs=x)

    def narrow(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(9.0, 1.0))

    with pytest.raises(ValueError, match="site 'x' of the model"):
        check_again(moving, narrow, moved=100.0)


@pytest.mark.parametrize("own", [None, True, False])
def test_new_values_are_validated_in_each_run(own, monkeypatch):
    seen = []
    check = dist.Bernoulli._validate_sample

    def count(self, value):
        seen.append(self)
        check(self, value)

    monkeypatch.setattr(torch.distributions.Bernoulli, "_validate_sample", count)

    def observed(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            likelihood = dist.Bernoulli(logits=z.unsqueeze(-1), validate_args=own).to_event(1)
            pyro.sample("x", likelihood, obs=x.unsqueeze(-1))
            pyro.sample("y", likelihood, obs=X.unsqueeze(-1))

    log_weight = LogWeight(
        ParticleSampler(1, False, max_plate_nesting=1), Programs(observed, guide, (X,), {}), "noise"
    )
    before = len(seen)
    log_weight(log_weight.coordinates)
    # Both are made again in each run.
    assert len(seen) - before == (0 if own is False else 2)


def test_the_very_same_observation_is_not_validated_again(monkeypatch):
    seen = []
    check = dist.Bernoulli._validate_sample

    def count(self, value):
        seen.append(self)
        check(self, value)

    monkeypatch.setattr(torch.distributions.Bernoulli, "_validate_sample", count)
    log_weight = LogWeight(
        ParticleSampler(1, False, max_plate_nesting=1), Programs(model, guide, (X,), {}), "noise"
    )
    before = len(seen)
    assert before == 1
    result = log_weight(log_weight.coordinates)
    assert len(seen) == before
    fn = result.sample.runs[0].model_trace.nodes["x"]["fn"]
    assert fn._validate_args  # and is as it was
