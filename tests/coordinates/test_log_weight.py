"""The log weight as a function of coordinates, against plain Pyro traces at the same values."""

import math
from collections import Counter

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.poutine.util import site_is_subsample

from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from tests.cases import every
from tests.plain_traces import plain_traces, values_of
from tests.zoo import EXAMPLES, data, flow

NAMES = list(EXAMPLES)
modes = pytest.mark.parametrize("vectorize", [False, True], ids=["looped", "vectorized"])


def in_turn(argument, options, names=None, every=1):
    """
    Each program, or every second one, with one option, looped or vectorised, and with all others
    among the slow tests.
    That both modes have the same weights at the same coordinates is a law of its own.
    """
    return pytest.mark.parametrize(
        ("name", argument, "vectorize"),
        [
            pytest.param(
                n,
                o,
                bool((i + j) % 2),
                id=f"{n}-{o}-{MODES[(i + j) % 2]}",
                marks=() if i % len(options) == j and i // 2 % every == 0 else pytest.mark.slow,
            )
            for i, n in enumerate(NAMES if names is None else names)
            for j, o in enumerate(options)
        ],
    )


def alternating(names=None, shift=0):
    """Each program once, looped or vectorised; two of three among the slow tests."""
    return pytest.mark.parametrize(
        ("name", "vectorize"),
        [
            pytest.param(
                n,
                bool((i + shift) % 2),
                id=f"{n}-{MODES[(i + shift) % 2]}",
                marks=() if (i + shift) % 3 == 0 else pytest.mark.slow,
            )
            for i, n in enumerate(NAMES if names is None else names)
        ],
    )


MODES = ("looped", "vectorized")
COORDINATES = ["noise", "latent"]


def values_in(evaluation, k):
    """The guide's values in particle k, and the minibatch."""
    sample = evaluation.sample
    run = sample.runs[0] if sample.runs[0].leading else sample.runs[k]
    return values_of(run, sample.subsamples, k)


def scored(trace):
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site_is_subsample(site)
    }


def by_hand(example, evaluation, k, pick=lambda program, site: True, plate_scale=True):
    """log p - log q of particle k, a tensor for each block that occurs: ``[*plates]``."""
    values = values_in(evaluation, k)
    traces = plain_traces(example.model, example.guide, example.args, values)
    totals = {}
    for program, trace in zip(("model", "guide"), traces, strict=True):
        for name, site in scored(trace).items():
            b = example.block_of(name)
            if b is None or not pick(program, site):
                continue
            plates = example.blocks[b][0]
            log_prob, keep = site["log_prob"], []
            for frame in site["cond_indep_stack"]:
                if plate_scale:
                    log_prob = log_prob / (frame.full_size / frame.size)
                if frame.name in plates:
                    keep.append(frame.dim)
            drop = [d for d in range(-log_prob.dim(), 0) if d not in keep]
            log_prob = log_prob.sum(drop) if drop else log_prob
            sign = 1 if program == "model" else -1
            totals[b] = totals.get(b, 0) + sign * log_prob
    return totals


def in_one_row(totals):
    """The blocks of one particle, side by side, in the order of their first element's plates."""
    values = list(totals.values())
    if len(values) == 1:
        return values[0]
    return torch.cat([v.reshape(-1) for v in values])


def assert_by_hand(example, evaluation, result=None, **options):
    result = evaluation.log_weight if result is None else result
    for k in range(len(result)):
        totals = by_hand(example, evaluation, k, **options)
        assert len(totals) == len(evaluation.sample.blocks)
        expected = in_one_row(in_order(example, evaluation, totals))
        assert result[k].shape == expected.shape
        assert torch.allclose(result[k], expected, atol=1e-8), k


def in_order(example, evaluation, totals):
    """The totals in the order of the sample's blocks, distinguished by a latent of each."""
    sample = evaluation.sample
    order = {}
    for key, b in sample.block_of[0].items():
        if b is not None:
            assert order.setdefault(b, example.block_of(key.name)) == example.block_of(key.name)
    return {order[b]: totals[order[b]] for b in sorted(order)}


def moved(example, log_weight, count=3, step=0.3):
    """Other coordinates: discrete values change places, the others move."""
    first = log_weight.coordinates.roll(1, 0)
    at = torch.cat([first, first])[:count]
    return at + step * data(*at.shape, seed=9) if example.smooth else at


