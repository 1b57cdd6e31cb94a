"""Save and load the whole state of a training run in one file."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import re
import uuid
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, cast

import pyro
import torch
from pyro.distributions import constraints
from pyro.infer import SVI
from pyro.infer.elbo import ELBO, ELBOModule
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_mcvae.compiled.elbo import CompiledELBO
from pyro_mcvae.ops import distributed as ranks
from pyro_mcvae.ops.checks import check_flag
from pyro_mcvae.ops.compat import saved_tables, tables_of, waiting_states
from pyro_mcvae.programs.stored_module import StoredModule

# The states of all random number generators that a training step may use.

# The states of the generators by kind, as tensors and plain values.
RNGState: TypeAlias = dict[str, Any]


def rng_state() -> RNGState:
    """Return the states of PyTorch's generators on all devices, NumPy's and Python's."""
    state = pyro.util.get_rng_state()
    name, keys, *position = state["numpy"]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    # A list instead of NumPy's array, which safe loading rejects.
    return {**state, "numpy": (name, keys.tolist(), *position), "cuda": cuda}


def set_rng_state(state: RNGState) -> None:
    """Set the states returned by :func:`rng_state`."""
    pyro.util.set_rng_state({name: state[name] for name in ("torch", "random", "numpy")})
    # On a machine with fewer devices, skip the states of the others.
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, device)


# The parts of a training run.

# The result of an object's ``state_dict``: tensors and plain values in any container.
Saved: TypeAlias = Any
Undo: TypeAlias = Callable[[], object]
# The parameters or the buffers of a module.
Table: TypeAlias = dict[str, Tensor | None]


class Part(NamedTuple):
    """
    An object with methods for its state: modules, optimizers, schedules, generators, statistics.

    :ivar kind: its class, to detect a mismatch.
    :ivar save: returns its state; tensors may be the live ones.
    :ivar load: sets its state; it may fail halfway.
    :ivar module: the module, or None for other objects.
    :ivar reseed: sets the seed of a generator, which each rank of a distributed run has of its own.
    """

    kind: str
    save: Callable[[], Saved]
    load: Callable[[Saved], object]
    module: nn.Module | None = None
    reseed: Callable[[int], object] | None = None


def as_parts(parts: Mapping[str, object]) -> dict[str, Part]:
    """
    Return parts by name; an :class:`~pyro.infer.SVI` has several.

    :raises ValueError: naming a part that has no state.
    """
    if not isinstance(parts, Mapping):
        raise ValueError(
            f"parts must be a dict of objects that change in training, by name, such as "
            f"{{'svi': svi}}, after the path, got {type(parts).__name__}"
        )
    # Modules first, because optimizers' states refer to parameters.
    flat = [(name, _as_part(name, value)) for name, value in _flatten(parts)]
    return dict(sorted(flat, key=lambda item: item[1].module is None))


