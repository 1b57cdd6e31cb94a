"""Parameters that Pyro trains beside their module: refused, for the module would never change."""

from __future__ import annotations

from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.messengers import is_param_tracer
from pyro_mcvae.programs.modules import find_modules
from pyro_mcvae.programs.run import Run
from pyro_mcvae.programs.types import Site

# What stands between a module's name and its parameter's in the names of `pyro.module`.
_DIVIDER = "$$$"
_CONTIGUOUS = (
    "its memory is not contiguous (channels last, say), and Pyro's store keeps a contiguous copy: "
    "leave the module's parameters contiguous, and change the memory format of inputs, or of the "
    "weights within forward"
)
_KNOWN = (
    "the store had one of this name, loaded or of another module: pass update_module_params=True "
    "to pyro.module, or call pyro.clear_param_store() before. If model and guide are PyroModules "
    "with parts of one name, give these different names, such as decoder and encoder; or train by "
    "elbo(model, guide) and an optimizer of PyTorch instead of SVI, which does not run with "
    "pyro.settings.set(module_local_params=True)"
)


def collects_parameters() -> bool:
    """Whether a caller trains what Pyro's store holds, as SVI does, and not a module's own."""
    return any(map(is_param_tracer, _PYRO_STACK))


def refuse_copied_parameters(programs: Programs, run: Run) -> None:
    """
    Refuse to train copies of parameters that a module registered by ``pyro.module`` does not read.

    :raises ValueError: naming such a parameter.
    """
    copied = {
        id(given): (name, given)
        for trace in (run.guide_trace, run.model_trace)
        for name, site in trace.nodes.items()
        if site["type"] == "param" and (given := _copied(name, site)) is not None
    }
    if not copied:
        return
    for module in find_modules(*programs.pair):
        for parameter in module.parameters():
            if id(parameter) in copied:
                name, given = copied[id(parameter)]
                raise ValueError(
                    f"parameter '{name}' of Pyro's store is a copy, of shape "
                    f"{tuple(given.shape)}, that its module does not read, so that training would "
                    f"leave the module as it is: {_KNOWN if given.is_contiguous() else _CONTIGUOUS}"
                )


def _copied(name: str, site: Site) -> Tensor | None:
    """What a module offered to the store, if the store has another tensor."""
    given = [*site["args"][1:2], site["kwargs"].get("init_tensor")][0]
    if _DIVIDER not in name or not isinstance(given, Tensor):
        return None
    return None if given._cdata == site["value"]._cdata else given
