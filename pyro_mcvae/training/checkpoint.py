"""Save and load the whole state of a training run in one file."""

from __future__ import annotations

import copy
import os
import pickle
import re
import uuid
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
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
from pyro_mcvae.ops.distributed import num_ranks, rank
from pyro_mcvae.truncated.closed_form import ClosedForm

# The state of all random number generators that a training step may draw from.

# The states of the generators by kind, of tensors and plain values.
RNGState: TypeAlias = dict[str, Any]


def rng_state() -> RNGState:
    """PyTorch's on all devices, NumPy's and Python's, of tensors and plain values."""
    state = pyro.util.get_rng_state()
    name, keys, *rest = state["numpy"]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    # A list, where NumPy has an array, which safe loading refuses.
    return {**state, "numpy": (name, keys.tolist(), *rest), "cuda": cuda}


def set_rng_state(state: RNGState) -> None:
    """Set what :func:`rng_state` returned."""
    pyro.util.set_rng_state({name: state[name] for name in ("torch", "random", "numpy")})
    # On a machine with fewer devices the others' states have nowhere to go.
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, device)


def seed_another(state: RNGState, rank: int) -> None:
    """Seed a rank that had no state of its own, from the first one's."""
    set_rng_state(state)
    seed = int(torch.randint(2**31, (rank + 1,))[-1])
    pyro.set_rng_seed(seed)


# What Pyro keeps by itself: the parameter store, and one optimizer for each parameter in it.

Undo: TypeAlias = Callable[[], object]
# What an object's own ``state_dict`` returns: tensors and plain values, however it has them.
Saved: TypeAlias = Any


class Part(ABC):
    """
    One thing with a state.

    :cvar str kind: its class, so that no other is taken for it.
    :cvar bool by_rank: whether each rank of a distributed run has a state of its own.
    """

    kind: str
    by_rank = False

    @abstractmethod
    def save(self) -> Saved:
        """The state, of tensors and plain values; tensors may be the live ones."""

    @abstractmethod
    def load(self, state: Saved) -> None:
        """Set the state; may fail halfway."""

    def undo(self) -> Undo:
        """Remember the present state, and return what sets it again."""
        before = copy.deepcopy(self.save())
        return lambda: self.load(before)


class PyroOptimPart(Part):
    """Pyro's optimizers: one of PyTorch's for each parameter, by its name in the store."""

    def __init__(self, optim: PyroOptim) -> None:
        self._optim = optim
        made = optim.pt_optim_constructor
        self.kind = f"{type(optim).__name__}({getattr(made, '__name__', made)})"

    def save(self) -> dict[str, Saved]:
        # What was loaded and has not met its parameter yet is part of the state.
        state = {**self._optim._state_waiting_to_be_consumed, **self._optim.get_state()}
        return {name: value for name, value in state.items() if name is not None}

    def load(self, state: Mapping[str, Saved]) -> None:
        # A state is consumed where an optimizer is made, so the present ones have to go.
        self._optim.optim_objs.clear()
        self._optim.grad_clip.clear()
        self._optim._state_waiting_to_be_consumed = copy.deepcopy(dict(state))