@in_turn("coordinates", COORDINATES, every=2)
def test_log_weights_are_those_of_plain_traces(name, vectorize, coordinates):
    example = EXAMPLES[name]()
    log_weight = example.log_weight(3, vectorize, coordinates)
    first = log_weight.first
    assert log_weight.coordinates.shape[:-1] == first.log_weight.shape
    assert first.log_weight.shape[0] == 3
    assert_by_hand(example, first)
    again = log_weight(log_weight.coordinates)
    assert torch.allclose(again.log_weight, first.log_weight, atol=1e-7)
    assert torch.allclose(again.log_base, first.log_base, atol=1e-7)
    for count in (3, 2, 5):  # as many as at first, and another number
        at = moved(example, log_weight, count)
        evaluation = log_weight(at)
        assert evaluation.log_weight.shape == at.shape[:-1]
        assert_by_hand(example, evaluation)


@pytest.mark.parametrize("name", every(2, NAMES[::3]))
def test_same_coordinates_have_the_same_log_weight_in_both_modes(name):
    example = EXAMPLES[name]()
    first, second = example.log_weight(3, True), example.log_weight(3, False)
    for a, b in ((first, second), (second, first)):
        at = moved(example, a)
        result, other = a(at), b(at)
        assert torch.allclose(result.log_weight, other.log_weight, atol=1e-8)
        assert torch.allclose(result.log_base, other.log_base, atol=1e-8)
    # And the same gradient, so that one of the modes is enough to compare with finite differences.
    gradients = [
        torch.autograd.grad(weighted(e.log_weight), example.parameters(), allow_unused=True)
        for e in (result, other)
    ]
    for g, h in zip(*gradients, strict=True):
        assert (g is None) == (h is None)
        assert g is None or torch.allclose(g, h, rtol=1e-7, atol=1e-9)


@alternating(shift=1)
def test_any_leading_shape_is_the_flat_one(name, vectorize):
    example = EXAMPLES[name]()
    log_weight = example.log_weight(6, vectorize)
    at, inner = moved(example, log_weight, 6), log_weight.coordinates.shape[1:]
    flat, shaped = log_weight(at), log_weight(at.reshape(2, 3, *inner))
    single = log_weight(at[4])
    for field in ("log_weight", "log_base"):
        expected = getattr(flat, field)
        result = getattr(shaped, field)
        torch.testing.assert_close(result, expected.reshape(2, 3, *inner[:-1]))
        torch.testing.assert_close(getattr(single, field), expected[4])


GAUSSIAN = [n for n in NAMES if n not in ("two-independent", "implicit", "mixture")]


@alternating(GAUSSIAN)
def test_base_density_is_that_of_the_coordinates_under_the_guide(name, vectorize):
    example = EXAMPLES[name]()
    log_weight = example.log_weight(3, vectorize)
    # Shorter vectors of blocks side by side are padded with zeros.
    used = log_weight.coordinates != 0
    if log_weight.movable is not None:
        used &= log_weight.movable != 0
    at = moved(example, log_weight)
    for evaluation, c in ((log_weight.first, log_weight.coordinates), (log_weight(at), at)):
        standard = dist.Normal(0.0, 1.0).log_prob(c)
        assert torch.allclose(evaluation.log_base, torch.where(used, standard, 0.0).sum(-1))


@alternating()
def test_minibatch_and_global_latents_stay_fixed(name, vectorize):
    example = EXAMPLES[name]()
    log_weight = example.log_weight(3, vectorize)
    first = log_weight.first.sample
    before = log_weight(log_weight.coordinates).log_weight
    pyro.set_rng_seed(77)
    for count in (3, 1, 5):
        sample = log_weight(moved(example, log_weight, count)).sample
        assert set(sample.global_values()) == set(first.global_values())
        for n, value in first.global_values().items():
            assert torch.equal(sample.global_values()[n], value)
        assert set(sample.subsamples) == set(first.subsamples)
        for n, indices in first.subsamples.items():
            assert torch.equal(torch.as_tensor(sample.subsamples[n]), torch.as_tensor(indices))
            for run in sample.runs:
                if n in run.model_trace.nodes:
                    assert torch.equal(
                        torch.as_tensor(run.model_trace.nodes[n]["value"]),
                        torch.as_tensor(indices),
                    )
    assert torch.allclose(log_weight(log_weight.coordinates).log_weight, before, atol=1e-8)


SMOOTH = [n for n in NAMES if n not in ("mixture", "two-independent")]
STEP = 1e-5


def weighted(value):
    """A sum in which each entry counts differently."""
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    return (weights * value).sum()


