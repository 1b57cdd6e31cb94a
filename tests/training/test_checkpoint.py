"""A run that is killed and resumed is the run that was never killed."""

import copy
import functools
import subprocess
import sys
import textwrap

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn

from pyro_mcvae import (
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSIS_ELBO,
    load_checkpoint,
    save_checkpoint,
)
from pyro_mcvae.training import checkpoint as checkpoint_file
from tests.training.runs import CONTINUOUS, OBJECTIVES, Run

INTERFACES = ("svi", "module")
interfaces = pytest.mark.parametrize("interface", INTERFACES)
# After how many steps a run is saved: before it has any state, with some, and with all of it.
SAVED_AT = (0, 1, 4)


def in_turn(names, saved_at, step=1):
    """Objectives at each moment, under each interface in turn; the whole product is slow."""
    slow = pytest.mark.slow
    return [
        pytest.param(
            name,
            interface,
            at,
            marks=() if (j, k) == (i // step % 2, i % len(saved_at)) and i % step == 0 else slow,
        )
        for i, name in enumerate(names)
        for j, interface in enumerate(INTERFACES)
        for k, at in enumerate(saved_at)
    ]


def steps(run, count):
    return [run.step() for _ in range(count)]


def fresh(*args, **kwargs):
    """A run as another process would begin it."""
    pyro.clear_param_store()
    pyro.set_rng_seed(99)
    return Run(*args, **kwargs)


def assert_same(first, second):
    # Modules that number themselves have another number in the store.
    first = {name: v for name, v in first.items() if "ELBO_" not in name and "mcvae_" not in name}
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(("name", "interface", "at"), in_turn(OBJECTIVES, SAVED_AT))
def test_a_resumed_run_equals_the_uninterrupted_one(name, interface, at, tmp_path):
    run = Run(name, interface)
    steps(run, at)
    save_checkpoint(tmp_path / "run.pt", run.parts, step=at)
    wanted, end = steps(run, 2), run.tensors()

    resumed = fresh(name, interface)
    assert load_checkpoint(tmp_path / "run.pt", resumed.parts) == {"step": at}
    resumed.count = at
    assert steps(resumed, 2) == wanted
    assert_same(end, resumed.tensors())
    # And back again, in a run that has gone on.
    load_checkpoint(tmp_path / "run.pt", resumed.parts)
    resumed.count = at
    assert steps(resumed, 2) == wanted
    assert_same(end, resumed.tensors())


@pytest.mark.parametrize(("name", "interface", "at"), in_turn(list(CONTINUOUS), [2], step=4))
def test_autoguides_resume(name, interface, at, tmp_path):
    run = Run(name, interface, auto=True)
    steps(run, at)
    save_checkpoint(tmp_path / "run.pt", run.parts)
    wanted = steps(run, 2)
    resumed = fresh(name, interface, auto=True)
    load_checkpoint(tmp_path / "run.pt", resumed.parts)
    assert steps(resumed, 2) == wanted


def test_functions_with_parameters_and_modules_in_the_store(tmp_path):
    # What a program registers by pyro.param and pyro.module, with the module among the parts.
    def begin():
        torch.manual_seed(0)
        decoder = nn.Linear(1, 3)

        def model(x):
            pyro.module("decoder", decoder)
            scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                loc = decoder(z.unsqueeze(-1))
                pyro.sample("x", dist.Normal(loc, scale).to_event(1), obs=x)

        def guide(x):
            locs = pyro.param("locs", torch.zeros(len(x)), dist.constraints.interval(-9.0, 9.0))
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(locs, 0.5))

        optim = pyro.optim.Adam(lambda name: {"lr": 0.1 if name == "scale" else 0.05})
        svi = SVI(model, guide, optim, loss=TraceSIS_ELBO(2))
        return svi, decoder

    x = torch.randn(5, 3)
    svi, decoder = begin()
    first = [svi.step(x) for _ in range(3)]
    save_checkpoint(tmp_path / "run.pt", {"svi": svi, "decoder": decoder})
    wanted, weight = [svi.step(x) for _ in range(3)], decoder.weight.detach().clone()

    pyro.clear_param_store()
    svi, decoder = begin()
    load_checkpoint(tmp_path / "run.pt", {"svi": svi, "decoder": decoder})
    assert [svi.step(x) for _ in range(3)] == wanted
    # The live module is trained, not a copy of it in the store.
    assert torch.equal(decoder.weight, weight)
    assert pyro.get_param_store()._params["decoder$$$weight"] is decoder.weight
    assert len(first) == 3


