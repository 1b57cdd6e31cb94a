"""Models compared by their evidence: against exact Bayes factors, and what k-hat allows to say."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import compare_models, log_evidence
from pyro_mcvae.evaluation.compare import ModelComparison
from tests.models import ConjugateGaussian, HierarchicalGaussian

X = torch.tensor([0.3, -1.2, 2.0, 0.7, 1.1])


def make(scale, wider=1.2):
    """A mean with a prior of this scale; the guide a wider or narrower posterior."""

    def model(x=X):
        z = pyro.sample("z", dist.Normal(0.0, scale))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x=X):
        precision = len(x) + scale**-2
        pyro.sample("z", dist.Normal(x.sum() / precision, wider * precision**-0.5))

    covariance = torch.eye(len(X)) + scale**2
    exact = dist.MultivariateNormal(torch.zeros(len(X)), covariance).log_prob(X)
    return (model, guide), exact


@pytest.mark.parametrize("options", [{}, {"schedule": 4, "num_particles": 100}])
def test_differences_are_log_bayes_factors(options):
    pairs = {f"{s}": make(s) for s in (0.05, 1.0, 30.0)}
    result = compare_models({n: p for n, (p, _) in pairs.items()}, **options)
    for one in pairs:
        for other in pairs:
            value, error = result.difference(one, other)
            assert abs(value - float(pairs[one][1] - pairs[other][1])) < 4 * error + 1e-9
    exact = torch.stack([e for _, e in pairs.values()]).softmax(0)
    assert list(result.probabilities) == sorted(pairs, key=lambda n: -pairs[n][1])
    assert [result.probabilities[n] for n in pairs] == pytest.approx(exact.tolist(), abs=0.03)


def test_a_model_with_many_weights_beside_one_with_few():
    """Evidences of all data, however they are weighed; arguments of their own."""
    local, joint = ConjugateGaussian(N=5), HierarchicalGaussian(N=5)
    result = compare_models(
        {
            "local": (local.model, local.guide),
            "joint": (lambda x: joint.model(), lambda x: joint.guide(), (X,)),
        },
        num_particles=4000,
    )
    for name, exact in (("local", local), ("joint", joint)):
        error = float(result[name].total_standard_error)
        assert abs(float(result[name].total - exact.log_evidence())) < 5 * error


def evaluated(totals, k):
    pair, _ = make(1.0)
    one = log_evidence(*pair, num_particles=30)
    entries = {
        n: replace(
            one,
            log_evidence=torch.tensor(total),
            standard_error=torch.tensor(0.1),
            pareto_k=torch.tensor(k.get(n, 0.2)),
            num_particles=1000,
        )
        for n, total in totals.items()
    }
    return ModelComparison(sorted(entries.items(), key=lambda e: -float(e[1].total)))


def test_what_k_hat_allows_to_say():
    """Heavy tails make estimates too low: a doubtful model may be the best, and never the worst."""
    clear = evaluated({"a": 0.0, "b": -3.0}, {})
    assert clear.verdict == "a has the highest evidence."
    near = evaluated({"a": 0.0, "b": -0.2, "c": -3.0}, {})
    assert near.best == ["a", "b"]
    assert "a, b do not differ significantly" in near.verdict
    low = evaluated({"a": 0.0, "b": -3.0}, {"b": 0.9})
    assert low.best == ["a", "b"]
    assert "may be the highest" in low.verdict
    assert "a has the highest" not in low.verdict
    chance = evaluated({"a": 0.0, "b": -3.0}, {"b": 0.6})  # 0.16 is the error of k-hat
    assert chance.best == ["a", "b"]
    few = evaluated({"a": 0.0, "b": -3.0}, {"b": math.nan})  # too few weights to know their tail
    assert few.best == ["a", "b"]
    lead = evaluated({"a": 0.0, "b": -3.0}, {"a": 0.9})
    assert lead.best == ["a"]
    assert "a has the highest evidence. The evidence of a is a lower bound" in lead.verdict
    assert math.isclose(sum(lead.probabilities.values()), 1.0)


@pytest.mark.parametrize("heavy", [0.0, 0.03, 0.2])
def test_one_heavy_tail_among_many_weights_leaves_a_decision(heavy):
    n, result = 200, {}
    for name, total in (("a", -1.0), ("b", -2.0)):
        one = evaluated({"x": total, "y": total}, {})["x"]
        k = torch.where(torch.arange(n) < heavy * n, 0.95, 0.55)
        weights = {"log_evidence": torch.full((n,), total), "pareto_k": k}
        result[name] = replace(one, **weights, standard_error=torch.full((n,), 0.05))
    result = ModelComparison(result)
    assert result.best == (["a", "b"] if heavy > 0.05 else ["a"])
    assert ("The evidences of a, b are lower bounds" in result.verdict) == (heavy > 0.05)


def test_it_prints_a_table():
    result = evaluated({"a": 0.0, "b": -3.0}, {"b": 0.9})
    assert "below a" in str(result)


def test_arguments():
    pair, _ = make(1.0)
    for wrong in ([pair, pair], {"a": pair}):
        with pytest.raises(ValueError, match="models must be a dict of two pairs or more"):
            compare_models(wrong)
    with pytest.raises(ValueError, match="models must have strings for names, got 1"):
        compare_models({"a": pair, 1: pair})
    with pytest.raises(ValueError, match=r"models\['b'\] must be \(model, guide\)"):
        compare_models({"a": pair, "b": pair[0]})
    with pytest.raises(ValueError, match="must be a tuple, got tensor"):
        compare_models({"a": pair, "b": (*pair, X)})
    with pytest.raises(TypeError, match="compare_models has no option 'particles'"):
        compare_models({"a": pair, "b": pair}, particles=3)
    exact = HierarchicalGaussian(N=5)
    with pytest.raises(ValueError, match="conditional on theta, which have fixed values"):
        compare_models({"a": (exact.model, exact.guide), "b": pair}, joint=False)


def test_minibatches_are_refused():
    """Two equal models differed by 16 nats with an error of zero: each had drawn other data."""

    def batch(x):
        return pyro.plate("data", len(x), subsample_size=10)

    def model(x):
        with batch(x) as i:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])

    def guide(x):
        with batch(x) as i:
            pyro.sample("z", dist.Normal(x[i] / 2, 0.5**0.5))

    pairs = {"a": (model, guide), "b": (model, guide)}
    with pytest.raises(ValueError, match=r"'a' is that of a minibatch.*over the same batches"):
        compare_models(pairs, torch.randn(100))
    result = compare_models(pairs, torch.randn(10))
    assert result.difference("a", "b")[0] == pytest.approx(0.0, abs=1e-9)


def located(mean, cleared):
    """A Gaussian latent of a given prior mean, and an AutoNormal at its posterior."""
    if cleared:
        pyro.clear_param_store()

    def model(x):
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    guide = AutoNormal(model, init_loc_fn=lambda site: torch.tensor((mean + 4 * 3.0) / 5))
    guide(torch.tensor(3.0))
    guide.scales.z = torch.tensor(0.2**0.5)
    return model, guide


def test_guides_of_one_class_are_judged_with_their_own_parameters():
    """Pyro's store has those of the last one by the same name."""
    x, means = torch.tensor(3.0), {"near": 0.0, "far": 20.0}
    pairs = {name: located(mean, cleared=True) for name, mean in means.items()}
    store = pyro.get_param_store()
    before = {name: value.clone() for name, value in store.items()}
    objects = dict(store._params)
    result = compare_models(pairs, x, num_particles=50, seed=0)
    for name, mean in means.items():
        exact = dist.Normal(mean, 1.25**0.5).log_prob(x)
        assert float(result[name].total) == pytest.approx(float(exact), abs=1e-4)
    assert {n: v.item() for n, v in before.items()} == {n: v.item() for n, v in store.items()}
    assert all(store._params[n] is value for n, value in objects.items())


