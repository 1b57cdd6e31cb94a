"""Save and load the whole state of a training run in one file."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

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


def seed_another(state: RNGState, rank: int) -> None:
    """Seed a rank without a saved state from the first rank's state."""
    set_rng_state(state)
    seed = int(torch.randint(2**31, (rank + 1,))[-1])
    pyro.set_rng_seed(seed)


# Pyro's state: the parameter store, and one optimizer for each parameter in it.

Undo: TypeAlias = Callable[[], object]
# The result of an object's ``state_dict``: tensors and plain values in any container.
Saved: TypeAlias = Any


class Part:
    """
    An object with methods for its state: optimizers, schedules, generators, statistics.

    :ivar str kind: its class, to detect a mismatch.
    :ivar bool by_rank: whether each rank of a distributed run has a separate state.
    """

    by_rank = False

    def __init__(
        self, value: object, get: Callable[[], Saved], set_: Callable[[Saved], object]
    ) -> None:
        self.kind = _kind(value)
        self.by_rank = isinstance(value, torch.Generator)
        self._get, self._set = get, set_

    def save(self) -> Saved:
        """Return the state, as tensors and plain values; tensors may be the live ones."""
        return self._get()

    def load(self, state: Saved) -> None:
        """Set the state; may fail halfway."""
        # Some objects store the argument itself, and change it later.
        self._set(copy.deepcopy(state))

    def undo(self) -> Undo:
        """Store the current state, and return a function that restores it."""
        before = copy.deepcopy(self.save())
        return lambda: self.load(before)


class PyroOptimPart(Part):
    """Pyro's optimizers: one PyTorch optimizer per parameter, by its name in the store."""

    def __init__(self, optim: PyroOptim) -> None:
        self._optim = optim
        constructor = optim.pt_optim_constructor
        self.kind = f"{type(optim).__name__}({getattr(constructor, '__name__', constructor)})"

    def save(self) -> dict[str, Saved]:
        # A loaded state whose parameter does not exist yet is included.
        state = {**waiting_states(self._optim), **self._optim.get_state()}
        return {name: value for name, value in state.items() if name is not None}

    def load(self, state: Mapping[str, Saved]) -> None:
        # A state is consumed when an optimizer is created, so current optimizers are removed.
        self._optim.optim_objs.clear()
        self._optim.grad_clip.clear()
        waiting_states(self._optim).clear()
        self._optim.set_state(copy.deepcopy(dict(state)))


def _prefixes(module: nn.Module) -> tuple[str, str]:
    """Return the prefixes of a compiled loss's state in a module, and of the plain loss's."""
    loss, start = module, ""
    if isinstance(module, ELBOModule):
        loss, start = module.elbo, "elbo."
    return (f"{start}plain." if isinstance(loss, CompiledELBO) else start), start


def _renamed(name: str, start: str, new: str) -> str:
    return new + name[len(start) :] if name.startswith(start) else name


def plain_name(module: nn.Module, name: str) -> str:
    """Return the name in a state without compilation, which is not part of the state."""
    return _renamed(f"{name}.", *_prefixes(module)).removesuffix(".")


def stored_modules(modules: Mapping[str, nn.Module]) -> dict[str, StoredModule]:
    """Return the modules that have a name in the parameter store, by their path."""
    return {
        f"{part}/{plain_name(whole, path)}": module
        for part, whole in modules.items()
        for path, module in whole.named_modules()
        if isinstance(module, StoredModule)
    }