def test_a_fresh_process_resumes(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        import pyro, torch
        from pyro_mcvae import load_checkpoint
        from tests.training.runs import Run

        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        run = Run("sis-learned", "svi")
        load_checkpoint(sys.argv[1], run.parts)
        print([run.step().hex() for _ in range(2)])
        """
    )
    Run("sis-learned", "svi")  # so that what numbers itself has another number there
    run = Run("sis-learned", "svi")
    steps(run, 2)
    save_checkpoint(tmp_path / "run.pt", run.parts)
    command = [sys.executable, "-c", script, str(tmp_path / "run.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert str([loss.hex() for loss in steps(run, 2)]) == done.stdout.strip()
    torch.set_num_threads(threads)


# What does not fit, and leaves everything as it was ---------------------------------------------


def refuses(path, run, match, error=ValueError, parts=None):
    before, rng = run.tensors(), torch.get_rng_state()
    states = copy.deepcopy([p.state_dict() for p in run.parts.values() if hasattr(p, "state_dict")])
    with pytest.raises(error, match=match):
        load_checkpoint(path, run.parts if parts is None else parts)
    after = run.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[n]) for n, v in before.items())
    assert torch.equal(rng, torch.get_rng_state())
    now = [p.state_dict() for p in run.parts.values() if hasattr(p, "state_dict")]
    assert str(states) == str(now)
    assert torch.isfinite(torch.tensor(run.step()))


@pytest.mark.parametrize(("name", "interface"), [("ais", "svi"), ("truncated", "module")])
def test_truncated_and_foreign_files_leave_the_run_alone(name, interface, tmp_path):
    run, path = Run(name, interface), tmp_path / "run.pt"
    steps(run, 2)
    save_checkpoint(path, run.parts)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        refuses(path, run, "run.pt is damaged, or not a checkpoint")
    path.write_text("step,loss\n1,2.0\n")
    refuses(path, run, "is damaged, or not a checkpoint")
    for other in ({"weight": torch.zeros(3)}, [1, 2], {"version": "pyro_mcvae checkpoint 9"}):
        torch.save(other, path)
        refuses(path, run, "was not written by this version of save_checkpoint")
    refuses(tmp_path / "none.pt", run, "none.pt", FileNotFoundError)


def test_files_that_could_run_code_are_refused(tmp_path):
    run, path = Run("sgvb", "module"), tmp_path / "run.pt"
    save_checkpoint(path, run.parts, what=pytest.approx(1.0))
    refuses(path, run, r"tensors and plain values \(a .*ApproxScalar\): pass weights_only=False")
    assert "what" in load_checkpoint(path, run.parts, weights_only=False)


def test_other_objectives_parts_and_shapes_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, Run("ais", "module").parts)
    pyro.clear_param_store()
    refuses(path, Run("sis", "module"), r"saved from a ELBOModule\(TraceAIS_ELBO\), and is now")
    pyro.clear_param_store()
    refuses(path, Run("ais", "svi"), r"has the parts \['elbo', 'optimizer', 'rates'\].*'svi.guide'")
    wide = Run("ais", "module")
    wide.guide.encoder.weight = nn.Parameter(torch.zeros(4, 7))
    before = wide.guide.encoder.weight
    with pytest.raises(ValueError, match=r"encoder.weight.*\[4, 3\].*\[4, 7\]"):
        load_checkpoint(path, wide.parts)
    assert wide.guide.encoder.weight is before


def test_a_failure_halfway_is_taken_back(tmp_path):
    path = tmp_path / "run.pt"
    run = Run("sis-latent", "module")
    steps(run, 2)
    save_checkpoint(path, run.parts)
    steps(run, 2)
    content = torch.load(path, weights_only=False)
    content["ranks"][0]["rng"]["torch"] = torch.zeros(
        3, dtype=torch.uint8
    )  # the very last to be set
    torch.save(content, path)
    refuses(path, run, "'the random number generators' of .* does not fit")
    content["parts"]["optimizer"]["param_groups"] = []
    torch.save(content, path)
    refuses(path, run, "'optimizer' of .* does not fit")


@interfaces
def test_a_failure_halfway_forgets_states_that_it_had_made(interface, tmp_path):
    path = tmp_path / "run.pt"
    run = Run("truncated", interface)
    steps(run, 2)
    save_checkpoint(path, run.parts)
    content = torch.load(path, weights_only=False)
    content["ranks"][0]["rng"]["torch"] = torch.zeros(3, dtype=torch.uint8)
    torch.save(content, path)
    new = fresh("truncated", interface)
    refuses(path, new, "random number generators")


def test_a_parameter_that_has_another_constraint_is_named(tmp_path):
    path, layer = tmp_path / "run.pt", nn.Linear(1, 1)
    bounds = dist.constraints.interval(torch.zeros(2), torch.ones(2))
    for constraint in (dist.constraints.positive, bounds):
        pyro.clear_param_store()
        pyro.param("s", torch.full((2,), 0.3), constraint=constraint)
        save_checkpoint(path, {"layer": layer})
        pyro.clear_param_store()
        pyro.param("s", torch.ones(2))
        with pytest.raises(ValueError, match=r"'s' was saved with the constraint .*, and has Real"):
            load_checkpoint(path, {"layer": layer})
        assert pyro.param("s").tolist() == [1.0, 1.0]
        pyro.clear_param_store()
        pyro.param("s", torch.full((2,), 0.5), constraint=copy.deepcopy(constraint))
        load_checkpoint(path, {"layer": layer})
        torch.testing.assert_close(pyro.param("s").detach(), torch.full((2,), 0.3))


@pytest.mark.parametrize("partial", [False, True])
def test_ranks_that_were_not_saved_draw_other_numbers(partial, monkeypatch, tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"a": torch.Generator(), "b": torch.Generator()})
    drawn = []
    for rank in range(3):
        monkeypatch.setattr(checkpoint_file.ranks, "rank", lambda rank=rank: rank)
        generators = {"a": torch.Generator(), "b": torch.Generator()}
        load_checkpoint(path, generators, partial=partial)
        drawn += [float(torch.rand((), generator=g)) for g in generators.values()][: 1 + rank]
        if not partial:
            drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == len(drawn)


def test_autoguides_that_were_never_called_say_so(tmp_path):
    path = tmp_path / "run.pt"
    run = Run("sgvb", "module", auto=True)
    save_checkpoint(path, run.parts)
    new = TraceIWAE_ELBO(3)(run.model, AutoNormal(run.model))
    save_checkpoint(path, {"elbo": TraceIWAE_ELBO(3)(run.model, run.guide)})
    with pytest.raises(ValueError, match="AutoGuide, must be called once before"):
        load_checkpoint(path, {"elbo": new})


def test_parts_without_a_state_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"part 'step' \(int\) has neither.*by keyword.*step="):
        save_checkpoint(tmp_path / "run.pt", {"step": 3})
    with pytest.raises(ValueError, match="part 'store' is Pyro's parameter store, which every"):
        save_checkpoint(tmp_path / "run.pt", {"store": pyro.get_param_store()})
    for given in ((tmp_path / "run.pt", torch.zeros(2)), ({"step": 3}, str(tmp_path / "run.pt"))):
        with pytest.raises(ValueError, match=r"parts must be a dict .* after the path, got"):
            save_checkpoint(*given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["save", "replace"])
def test_a_run_killed_while_it_saves_leaves_the_older_checkpoint(where, tmp_path, monkeypatch):
    run, path = Run("sis", "module"), tmp_path / "run.pt"
    save_checkpoint(path, run.parts, step=1)
    before = path.read_bytes()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        *((torch, "save") if where == "save" else (checkpoint_file.os, "replace")), killed
    )
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, run.parts, step=2)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    assert load_checkpoint(path, run.parts) == {"step": 1}


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """PyTorch writes checksums and does not read them: wrong weights would load without a word."""
    saved, path = nn.Linear(20, 20), tmp_path / "run.pt"
    save_checkpoint(path, {"net": saved})
    whole = path.read_bytes()
    first = whole.index(saved.weight.detach().numpy().tobytes())
    chosen = torch.randint(len(whole), (60,)).tolist()
    refused = 0
    for at in [first + 7, first + 801, whole.index(b"extra"), whole.index(b"kinds"), *chosen]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        live = nn.Linear(20, 20)
        before, rng = copy.deepcopy(live.state_dict()), torch.get_rng_state()
        try:
            load_checkpoint(path, {"net": live})
        except ValueError:
            refused += 1
            assert_same(before, live.state_dict())
            assert torch.equal(rng, torch.get_rng_state())
        else:  # padding between the records
            assert_same(saved.state_dict(), live.state_dict())
    assert refused > 40
    path.write_bytes(whole[:first] + b"1" + whole[first + 1 :])
    with pytest.raises(ValueError, match=r"run.pt is damaged, or was not written"):
        load_checkpoint(path, {"net": saved})


def test_pytorch_reads_the_file_without_this_package(tmp_path):
    path, net = tmp_path / "run.pt", nn.Linear(2, 2)
    pyro.param("scale", torch.ones(3), constraint=dist.constraints.positive)
    pyro.param("rate", torch.ones(()), constraint=dist.constraints.interval(0.5, 2.0))
    save_checkpoint(path, {"net": net})
    content = torch.load(path, weights_only=True)
    assert torch.equal(content["parts"]["net"]["weight"], net.weight)
    pyro.clear_param_store()
    load_checkpoint(path, {"net": net})
    constraints = pyro.get_param_store()._constraints
    assert constraints["scale"].lower_bound == 0.0
    assert constraints["rate"].upper_bound == 2.0


def test_a_part_of_the_format_that_is_missing_is_refused_first(tmp_path):
    path, live = tmp_path / "run.pt", nn.Linear(2, 2)
    save_checkpoint(path, {"net": live})
    content = torch.load(path, weights_only=False)
    del content["extra"]
    torch.save(content, path)
    other = nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="is damaged, or was not written"):
        load_checkpoint(path, {"net": other})
    assert_same(before, other.state_dict())


# Modules behind programs ------------------------------------------------------------------------


class Pair(nn.Module):
    """Pyro's usual VAE: networks that are registered in bound methods."""

    def __init__(self):
        super().__init__()
        self.decoder, self.encoder = nn.Linear(2, 3), nn.Linear(3, 2)

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 0.5).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.encoder(x), 0.5).to_event(1))


