"""Each private interface of PyTorch and Pyro does what its name says, and so does its fallback."""

import ast
import importlib.util
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import config_enumerate
from pyro.nn import PyroModule, PyroParam
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.einsum.adjoint import require_backward
from pyro.ops.rings import SampleRing
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx import symbolic_trace
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from pyro_mcvae.ops import compat as imported


def loaded(public_only: bool) -> ModuleType:
    """The module once more, with or without private interfaces that have a fallback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCVAE_PUBLIC_ONLY", str(int(public_only)))
        spec = importlib.util.spec_from_file_location("compat_again", imported.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    assert public_only == module.PUBLIC_ONLY
    return module


MODULES = {"private": loaded(False), "public": loaded(True)}


@pytest.fixture(params=MODULES)
def compat(request: pytest.FixtureRequest) -> ModuleType:
    return MODULES[request.param]


# Contexts -----------------------------------------------------------------------------------------


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_without_torch_function(compat):
    with Counting() as mode, compat.without_torch_function():
        torch.ones(2).sum()
    assert mode.calls == 0


class Dispatched(imported.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.funcs: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.funcs.append(func)
        return func(*args, **(kwargs or {}))


def test_without_dispatch_modes(compat):
    with Dispatched() as mode:
        with compat.without_dispatch_modes():
            torch.ones(2).sum()
        assert mode.funcs == []
        torch.ones(2).sum()
    assert torch.ops.aten.sum.default in mode.funcs


def test_without_transforms(compat):
    def level(x: Tensor) -> Tensor:
        with compat.without_transforms():
            y = torch.ones(2, requires_grad=True).sum()
        return x * y.detach()

    assert grad(level)(torch.tensor(1.0)) == 2


def test_recomputations_end_by_an_exception(compat):
    raised = []

    def function(x: Tensor) -> Tensor:
        try:
            return x.exp().exp()
        except compat.StopRecomputation as error:
            raised.append(error)
            raise

    x = torch.tensor(0.1, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).backward()
    assert len(raised) == 1


@pytest.mark.parametrize("entered", ["cpu", None])
def test_autocast(compat, entered):
    assert not compat.is_autocast_enabled()
    with torch.autocast("cpu", enabled=entered is not None):
        assert compat.is_autocast_enabled() == (entered is not None)
    assert {"cpu", "cuda"} < set(compat.devices())
    assert not any(map(torch.is_autocast_enabled, compat.devices()))


def test_casts_are_cached_without_gradients_in_old_versions(compat):
    weight, x = torch.ones(2, 2, dtype=torch.float32, requires_grad=True), torch.ones(2, 2)
    with torch.autocast("cpu"):
        with torch.no_grad():
            x.float() @ weight
        has_gradient = (x.float() @ weight).requires_grad
    assert has_gradient != compat.CACHES_CASTS_WITHOUT_GRADIENTS


def test_call_after_backward(compat):
    x, called = torch.ones(2, requires_grad=True), []
    loss = x.sum()
    loss.register_hook(lambda _: compat.call_after_backward(lambda: called.append(x.grad)))
    loss.backward()
    assert len(called) == 1
    assert called[0] is not None  # gradients were there


# Tensors ------------------------------------------------------------------------------------------


def test_versions(compat):
    x = torch.zeros(3)
    before, restored = compat.version_of(x), compat.version_restored(x)
    x.add_(1)
    assert compat.version_of(x) == before + 1
    with restored:
        x.zero_()
    assert compat.version_of(x) == before


def test_storage_key(compat):
    x = torch.zeros(3)
    assert compat.storage_key(x) == compat.storage_key(x[1:]) == compat.storage_key(x.detach())
    assert compat.storage_key(x) != compat.storage_key(x.clone())
    assert compat.storage_key(torch.eye(2).to_sparse()) is None


def test_generator_key(compat):
    class Keys(imported.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            found.update(map(compat.generator_key, filter(None, [kwargs.get("generator")])))
            return func(*args, **kwargs)

    found: set[int] = set()
    generator, other = torch.Generator(), torch.Generator()
    with Keys():
        torch.rand(2, generator=generator)
    assert found == {compat.generator_key(generator)} != {compat.generator_key(other)}


def test_is_same_tensor(compat):
    x = nn.Parameter(torch.zeros(3))
    module = nn.Module()
    module.x = x
    assert compat.is_same_tensor(x, module.x)
    assert not compat.is_same_tensor(x, x.clone())


def test_source_of_view(compat):
    x = torch.zeros(3, requires_grad=True)
    assert compat.source_of_view(x) is None
    source = compat.source_of_view(x.expand(2, 3))
    assert (source is x) != compat.PUBLIC_ONLY
    assert torch.equal(source, x)
    source.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_stored_entries(compat):
    x = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (3,), check_invariants=True)
    assert compat.stored_entries(x).sum() == 7


def test_norms(compat):
    norms = compat.norms([torch.ones(4), torch.ones(3, 3).float()], dtype=torch.float64)
    assert torch.stack(list(norms)).tolist() == [2, 3]


def test_multiplied(compat):
    a, b = compat.multiplied([torch.ones(2), torch.ones(())], torch.tensor(3.0))
    assert a.tolist() == [3, 3]
    assert b.item() == 3


def test_gradient_hooks(compat):
    x = torch.ones(2, requires_grad=True)
    assert not compat.has_gradient_hooks(x)
    x.register_hook(lambda g: 10 * g)
    assert compat.has_gradient_hooks(x)
    with compat.without_gradient_hooks([x]):
        assert torch.autograd.grad(x.sum(), x)[0].tolist() == [1, 1]
    assert torch.autograd.grad(x.sum(), x)[0].tolist() == [10, 10]
    y = torch.ones(2, requires_grad=True)
    y.register_post_accumulate_grad_hook(lambda _: None)
    assert compat.has_gradient_hooks(y)


def test_standard_gamma(compat):
    concentration = torch.full((20_000,), 3.0, requires_grad=True)
    draws = compat.standard_gamma(concentration)
    torch.testing.assert_close(draws.mean().item(), 3.0, atol=5 * (3 / 20_000) ** 0.5, rtol=0)
    (gradient,) = torch.autograd.grad(draws.mean() * len(draws), concentration)
    torch.testing.assert_close(gradient.mean().item(), 1.0, atol=0.02, rtol=0)


# Operators ----------------------------------------------------------------------------------------


def test_schema_of(compat):
    assert compat.schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert not compat.schema_of(torch.ops.aten.add.Tensor).is_mutable
    assert compat.schema_of(torch.ops.aten.add.Tensor).arguments[0].name == "self"
    assert compat.schema_of(len) is None


def test_read_number(compat):
    with Dispatched() as mode:
        torch.ones(()).item()
    assert compat.READ_NUMBER in mode.funcs


def test_trees(compat):
    tree = {"a": [torch.ones(1), 2], "b": (3,)}
    leaves, spec = compat.tree_flatten(tree)
    assert compat.tree_unflatten(leaves, spec) == tree
    assert isinstance(spec, compat.TreeSpec)
    assert compat.tree_leaves(tree) == leaves == [torch.ones(1), 2, 3]
    assert compat.tree_map(lambda leaf: 0, tree) == {"a": [0, 0], "b": (0,)}
    assert compat.tree_map_only(int, lambda n: -n, tree)["b"] == (-3,)


# Levels of torch.func -----------------------------------------------------------------------------


def test_levels_of_transforms(compat):
    assert not compat.innermost_level()

    def inside(x: Tensor) -> Tensor:
        assert compat.innermost_level() == 1
        assert compat.is_mapped(x)
        assert compat.level_of(x) == 1
        assert compat.mapped_dim_of(x) == 0
        assert compat.unwrapped(x).shape == (3, 2)
        return x

    def differentiated(x: Tensor) -> Tensor:
        assert compat.is_differentiated(x)
        assert not compat.is_mapped(x)
        return x.sum()

    vmap(inside)(torch.ones(3, 2))
    grad(differentiated)(torch.ones(2))
    assert not compat.is_mapped(torch.ones(2))
    assert not compat.is_differentiated(torch.ones(2))


def test_levels_that_are_opened_by_hand(compat):
    level = compat.open_level(3)
    try:
        x = compat.map_dim(torch.arange(6.0).reshape(3, 2), 0, level)
        assert x.shape == (2,)
        assert compat.unwrapped(x.sum()).tolist() == [1, 5, 9]
        noise = compat.unwrapped(torch.rand_like(x))
        assert noise.unique().numel() == 6  # different in each entry
        suspended = compat.suspend_level()
        assert not compat.innermost_level()
        assert torch.ones(2).sum() == 2
        compat.resume_level(suspended)
        assert compat.innermost_level() == level
    finally:
        compat.close_level()
    assert not compat.innermost_level()


# Modules and data loaders -------------------------------------------------------------------------


def test_tables_of(compat):
    module = nn.BatchNorm1d(2)
    module.inner = nn.Linear(1, 1)
    tables = compat.tables_of(module)
    assert list(tables["parameters"]) == ["weight", "bias"]
    assert tables["buffers"]["running_mean"] is module.running_mean
    assert tables["modules"] == {"inner": module.inner}
    del tables["buffers"]["running_mean"]
    assert not hasattr(module, "running_mean")


def test_attributes_of_modules(compat):
    handle = nn.Linear(1, 1)
    assert vars(handle).keys() - compat.OF_MODULES == {"in_features", "out_features"}
    assert vars(PyroModule()).keys() - compat.OF_PYRO_MODULES <= {"_pyro_params", "_pyro_samples"}
    handle.register_forward_pre_hook(lambda *_: None)
    handle.register_forward_hook(lambda *_: None)
    handle.register_full_backward_hook(lambda *_: None)
    handle.register_full_backward_pre_hook(lambda *_: None)
    assert {name for name, v in vars(handle).items() if "hooks" in name and v} == compat.HOOKS


def test_change_tensors(compat):
    module = nn.BatchNorm1d(2)
    weight = module.weight
    weight.grad = torch.ones(2)
    compat.change_tensors(module, lambda t: t.float() if t.is_floating_point() else t)
    assert module.weight is weight
    assert {weight.dtype, weight.grad.dtype, module.running_mean.dtype} == {torch.float32}
    assert module.num_batches_tracked.dtype is torch.int64


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_iterator(compat, workers):
    iterator = iter(DataLoader([0, 1], num_workers=workers))
    assert isinstance(iterator, compat.LoaderIterator)
    list(iterator)


# Distributions ------------------------------------------------------------------------------------


def test_mask_of(compat):
    assert compat.mask_of(dist.Normal(0, 1).mask(False)) is False


def test_inverse_transform(compat):
    transform = dist.transforms.ExpTransform()
    assert type(transform.inv) is compat.InverseTransform
    assert type(transform) is not compat.InverseTransform


def test_categorical_parameters(compat):
    fn = dist.Categorical(logits=torch.zeros(3))
    vars(fn)[compat.CATEGORICAL_PARAMETERS] = torch.zeros(5, 3)
    assert fn.param_shape == (5, 3)


def test_validate(compat):
    with pytest.raises(ValueError, match="support"):
        compat.validate(dist.Gamma(1.0, 1.0, validate_args=True), torch.tensor(-1.0))
    compat.validate(dist.Gamma(1.0, 1.0, validate_args=True), torch.tensor(1.0))
    compat.validate(dist.Gamma(1.0, 1.0, validate_args=False), torch.tensor(-1.0))
    fn = dist.Bernoulli(torch.tensor(0.5))
    before = dict(vars(fn))
    compat.validate(fn, torch.tensor(1.0))
    assert vars(fn) == before


def test_names_of_functions_that_validate(compat):
    called = set()

    def note(frame, event, _):
        called.add(frame.f_code.co_name)

    fn = dist.Normal(torch.zeros(2), 1.0, validate_args=True)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fn.log_prob(torch.zeros(2))
        with pyro.plate("p", 2):
            poutine.trace(lambda: pyro.sample("z", fn)).get_trace().compute_log_prob()
    finally:
        sys.setprofile(before)
    assert "_validate_sample" in compat.VALIDATION & called


@pytest.mark.parametrize("own", [True, None])
def test_without_validation(compat, own):
    fn = dist.Gamma(1.0, 1.0, validate_args=own)
    wrapped = fn.expand([2]).to_event(1)
    before = dict(vars(fn))
    with compat.without_validation([fn, wrapped]):
        fn.log_prob(torch.tensor(-1.0))
    assert vars(fn) == before
    with pytest.raises(ValueError, match="support"):
        fn.log_prob(torch.tensor(-1.0))


def test_factors_of_normals(compat):
    scale = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    fn = dist.MultivariateNormal(torch.zeros(5, 2), scale_tril=scale)
    torch.testing.assert_close(compat.scale_tril_of(fn).expand(5, 2, 2), scale.expand(5, 2, 2))
    low = dist.LowRankMultivariateNormal(torch.zeros(5, 2), scale[:, :1], torch.ones(2))
    factor, diagonal = compat.low_rank_of(low)
    torch.testing.assert_close(factor.expand(5, 2, 1), scale[:, :1].expand(5, 2, 1))
    torch.testing.assert_close(diagonal.expand(5, 2), torch.ones(5, 2))


def test_divergence_rule(compat):
    rule, pairs = compat.divergence_rule(dist.Normal, dist.Normal)
    q, p = dist.Normal(0.0, 1.0), dist.Normal(1.0, 2.0)
    assert rule(q, p) == torch.distributions.kl_divergence(q, p)
    assert (torch.distributions.Normal, torch.distributions.Normal) in pairs
    assert compat.divergence_rule(dist.Normal, dist.Categorical)[0] is NotImplemented


def test_row_lengths(compat):
    fn = dist.LKJCholesky(3, torch.tensor(1.0))
    setattr(fn, compat.ROW_LENGTHS, dist.Beta(torch.ones(3) * 1e-3, 1e3))
    rows = fn.sample()
    torch.testing.assert_close(rows.diagonal(), torch.ones(3), atol=1e-2, rtol=0)


def test_state_of(compat):
    transform = dist.transforms.AffineTransform(0.0, 2.0, cache_size=1)
    transform(torch.ones(2))
    assert transform.inv is not None
    assert compat.state_of(transform).items() >= {"loc": 0.0, "scale": 2.0}.items()
    assert not any(isinstance(v, Tensor | tuple) for v in compat.state_of(transform).values())


def test_relaxed_values(compat):
    fn = dist.RelaxedBernoulliStraightThrough(torch.tensor(0.5), torch.tensor([0.3]))
    draw = fn.rsample()
    relaxed = getattr(draw, compat.RELAXED)
    assert 0 < relaxed < 1
    assert (relaxed.round() == draw).all()


# Checkpoints --------------------------------------------------------------------------------------


def test_non_reentrant(compat):
    weight = torch.ones((), requires_grad=True)
    with compat.NonReentrant():
        loss = checkpoint(lambda x: x * weight, torch.ones(()), use_reentrant=True)
    torch.autograd.grad(loss, weight)  # reentrant checkpoints have none


# Inductor -----------------------------------------------------------------------------------------


# Importing Inductor uses parts of PyTorch that are deprecated.
of_inductor = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@of_inductor
def test_torch_compiled_draws_the_numbers_of_the_graph(compat):
    graph = symbolic_trace(lambda x: [x + torch.rand_like(x)])
    compiled = compat.torch_compiled(graph, "inductor", {})
    with compat.inductor_options(compat.RANDOM_NUMBERS):
        torch.manual_seed(0)
        (actual,) = compiled(torch.ones(3))
    torch.manual_seed(0)
    torch.testing.assert_close(actual, 1 + torch.rand(3))


@of_inductor
def test_inductor_options():
    from torch._inductor import config

    compat = MODULES["private"]
    assert not config.fallback_random
    with compat.inductor_options({"no such option": 1, "fallback_random": True}, where_known=True):
        assert config.fallback_random
    assert not config.fallback_random
    with pytest.raises(AttributeError), compat.inductor_options({"no such option": 1}):
        pass
    with MODULES["public"].inductor_options({"fallback_random": True}):
        assert not config.fallback_random


@pytest.mark.slow
@of_inductor
def test_kernels_of_inductor():
    compat = MODULES["private"]
    made: list[tuple[list[str], str]] = []
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: [x.sin() + 1])(torch.ones(3))
    with (
        torch.no_grad(),
        compat.deferred_kernels(lambda *kernel: made.append(kernel) or len(made)) as scopes,
    ):
        run, inner = compat.inductor_kernels(graph, [torch.ones(3)])
        assert callable(run)
        assert len(inner) == 1
    ((types, source),) = made
    assert len(types) == 2
    assert "std::sin" in source or ".sin()" in source
    assert 1 in scopes[0].values()
    kernel = compat.kernel_cache().load_pybinding(types, source)
    x, y = torch.ones(3), torch.zeros(3)
    kernel(x, y)
    torch.testing.assert_close(y, x.sin() + 1)


# Pyro ---------------------------------------------------------------------------------------------


def test_handlers(compat):
    with poutine.trace() as outer, poutine.scale(scale=2.0) as inner:
        assert compat.HANDLERS[-2:] == [outer, inner]
    assert compat.HANDLERS == []


def test_broadcast_to_plates(compat):
    def model() -> None:
        with pyro.plate("p", 3, dim=-1):
            pass

    frame = poutine.trace(model).get_trace().nodes["p"]["cond_indep_stack"]
    with pyro.plate("p", 3, dim=-1) as indices:
        frame = poutine.trace(lambda: pyro.sample("z", dist.Normal(0, 1))).get_trace()
    site = {**frame.nodes["z"], "fn": dist.Normal(0, 1), "done": False, "type": "sample"}
    compat.broadcast_to_plates(site)
    assert site["fn"].batch_shape == indices.shape


@pytest.fixture
def enumerated() -> Iterator[dict[str, object]]:
    @config_enumerate
    def model() -> None:
        with pyro.plate("data", 2, dim=-1):
            pyro.sample("c", dist.Categorical(torch.ones(3)))

    trace = poutine.trace(poutine.enum(model, first_available_dim=-2)).get_trace()
    trace.compute_log_prob()
    trace.pack_tensors()
    return trace.nodes["c"]


def test_annotations_of_enumeration(compat, enumerated):
    infer = enumerated["infer"]
    assert infer[compat.ENUMERATE_DIM] == -2
    assert infer[compat.DIM_TO_SYMBOL][-2] == infer[compat.ENUMERATE_SYMBOL]
    assert compat.DIM_TO_ID in infer


def test_annotations_of_hidden_sites(compat):
    def model() -> None:
        pyro.deterministic("d", torch.ones(()))
        infer = {compat.DO_NOT_TRACE: True, "is_auxiliary": True}
        pyro.sample("z", dist.Normal(0, 1), infer=infer)

    nodes = poutine.trace(model).get_trace().nodes
    assert nodes["d"]["infer"][compat.DETERMINISTIC]
    assert "z" not in nodes


def test_without_plates(compat):
    def model() -> None:
        with outer, compat.without_plates(), inner:
            pass

    outer, inner = pyro.plate("outer", 2, dim=-1), pyro.plate("inner", 3, dim=-1)
    model()
    with pytest.raises(ValueError, match="collide"), outer, inner:
        pass


def test_packed_tensors(compat, enumerated):
    log_prob = enumerated["packed"]["log_prob"]
    symbols = enumerated["infer"][compat.DIM_TO_SYMBOL]
    assert sorted(compat.dims_of(log_prob)) == sorted(symbols.values())
    value = compat.with_dims(torch.ones(2, 3), compat.dims_of(log_prob))
    assert packed.unpack(value, {s: d for d, s in symbols.items()}).dim() == 2


def test_draws_from_a_sum(compat):
    # Two states, of which the second has all of the probability.
    log_prob = compat.with_dims(torch.tensor([[-torch.inf, 0.0]] * 4), "ba")
    require_backward(log_prob)
    tree = OrderedDict({frozenset("b"): [log_prob]})
    ring = SampleRing(dim_to_size={"a": 2, "b": 4})
    ((_, (total,)),) = contract_tensor_tree(tree, {"a"}, ring=ring).items()
    compat.draw_from_sum(total)
    index = compat.drawn_index(log_prob, "a")
    assert index.tolist() == [1] * 4
    assert compat.dims_of(index) == "b"
    assert compat.drawn_index(log_prob, "c") is None


def test_saved_tables(compat):
    store = pyro.get_param_store()
    a = pyro.param("a", torch.ones(2), constraint=dist.constraints.positive)
    leaf = a.unconstrained()
    restore = compat.saved_tables()
    del store["a"]
    pyro.param("b", torch.zeros(3))
    restore()
    assert list(store.keys()) == ["a"]
    assert dict(store.named_parameters())["a"] is leaf
    assert store.param_name(leaf) == "a"
    torch.testing.assert_close(store["a"], torch.ones(2))


class Scale(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = PyroParam(torch.ones(2), dist.constraints.positive)

    def forward(self) -> Tensor:
        return self.scale


def test_stored_parameters(compat):
    module = Scale()
    assert list(compat.stored_parameters(module)) == []
    assert list(compat.stored_parameters(nn.Linear(1, 1))) == []
    module()
    ((attribute, name),) = compat.stored_parameters(module)
    assert attribute == "scale"
    assert name in pyro.get_param_store()


def test_waiting_states(compat):
    optim = pyro.optim.Adam({"lr": 0.1})
    optim.set_state({"a": {"state": 1}})
    assert compat.waiting_states(optim) == {"a": {"state": 1}}
    compat.waiting_states(optim).clear()
    assert compat.waiting_states(optim) == {}


def defined_names() -> Iterator[str]:
    for node in ast.parse(Path(imported.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname for alias in node.names if alias.asname)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        else:
            names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            yield from (
                n.id for n in names if isinstance(n.ctx, ast.Store) and n.id in vars(imported)
            )


def test_every_name_has_a_test():
    text = Path(__file__).read_text()
    names = {n for n in defined_names() if not n.startswith("_")} - {"PUBLIC_ONLY"}
    assert len(names) > 50
    assert {n for n in names if not re.search(rf"(compat|imported)\.{n}\b", text)} == set()