class ParamStorePart(Part):
    """
    Pyro's parameter store.

    Many of its tensors are parameters of modules. Their identity is kept; otherwise a module
    would use values that no optimizer updates.
    """

    kind = "ParamStoreDict"

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._store = pyro.get_param_store()
        self._modules = modules

    def _owned(self) -> dict[str, Tensor]:
        return {
            f"{part}/{plain_name(module, name)}": value
            for part, module in self._modules.items()
            for name, value in module.named_parameters(remove_duplicate=False)
        }

    def save(self) -> dict[str, dict[str, Any]]:
        """
        Return the state by names in the store.

        It has the values and the constraints. For parameters of modules among the parts it has the
        part and the name (``owners``), and it has the parameters of other modules (``of_modules``).
        Other modules do not read the store: values put there would be trained, but never used.
        """
        keys: dict[int, str] = {}
        for key, value in self._owned().items():
            keys.setdefault(id(value), key)
        state = self._store.get_state()
        other_params = {n: p for n, p in state["params"].items() if id(p) not in keys}
        return {
            "owners": {n: keys[id(p)] for n, p in state["params"].items() if id(p) in keys},
            "of_modules": {n: True for n, p in other_params.items() if isinstance(p, nn.Parameter)},
            "params": {n: p.detach() for n, p in state["params"].items()},
            "constraints": state["constraints"],
        }

    def load(self, state: Mapping[str, dict[str, Any]]) -> None:
        for name in list(self._store.keys()):
            if name not in state["params"]:
                del self._store[name]
        self.update(state)

    def select(self, state: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the parameters of the modules, and those of functions."""
        owners, others = state["owners"], state["of_modules"]
        owned = self._owned()
        kept = [n for n in state["params"] if owners.get(n) in owned or n not in {*owners, *others}]
        return {**state, "params": {n: state["params"][n] for n in kept}}

    def update(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Set the parameters that a state has, and keep all others."""
        owned, params = self._owned(), dict(self._store.named_parameters())
        for name, saved in state["params"].items():
            live = params.get(name)
            owner = owned.get(state["owners"].get(name, ""))
            if live is not None and live.shape == saved.shape and live.dtype == saved.dtype:
                if owner is None:
                    with torch.no_grad():
                        live.copy_(saved)
                    continue
            elif owner is None and name in state["of_modules"]:
                raise ValueError(
                    f"parameter '{name}' of shape {tuple(saved.shape)} belongs to a module that is "
                    f"not among the parts, and the store has none of this shape: pass the module "
                    f"to save_checkpoint and load_checkpoint, too, or call the model and the guide "
                    f"once before loading"
                )
            # The module's next call adds its own tensor.
            if live is not None and live is not owner:
                del self._store[name]
            if owner is None:
                parameter = saved.clone().requires_grad_()
                constraint = {name: state["constraints"][name]}
                self._store.set_state({"params": {name: parameter}, "constraints": constraint})

    def undo(self) -> Undo:
        restore_tables = saved_tables()
        values = [(p, p.detach().clone()) for _, p in self._store.named_parameters()]

        def restore() -> None:
            restore_tables()
            with torch.no_grad():
                for parameter, value in values:
                    parameter.copy_(value)

        return restore


# The file of a checkpoint: written atomically, and verified when read.

FORMAT = "pyro_mcvae checkpoint"


VERSION = 1


# The classes of the parts (``kinds``), their states (``parts``), that of the parameter store
# (``store``), the names of modules in it (``names``), the state of each rank
# (``ranks``: its generators and parts), and additional values of the user (``extra``).
Content: TypeAlias = dict[str, Any]
_KEYS = {"format", "version", "kinds", "parts", "store", "names", "ranks", "extra"}


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
    _check_bits(path)
    try:
        with torch.serialization.safe_globals(_constraints()):
            content = torch.load(path, map_location="cpu", weights_only=weights_only)
            if isinstance(content, dict) and content.keys() == _KEYS:
                packed = io.BytesIO(content["store"]["constraints"].numpy().tobytes())
                content["store"]["constraints"] = torch.load(
                    packed, map_location="cpu", weights_only=weights_only
                )
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path} is truncated, or not a checkpoint: {error}") from error
        culprit = re.search(r"(?:GLOBAL|class|type) ([\w.]*\w)", str(error))
        raise ValueError(
            f"{path} contains more than tensors and plain values"
            f"{f' ({culprit[1]})' if culprit else ''}: pass weights_only=False if you trust it"
        ) from error
    except Exception as error:
        raise ValueError(f"{path} is truncated, or not a checkpoint: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        keys = f" of {sorted(map(str, content))[:5]}" if isinstance(content, dict) else ""
        kind = type(content).__name__
        raise ValueError(f"{path} was not written by save_checkpoint: it is a {kind}{keys}")
    if content["version"] != VERSION:
        raise ValueError(
            f"{path} has version {content['version']} of the checkpoint format, and this package "
            f"reads version {VERSION}"
        )
    if content.keys() != _KEYS:
        raise ValueError(f"{path} is damaged: it has only {sorted(map(str, content))}")
    return content


def _check_bits(path: Path) -> None:
    """
    Compare the file with its checksums, which PyTorch writes but does not verify.

    :raises ValueError: naming the record that differs.
    """
    if not zipfile.is_zipfile(path):
        return  # loading raises the error
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a flipped bit can change any field of the archive
        raise ValueError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: its record '{damaged}' has changed")


def _constraints() -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    """Return the classes of constraints, the only objects in a parameter store beside tensors."""
    modules = torch.distributions.constraints, constraints
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    return [c for c in classes if issubclass(c, torch.distributions.constraints.Constraint)]


# The parts of a training run: how each is saved, loaded, and restored after an error.

Spaces: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]


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
    # Modules first: optimizers' states refer to parameters, and the parameter store to modules.
    flat = [(name, _as_part(name, value)) for name, value in _flatten(parts)]
    return dict(sorted(flat, key=lambda item: not isinstance(item[1], ModulePart)))