def svi_of(model, guide):
    return SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=Trace_ELBO())


def wrapped(program):
    @functools.wraps(program)
    def run(*args):
        return program(*args)

    return functools.partial(run)


@pytest.mark.parametrize("wrap", [lambda program: program, wrapped], ids=["methods", "wrapped"])
def test_an_svi_alone_has_the_modules_that_its_programs_are_methods_of(wrap, tmp_path):
    def begin():
        pyro.clear_param_store()
        pair = Pair()
        return pair, svi_of(wrap(pair.model), wrap(pair.guide))

    x = torch.randn(5, 3)
    _, svi = begin()
    for _ in range(3):
        svi.step(x)
    save_checkpoint(tmp_path / "run.pt", {"svi": svi})
    wanted = [svi.step(x) for _ in range(3)]
    pair, svi = begin()
    load_checkpoint(tmp_path / "run.pt", {"svi": svi})
    loaded = copy.deepcopy(pair.state_dict())
    assert [svi.step(x) for _ in range(3)] == wanted
    assert all((value != loaded[name]).any() for name, value in pair.state_dict().items())


@pytest.mark.parametrize("kind", [nn.Linear, PyroModule[nn.Linear]], ids=["module", "pyro"])
def test_a_module_that_only_its_program_knows_is_asked_for(kind, tmp_path):
    """Its values would lie in the store, be trained there, and be used by nobody."""

    def begin():
        pyro.clear_param_store()
        decoder = kind(2, 3)

        def model(x):
            if kind is nn.Linear:
                pyro.module("decoder", decoder)
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(decoder(z), 0.5).to_event(1), obs=x)

        def guide(x):
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(torch.zeros(2), 0.5).to_event(1))

        return decoder, svi_of(model, guide)

    x, path = torch.randn(5, 3), tmp_path / "run.pt"
    saved, svi = begin()
    for _ in range(3):
        svi.step(x)
    save_checkpoint(path, {"svi": svi})
    end = copy.deepcopy(saved.state_dict())
    wanted = [svi.step(x) for _ in range(3)]

    decoder, svi = begin()
    del saved
    before = copy.deepcopy(decoder.state_dict())
    with pytest.raises(ValueError, match="belongs to a module that is not among the parts"):
        load_checkpoint(path, {"svi": svi})
    assert_same(before, decoder.state_dict())
    assert not list(pyro.get_param_store())
    # Once the store knows it, its own tensors take the values.
    svi.step(x)
    load_checkpoint(path, {"svi": svi})
    assert_same(end, decoder.state_dict())
    assert [svi.step(x) for _ in range(3)] == wanted


