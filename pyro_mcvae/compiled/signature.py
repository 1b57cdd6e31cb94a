"""What a call of a loss is, so that a recording of one serves the other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from types import MethodType
from typing import TypeAlias

import torch
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_mcvae.compiled.guards import NotRecordable
from pyro_mcvae.ops.trees import Tree
from pyro_mcvae.programs.messengers import is_param_tracer
from pyro_mcvae.programs.types import Program

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

    def __post_init__(self) -> None:
        self.leaves: list[object] = [*self.args, *self.kwargs.values()]
        self.spec: Hashable = (len(self.args), *self.kwargs)
        if not all(type(leaf) in _LEAVES for leaf in self.leaves):
            self.leaves, tree = tree_flatten((self.args, self.kwargs))
            self.spec = Tree(tree)

    @property
    def key(self) -> Hashable:
        """
        Equal for calls that one recording may serve.

        :raises NotRecordable: naming an argument that no recording can take.
        """
        about = [_about(i, leaf) for i, leaf in enumerate(self.leaves)]
        pair = _hashable(self.model), _hashable(self.guide)
        return (self.function, *pair, self.spec, *about, *_settings())

    def inputs(self) -> list[Tensor]:
        """Return the tensors, and the floats as tensors of their precision."""
        return [
            leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64)
            for leaf in self.leaves
            if _is_input(leaf)
        ]

    def numbers(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the inputs that are floats."""
        pairs = zip(inputs, filter(_is_input, self.leaves), strict=True)
        return [given for given, leaf in pairs if not isinstance(leaf, Tensor)]

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Args, Kwargs]:
        """Return the arguments with other tensors in the place of the inputs."""
        given = iter(inputs)
        leaves = [next(given) if _is_input(leaf) else leaf for leaf in self.leaves]
        if isinstance(self.spec, Tree):
            args, kwargs = tree_unflatten(leaves, self.spec.spec)
            return args, kwargs
        count = len(self.args)
        return tuple(leaves[:count]), dict(zip(self.kwargs, leaves[count:], strict=True))


def _is_input(leaf: object) -> bool:
    """Whether a leaf may have another value at each replay."""
    return isinstance(leaf, Tensor) or type(leaf) is float


def _about(index: int, leaf: object) -> Hashable:
    if isinstance(leaf, Tensor) and type(leaf) in _TENSORS and not leaf.requires_grad:
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    if type(leaf) is float:
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


def _hashable(program: object) -> Hashable:
    # Objects of dataclasses have no hash; a method of one is hashed by who has it.
    return program if isinstance(program, Hashable) else MethodType(id, program)


def _settings() -> tuple[Hashable, ...]:
    for handler in _PYRO_STACK:
        if not is_param_tracer(handler):
            raise NotRecordable(
                f"the loss is called within a handler ({type(handler).__name__}), which would not "
                f"see the sites of a recording: put it around the model or the guide"
            )
    if torch.is_inference_mode_enabled():
        raise NotRecordable("the loss is called in inference mode: use torch.no_grad()")
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    return (torch.is_grad_enabled(), torch.get_default_dtype(), *autocast)
