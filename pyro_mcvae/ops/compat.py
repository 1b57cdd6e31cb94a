"""
All private interfaces of PyTorch and Pyro that the package uses, each by a name for what it does.

They worked with PyTorch 2.5 and 2.13 and with Pyro 1.9.1 and 1.9.2, and may change in any release.
With the environment variable ``MCVAE_PUBLIC_ONLY=1``, the fallbacks are used: public interfaces,
which are slower. A step is then compiled by :func:`torch.compile`, not by ``compiled/inductor.py``.
Most private interfaces have no public one.

All layers may import this module. Unlike the rest of layer 0, it imports Pyro.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter, methodcaller
from typing import Any, ClassVar

import pyro
import torch
from pyro.nn import PyroModule
from pyro.poutine import runtime
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from torch import Tensor, nn
from torch.distributions import Distribution, Gamma, Transform, kl
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.data import DataLoader, dataloader

PUBLIC_ONLY = os.environ.get("MCVAE_PUBLIC_ONLY") == "1"


def _private(owner: object, name: str, public: Any) -> Any:
    """Return an attribute, or its fallback, also if a later version no longer has it."""
    return public if PUBLIC_ONLY else getattr(owner, name, public)


# PyTorch: contexts and errors.

# Turns off all of __torch_function__ (modes and subclasses), dispatch modes, or torch.func.
without_torch_function = torch._C.DisableTorchFunction
without_dispatch_modes = _disable_current_modes
without_transforms = torch._C._DisableFuncTorch

# Ends the recomputation of a checkpoint as soon as all saved tensors are there.
StopRecomputation = torch.utils.checkpoint._StopRecomputationError

# Autocast caches cast weights also without gradients before this version.
CACHES_CASTS_WITHOUT_GRADIENTS = torch.__version__ < "2.13"


def devices() -> tuple[str, ...]:
    """Return the kinds of devices that may have autocast, with one that PyTorch does not ship."""
    other = _private(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    return "cpu", "cuda", "mps", "xpu", other()


is_autocast_enabled = _private(
    torch._C, "_is_any_autocast_enabled", lambda: any(map(torch.is_autocast_enabled, devices()))
)


# Calls a function at the end of the running backward pass, which raises its errors.
call_after_backward = torch.autograd.Variable._execution_engine.queue_callback


# PyTorch: tensors.

# Returns the number of writes in place to a tensor; an error for inference tensors.
version_of = attrgetter("_version")
# Returns a context that sets this number to its value at the call.
version_restored = torch.autograd.grad_mode._unsafe_preserve_version_counter

_storage_id = methodcaller("data_ptr") if PUBLIC_ONLY else attrgetter("_cdata")


def storage_key(tensor: Tensor) -> int | None:
    """Return a number that tensors share if they have the same memory; None without memory."""
    try:
        return _storage_id(tensor.untyped_storage()) or None
    except (RuntimeError, NotImplementedError):
        return None


# Returns a number that Python objects of the same generator share.
generator_key = attrgetter("_cdata")


def is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether two Python objects are the same tensor."""
    return a.is_set_to(b) if PUBLIC_ONLY else a._cdata == b._cdata


