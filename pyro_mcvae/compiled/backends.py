"""Ways to run a recorded graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_mcvae.compiled.agreement import check_kernels
from pyro_mcvae.compiled.calls import quick
from pyro_mcvae.compiled.kernels import in_one_file, instructions
from pyro_mcvae.compiled.merging import owns_outputs
from pyro_mcvae.compiled.repeats import compile_parts
from pyro_mcvae.ops.generators import Generators

__all__ = ["Backend"]

_logger = logging.getLogger(__name__)

Run = Callable[..., list[Tensor]]


class Backend:
    """
    Makes a function of a graph.

    :param str name: ``"eager"``, ``"inductor"`` or another backend of :func:`torch.compile`.
    :param options: of :func:`torch.compile`.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options

    @property
    def replays(self) -> bool:
        """Whether graphs are run as they are."""
        return self.name == "eager"

    def compile(self, graph: GraphModule, example: list[Tensor]) -> Run:
        """The graph's function; the graph itself where the compiler fails, which is logged."""
        if self.replays:
            return quick(graph)
        _logger.warning(
            "compiling a step of %d operations once, by %s; it trains on when that is done "
            "(backend='eager' needs no compiler)",
            len(graph.graph.nodes),
            self.name,
        )
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                run = self._compile(graph, example)
        except Exception as error:
            _logger.warning(
                "%s cannot compile the step, which is replayed without a compiler from now on: %s",
                self.name,
                _first_line(getattr(error, "inner_exception", error)),
            )
            return quick(graph)
        _logger.warning("compiled in %.1f s", time.perf_counter() - begin)
        return run

    def _compile(self, graph: GraphModule, example: list[Tensor]) -> Run:
        from torch._inductor import config

        run: Run
        # The random numbers of PyTorch's own operations: a compiled step draws those of the plain
        # one. Measured, they cost no more than Inductor's.
        with config.patch({"fallback_random": True}):
            if self.name == "inductor" and not self.options:
                on_cpu = any(tensor.device.type == "cpu" for tensor in example)
                with in_one_file(), instructions(on_cpu) as known:
                    run = compile_parts(graph, example, partial(_inductor, known))
            else:
                run = torch.compile(graph, backend=self.name, fullgraph=True, **self.options)
            # Its first call, which is the compilation of torch.compile.
            generators = Generators()
            found = run(*example)
            generators.put_back()
        (output,) = (n for n in graph.graph.nodes if n.op == "output")
        if len(found) != len(output.args[0]):
            raise RuntimeError(f"it returns {len(found)} of {len(output.args[0])} tensors")
        if self.name == "inductor" and not self.options:
            check_kernels(run, graph, example)
        return run


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _inductor(
    instructions: Future[dict[str, object]], part: GraphModule, example: list[Tensor]
) -> Run:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made: list[Callable[[list[Tensor]], list[Tensor]]] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        with config.patch(instructions.result()):
            made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    owns = owns_outputs(part.graph)
    run: Any = compile_fx(part, list(example), inner_compile=remembered)
    # What stands around the compiled function puts views of inputs and updates of them together.
    # Where there are none it does nothing, in a tenth of the time of a small graph.
    found: Run = _unboxed(made[0]) if owns and len(made) == 1 else run
    return found


def _unboxed(run: Callable[[list[Tensor]], list[Tensor]]) -> Run:
    return lambda *inputs: run(list(inputs))