def store_names(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The names in the parameter store of modules that number themselves, by where they are."""
    return {
        f"{part}/{path}": module.param_name
        for part, whole in modules.items()
        for path, module in whole.named_modules()
        if isinstance(getattr(module, "param_name", None), str)
    }


class ParamStorePart(Part):
    """
    Pyro's parameter store.

    Many of its tensors are parameters of modules. These keep the modules' tensors, or a module
    would go on with values that no optimizer sees.
    """

    kind = "ParamStoreDict"

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._store = pyro.get_param_store()
        self._modules = modules

    def _owned(self) -> dict[str, Tensor]:
        return {
            f"{part}/{name}": value
            for part, module in self._modules.items()
            for name, value in module.named_parameters(remove_duplicate=False)
        }

    def save(self) -> dict[str, dict[str, Any]]:
        """
        Return everything by its name in the store: values, constraints, the part and the name there
        of parameters that modules among the parts hold (``owners``), and which ones other modules
        hold (``of_modules``). These do not look for their values in the store: what is put there
        would be trained by the optimizer and used by nobody.
        """
        keys: dict[int, str] = {}
        for key, value in self._owned().items():
            keys.setdefault(id(value), key)
        state = self._store.get_state()
        others = {n: p for n, p in state["params"].items() if id(p) not in keys}
        return {
            "owners": {n: keys[id(p)] for n, p in state["params"].items() if id(p) in keys},
            "of_modules": {n: True for n, p in others.items() if isinstance(p, nn.Parameter)},
            "params": {n: p.detach() for n, p in state["params"].items()},
            "constraints": state["constraints"],
        }

    def load(self, state: Mapping[str, dict[str, Any]]) -> None:
        owned, params = self._owned(), self._store._params
        for name in list(params):
            if name not in state["params"]:
                del self._store[name]
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
                    f"not among the parts, and the store does not know one of this shape: pass the "
                    f"module to save_checkpoint and load_checkpoint too, or call the model and the "
                    f"guide once before loading"
                )
            # A module's next call puts its own tensor there.
            if live is not None and live is not owner:
                del self._store[name]
            if owner is None:
                made = saved.clone().requires_grad_()
                constraint = {name: state["constraints"][name]}
                self._store.set_state({"params": {name: made}, "constraints": constraint})

    def undo(self) -> Undo:
        store = self._store
        names = "_params", "_param_to_name", "_constraints"
        before = {name: dict(getattr(store, name)) for name in names}
        values = {name: p.detach().clone() for name, p in store._params.items()}

        def restore() -> None:
            for name, value in before.items():
                setattr(store, name, value)
            with torch.no_grad():
                for name, value in values.items():
                    before["_params"][name].copy_(value)

        return restore


# The file of a checkpoint: written in one piece, and read only if it is what was written.

FORMAT = "pyro_mcvae checkpoint"


VERSION = 1


# By name: which class each part is of (``kinds``), their states (``parts``), the parameter store's
# (``store``), the names in it of modules that number themselves (``names``), what each rank has for
# itself (``ranks``: its generators and parts), and what the user adds (``extra``).
Content: TypeAlias = dict[str, Any]
_KEYS = {"format", "version", "kinds", "parts", "store", "names", "ranks", "extra"}


def write_content(path: Path, content: Content) -> None:
    """Write a file, in place of an older one at once."""
    # Beside it, since only within one file system a file takes another's place at once.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    # True checksums, whatever PyTorch has been told.
    get, set_ = (getattr(torch.serialization, f"{n}_crc32_options", None) for n in ("get", "set"))
    computes = get() if get else True
    try:
        if set_:
            set_(True)
        with partial.open("xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        if set_:
            set_(computes)


def read_content(path: Path, weights_only: bool) -> Content:
    """
    What a file holds.

    :raises ValueError: for a file that is damaged, or no checkpoint of this version.
    """
    _check_bits(path)
    try:
        with torch.serialization.safe_globals(_constraints()):
            content = torch.load(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path} is truncated, or no checkpoint: {error}") from error
        culprit = re.search(r"(?:GLOBAL|class|type) ([\w.]*\w)", str(error))
        raise ValueError(
            f"{path} holds more than tensors and plain values"
            f"{f' ({culprit[1]})' if culprit else ''}: pass weights_only=False if you trust it"
        ) from error
    except Exception as error:
        raise ValueError(f"{path} is truncated, or no checkpoint: {error}") from error
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
    Compare the file with its checksums, which PyTorch writes and does not read.

    :raises ValueError: naming the record that differs.
    """
    if not zipfile.is_zipfile(path):
        return  # loading says why not
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a flipped bit can ask for anything: a password, a compression
        raise ValueError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: its record '{damaged}' is not what was written")


def _constraints() -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    """Constraints are the only objects in a parameter store that are not tensors."""
    modules = torch.distributions.constraints, constraints
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    return [c for c in classes if issubclass(c, torch.distributions.constraints.Constraint)]


# The parts of a training run: what each saves, checks, loads, and takes back.

Spaces: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]