def test_guides_that_share_the_store_are_named():
    pyro.clear_param_store()
    pairs = {name: located(mean, cleared=False) for name, mean in {"a": 0.0, "b": 20.0}.items()}
    with pytest.warns(UserWarning, match=r"parameter 'AutoNormal.* is shared with another"):
        compare_models(pairs, torch.tensor(3.0), num_particles=50, seed=0)


def test_an_error_that_log_evidence_does_not_know_is_not_printed():
    """The guide of one model is thousands of nats off."""

    def model(x, scale):
        z = pyro.sample("z", dist.Normal(torch.zeros(25), 1.0).to_event(1))
        with pyro.plate("data", 25):
            pyro.sample("x", dist.Normal(z, scale), obs=x)

    def guide(x, scale):
        loc = x / (1 + scale**2) + (scale < 0.1) * 3.0
        pyro.sample("z", dist.Normal(loc, scale / (1 + scale**2) ** 0.5).to_event(1))

    x = torch.randn(25)
    models = {n: (model, guide, (x, s)) for n, s in (("good", 1.0), ("poor", 0.05))}
    result = compare_models(models, seed=0, num_particles=200)
    assert result.doubtful == ["poor"]
    value, error = result.difference("good", "poor")
    assert value > 100
    assert math.isnan(error)
    assert math.isfinite(result.difference("good", "good")[1])
    rows = str(result).splitlines()
    assert sum("± unknown" in row for row in rows) == 1
    assert next(r for r in rows if r.startswith("poor")).count("± unknown") == 2
