"""What a call of a loss is, so that a recording of one serves the other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_mcvae.compiled.refusal import NotRecordable
from pyro_mcvae.ops.trees import Tree
from pyro_mcvae.programs.messengers import is_param_tracer
from pyro_mcvae.programs.types import Program

__all__ = ["Args", "Call", "Kwargs"]

Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]

_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LEAVES = {*_TENSORS, bool, int, float, str, type(None)}


@dataclass
class Call:
    """
    One call of one of a loss's functions.

    :ivar function: ``loss``, ``differentiable_loss`` or ``loss_and_grads``.
    :ivar leaves: of the arguments; tensors and floats are a recording's inputs.
    :ivar spec: how they are put together: a tree, or, which is quicker, as many arguments of
        these names.
    """

    function: str
    model: Program
    guide: Program
    args: Args
    kwargs: Kwargs
    leaves: list[object]
    spec: Hashable
    fixed_floats: bool = False

    @classmethod
    def of(cls, function: str, model: Program, guide: Program, args: Args, kwargs: Kwargs) -> Call:
        """With its arguments' leaves."""
        leaves: list[object] = [*args, *kwargs.values()]
        spec: Hashable = (len(args), *kwargs)
        if not all(type(leaf) in _LEAVES for leaf in leaves):
            leaves, tree = tree_flatten((args, kwargs))
            spec = Tree(tree)
        return cls(function, model, guide, args, kwargs, leaves, spec)

    @property
    def key(self) -> Hashable:
        """
        Equal for calls that one recording may serve.

        :raises NotRecordable: naming an argument that no recording can take.
        """
        about = [self._about(i, leaf) for i, leaf in enumerate(self.leaves)]
        pair = _hashable(self.model), _hashable(self.guide)
        return (self.function, *pair, self.spec, *about, *_settings())

    def _about(self, index: int, leaf: object) -> Hashable:
        if isinstance(leaf, Tensor) and type(leaf) in _TENSORS and not leaf.requires_grad:
            return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if type(leaf) is float and not self.fixed_floats:
            return float
        if isinstance(leaf, (*_PLAIN, float)):
            return (type(leaf), leaf)
        if isinstance(leaf, Tensor):
            why = "requires a gradient" if leaf.requires_grad else f"is a {type(leaf).__name__}"
        elif callable(leaf):
            return _hashable(leaf)  # its own globals and attributes are watched
        else:
            why = f"is a {type(leaf).__name__}, whose changes do not show"
        raise NotRecordable(
            f"argument {index} {why}: pass tensors, numbers, strings, or containers of these"
        )

    def inputs(self) -> list[Tensor]:
        """The tensors, and the floats as tensors of their precision."""
        return [
            leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64)
            for leaf in self.leaves
            if self.is_input(leaf)
        ]

    def numbers(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """The inputs that are floats."""
        leaves = [leaf for leaf in self.leaves if self.is_input(leaf)]
        pairs = zip(inputs, leaves, strict=True)
        return [given for given, leaf in pairs if not isinstance(leaf, Tensor)]

    def is_input(self, leaf: object) -> bool:
        """Whether a leaf may have another value at each replay."""
        return isinstance(leaf, Tensor) or (type(leaf) is float and not self.fixed_floats)

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Args, Kwargs]:
        """The arguments with other tensors in the place of the inputs."""
        given = iter(inputs)
        leaves = [next(given) if self.is_input(leaf) else leaf for leaf in self.leaves]
        if isinstance(self.spec, Tree):
            args, kwargs = tree_unflatten(leaves, self.spec.spec)
            return args, kwargs
        count = len(self.args)
        return tuple(leaves[:count]), dict(zip(self.kwargs, leaves[count:], strict=True))


class _Itself(NamedTuple):
    """Stands for a program without a hash, as objects of dataclasses are."""

    program: object

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.program is self.program


def _hashable(program: object) -> Hashable:
    return program if isinstance(program, Hashable) else _Itself(program)


def _settings() -> tuple[Hashable, ...]:
    for handler in _PYRO_STACK:
        if not is_param_tracer(handler):
            raise NotRecordable(
                f"the loss is called within a handler ({type(handler).__name__}), which would not "
                f"see the sites of a recording: put it around the model or the guide"
            )
    if torch.is_inference_mode_enabled():
        raise NotRecordable("the loss is called in inference mode: use torch.no_grad()")
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    return (torch.is_grad_enabled(), torch.get_default_dtype(), *autocast)


_DEVICES = ("cpu", "cuda")