@alternating(SMOOTH)
def test_gradient_in_the_coordinates_is_that_of_finite_differences(name, vectorize):
    example = EXAMPLES[name]()
    log_weight = example.log_weight(3, vectorize)
    at = moved(example, log_weight).requires_grad_()
    used = log_weight.coordinates != 0  # not the padding
    direction = data(*at.shape, seed=5) * used

    def gradient(c):
        evaluation = log_weight(c)
        total = weighted(evaluation.log_weight + 0.3 * evaluation.log_base)
        return total, torch.autograd.grad(total, c, create_graph=True)[0]

    _, grad = gradient(at)
    ends = [gradient((at + s * direction).detach().requires_grad_()) for s in (STEP, -STEP)]
    slope = (ends[0][0] - ends[1][0]) / (2 * STEP)
    assert torch.allclose((grad * direction).sum(), slope, rtol=1e-5, atol=1e-7)
    assert (grad * used).abs().max() > 1e-3
    # And the second derivative, which chains need.
    (second,) = torch.autograd.grad((grad * direction).sum(), at)
    change = (ends[0][1] - ends[1][1]) / (2 * STEP)
    assert torch.allclose(second, change, rtol=1e-4, atol=1e-6)


@alternating(SMOOTH, shift=1)
def test_gradients_in_the_parameters_at_fixed_noise_are_those_of_finite_differences(
    name, vectorize
):
    """Of the log weight, and of its gradient in the coordinates, which chains follow."""
    example = EXAMPLES[name]()
    sampler = example.sampler(3, vectorize)
    log_weight = example.log_weight(sampler=sampler)
    at = moved(example, log_weight).detach()
    direction = data(*at.shape, seed=5)
    parameters = example.parameters()
    assert parameters
    directions = [data(*p.shape, seed=i) for i, p in enumerate(parameters)]

    def value_and_slope():
        c = at.clone().requires_grad_()
        total = weighted(example.log_weight(sampler=sampler)(c).log_weight)
        return total, (torch.autograd.grad(total, c, create_graph=True)[0] * direction).sum()

    def at_offset(step):
        for p, d in zip(parameters, directions, strict=True):
            p.data.add_(d, alpha=step)
        result = [v.detach() for v in value_and_slope()]
        for p, d in zip(parameters, directions, strict=True):
            p.data.add_(d, alpha=-step)
        return result

    ends = zip(at_offset(STEP), at_offset(-STEP), strict=True)
    for value, (after, before), rtol in zip(value_and_slope(), ends, (1e-5, 1e-4), strict=True):
        grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pairs = zip(grads, directions, strict=True)
        result = sum((g * d).sum() for g, d in pairs if g is not None)
        expected = (after - before) / (2 * STEP)
        assert torch.allclose(result, expected, rtol=rtol, atol=1e-6)


# A messenger runs both programs at once; each minibatch of turns has sites of its own.
@alternating([n for n in NAMES if n not in ("messenger", "sequential-subsampled")])
def test_only_guides_with_structure_are_run_again(name, vectorize):
    example = EXAMPLES[name]()
    sampler, programs = (
        ParticleSampler(3, vectorize, example.nesting, find_roots=True),
        example.counted,
    )
    LogWeight(sampler, programs)  # finds the structure out
    example.calls()
    log_weight = LogWeight(sampler, programs)
    runs = 1 if vectorize else 3
    assert example.calls() == {"model": runs, "guide": runs}
    log_weight(moved(example, log_weight))
    again = 0 if example.mean_field else runs
    assert example.calls() == Counter(model=runs, guide=again)
    log_weight(moved(example, log_weight, 2))  # another number of particles is looked at once
    example.calls()
    log_weight(moved(example, log_weight, 2))
    # Its distributions are those of three particles.
    assert example.calls()["guide"] == (1 if vectorize else 2)


@modes
def test_a_flow_without_an_inverse_works_in_noise_coordinates(vectorize):
    example = flow("planar")
    log_weight = example.log_weight(3, vectorize)
    transform, x = example.guide.transform, data(4, 2)
    for at in (log_weight.coordinates, moved(example, log_weight)):
        evaluation = log_weight(at)
        base = pyro.param("m") * x + pyro.param("s").exp() * at
        z = transform(base)
        log_q = dist.Normal(pyro.param("m") * x, pyro.param("s").exp()).log_prob(base).sum(-1)
        log_q = log_q - transform.log_abs_det_jacobian(base, z)
        log_p = dist.Normal(0.0, 1.0).log_prob(z).sum(-1)
        log_p = log_p + dist.Normal(z * pyro.param("slope"), 0.7).log_prob(x).sum(-1)
        assert torch.allclose(evaluation.log_weight, log_p - log_q)