def test_a_function_around_an_autoguide_is_asked_for(tmp_path):
    def begin():
        pyro.clear_param_store()

        def model(x):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with pyro.plate("data", len(x)):
                pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

        auto = AutoNormal(model, init_scale=0.5)
        return auto, svi_of(model, lambda x: auto(x))

    x, path = torch.randn(5, 2), tmp_path / "run.pt"
    auto, svi = begin()
    for _ in range(3):
        svi.step(x)
    save_checkpoint(path, {"svi": svi})
    wanted = auto.locs.z.detach().clone()
    auto, svi = begin()
    with pytest.raises(ValueError, match="module that is not among the parts"):
        load_checkpoint(path, {"svi": svi})
    auto(x)
    load_checkpoint(path, {"svi": svi})
    assert torch.equal(auto.locs.z, wanted)
    svi.step(x)
    assert (auto.locs.z != wanted).all()


# Parts by themselves --------------------------------------------------------------------------


def test_generators_and_pyros_own_losses(tmp_path):
    generator = torch.Generator().manual_seed(5)
    parts = {"generator": generator, "loss": Trace_ELBO()}
    save_checkpoint(tmp_path / "run.pt", parts, done=[1, {"a": None}])
    wanted = torch.rand(3, generator=generator), torch.rand(3)
    assert load_checkpoint(tmp_path / "run.pt", parts) == {"done": [1, {"a": None}]}
    assert torch.equal(torch.rand(3, generator=generator), wanted[0])
    assert torch.equal(torch.rand(3), wanted[1])
    with pytest.raises(ValueError, match="'loss' was saved from a Trace_ELBO, and is now a"):
        load_checkpoint(tmp_path / "run.pt", {**parts, "loss": TraceAIS_ELBO(2)})