def source_of_view(tensor: Tensor) -> Tensor | None:
    """
    Return the tensor that a tensor is a view of; None if it is none.

    The fallback returns the entries that an expanded tensor repeats, whose gradient needs a tensor
    of its size.
    """
    if not PUBLIC_ONLY:
        return tensor._base
    repeated = [s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor[tuple(0 if r else slice(None) for r in repeated)] if any(repeated) else None


# Returns the stored entries of a sparse tensor; the fallback adds repeated ones.
stored_entries = _private(Tensor, "_values", lambda t: t.coalesce().values())
# Returns the norms of a list of tensors with a dtype; and a list of tensors times a scalar.
norms = _private(
    torch, "_foreach_norm", lambda ts, dtype: [torch.linalg.vector_norm(t, dtype=dtype) for t in ts]
)
multiplied = _private(torch, "_foreach_mul", lambda tensors, scale: [t * scale for t in tensors])


def has_gradient_hooks(leaf: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient or on the accumulation of gradients."""
    return bool(leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None))


@contextmanager
def without_gradient_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Remove the hooks on the gradients of parameters inside."""
    before = [leaf._backward_hooks for leaf in leaves]
    for leaf in leaves:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in zip(leaves, before, strict=True):
            leaf._backward_hooks = hooks


# Draws Gamma(concentration, 1) with a gradient; the fallback clamps draws at the least number.
standard_gamma = _private(torch, "_standard_gamma", lambda c: Gamma(c, 1.0).rsample())


# PyTorch: operators.


def schema_of(operation: Any) -> Any:
    """Return the schema of an operator: its arguments, and which it writes to; None for others."""
    return getattr(operation, "_schema", None)


# Reads a number from a tensor.
READ_NUMBER = torch.ops.aten._local_scalar_dense.default


# PyTorch: the levels of torch.func, opened and closed by hand. Later levels are further inside.

_functorch = torch._C._functorch

# Returns the innermost level; None or 0 outside transforms.
innermost_level = _functorch.maybe_current_level
close_level = _functorch._vmap_decrement_nesting
# Leaves the innermost level, which is returned, until it is resumed.
suspend_level = _functorch.pop_dynamic_layer_stack
resume_level = _functorch.push_dynamic_layer_stack
is_mapped, is_differentiated = _functorch.is_batchedtensor, _functorch.is_gradtrackingtensor
# Returns a tensor without its innermost level.
unwrapped = _functorch.get_unwrapped
# Returns the innermost level of a mapped tensor, and the dim that is mapped.
level_of, mapped_dim_of = _functorch.maybe_get_level, _functorch.maybe_get_bdim
# Maps a dim at a level.
map_dim = _functorch._add_batch_dim


def open_level(size: int) -> int:
    """Open a level of ``vmap`` with different random numbers in each entry, and return it."""
    return _functorch._vmap_increment_nesting(size, "different")


# PyTorch: modules and data loaders.


def tables_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the dicts in which a module has its own parameters, buffers and submodules."""
    # Traced modules compute theirs.
    return {kind: getattr(module, f"_{kind}") for kind in ("parameters", "buffers", "modules")}


# Attributes that every module has, and every PyroModule. Hooks are among them.
OF_MODULES = frozenset(vars(nn.Module()))
OF_PYRO_MODULES = OF_MODULES | {"_pyro_context", "_pyro_name"}
HOOKS = frozenset(f"_{k}_hooks" for k in ("forward", "forward_pre", "backward", "backward_pre"))


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change all parameters and buffers, which remain the same objects if they can."""
    if not PUBLIC_ONLY:
        module._apply(change)
        return
    for device in {change(t).device for t in (*module.parameters(), *module.buffers())}:
        module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = change(tensor.data)
        if tensor.grad is not None:
            tensor.grad = change(tensor.grad)


def _loader_iterator() -> type:
    # A generator of its own, so that the global one does not change.
    loader: Any = DataLoader([0], generator=torch.Generator())  # type: ignore[arg-type]
    return type(iter(loader)).__mro__[1]


# The base class of the iterators of data loaders.
LoaderIterator: type = _loader_iterator() if PUBLIC_ONLY else dataloader._BaseDataLoaderIter


# PyTorch: distributions.

# Returns the mask of a MaskedDistribution: a bool or a tensor.
mask_of = attrgetter("_mask")
# The type of the inverse of a transform.
InverseTransform = type(torch.distributions.ExpTransform().inv)
# The attribute with the parameters of a Categorical distribution.
CATEGORICAL_PARAMETERS = "_param"

# The names of functions that validate values.
VALIDATION = frozenset({"_validate_sample", "check_site_shape"})


def validate(fn: Distribution, value: Tensor) -> None:
    """
    Validate a value if the distribution is validated.

    :raises ValueError: for a value that its density rejects.
    """
    if fn._validate_args:
        fn._validate_sample(value)


@contextmanager
def without_validation(fns: Iterable[Distribution]) -> Iterator[None]:
    """
    Turn off the validation of distributions inside.

    In wrappers where the setting is a property, it is that of their base distribution.
    """
    before = {
        fn: {name: v for name, v in vars(fn).items() if name == "_validate_args"}
        for fn in fns
        if not isinstance(getattr(type(fn), "_validate_args", None), property)
    }
    for fn in before:
        fn._validate_args = False
    try:
        yield
    finally:
        for fn, own in before.items():
            del fn._validate_args
            vars(fn).update(own)


# Returns the Cholesky factor of a MultivariateNormal, and factor and diagonal of a low-rank one,
# all of which the fallback expands to the batch.
_START = "" if PUBLIC_ONLY else "_unbroadcasted_"
scale_tril_of = attrgetter(f"{_START}scale_tril")
low_rank_of = attrgetter(f"{_START}cov_factor", f"{_START}cov_diag")


def divergence_rule(q: type, p: type) -> tuple[Any, list[tuple[type, type]]]:
    """
    Return the function that ``kl_divergence`` calls for two classes, or NotImplemented, and the
    pairs of classes for which it is registered.
    """
    pair = q, p
    rule = kl._KL_MEMOIZE[pair] if pair in kl._KL_MEMOIZE else kl._dispatch_kl(*pair)
    return rule, [known for known, other in kl._KL_REGISTRY.items() if other is rule]


# The attribute of LKJCholesky from which it draws the squared lengths of its rows.
ROW_LENGTHS = "_beta"


def state_of(part: Distribution | Transform) -> dict[str, Any]:
    """Return the attributes of a distribution or transform, without caches of transforms."""
    return {n: v for n, v in vars(part).items() if n != "_inv" and not n.startswith("_cached")}


# The attribute of straight-through draws with their relaxed value.
RELAXED = "_unquantize"


# PyTorch: checkpoints.


class NonReentrant:
    """
    A context in which ``checkpoint(..., use_reentrant=True)`` runs with ``use_reentrant=False``.

    The numbers are the same. But a reentrant checkpoint of tensors without gradient (latents that
    are detached from the guide) has no gradient for its parameters either. It can also not be
    differentiated twice, or with respect to chosen tensors. Other threads keep theirs.

    ``checkpoint`` calls ``CheckpointFunction.apply(function, preserve_rng_state, *args)``.
    """

    _lock = threading.Lock()
    _threads: ClassVar[list[int]] = []  # one entry for each context, in any order
    _before: Any = None

    def __enter__(self) -> None:
        self._thread, kind = threading.get_ident(), NonReentrant
        with self._lock:
            if not self._threads:
                kind._before = vars(CheckpointFunction).get("apply")
                setattr(CheckpointFunction, "apply", staticmethod(_non_reentrant))  # noqa: B010
            self._threads.append(self._thread)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._threads.remove(self._thread)
            if self._threads:
                return
            if self._before is None:
                del CheckpointFunction.apply  # restores the method of its base class
            else:
                setattr(CheckpointFunction, "apply", self._before)  # noqa: B010


def _non_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    if threading.get_ident() not in NonReentrant._threads:
        original = NonReentrant._before
        if original is not None:
            return original.__get__(None, CheckpointFunction)(function, preserve_rng_state, *args)
        return super(CheckpointFunction, CheckpointFunction).apply(
            function, preserve_rng_state, *args
        )
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


# PyTorch: Inductor, which is imported at its first use.

# With the random numbers of PyTorch's operations a compiled step draws those of the plain one.
# Measured, they cost no more than Inductor's. Before PyTorch 2.13 the pass for locality changes the
# order of the draws.
RANDOM_NUMBERS = {"fallback_random": True, "reorder_for_locality": False}


def torch_compiled(graph: GraphModule, backend: str, options: dict[str, Any]) -> Callable[..., Any]:
    """
    Return a graph compiled by :func:`torch.compile`.

    The fallback sets Inductor's options here, which is not possible together with a ``mode``.
    """
    if PUBLIC_ONLY and backend == "inductor" and "mode" not in options:
        options = {**options, "options": {**RANDOM_NUMBERS, **(options.get("options") or {})}}
    return torch.compile(graph, backend=backend, fullgraph=True, **options)


def inductor_options(options: Mapping[str, object], where_known: bool = False) -> Any:
    """
    Set options of Inductor inside; without effect on the fallback.

    :param where_known: whether to leave out those that this version of PyTorch does not have.
    """
    if PUBLIC_ONLY:
        return nullcontext()
    from torch._inductor import config

    return config.patch({n: v for n, v in options.items() if not where_known or hasattr(config, n)})


def inductor_kernels(graph: GraphModule, example: list[Tensor]) -> tuple[Any, list[Any]]:
    """Return a graph compiled by Inductor, and the compiled functions inside its wrapper."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: list[Any] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        inner.append(compile_fx_inner(*args, **kwargs))
        return inner[-1]

    run = compile_fx(graph, list(example), inner_compile=remembered)
    return run, [getattr(kernel, "current_callable", kernel) for kernel in inner]


def kernel_cache() -> Any:
    """Return the class that compiles C++ kernels with Python bindings."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache


@contextmanager
def deferred_kernels(make: Callable[[list[str], str], object]) -> Iterator[list[dict[str, Any]]]:
    """
    Compile graphs inside without their C++ kernels.

    :param make: returns a kernel, given the types of its arguments and its source.
    :returns: the globals of the generated modules, in which the kernels are, at the end.
    """
    from torch._inductor.async_compile import AsyncCompile

    load, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    scopes: list[dict[str, Any]] = []

    def load_later(self: AsyncCompile, argtypes: list[str], source_code: str) -> object:
        return make(argtypes, source_code)

    def wait_for_others(self: AsyncCompile, scope: dict[str, Any]) -> None:
        scopes.append(scope)
        wait(self, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = load_later, wait_for_others  # type: ignore[method-assign]
    try:
        yield scopes
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = load, wait  # type: ignore[method-assign]


# Pyro: handlers and sites.

# The active handlers, outermost first; Pyro changes the list in place.
HANDLERS: list[Any] = runtime._PYRO_STACK
# Expands a site to the sizes of the plates around it.
broadcast_to_plates = BroadcastMessenger._pyro_sample

# Keys of a site's infer dict: the batch dim of an enumerated site and its symbol, the symbol of
# each batch dim, a set of earlier dims; and whether a site is hidden from traces, or deterministic.
ENUMERATE_DIM, ENUMERATE_SYMBOL = "_enumerate_dim", "_enumerate_symbol"
DIM_TO_SYMBOL, DIM_TO_ID = "_dim_to_symbol", "_dim_to_id"
DO_NOT_TRACE, DETERMINISTIC = "_do_not_trace", "_deterministic"


@contextmanager
def without_plates() -> Iterator[None]:
    """Make the dims of outer plates available inside."""
    allocator = runtime._DIM_ALLOCATOR
    stack, allocator._stack = allocator._stack, []
    try:
        yield
    finally:
        allocator._stack = stack


# Pyro: packed tensors, whose dims have symbols.

# Returns the symbols of the dims of a packed tensor, one letter each.
dims_of = attrgetter("_pyro_dims")


def with_dims(value: Tensor, dims: str) -> Tensor:
    """Give symbols to the dims of a packed tensor."""
    value._pyro_dims = dims  # type: ignore[attr-defined]
    return value


# Draws the terms of a sum over a SampleRing, for all tensors that require it.
draw_from_sum = methodcaller("_pyro_backward")


def drawn_index(term: Tensor, symbol: str) -> Tensor | None:
    """Return the drawn index of a term in one of its dims, packed; None if it has no such dim."""
    samples = term._pyro_backward_result  # type: ignore[attr-defined]
    # A string or a set; its iteration order is the order of the draws.
    symbols = [] if samples is None else list(samples._pyro_sample_dims)
    if symbol not in symbols:
        return None
    return with_dims(samples[symbols.index(symbol)], dims_of(samples)[1:])


# Pyro: the parameter store, modules and optimizers.


def saved_tables() -> Callable[[], None]:
    """
    Return a function that restores which parameters Pyro's parameter store has, without values.

    It restores the dicts of the store instead of deleting names: two names may belong to one
    parameter, which the store removes with the first name.
    """
    store = pyro.get_param_store()
    if PUBLIC_ONLY:
        state = store.get_state()
        return lambda: (store.clear(), store.set_state(state))[1]
    before = {name: dict(vars(store)[name]) for name in _STORED}
    return lambda: vars(store).update({name: dict(v) for name, v in before.items()})


_STORED = "_params", "_param_to_name", "_constraints"


def stored_parameters(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the own parameters of a PyroModule, with their names in the store, once it has run."""
    if isinstance(module, PyroModule) and module._pyro_context.used:
        for parameter in module._pyro_params:
            yield parameter, module._pyro_get_fullname(parameter)


# Returns the loaded states of parameters that an optimizer of Pyro has not seen yet, by name.
waiting_states = attrgetter("_state_waiting_to_be_consumed")