def as_parts(parts: Mapping[str, object]) -> dict[str, Part]:
    """
    Parts by name; an :class:`~pyro.infer.SVI` is several.

    :raises ValueError: naming a part that has no state.
    """
    if not isinstance(parts, Mapping):
        raise ValueError(
            f"parts must be a dict of what changes in training, by name, such as {{'svi': svi}}, "
            f"after the path, got {type(parts).__name__}"
        )
    # Modules first: optimizers' states refer to parameters, and the parameter store to modules.
    found = [(name, _as_part(name, value)) for name, value in _flatten(parts)]
    return dict(sorted(found, key=lambda item: not isinstance(item[1], ModulePart)))


def _flatten(parts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in parts.items():
        if not isinstance(value, SVI):
            yield name, value
            continue
        yield f"{name}.optim", value.optim
        loss = getattr(value.loss, "__self__", value.loss)
        # How a loss is computed is not what it has learned.
        yield f"{name}.loss", loss.plain if isinstance(loss, CompiledELBO) else loss
        seen = None
        for program in ("model", "guide"):
            found = _module_of(getattr(value, program))
            if found is not None and found is not seen:
                yield f"{name}.{program}", found
            seen = found


def _module_of(program: object) -> nn.Module | None:
    """The module that a program is, or is a method of, also where it is wrapped."""
    while not isinstance(program, nn.Module):
        inside = ("func", "__wrapped__", "__self__")  # partial, wraps, a bound method
        found = next((f for n in inside if (f := getattr(program, n, None)) is not None), None)
        if found is None or isinstance(found, ModuleType):  # a builtin's __self__
            return None
        program = found
    return program


def _as_part(name: str, value: object) -> Part:
    if isinstance(value, nn.Module):
        return ModulePart(value)
    if isinstance(value, PyroOptim):
        return PyroOptimPart(value)
    if isinstance(value, ClosedForm):
        return _ClosedFormPart(value)
    for save, load in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if callable(getattr(value, save, None)) and callable(getattr(value, load, None)):
            return _ObjectPart(value, getattr(value, save), getattr(value, load))
    if isinstance(value, ELBO) or name.endswith(".loss"):
        return _ObjectPart(value, lambda: None, lambda _: None)  # without parts of its own
    raise ValueError(
        f"part '{name}' ({type(value).__name__}) has neither state_dict and load_state_dict nor "
        f"get_state and set_state: leave it out, or pass a value by keyword, "
        f"save_checkpoint(path, parts, {name}=...)"
    )


def _kind(value: object) -> str:
    if isinstance(value, ELBOModule):
        return f"ELBOModule({_kind(value.elbo)})"
    return type(value).__name__


class ModulePart(Part):
    """A module, whose tensors are overwritten in place."""

    def __init__(self, module: nn.Module) -> None:
        # The wrapper belongs to the number of processes, not to what was learned.
        wrapped = isinstance(module, DistributedDataParallel)
        self.module = cast("nn.Module", module.module if wrapped else module)
        self.kind = _kind(self.module)

    def save(self) -> dict[str, Saved]:
        return self.module.state_dict()

    def load(self, state: Mapping[str, Saved]) -> None:
        for path, module in self.module.named_modules():
            prefix = f"{path}." if path else ""
            own = [prefix + name for name, b in module._buffers.items() if b is not None]
            if hasattr(module, "forget") and any(name not in state for name in own):
                module.forget()  # saved before its first call
        try:
            self.module.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"{error} (a module that makes its parameters at its first call, such as an "
                f"AutoGuide, must have been called once before)"
            ) from error

    def undo(self) -> Undo:
        kept = [
            (held, dict(held), {n: t.detach().clone() for n, t in held.items() if t is not None})
            for module in self.module.modules()
            for held in cast("Spaces", (module._parameters, module._buffers))
        ]

        def restore() -> None:
            with torch.no_grad():
                for held, before, values in kept:
                    held.clear()
                    held.update(before)
                    for name, value in values.items():
                        held[name].copy_(value)

        return restore


