"""How often programs run, on which minibatch, with which draws, and what is refused."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.poutine import runtime

from pyro_mcvae import TraceIWAE_ELBO, TraceSIS_ELBO
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.programs.types import PARTICLE_PLATE
from tests.cases import every
from tests.params import in_turn
from tests.tally import Tally
from tests.zoo import EXAMPLES, data, nested, plain, subsampled

INF = float("inf")
K = 4
# The marked runs of an analysis: alone, and in the batched layout.
ALONE = BATCHED = 1
modes = pytest.mark.parametrize("vectorize", [False, True], ids=["looped", "vectorized"])


def normal(loc=0.0):
    return dist.Normal(loc, 1.0)


def sampler(vectorize=True, nesting=INF, num_particles=K, **options):
    return ParticleSampler(num_particles, vectorize, nesting, **options)


def pair(model, guide, *args):
    return Programs(model, guide, args, {})


def values(sample, name):
    """The draws of a guide site: one tensor per run, or one for all."""
    return [run.guide_trace.nodes[name]["value"] for run in sample.runs]


def assert_clean():
    """No handler is left on the stack, and no batch dim is taken."""
    assert not runtime._PYRO_STACK
    assert not any(runtime._DIM_ALLOCATOR._stack)


class Counter:
    """Runs of the programs of a data plate, with or without a global latent."""

    x = data(5)

    def __init__(self, with_global):
        self.with_global = with_global
        self.tally = Tally()

    def model(self):
        self.tally.add("model")
        theta = pyro.sample("theta", normal()) if self.with_global else 0.0
        with pyro.plate("data", 5):
            z = pyro.sample("z", normal(theta))
            pyro.sample("x", normal(z), obs=self.x)

    def guide(self):
        self.tally.add("guide")
        if self.with_global:
            pyro.sample("theta", normal())
        with pyro.plate("data", 5):
            pyro.sample("z", normal(self.x))

    def runs(self, sampler):
        self.tally.take()
        sampler.sample(pair(self.model, self.guide))
        counts = self.tally.take()
        return counts["model"], counts["guide"]


def is_analyzed(step):
    return step in (1, 2, 4, 8)


def test_without_global_latents_a_step_is_one_run_per_particle_or_one_for_all():
    counter = Counter(with_global=False)
    looped, vectorized = sampler(False), sampler(True, 1)
    for step in range(1, 9):
        extra = ALONE if is_analyzed(step) else 0
        assert counter.runs(looped) == (K + extra, K + extra)
        extra = ALONE + BATCHED if is_analyzed(step) else 0
        assert counter.runs(vectorized) == (1 + extra, 1 + extra)


def test_an_unknown_nesting_costs_no_further_run():
    counter, unknown = Counter(with_global=False), sampler(True)
    assert counter.runs(unknown) == (1 + ALONE + BATCHED,) * 2


@modes
def test_global_latents_cost_extra_runs_in_the_first_step_only(vectorize):
    counter, fresh = Counter(with_global=True), sampler(vectorize, 1)
    first = counter.runs(fresh)
    assert first[0] == first[1] <= (4 if vectorize else K + 2)
    counter.runs(fresh)
    assert counter.runs(fresh) == ((1, 1) if vectorize else (K, K))


def test_one_particle_is_one_run_in_either_mode():
    counter = Counter(with_global=False)
    for vectorize in (False, True):
        single = sampler(vectorize, num_particles=1)
        for step in range(1, 6):
            runs = 1 + (ALONE if is_analyzed(step) else 0)
            assert counter.runs(single) == (runs, runs)


class Minibatches:
    """A subsampled plate in the model only, or in both programs; what each run saw."""

    def __init__(self, in_guide):
        self.in_guide = in_guide
        self.seen = []

    def model(self):
        with pyro.plate("data", 100, 5) as i:
            self.seen.append(i)
            z = pyro.sample("z", normal()) if self.in_guide else 0.0
            pyro.sample("x", normal(z), obs=data(100)[i])

    def guide(self):
        if self.in_guide:
            with pyro.plate("data", 100, 5) as i:
                self.seen.append(i)
                pyro.sample("z", normal())


@modes
@pytest.mark.parametrize("in_guide", [True, False])
def test_all_particles_of_a_step_see_one_minibatch(vectorize, in_guide):
    programs, fresh = Minibatches(in_guide), sampler(vectorize, 1)
    minibatches = []
    for step in range(3):
        programs.seen = []
        sample = fresh.sample(pair(programs.model, programs.guide))
        used = programs.seen[-(2 if in_guide else 1) * len(sample.runs) :]
        assert all(torch.equal(i, used[0]) for i in used), step
        assert torch.equal(sample.subsamples["data"], used[0])
        minibatches.append(used[0])
    assert not torch.equal(minibatches[0], minibatches[1])
    assert not torch.equal(minibatches[1], minibatches[2])


@modes
def test_a_minibatch_may_be_given_as_indices(vectorize):
    fresh = sampler(vectorize, 1)
    for indices in (torch.tensor([3, 1, 17]), torch.tensor([0, 5]), torch.arange(20)):
        example = subsampled(indices)
        sample = fresh.sample(example.programs)
        assert sample.log_weight.shape == (K, len(indices))
        assert sample.scale == 20 / len(indices)
        assert sample.plate_names == ("data",)


@in_turn(
    name=["hierarchical", "subsampled", "nested-subsampled", "two-plates", "subsampled"],
    vectorize=[False, True],
)
def test_global_latents_are_drawn_once_and_local_ones_per_particle(name, vectorize):
    example = EXAMPLES[name]()
    fresh = sampler(vectorize, example.nesting)
    previous = None
    for _ in range(3):
        sample = fresh.sample(example.programs)
        shared = sample.structure.global_sites.guide
        assert shared == {"a"} if name.startswith("nested") else {"theta"}
        for site in shared:
            drawn = values(sample, site)
            assert all(torch.equal(v, drawn[0]) for v in drawn)
            assert drawn[0].shape == ((4,) if name.startswith("nested") else ())
            assert previous is None or not torch.equal(drawn[0], previous)
            previous = drawn[0]
        names = {k.name for k, b in sample.block_of[0].items() if b is not None}
        for site in names & {"z", "w", "b", "a"} - shared:
            drawn = values(sample, site)
            drawn = list(drawn[0]) if vectorize else drawn
            assert len(drawn) == K
            assert all((a != b).all() for a, b in itertools.pairwise(drawn))


@modes
def test_independent_particles_draw_global_latents_too(vectorize):
    runs = sampler(vectorize, 1).independent(EXAMPLES["hierarchical"]().programs)
    drawn = [run.guide_trace.nodes["theta"]["value"] for run in runs]
    assert torch.cat([v.flatten() for v in drawn]).unique().numel() == K


@in_turn(
    name=[
        *("plain", "structured", "hierarchical", "crossed", "two-plates", "sequential"),
        *("subsampled", "nested-subsampled", "auto-normal", "mixture"),
    ],
    vectorize=[False, True, True, False, True],
    nesting=["given", "found"],
)
def test_a_seed_gives_the_same_draws_in_the_first_step_and_later(name, vectorize, nesting):
    example = EXAMPLES[name]()
    fresh = sampler(vectorize, example.nesting if nesting == "given" else INF, find_roots=True)
    result = []
    for _ in range(3):
        pyro.set_rng_seed(5)
        sample = fresh.sample(example.programs)
        result.append((sample.log_weight, torch.rand(())))
    for log_weight, after in result[1:]:
        assert torch.equal(log_weight, result[0][0])
        assert torch.equal(after, result[0][1])


@in_turn(name=["hierarchical", "subsampled", "two-plates"], vectorize=[False, True])
def test_a_seed_gives_the_same_coordinates_in_the_first_step_and_later(name, vectorize):
    example = EXAMPLES[name]()
    fresh = sampler(vectorize, find_roots=True)
    result = []
    for _ in range(2):
        pyro.set_rng_seed(5)
        result.append(LogWeight(fresh, example.programs))
    assert torch.equal(result[0].coordinates, result[1].coordinates)
    assert torch.equal(result[0].first.log_weight, result[1].first.log_weight)


def plated(*sizes, automatic=False):
    """A model with one latent inside plates of these sizes, and its guide."""

    def enter(body):
        for d in range(-len(sizes), 0):
            plate = pyro.plate(f"plate{d}", sizes[d], dim=None if automatic else d)
            body = _inside(plate, body)
        return body

    def guide():
        enter(lambda: pyro.sample("z", normal(data(*sizes))))()

    def model():
        def body():
            z = pyro.sample("z", normal())
            pyro.sample("x", normal(z), obs=data(*sizes))

        enter(body)()

    return pair(model, guide)


def _inside(plate, body):
    def plated():
        with plate:
            return body()

    return plated


@pytest.mark.parametrize(("validate", "automatic"), [(True, True), (False, False)])
def test_a_deeper_model_is_looked_at_again(automatic, validate):
    pyro.enable_validation(validate)
    fresh = sampler()
    # As many elements as particles, so that a dim taken for another is no error by itself.
    for sizes in [(3,), (K, 3), (3,), (K, K, 3), ()]:
        programs, x = plated(*sizes, automatic=automatic), data(*sizes)
        for _ in range(2):
            sample = fresh.sample(programs)
            frames = sample.runs[0].guide_trace.nodes["z"]["cond_indep_stack"]
            assert min(frames, key=lambda f: f.dim).name == PARTICLE_PLATE
            z = values(sample, "z")[0].reshape(K, *sizes)
            expected = normal().log_prob(z) - normal(x).log_prob(z) + normal(z).log_prob(x)
            assert torch.allclose(sample.log_weight, expected)


@pytest.mark.parametrize(
    ("vectorize", "validate", "automatic"),
    [(False, True, True), (True, False, True), (True, True, False), (False, False, False)],
)
def test_a_model_deeper_than_declared_is_refused(vectorize, automatic, validate):
    pyro.enable_validation(validate)
    fresh = sampler(vectorize, 1)
    good = fresh.sample(plated(3)).log_weight.shape
    with pytest.raises(ValueError, match=r"max_plate_nesting=1, but .* pass max_plate_nesting=2"):
        fresh.sample(plated(K, 3, automatic=automatic))
    assert_clean()
    assert fresh.sample(plated(3)).log_weight.shape == good == (K, 3)


def test_a_plate_with_deterministic_sites_only_does_not_collide_with_the_particles():
    def model():
        with pyro.plate("data", 3, dim=-1):
            z = pyro.sample("z", normal())
            pyro.sample("x", normal(z), obs=data(3))
            with pyro.plate("copies", 2, dim=-2):
                pyro.deterministic("copied", z * torch.ones(2, 1))

    def guide():
        with pyro.plate("data", 3, dim=-1):
            pyro.sample("z", normal())

    sample = sampler().sample(pair(model, guide))
    assert sample.log_weight.shape == (K, 3)


def observe(x, loc):
    pyro.sample("x", normal(loc), obs=x)


class Unfit:
    """Programs that run with one particle, and cannot be vectorised."""

    def view(self):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            observe(data(3), z.view(6).reshape(3, 2).sum(-1))

    def reshape(self):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            observe(data(3), z.reshape(3, 2)[:, 0])

    def mean(self):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        observe(torch.tensor(0.3), z.mean())

    def sum_over_plate(self):
        with pyro.plate("data", 3):
            z = pyro.sample("z", normal())
        observe(torch.tensor(0.3), z.sum(-1))

    def mean_of_latent(self):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        y = pyro.sample("y", normal(z.mean()))
        observe(torch.tensor(0.3), y)

    def undeclared_batch(self):
        z = pyro.sample("z", normal())
        observe(data(K), z)  # as many data as particles, in no plate


def unfit(name):
    model = getattr(Unfit(), name)
    event = name not in ("sum_over_plate", "undeclared_batch")
    plate = pyro.plate("data", 3) if name in ("view", "reshape", "sum_over_plate") else None

    def draw():
        fn = dist.Normal(torch.zeros(2), 1.0).to_event(1) if event else normal()
        pyro.sample("z", fn)

    def guide():
        if plate is None:
            draw()
        else:
            with plate:
                draw()
        if name == "mean_of_latent":
            pyro.sample("y", normal())

    return pair(model, guide)


REFUSED = r"vectorize_particles=False|invalid log_prob shape"
UNFIT = [name for name in vars(Unfit) if not name.startswith("_")]


@in_turn(name=UNFIT, nesting=["given", "found"])
@pytest.mark.usefixtures("leading_dims_only")
def test_programs_that_cannot_be_vectorised_are_refused(name, nesting):
    programs = unfit(name)
    depth = 1 if name in ("view", "reshape", "sum_over_plate") else 0
    fresh = sampler(nesting=depth if nesting == "given" else INF)
    for _ in range(2):  # again in the second step
        with pytest.raises((RuntimeError, ValueError), match=REFUSED):
            fresh.sample(programs)
        assert_clean()
    if name == "undeclared_batch":  # which one particle cannot have either
        with pytest.raises(ValueError, match=REFUSED):
            sampler(False).sample(programs)
    else:
        assert sampler(False).sample(programs).log_weight.shape[0] == K


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.usefixtures("leading_dims_only")
def test_independent_particles_refuse_them_too(name):
    with pytest.raises((RuntimeError, ValueError), match=REFUSED):
        sampler().independent(unfit(name))
    assert_clean()


@pytest.mark.parametrize("name", [name for name in UNFIT if name != "undeclared_batch"])
@pytest.mark.usefixtures("leading_dims_only")
def test_one_particle_at_first_does_not_hide_that_more_cannot_be_vectorised(name):
    # A chain's weight is evaluated for one particle, and then for many.
    fresh = sampler(num_particles=1)
    log_weight = LogWeight(fresh, unfit(name))
    at = torch.randn(K, *log_weight.coordinates.shape[1:])
    with pytest.raises((RuntimeError, ValueError), match=REFUSED):
        log_weight(at)
    assert_clean()


def test_a_program_that_reduces_over_its_plate_and_keeps_the_dim_is_accepted():
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", normal())
        observe(torch.tensor([0.3]), z.sum(-1, keepdim=True))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", normal())

    sample = sampler(nesting=1).sample(pair(model, guide))
    (z,) = values(sample, "z")
    expected = normal(z.sum(-1)).log_prob(torch.tensor(0.3))
    assert torch.allclose(sample.log_weight, expected)


@modes
def test_a_programs_own_error_is_raised_as_it_is(vectorize):
    def model():
        with pyro.plate("data", 3):
            pyro.sample("z", normal())
            raise ArithmeticError("mine")

    fresh, good = sampler(vectorize, 1), plated(3)
    with pytest.raises(ArithmeticError, match=r"^mine"):
        fresh.sample(pair(model, good.guide))
    assert_clean()
    assert fresh.sample(good).log_weight.shape == (K, 3)


@modes
def test_an_error_inside_of_a_plate_frees_its_dim(vectorize):
    def broken():
        with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 3):
            raise RuntimeError("broken")

    fresh = sampler(vectorize)
    with pytest.raises(RuntimeError, match="broken"):
        fresh.sample(pair(broken, broken))
    assert_clean()
    assert fresh.sample(plated(2, 3)).log_weight.shape == (K, 2, 3)


@modes
def test_the_same_sites_with_other_dependencies_are_told_apart(vectorize):
    # The same sites in the same plates; but one program's second observation joins the plates.
    def make(joined):
        def model():
            with pyro.plate("A", 3, dim=-1):
                a = pyro.sample("a", normal())
                pyro.sample("x", normal(a), obs=data(3))
            with pyro.plate("B", 2, dim=-2):
                b = pyro.sample("b", normal())
                shift = a.sum(-1, keepdim=True) if joined else 0.0
                pyro.sample("y", normal(b + shift), obs=data(2, 1))

        def guide():
            with pyro.plate("A", 3, dim=-1):
                pyro.sample("a", normal())
            with pyro.plate("B", 2, dim=-2):
                pyro.sample("b", normal())

        return pair(model, guide)

    apart, joined, fresh = make(False), make(True), sampler(vectorize, 2)
    assert fresh.sample(apart).log_weight.shape == (K, 5)
    assert fresh.sample(joined).log_weight.shape == (K,)
    assert fresh.sample(apart).log_weight.shape == (K, 5)


@modes
def test_a_guide_that_gains_structure_is_run_again(vectorize):
    # As in the test before: the sites of both guides are the same.
    def model():
        with pyro.plate("data", 3):
            a = pyro.sample("a", normal())
            b = pyro.sample("b", normal())
            pyro.sample("x", normal(a + b), obs=data(3))

    def guide_of(weight):
        def guide():
            with pyro.plate("data", 3):
                a = pyro.sample("a", normal())
                pyro.sample("b", normal(weight * a if weight else data(3)))

        return guide

    fresh = sampler(vectorize, 1, find_roots=True)
    LogWeight(fresh, pair(model, guide_of(None)))
    log_weight = LogWeight(fresh, pair(model, guide_of(0.9)))
    at = log_weight.coordinates + 1.0
    a, eps = at.unbind(-1)
    b = 0.9 * a + eps
    expected = normal().log_prob(b) - normal().log_prob(eps) + normal(a + b).log_prob(data(3))
    assert torch.allclose(log_weight(at).log_weight, expected)


def test_particles_of_one_step_in_different_plates_are_refused():
    name = ["A"]

    def model():
        with pyro.plate(name[0], 3):
            pyro.sample("z", normal())

    def guide():
        name[0] = "B" if name[0] == "A" else "A"
        model()

    with pytest.raises(ValueError, match="two particles of one step have different plates"):
        sampler(False, 1).sample(pair(model, guide))
    assert_clean()


@modes
def test_joint_weighs_global_latents_with_the_local_ones(vectorize):
    example = EXAMPLES["hierarchical"]()
    sample = sampler(vectorize, 1, joint=True).sample(example.programs)
    assert sample.log_weight.shape == (K,)
    drawn = torch.cat([v.flatten() for v in values(sample, "theta")])
    assert drawn.unique().numel() == K


def test_outer_handlers_see_the_step_and_not_the_looking():
    fresh = sampler()
    with poutine.trace(param_only=True) as outer:
        fresh.sample(plain().programs)
    assert set(outer.trace.nodes) == {"slope", "a", "s"}


def test_nested_plates_are_found_in_either_order():
    assert sampler().sample(nested().programs).log_weight.shape == (K, 4)
    assert sampler().sample(nested(2).programs).log_weight.shape == (K, 2, 4)


@pytest.mark.slow
def test_plates_over_a_drawn_number_of_objects():
    """Each particle has plates of its own size: the evidence is that of the mixture over sizes."""
    x = torch.tensor(1.7)

    def latents(sizes):
        n = int(pyro.sample("n", dist.Categorical(sizes))) + 1
        with pyro.plate("objects", n):
            return pyro.sample("z", dist.Normal(0.0, 1.0))

    def model():
        z = latents(torch.tensor([0.5, 0.3, 0.2]))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=x)

    def guide():
        latents(torch.tensor([0.2, 0.3, 0.5]))

    pyro.set_rng_seed(0)
    elbo = TraceIWAE_ELBO(400, vectorize_particles=False, joint=True)
    exact = torch.logsumexp(
        torch.stack(
            [
                torch.tensor(w).log() + dist.Normal(0.0, (n + 2) ** 0.5).log_prob(x)
                for n, w in enumerate([0.5, 0.3, 0.2])
            ]
        ),
        0,
    )
    assert abs(-elbo.loss(model, guide) - exact) < 0.08


def test_a_minibatch_from_plates_of_two_sizes_is_refused():
    def model(x):
        with pyro.plate("data", 7, dim=-1) as idx:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[idx])

    def guide(x):
        with pyro.plate("data", 10, subsample_size=4, dim=-1):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"plate 'data' has size 7.*minibatch of 4.*from 10"):
        TraceIWAE_ELBO(3).loss(model, guide, torch.zeros(10))


@pytest.mark.usefixtures("leading_dims_only")
@pytest.mark.parametrize("nesting", [1, math.inf])
def test_draws_that_cross_the_particles_are_refused(nesting):
    """theta.unsqueeze(-1) makes [K, 1] to [K, 1, 1], which would be summed as if it were data."""

    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(theta, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.zeros(3))

    def guide():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(theta.unsqueeze(-1), 1.0))

    sampler = ParticleSampler(5, True, nesting, joint=True)
    with pytest.raises(RuntimeError, match=r"log_prob of shape .* to the left of the particles"):
        sampler.sample(Programs(model, guide, (), {}))


@pytest.mark.parametrize("couples", [False, True])
@pytest.mark.parametrize("make", every(2, [TraceIWAE_ELBO, TraceSIS_ELBO]))
def test_calls_that_share_other_sites_in_turn_run_once_each(make, couples):
    """Running statistics count each step once, and a seed gives the draws of a new objective."""
    norm = torch.nn.BatchNorm1d(1).double()

    def model(x, y):
        mean = pyro.sample("mean", normal())
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", normal(mean))
            pyro.sample("x", normal(z - z.mean(-1, keepdim=True) if couples else z), obs=x)
        if y is not None:
            pyro.sample("y", normal(mean), obs=y)

    def guide(x, y):
        pyro.sample("mean", normal())
        with pyro.plate("data", len(x)):
            pyro.sample("z", normal(norm(x.unsqueeze(-1)).squeeze(-1).detach()))

    # An observation makes the mean a site that all share. So does a second latent of a plate.
    calls = (data(6), torch.tensor(1.0)), (data(2 if couples else 6), None)
    elbo = make(3)
    for step in range(12):
        losses = []
        for objective in elbo, make(3):
            pyro.set_rng_seed(step)
            losses.append(objective.loss(model, guide, *calls[step % 2]))
        assert losses[0] == pytest.approx(losses[1])
        assert norm.num_batches_tracked == 2 * (step + 1)


@pytest.mark.parametrize("make", [TraceIWAE_ELBO, TraceSIS_ELBO])
def test_operations_enumeration_and_shared_sites_may_change_at_once(make):
    x = data(6)

    def model(y, enumerates):
        mean = pyro.sample("mean", normal())
        with pyro.plate("data", len(x)):
            loc = pyro.sample("z", normal(mean))
            if enumerates:
                options = {"infer": {"enumerate": "parallel"}}
                loc = loc + pyro.sample("k", dist.Bernoulli(0.3), **options)
            pyro.sample("x", normal(loc), obs=x)
        if y is not None:
            pyro.sample("y", normal(mean), obs=y)

    def guide(y, enumerates):
        pyro.sample("mean", normal())
        with pyro.plate("data", len(x)):
            pyro.sample("z", normal(x))

    elbo = make(3)
    elbo.loss(model, guide, torch.tensor(1.0), False)
    losses = []
    for objective in elbo, make(3):
        pyro.set_rng_seed(0)
        losses.append(objective.loss(model, guide, None, True))
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.usefixtures("leading_dims_only")
def test_a_gather_along_a_plate_is_told_how_to_index() -> None:
    """Houses in counties: ``means[county]`` picks particles when there are several at once."""
    county, y = torch.arange(9) % 4, torch.zeros(9)

    def model(index):
        with pyro.plate("counties", 4):
            means = pyro.sample("means", dist.Normal(0.0, 1.0))
        with pyro.plate("houses", 9):
            pyro.sample("y", dist.Normal(index(means), 1.0), obs=y)

    def guide(index):
        with pyro.plate("counties", 4):
            pyro.sample("means", dist.Normal(0.0, 0.5))

    elbo = TraceIWAE_ELBO(2, vectorize_particles=True)
    with pytest.raises(RuntimeError, match=r"means\[\.\.\., group\] instead of means"):
        elbo.loss(model, guide, lambda means: means[county])
    assert math.isfinite(elbo.loss(model, guide, lambda means: means[..., county]))
    assert math.isfinite(TraceIWAE_ELBO(2).loss(model, guide, lambda means: means[county]))