def _flatten(parts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in parts.items():
        if not isinstance(value, SVI):
            yield name, value
            continue
        yield f"{name}.optim", value.optim
        loss = getattr(value.loss, "__self__", value.loss)
        # Compilation is not part of the state.
        yield f"{name}.loss", loss.plain if isinstance(loss, CompiledELBO) else loss
        seen = None
        for program in ("model", "guide"):
            module = _module_of(getattr(value, program))
            if module is not None and module is not seen:
                yield f"{name}.{program}", module
            seen = module


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
    if isinstance(value, nn.Module):
        return ModulePart(value)
    if isinstance(value, PyroOptim):
        return PyroOptimPart(value)
    for save, load in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if callable(getattr(value, save, None)) and callable(getattr(value, load, None)):
            return Part(value, getattr(value, save), getattr(value, load))
    if isinstance(value, ELBO) or name.endswith(".loss"):
        return Part(value, lambda: None, lambda _: None)  # without separate parts
    raise ValueError(
        f"part '{name}' ({type(value).__name__}) has neither state_dict and load_state_dict nor "
        f"get_state and set_state: leave it out, or pass a value by keyword, "
        f"save_checkpoint(path, parts, {name}=...)"
    )


def _kind(value: object) -> str:
    if isinstance(value, ELBOModule):
        return f"ELBOModule({_kind(value.elbo)})"
    if isinstance(value, CompiledELBO):
        return _kind(value.plain)
    return type(value).__name__


class ModulePart(Part):
    """A module, whose tensors are overwritten in place."""

    def __init__(self, module: nn.Module) -> None:
        # The wrapper depends on the number of processes, and is not part of the state.
        wrapped = isinstance(module, DistributedDataParallel)
        self.module = cast("nn.Module", module.module if wrapped else module)
        super().__init__(self.module, self.module.state_dict, self.module.load_state_dict)
        self._compiled, self._plain = _prefixes(self.module)

    def save(self) -> Saved:
        state = super().save()
        if self._compiled != self._plain:
            state = {plain_name(self.module, n): value for n, value in state.items()}
        return state

    def load(self, state: Mapping[str, Saved]) -> None:
        if self._compiled != self._plain:
            state = {_renamed(n, self._plain, self._compiled): v for n, v in (state or {}).items()}
        for path, module in self.module.named_modules():
            prefix = f"{path}." if path else ""
            buffer_names = [prefix + name for name, _ in module.named_buffers(recurse=False)]
            if hasattr(module, "forget") and any(name not in state for name in buffer_names):
                module.forget()  # saved before its first call
        try:
            self._set(state)
        except RuntimeError as error:
            raise ValueError(
                f"{error} (a module that creates its parameters in its first call, such as an "
                f"AutoGuide, must be called once before)"
            ) from error

    def undo(self) -> Undo:
        saved = [
            (live, dict(live), {n: t.detach().clone() for n, t in live.items() if t is not None})
            for module in self.module.modules()
            for kind, live in tables_of(module).items()
            if kind != "modules"
        ]

        def restore() -> None:
            with torch.no_grad():
                for live, before, values in saved:
                    live.clear()
                    live.update(before)
                    for name, value in values.items():
                        live[name].copy_(value)

        return restore


def undo_training(modules: Sequence[nn.Module]) -> Undo:
    """
    Return a function that restores parameters, buffers and Pyro's parameter store, as they are now.

    The values are put back into the same tensors, so that optimizers still update them.
    """
    inner = {id(part) for module in modules for part in list(module.modules())[1:]}
    undos = [ModulePart(m).undo() for m in modules if id(m) not in inner]
    undos.append(ParamStorePart({}).undo())

    def restore() -> None:
        for undo in undos:
            undo()

    return restore


# Checkpoints: the whole state of a training run in one file.

_STORE = "pyro's parameter store"


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
    rank_states = {name: part.save() for name, part in live.items() if part.by_rank}
    content: Content = {
        "format": FORMAT,
        "version": VERSION,
        "kinds": {name: part.kind for name, part in live.items()},
        "parts": {name: part.save() for name, part in live.items()},
        "store": ParamStorePart(modules).save(),
        "names": {path: m.param_name for path, m in stored_modules(modules).items()},
        "ranks": ranks.gather({"rng": rng_state(), "parts": rank_states}),
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
    named = as_parts(parts)
    _check_names(content, named, partial)
    modules = _modules(named)
    store = ParamStorePart(modules)
    live: dict[str, Part] = {**named, _STORE: store}
    states = {**content["parts"], _STORE: content["store"]}
    stored = stored_modules(modules)
    names = {path: module.param_name for path, module in stored.items()}
    rank_state = content["ranks"][ranks.rank()] if ranks.rank() < len(content["ranks"]) else None
    rng = rng_state()
    undo = [part.undo() for part in live.values()]
    name = ""
    try:
        _rename(stored, content["names"])
        for name, part in live.items():
            if partial and part is store:
                store.update(store.select(states[name]))
                continue
            part.load(rank_state["parts"].get(name, states[name]) if rank_state else states[name])
        name = "the random number generators"
        if partial:
            pass
        elif rank_state:
            set_rng_state(rank_state["rng"])
        else:
            seed_another(content["ranks"][0]["rng"], ranks.rank())
    except Exception as error:
        _rename(stored, names)
        for restore in undo:
            restore()
        set_rng_state(rng)
        raise ValueError(f"'{name}' of {path} does not fit: {error}") from error
    return dict(content["extra"])


def _modules(parts: Mapping[str, Part]) -> dict[str, nn.Module]:
    return {name: part.module for name, part in parts.items() if isinstance(part, ModulePart)}


def _rename(stored: Mapping[str, StoredModule], names: Mapping[str, str]) -> None:
    for path, module in stored.items():
        module.param_name = names.get(path, module.param_name)


def _check_names(content: Content, parts: Mapping[str, Part], partial: bool) -> None:
    saved, live = content["kinds"], {name: part.kind for name, part in parts.items()}
    if not (saved.keys() >= live.keys() if partial else saved.keys() == live.keys()):
        raise ValueError(
            f"the checkpoint has the parts {sorted(saved)}, but those to load are {sorted(live)}: "
            f"pass the same parts to save_checkpoint and load_checkpoint, or partial=True to load "
            f"only some of them"
        )
    for name, kind in live.items():
        if kind != saved[name]:
            raise ValueError(f"'{name}' was saved from a {saved[name]}, and is now a {kind}")
