"""Run a recorded graph, compiled or as it is."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_mcvae.compiled.agreement import check_kernels
from pyro_mcvae.compiled.graph import owns_outputs
from pyro_mcvae.compiled.kernels import in_one_file
from pyro_mcvae.ops.generators import Generators
from pyro_mcvae.programs.errors import first_line

_logger = logging.getLogger(__name__)

Run = Callable[..., list[Tensor]]

# A compiler takes about a second for a hundred operations: beyond these it takes minutes.
_MOST = 5000

_aten = torch.ops.aten
# A call through torch.ops looks its arguments up in a schema, 1 to 2 of some 5 microseconds.
_OVERLOADS = {
    "Tensor": "add sub mul div pow eq ne lt le gt ge",
    "Scalar": "eq ne lt le gt ge",
    "Tensor_Scalar": "pow",
    "dim_IntList": "sum",
    "dim": "select squeeze all any",
    "self": "where",
    "default": "abs addmm all clone exp expm1 isfinite log log1p mm neg reciprocal rsqrt sigmoid "
    "sqrt sum t tanh unsqueeze",
}
_QUICK: dict[object, Callable[..., object]] = {
    getattr(getattr(_aten, name), overload): getattr(torch, name)
    for overload, names in _OVERLOADS.items()
    for name in names.split()
    if hasattr(getattr(_aten, name), overload)
}
_QUICK |= {_aten.expand.default: Tensor.expand, _aten.view.default: Tensor.view}


def quick(graph: GraphModule) -> GraphModule:
    """Return a graph of the same operations, by the quickest calls of the same kernels."""
    found = GraphModule(torch.nn.Module(), copy.deepcopy(graph.graph))
    for node in found.graph.nodes:
        node.target = _QUICK.get(node.target, node.target)
    found.recompile()
    return found


class Backend:
    """
    Makes a function of a graph.

    :param str name: ``"eager"``, ``"inductor"`` or another backend of :func:`torch.compile`.
    :param options: of :func:`torch.compile`.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options
        self.replays = name == "eager"

    def compile(self, graph: GraphModule, example: list[Tensor]) -> Run:
        """Return the graph's function; the graph itself if the compiler fails, which is logged."""
        if self.replays:
            return quick(graph)
        count = len(graph.graph.nodes)
        begin = time.perf_counter()
        try:
            if count > _MOST:
                raise RuntimeError(f"to compile its {count} operations would take minutes")
            _logger.warning(
                "compiling a step of %d operations once, by %s; training goes on when that is done "
                "(backend='eager' needs no compiler)",
                count,
                self.name,
            )
            with torch.no_grad():
                run = self._compile(graph, example)
        except Exception as error:
            _logger.warning(
                "%s cannot compile the step, which is replayed without a compiler from now on: %s",
                self.name,
                first_line(getattr(error, "inner_exception", error)),
            )
            return quick(graph)
        _logger.warning("compiled in %.1f s", time.perf_counter() - begin)
        return run

    def _compile(self, graph: GraphModule, example: list[Tensor]) -> Run:
        from torch._inductor import config

        run: Run
        plain = self.name == "inductor" and not self.options
        # The random numbers of PyTorch's own operations: a compiled step draws those of the plain
        # one. Measured, they cost no more than Inductor's.
        with config.patch({"fallback_random": True}):
            if plain:
                with in_one_file():
                    run = _inductor(graph, example)
            else:
                run = torch.compile(graph, backend=self.name, fullgraph=True, **self.options)
            # Its first call, which is the compilation of torch.compile.
            generators = Generators()
            found = run(*example)
            generators.put_back()
        (output,) = (n for n in graph.graph.nodes if n.op == "output")
        if len(found) != len(output.args[0]):
            raise RuntimeError(f"it returns {len(found)} of {len(output.args[0])} tensors")
        if plain:
            check_kernels(run, graph, example)
        return run


def _inductor(graph: GraphModule, example: list[Tensor]) -> Run:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made: list[Callable[[list[Tensor]], list[Tensor]]] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    owns = owns_outputs(graph.graph)
    run: Any = compile_fx(graph, list(example), inner_compile=remembered)
    # What stands around the compiled function puts views of inputs and updates of them together.
    # Where there are none it does nothing, in a tenth of the time of a small graph.
    found: Run = (lambda *inputs: made[0](list(inputs))) if owns and len(made) == 1 else run
    return found