class _ObjectPart(Part):
    """Anything with a pair of methods: optimizers, schedules, generators, statistics."""

    def __init__(
        self, value: object, get: Callable[[], Saved], set_: Callable[[Saved], object]
    ) -> None:
        self.kind = _kind(value)
        self.by_rank = isinstance(value, torch.Generator)
        self._get, self._set = get, set_

    def save(self) -> Saved:
        return self._get()

    def load(self, state: Saved) -> None:
        # Some keep what they are given, and change it later.
        self._set(copy.deepcopy(state))

    def undo(self) -> Undo:
        before = copy.deepcopy(self._get())
        return lambda: self._set(before)


class _ClosedFormPart(_ObjectPart):
    """Statistics of an epoch, which ranks have gathered apart."""

    def __init__(self, value: ClosedForm) -> None:
        super().__init__(value, value.state_dict, value.load_state_dict)
        self._value = value

    def save(self) -> Saved:
        state = super().save()
        if num_ranks() > 1:
            state["total"], state["count"] = self._value.over_ranks()
        return state

    def load(self, state: Saved) -> None:
        # They are summed over ranks again when they are used.
        super().load(state if rank() == 0 else {**state, "total": 0.0, "count": 0.0})


# Checkpoints: everything that a training run has learned or drawn, in one file.

_STORE = "pyro's parameter store"


def save_checkpoint(
    path: str | os.PathLike[str], parts: Mapping[str, object], **extra: object
) -> None:
    """
    Save a training run, so that it can be resumed as if it had never stopped.

    Besides the parts, the file holds Pyro's parameter store and the state of the random number
    generators (PyTorch's on all devices, NumPy's, Python's). It replaces an older one of that name
    only when it is complete: a run that is killed while it saves leaves the old one.

    In a distributed run every rank must call this, and rank 0 writes one file, which loads on any
    number of ranks: the generators of all ranks are in it, and closed forms' statistics are summed.

    What no part holds is not in the file: pass it as ``extra``, such as the temperature of
    :class:`GumbelSoftmax` if you anneal it. A draw of :class:`MonteCarloEM` that still serves
    further updates is made again.

    :param path: where to.
    :param parts: by names of one's own, everything that changes in training: modules (models,
        guides, ``elbo(model, guide)``, objectives with learned or adapting parts, also wrapped in
        :class:`~torch.nn.parallel.DistributedDataParallel`), optimizers and learning rate schedules
        of PyTorch or Pyro, a whole :class:`~pyro.infer.SVI` (with the modules that its model and
        guide are, or are methods of; pass others that these use), closed-form updates, batch
        samplers, random generators: whatever has ``state_dict`` or ``get_state``.
    :param extra: numbers, strings, tensors, and lists and dicts of them; :func:`load_checkpoint`
        returns them.
    :raises ValueError: naming a part that has no state to save.

    Example::

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
        >>> then == [svi.step(x) for _ in range(3)]
        True
    """
    found = as_parts(parts)
    modules = _modules(found)
    own = {name: part.save() for name, part in found.items() if part.by_rank}
    content: Content = {
        "format": FORMAT,
        "version": VERSION,
        "kinds": {name: part.kind for name, part in found.items()},
        "parts": {name: part.save() for name, part in found.items()},
        "store": ParamStorePart(modules).save(),
        "names": store_names(modules),
        "ranks": ranks.gather({"rng": rng_state(), "parts": own}),
        "extra": extra,
    }
    ranks.first_alone(lambda: write_content(Path(path), content))


