"""Checkpoints: everything that a training run has learned or drawn, in one file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from pyro_mcvae.ops import ranks
from pyro_mcvae.training.checkpoint_file import (
    FORMAT,
    VERSION,
    Content,
    read_content,
    write_content,
)
from pyro_mcvae.training.generators import rng_state, seed_another, set_rng_state
from pyro_mcvae.training.parts import ModulePart, as_parts
from pyro_mcvae.training.store import (
    ParamStorePart,
    Part,
    PyroOptimPart,
    Saved,
    store_names,
)

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
    further updates is made anew.

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
    anew, from the saved ones. AutoGuides have no parameters before their first call, so
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