def _flatten(parts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in parts.items():
        if not isinstance(value, SVI):
            yield name, value
            continue
        yield f"{name}.optim", value.optim
        yield f"{name}.loss", getattr(value.loss, "__self__", value.loss)
        # By module, because the model and the guide may be methods of one.
        modules = {_module_of(getattr(value, n)): n for n in ("guide", "model")}
        yield from ((f"{name}.{n}", m) for m, n in modules.items() if m is not None)


def _module_of(program: object) -> nn.Module | None:
    """Return the module that a (possibly wrapped) program is, or is a method of."""
    while not isinstance(program, nn.Module):
        inside = ("func", "__wrapped__", "__self__")  # partial, wraps, a bound method
        inner = next((f for n in inside if (f := getattr(program, n, None)) is not None), None)
        if inner is None or isinstance(inner, ModuleType):  # a builtin's __self__
            return None
        program = inner
    return program


def _as_part(name: str, value: object) -> Part:
    value = _unwrapped(value)
    kind = type(value).__name__
    if value is pyro.get_param_store():
        raise ValueError(
            f"part '{name}' is Pyro's parameter store, which every checkpoint has: leave it out"
        )
    if isinstance(value, ELBOModule):
        kind = f"ELBOModule({type(value.elbo).__name__})"
    if isinstance(value, nn.Module):
        return Part(kind, value.state_dict, functools.partial(_load_module, value), value)
    if isinstance(value, PyroOptim):
        constructor = value.pt_optim_constructor
        kind += f"({getattr(constructor, '__name__', constructor)})"
        save, load = (functools.partial(f, value) for f in (_optim_state, _load_optim))
        return Part(kind, save, load)
    for get, set_ in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if callable(getattr(value, get, None)) and callable(getattr(value, set_, None)):
            reseed = value.manual_seed if isinstance(value, torch.Generator) else None
            return Part(kind, getattr(value, get), getattr(value, set_), reseed=reseed)
    if isinstance(value, ELBO) or name.endswith(".loss"):
        return Part(kind, lambda: None, lambda _: None)
    raise ValueError(
        f"part '{name}' ({kind}) has neither state_dict and load_state_dict nor get_state and "
        f"set_state: leave it out, or pass a value by keyword, "
        f"save_checkpoint(path, parts, {name}=...)"
    )


def _unwrapped(value: object) -> object:
    """Return a part without what its state does not have: other processes, and compilation."""
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if isinstance(value, ELBOModule) and isinstance(value.elbo, CompiledELBO):
        return ELBOModule(value.model, value.guide, cast("ELBO", value.elbo.plain))
    return value.plain if isinstance(value, CompiledELBO) else value


def _load_module(module: nn.Module, state: Mapping[str, Saved]) -> None:
    """Overwrite the tensors of a module in place."""
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        buffers = [prefix + name for name, _ in inner.named_buffers(recurse=False)]
        if hasattr(inner, "forget") and any(name not in state for name in buffers):
            inner.forget()  # saved before its first call
    module.load_state_dict(state)


def _optim_state(optim: PyroOptim) -> dict[str, Saved]:
    # A loaded state whose parameter does not exist yet is included.
    state = {**waiting_states(optim), **optim.get_state()}
    return {name: value for name, value in state.items() if name is not None}


def _load_optim(optim: PyroOptim, state: Mapping[str, Saved]) -> None:
    # A state is consumed when an optimizer is created, so current optimizers are removed.
    optim.optim_objs.clear()
    optim.grad_clip.clear()
    waiting_states(optim).clear()
    optim.set_state(dict(state))


def undo_training(modules: Iterable[nn.Module]) -> Undo:
    """
    Return a function that restores parameters, buffers and Pyro's parameter store, as they are now.

    The values are put back into the same tensors, so that optimizers still update them.
    """
    restore_tables = saved_tables()
    every = {id(inner): inner for module in modules for inner in module.modules()}.values()
    kinds = "parameters", "buffers"
    tables = [cast("Table", tables_of(m)[kind]) for m in every for kind in kinds]
    before = [(table, dict(table)) for table in tables]
    tensors = [
        *(p for _, p in pyro.get_param_store().named_parameters()),
        *(t for _, b in before for t in b.values()),
    ]
    values = [(t, t.detach().clone()) for t in tensors if t is not None]

    @torch.no_grad()
    def restore() -> None:
        restore_tables()
        for table, entries in before:
            table.clear()
            table.update(entries)
        for tensor, value in values:
            tensor.copy_(value)

    return restore


# Pyro's parameter store.


def stored_modules(modules: Mapping[str, nn.Module]) -> dict[str, StoredModule]:
    """Return the modules that have a name in the parameter store, by their path."""
    return {
        f"{part}/{path}": module
        for part, whole in modules.items()
        for path, module in whole.named_modules()
        if isinstance(module, StoredModule)
    }


def _rename(stored: Mapping[str, StoredModule], names: Mapping[str, str]) -> None:
    for path, module in stored.items():
        module.param_name = names.get(path, module.param_name)


def store_state(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """
    Return the parameters in Pyro's parameter store that no module among the parts has.

    It has their unconstrained values, their constraints, and the names of those that belong to
    other modules (``of_modules``). Modules do not read the store: new values there would be
    trained, but never used. It also has the names of the parameters of the parts (``of_parts``).
    """
    state, owned = pyro.get_param_store().get_state(), _parameter_ids(modules)
    params = {name: value for name, value in state["params"].items() if id(value) not in owned}
    return {
        "of_parts": [name for name in state["params"] if name not in params],
        "params": {name: value.detach() for name, value in params.items()},
        "constraints": {name: state["constraints"][name] for name in params},
        "of_modules": [name for name, value in params.items() if isinstance(value, nn.Parameter)],
    }


def load_store(state: Mapping[str, Any], modules: Mapping[str, nn.Module], partial: bool) -> None:
    """
    Set Pyro's parameter store, and keep the tensors that optimizers and modules have.

    :param partial: keep parameters that the state does not have, and those of other modules.
    """
    store, params = pyro.get_param_store(), dict(state["params"])
    stored, constraints_now = dict(store.named_parameters()), store.get_state()["constraints"]
    if partial:
        params = {name: value for name, value in params.items() if name not in state["of_modules"]}
    else:
        owned = _parameter_ids(modules)
        for name, value in stored.items():
            of_part = name in state["of_parts"] and id(value) in owned
            if not of_part and name not in params:
                del store[name]
    for name, saved in params.items():
        live, then = stored.get(name), state["constraints"][name]
        if live is not None and _content(then) != _content(now := constraints_now[name]):
            raise ValueError(
                f"parameter '{name}' was saved with the constraint {then}, and has {now} now: use "
                f"the constraint with which it was saved"
            )
        if live is not None and live.shape == saved.shape and live.dtype == saved.dtype:
            with torch.no_grad():
                live.copy_(saved)
            continue
        if name in state["of_modules"]:
            raise ValueError(
                f"parameter '{name}' of shape {tuple(saved.shape)} belongs to a module that is not "
                f"among the parts, and the store has none of this shape: pass the module to "
                f"save_checkpoint and load_checkpoint, too, or call the model and the guide once "
                f"before loading"
            )
        if live is not None:
            del store[name]
        parameter = saved.clone().requires_grad_()
        store.set_state({"params": {name: parameter}, "constraints": {name: then}})


def _content(value: object) -> object:
    """Return what two equal constraints have in common, on any device."""
    if isinstance(value, list | tuple):
        return [_content(v) for v in value]
    if isinstance(value, torch.distributions.constraints.Constraint):
        return type(value), {name: _content(v) for name, v in vars(value).items()}
    return value.tolist() if isinstance(value, Tensor) else value


def _parameter_ids(modules: Mapping[str, nn.Module]) -> set[int]:
    return {id(p) for module in modules.values() for p in module.parameters()}


# The file of a checkpoint: written atomically, and verified when read.

VERSION = "pyro_mcvae checkpoint 1"

# The classes of the parts (``kinds``), their states (``parts``), that of the parameter store
# (``store``), the names of modules in it (``names``), the state of each rank
# (``ranks``: its generators and parts), and additional values of the user (``extra``).
Content: TypeAlias = dict[str, Any]
_KEYS = {"version", "kinds", "parts", "store", "names", "ranks", "extra"}


def write_content(path: Path, content: Content) -> None:
    """
    Write a file, and atomically replace an older one.

    It has only tensors and plain values: the objects of constraints are bytes in a tensor.
    """
    objects = io.BytesIO()
    torch.save(content["store"]["constraints"], objects)
    packed = torch.frombuffer(bytearray(objects.getvalue()), dtype=torch.uint8)
    content = {**content, "store": {**content["store"], "constraints": packed}}
    # In the same folder, because replacing is atomic only within one file system.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_content(path: Path, weights_only: bool) -> Content:
    """
    Read the content of a file.

    :raises ValueError: for a file that is damaged, or not a checkpoint of this version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # PyTorch writes checksums, but does not verify them.
            damaged = archive.testzip()
        content = None if damaged else torch.load(path, "cpu", weights_only=weights_only)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(
            f"{path} contains more than tensors and plain values"
            f"{f' (a {found[1]})' if found else ''}: pass weights_only=False if you trust it"
        ) from error
    except Exception as error:  # a flipped bit can change any field of the archive
        raise ValueError(f"{path} is damaged, or not a checkpoint: {error}") from error
    whole = isinstance(content, dict) and content.keys() == _KEYS
    if content is None or not whole or content["version"] != VERSION:
        raise ValueError(
            f"{path} is damaged, or was not written by this version of save_checkpoint"
        )
    packed = io.BytesIO(content["store"]["constraints"].numpy().tobytes())
    with torch.serialization.safe_globals(_constraints()):
        content["store"]["constraints"] = torch.load(packed, weights_only=weights_only)
    return content


def _constraints() -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    """Return the classes of constraints, the only objects in a parameter store beside tensors."""
    modules = torch.distributions.constraints, constraints
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    return [c for c in classes if issubclass(c, torch.distributions.constraints.Constraint)]


# Checkpoints: the whole state of a training run in one file.


def save_checkpoint(
    path: str | os.PathLike[str], parts: Mapping[str, object], **extra: object
) -> None:
    """
    Save a training run, so that a resumed run gives the same numbers as an uninterrupted one.

    Besides the parts, the file has Pyro's parameter store and the states of the random number
    generators (PyTorch's on all devices, NumPy's, Python's). It replaces an older file only when it
    is complete: if a run is killed while saving, the old file remains.

    In a distributed run every rank must call this. Rank 0 writes one file, which loads on any
    number of ranks: it has the generators of all ranks.

    A :class:`CompiledELBO` runs its first steps uncompiled, also after a resume. With
    ``backend="eager"`` the numbers are the same; under other backends they differ by rounding.

    Pass other state as ``extra``, such as an annealed temperature. A draw that
    :class:`MonteCarloEM` reuses for further updates is not saved, and is drawn again.

    :param path: the path of the file.
    :param parts: a dict of all objects that change in training, by any names: any object with
        ``state_dict`` or ``get_state``. These are modules (models, guides, ``elbo(model, guide)``,
        objectives with learned or adaptive parts), also in
        :class:`~torch.nn.parallel.DistributedDataParallel`. Optimizers and learning rate schedules
        of PyTorch or Pyro, batch samplers and random generators are parts, too. An
        :class:`~pyro.infer.SVI` includes the modules that its model and guide are, or are methods
        of. Pass other modules that these use.
    :param extra: numbers, strings, tensors, and lists and dicts of them; :func:`load_checkpoint`
        returns them.
    :raises ValueError: naming a part that has no state to save.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_mcvae import TraceSIS_ELBO, load_checkpoint, save_checkpoint
        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.7))
        >>> elbo = TraceSIS_ELBO(num_steps=2)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=elbo)
        >>> x = torch.randn(5)
        >>> loss = svi.step(x)
        >>> save_checkpoint("run.pt", {"svi": svi}, step=1)
        >>> then = [svi.step(x) for _ in range(3)]
        >>> load_checkpoint("run.pt", {"svi": svi})
        {'step': 1}
        >>> again = [svi.step(x) for _ in range(3)]  # the same steps
        >>> max(abs(a - b) for a, b in zip(then, again))
        0.0
    """
    live = as_parts(parts)
    modules = _modules(live)
    by_rank = {name: part.save() for name, part in live.items() if part.reseed}
    content: Content = {
        "version": VERSION,
        "kinds": {name: part.kind for name, part in live.items()},
        "parts": {name: part.save() for name, part in live.items()},
        "store": store_state(modules),
        "names": {path: m.param_name for path, m in stored_modules(modules).items()},
        "ranks": ranks.gather({"rng": rng_state(), "parts": by_rank}),
        "extra": extra,
    }
    ranks.first_alone(lambda: write_content(Path(path), content))


def load_checkpoint(
    path: str | os.PathLike[str],
    parts: Mapping[str, object],
    *,
    partial: bool = False,
    weights_only: bool = True,
) -> dict[str, Saved]:
    """
    Restore a training run.

    On the same machine the next step equals the step after the save, bit for bit. Values are copied
    into the existing tensors, on any device, so that optimizers and compiled modules still refer to
    them. Ranks without a saved state are seeded from the saved states. AutoGuides have no
    parameters before their first call, so call them once before loading. If a part does not fit,
    nothing is changed.

    :param path: a file written by :func:`save_checkpoint`.
    :param parts: the objects to restore, by the names used for saving.
    :param bool partial: restore these parts alone, such as the model for evaluation. Parameters of
        functions (``pyro.param``) are restored, too. Parameters of other parts and the random
        number generators stay as they are. Compilation is not part of the state, so a part that was
        saved from a :class:`CompiledELBO` can be loaded into its plain loss.
    :param bool weights_only: reject files with anything but tensors, plain values and constraints,
        because unpickling other objects can run code. Use False only for files that you trust.
    :returns: the saved ``extra`` values.
    :raises ValueError: for a file that is truncated, damaged (a flipped bit) or not a checkpoint.
        The error names a part that is missing, of another class or of another shape. It also names
        a module that is not among the parts, if its parameters are in the file and it was not
        called yet.

    Example::

        >>> import torch
        >>> from pyro_mcvae import load_checkpoint, save_checkpoint
        >>> layer = torch.nn.Linear(2, 1)
        >>> save_checkpoint("run.pt", {"layer": layer}, epoch=3)
        >>> load_checkpoint("run.pt", {"layer": torch.nn.Linear(2, 1)})
        {'epoch': 3}
        >>> load_checkpoint("run.pt", {"layers": layer})
        Traceback (most recent call last):
            ...
        ValueError: ...
    """
    check_flag("partial", partial)
    content = read_content(Path(path), weights_only)
    live = as_parts(parts)
    _check_kinds(content["kinds"], {name: part.kind for name, part in live.items()}, partial)
    modules, rank, num_saved = _modules(live), ranks.rank(), len(content["ranks"])
    of_rank = content["ranks"][rank if rank < num_saved else 0]
    states = {**content["parts"], **of_rank["parts"]}
    undo, name = _undo(live, modules), ""
    try:
        _rename(stored_modules(modules), content["names"])
        for name, part in live.items():
            part.load(states[name])
        name = "pyro's parameter store"
        load_store(content["store"], modules, partial)
        name = "the random number generators"
        if not partial:
            set_rng_state(of_rank["rng"])
        if rank >= num_saved:
            _reseed(live.values(), of_rank["rng"], rank, partial)
    except Exception as error:
        undo()
        raise ValueError(
            f"'{name}' of {path} does not fit: {error}. A module that makes its parameters in its "
            f"first call, such as an AutoGuide, must be called once before"
        ) from error
    return dict(content["extra"])


def _reseed(parts: Collection[Part], state: RNGState, rank: int, partial: bool) -> None:
    """Give a rank without a saved state other random numbers than those of the first rank."""
    first = torch.Generator()
    first.set_state(state["torch"])
    shape = rank + 1, 1 + len(parts)
    seeds = iter(torch.randint(2**31, shape, generator=first)[-1].tolist())
    if not partial:
        pyro.set_rng_seed(next(seeds))
    for part in parts:
        if part.reseed is not None:
            part.reseed(next(seeds))


def _modules(parts: Mapping[str, Part]) -> dict[str, nn.Module]:
    return {name: part.module for name, part in parts.items() if part.module is not None}


def _undo(parts: Mapping[str, Part], modules: Mapping[str, nn.Module]) -> Undo:
    """Return a function that restores all that a checkpoint changes, as it is now."""
    stored, rng = stored_modules(modules), rng_state()
    restore_modules = undo_training(modules.values())
    names = {path: module.param_name for path, module in stored.items()}
    others = [part for part in parts.values() if part.module is None]
    states = [copy.deepcopy(part.save()) for part in others]

    def restore() -> None:
        _rename(stored, names)
        restore_modules()
        for part, state in zip(others, states, strict=True):
            part.load(state)
        set_rng_state(rng)

    return restore


def _check_kinds(saved: Mapping[str, str], live: Mapping[str, str], partial: bool) -> None:
    if not (saved.keys() >= live.keys() if partial else saved.keys() == live.keys()):
        raise ValueError(
            f"the checkpoint has the parts {sorted(saved)}, but those to load are {sorted(live)}: "
            f"pass the same parts to save_checkpoint and load_checkpoint, or partial=True to load "
            f"only some of them"
        )
    for name, kind in live.items():
        if kind != saved[name]:
            raise ValueError(f"'{name}' was saved from a {saved[name]}, and is now a {kind}")