def load_checkpoint(
    path: str | os.PathLike[str], parts: Mapping[str, object], *, weights_only: bool = True
) -> dict[str, Saved]:
    """
    Restore a training run. Its next step is the one that would have followed the save, to the bit
    on the same machine.

    Values are copied into the live tensors, so that optimizers and compiled modules keep hold of
    them, on whatever device they are. On other ranks than were saved the generators are seeded
    again, from the saved ones. AutoGuides have no parameters before their first call, so
    call them once before; what that call draws does not matter, as the generators are set here.
    If anything does not fit, nothing is changed.

    :param path: what :func:`save_checkpoint` wrote.
    :param parts: the live parts, under the names that they were saved under.
    :param bool weights_only: refuse files that hold anything but tensors, plain values and
        constraints, since unpickling others can run code. False for files that you trust.
    :returns: the ``extra`` values that were saved.
    :raises ValueError: for a file that is truncated, damaged (a flipped bit) or no checkpoint, and
        naming a part that is missing, of another class or of another shape; also a module that is
        not among the parts, if its parameters are in the file and it has not been called yet.

    Example::

        >>> layer = torch.nn.Linear(2, 1)
        >>> save_checkpoint("run.pt", {"layer": layer}, epoch=3)
        >>> load_checkpoint("run.pt", {"layer": torch.nn.Linear(2, 1)})
        {'epoch': 3}
        >>> load_checkpoint("run.pt", {"layers": layer})
        Traceback (most recent call last):
            ...
        ValueError: ...
    """
    content = read_content(Path(path), weights_only)
    found = as_parts(parts)
    _check_names(content, found)
    modules = _modules(found)
    live: dict[str, Part] = {**found, _STORE: ParamStorePart(modules)}
    states = _renamed(content, found, store_names(modules))
    own = content["ranks"][ranks.rank()] if ranks.rank() < len(content["ranks"]) else None
    rng = rng_state()
    undo = [part.undo() for part in live.values()]
    name = ""
    try:
        for name, part in live.items():
            part.load(own["parts"].get(name, states[name]) if own else states[name])
        name = "the random number generators"
        if own:
            set_rng_state(own["rng"])
        else:
            seed_another(content["ranks"][0]["rng"], ranks.rank())
    except Exception as error:
        for restore in undo:
            restore()
        set_rng_state(rng)
        raise ValueError(f"'{name}' of {path} does not fit: {error}") from error
    return dict(content["extra"])


def _modules(parts: Mapping[str, Part]) -> dict[str, nn.Module]:
    return {name: part.module for name, part in parts.items() if isinstance(part, ModulePart)}


def _renamed(
    content: Content, parts: Mapping[str, Part], names: Mapping[str, str]
) -> dict[str, Saved]:
    """The saved states by part, with the names in the store that live modules go by."""
    new = {old: names.get(where, old) for where, old in content["names"].items()}

    def rename(state: Mapping[str, Saved]) -> dict[str, Saved]:
        split = {key: key.split("$$$", 1) for key in state}
        return {
            "$$$".join([new.get(first, first), *rest]): state[key]
            for key, (first, *rest) in split.items()
        }

    states = dict(content["parts"])
    for name, part in parts.items():
        if isinstance(part, PyroOptimPart):
            states[name] = rename(states[name])
    states[_STORE] = {key: rename(value) for key, value in content["store"].items()}
    return states


def _check_names(content: Content, parts: Mapping[str, Part]) -> None:
    saved, live = content["kinds"], {name: part.kind for name, part in parts.items()}
    if saved.keys() != live.keys():
        raise ValueError(
            f"the checkpoint has the parts {sorted(saved)}, and those to load are {sorted(live)}: "
            f"pass the same parts to save_checkpoint and load_checkpoint"
        )
    for name, kind in saved.items():
        if kind != live[name]:
            raise ValueError(f"'{name}' was saved from a {kind}, and is now a {live[name]}")
