"""A loss recorded once, and replayed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable
from typing import Any, cast

from pyro.infer.elbo import ELBO
from torch import Tensor, nn

from pyro_mcvae.compiled.backends import Backend
from pyro_mcvae.compiled.case import Case
from pyro_mcvae.compiled.guards import NotRecordable
from pyro_mcvae.compiled.signature import Args, Call, Kwargs
from pyro_mcvae.ops.notices import WarnOnce
from pyro_mcvae.ops.options import FixedOptions, options_of
from pyro_mcvae.programs.types import Program

_logger = logging.getLogger(__name__)

# Kinds of calls; beyond that a program is called in ever new ways, and recordings do not pay.
_MAX_CASES = 16

# The options of Pyro's losses, which are those of the plain loss.
_PYROS = frozenset(inspect.signature(ELBO.__init__).parameters) - {"self", "num_particles"}


class CompiledELBO(FixedOptions, ELBO, nn.Module):
    """
    Any loss, recorded once and replayed: the numbers of the plain loss without its Python.

    The first steps run as ever. Then one step is recorded as a graph of tensor operations, with its
    gradient and with the updates of what adapts; further steps compute the graph.

    :param loss: an objective with Pyro's interface: one of this package's, or Pyro's own.
    :param str backend: ``"inductor"`` compiles the graph, once, for seconds to a minute;
        ``"eager"`` computes it as it is, with the very operations of the plain loss; or another
        backend of :func:`torch.compile`.
    :param options: of :func:`torch.compile`, such as ``mode="reduce-overhead"``.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     slope = pyro.param("slope", torch.tensor(0.1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(slope * x, 0.7))
        >>> x = torch.tensor([-2.0, 0.0, 2.0])
        >>> loss = CompiledELBO(TraceSIS_ELBO(num_steps=2), backend="eager")
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss)
        >>> losses = [svi.step(x) for _ in range(100)]
        >>> bool(abs(pyro.param("slope") - 0.5) < 0.2)
        True
    """

    def __init__(self, loss: ELBO, backend: str = "inductor", **options: object) -> None:
        nn.Module.__init__(self)
        if isinstance(loss, type) or not callable(getattr(loss, "loss", None)):
            raise ValueError(f"CompiledELBO takes a loss such as Trace_ELBO(), got {loss!r}")
        self.plain = loss
        ELBO.__init__(self, num_particles=getattr(loss, "num_particles", 1))
        self.backend = backend
        self._backend = Backend(backend, options)
        self._forget()

    def _is_made(self) -> bool:
        return "_backend" in vars(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made() and name in (options_of(self.plain) | _PYROS) - {"loss"}:
            setattr(self.plain, name, value)  # which may refuse it
            self._forget()
        else:
            super().__setattr__(name, value)

    @property
    def num_particles(self) -> Any:
        """The plain loss's, also where it is assigned."""
        return self.plain.num_particles

    @num_particles.setter
    def num_particles(self, num_particles: int) -> None:
        self.plain.num_particles = num_particles

    def loss(self, model: Program, guide: Program, *args: object, **kwargs: object) -> Any:
        """The plain loss's ``loss``."""
        return self._take("loss", model, guide, args, kwargs)

    def loss_and_grads(
        self, model: Program, guide: Program, *args: object, **kwargs: object
    ) -> Any:
        """The plain loss's ``loss_and_grads``."""
        return self._take("loss_and_grads", model, guide, args, kwargs)

    def differentiable_loss(
        self, model: Program, guide: Program, *args: object, **kwargs: object
    ) -> Tensor:
        """The plain loss's ``differentiable_loss``."""
        return cast(Tensor, self._take("differentiable_loss", model, guide, args, kwargs))

    def _get_trace(self, model: Program, guide: Program, args: Args, kwargs: Kwargs) -> object:
        # Pyro's hook for one particle, abstract in ELBO.
        return self.plain._get_trace(model, guide, args, kwargs)

    def _take(
        self, function: str, model: Program, guide: Program, args: Args, kwargs: Kwargs
    ) -> object:
        call = Call(function, model, guide, args, kwargs)
        try:
            key = call.key
            if key not in self._cases and len(self._cases) >= _MAX_CASES:
                raise NotRecordable(
                    f"it is called in more than {_MAX_CASES} ways (shapes, modes, arguments that "
                    f"are no tensors or floats): new ones"
                )
            if key not in self._cases:
                self._cases[key] = Case(self.plain, self._backend, self._tell)
            return self._cases[key].take(call)
        except NotRecordable as reason:
            self._tell(str(reason))
            return getattr(self.plain, function)(model, guide, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # The kernel, the schedule, last_step, bounds: what the loss has is the same here.
            if name.startswith("_") or name == "plain":
                raise
            return getattr(self.plain, name)

    def __getstate__(self) -> dict[str, object]:
        # Recordings hold the very tensors of programs; a copy makes its own.
        return {**self.__dict__, "_cases": {}, "_warn": WarnOnce(_logger)}

    def _tell(self, reason: str) -> None:
        self._warn(f"{type(self.plain).__name__} cannot be recorded and runs as ever: {reason}")

    def _forget(self) -> None:
        self._cases: dict[Hashable, Case] = {}
        self._warn = WarnOnce(_logger)