def test_a_part_of_a_run_is_loaded_alone(tmp_path):
    """The model for evaluation, without the guide and the optimizer."""
    model, guide = torch.nn.Linear(2, 1), torch.nn.Linear(1, 2)
    optim = torch.optim.Adam(model.parameters())
    pyro.module("decoder", model), pyro.module("encoder", guide)
    pyro.param("prior", torch.tensor(1.5))
    parts = {"model": model, "guide": guide, "optim": optim}
    save_checkpoint(tmp_path / "run.pt", parts, epoch=3)
    saved = {n: p.detach().clone() for n, p in model.named_parameters()}

    pyro.clear_param_store()
    pyro.param("other", torch.tensor(2.0))
    fresh, state = torch.nn.Linear(2, 1), torch.get_rng_state()
    with pytest.raises(ValueError, match="or partial=True to load only some"):
        load_checkpoint(tmp_path / "run.pt", {"model": fresh})
    result = load_checkpoint(tmp_path / "run.pt", {"model": fresh}, partial=True)
    assert result == {"epoch": 3}
    assert all(torch.equal(p, saved[n]) for n, p in fresh.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    store = pyro.get_param_store()
    assert store["prior"] == 1.5
    assert store["other"] == 2.0
    assert not any(name.startswith("encoder") for name in store)
    with pytest.raises(ValueError, match=r"those to load are \['decoder'\]"):
        load_checkpoint(tmp_path / "run.pt", {"decoder": fresh}, partial=True)
    with pytest.raises(ValueError, match="saved from a Linear, and is now a Adam"):
        load_checkpoint(tmp_path / "run.pt", {"model": optim}, partial=True)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_loss_and_a_plain_one_have_the_same_checkpoint(compiled, tmp_path):
    """For serving: the file of a compiled run is loaded into plain modules."""
    x = torch.tensor([-1.0, 0.5])

    class Model(nn.Linear):
        def forward(self, x):
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(super().forward(z).squeeze(-1), 1.0), obs=x)

    class Guide(nn.Linear):
        def forward(self, x):
            with pyro.plate("data", len(x)):
                loc = super().forward(x.unsqueeze(-1))
                pyro.sample("z", dist.Normal(loc, 0.8).to_event(1))

    def run(compiles):
        loss = TraceSIS_ELBO(2)
        loss = CompiledELBO(loss, backend="eager") if compiles else loss
        return loss(Model(1, 1), Guide(1, 1))

    elbo = run(compiled)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        elbo(x).backward()
        optimizer.step()
    save_checkpoint(tmp_path / "run.pt", {"elbo": elbo, "optimizer": optimizer})
    pyro.clear_param_store()
    served = run(not compiled)
    served(x)
    load_checkpoint(tmp_path / "run.pt", {"elbo": served}, partial=True)
    for first, second in zip(elbo.state_dict().values(), served.state_dict().values(), strict=True):
        assert torch.equal(first, second)
    pyro.set_rng_seed(0)
    expected = elbo.elbo.bounds(elbo.model, elbo.guide, x).per_datum
    pyro.set_rng_seed(0)
    result = served.elbo.bounds(served.model, served.guide, x).per_datum
    assert torch.equal(result, expected)