def test_coordinates_of_another_shape_are_refused():
    log_weight = EXAMPLES["structured"]().log_weight()
    for shape in [(3,), (4,), (3, 4), (3, 4, 2), (3, 5, 3), (4, 1), (3, 3, 4, 1)]:
        with pytest.raises(ValueError, match=r"must have shape \[\*leading, 4, 3\], got"):
            log_weight(torch.zeros(shape))


def refused(model, guide, vectorize, coordinates="noise"):
    sampler = ParticleSampler(3, vectorize, 1, find_roots=True)
    return lambda: LogWeight(sampler, Programs(model, guide, (), {}), coordinates)


@modes
def test_a_distribution_without_coordinates_is_named(vectorize):
    class Directions(dist.ProjectedNormal):
        """Draws in another way than its parent."""

        def rsample(self, sample_shape=()):
            return -super().rsample(sample_shape)

    def program():
        pyro.sample("v", Directions(torch.ones(3)))

    with pytest.raises(ValueError, match=r"guide site 'v' \(Directions\).*register_noise"):
        refused(program, program, vectorize)()
    assert not poutine.runtime._PYRO_STACK


@modes
def test_a_distribution_with_noise_alone_says_so(vectorize):
    def program():
        pyro.sample("v", dist.ProjectedNormal(torch.ones(3)))

    with pytest.raises(ValueError, match=r"site 'v' .* no unconstrained.*coordinates=\"noise\""):
        refused(program, program, vectorize, "latent")()


@modes
@pytest.mark.parametrize("coordinates", ["noise", "latent"])
def test_rounded_draws_are_refused(vectorize, coordinates):
    def program():
        with pyro.plate("data", 3):
            soft = dist.RelaxedOneHotCategoricalStraightThrough
            v = pyro.sample("v", soft(torch.tensor(0.5), probs=torch.ones(2)).mask(True))
            pyro.sample("x", dist.Normal(v[..., 0], 1.0), obs=torch.zeros(3))

    with pytest.raises(ValueError, match=r"site 'v' .* rounds its draws.*TraceIWAE_ELBO"):
        refused(program, poutine.block(program, hide=["x"]), vectorize, coordinates)()


def comes_and_goes(second=True):
    n = pyro.sample("n", dist.Normal(0.0, 1.0))
    if second:
        pyro.sample("m", dist.Normal(n, 1.0))
    if n > 0.5:
        pyro.sample("z", dist.Normal(0.0, 1.0))


def test_sites_that_come_and_go_are_refused():
    programs = Programs(comes_and_goes, comes_and_goes, (), {})
    message = "'z' is drawn in some executions and not in others"
    with pytest.raises(ValueError, match=message):
        LogWeight(ParticleSampler(20, False, math.inf, joint=True), programs)
    log_weight = LogWeight(ParticleSampler(1, False, math.inf, joint=True), programs)
    present = log_weight.coordinates.shape[-1] == 3
    other = torch.full_like(log_weight.coordinates, -1.0 if present else 1.0)
    with pytest.raises(ValueError, match=message):
        log_weight(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_all_noise_integrate_to_the_evidence(dtype):
    """Also where Phi(noise) is far below rounding, as of a Gumbel draw, whose density is not."""

    def model():
        z = pyro.sample("z", dist.Gumbel(torch.zeros((), dtype=dtype), 1.0))
        pyro.sample("x", dist.Normal(z, 0.9), obs=torch.tensor(0.5, dtype=dtype))

    def guide():
        pyro.sample("z", dist.Gumbel(torch.tensor(0.1, dtype=dtype), 1.0))

    count = 4001
    grid = torch.linspace(-12, 12, count, dtype=dtype)
    log_weight = LogWeight(ParticleSampler(count, None, 0), Programs(model, guide, (), {}))
    result = log_weight(grid.reshape(-1, 1))
    z = torch.linspace(-4, 12, 100001)
    exact = dist.Gumbel(0.0, 1.0).log_prob(z) + dist.Normal(z, 0.9).log_prob(torch.tensor(0.5))
    integral = (result.log_weight + result.log_base).exp().sum() * (24 / (count - 1))
    assert integral.item() == pytest.approx(exact.exp().sum().item() * 16 / 100000, rel=1e-4)
