"""The log evidence of a data set that comes in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_mcvae.coordinates.chain_density import outside_inference_mode
from pyro_mcvae.evaluation.arguments import as_arguments, as_device, check_call, check_function
from pyro_mcvae.evaluation.evaluation_mode import evaluation_mode
from pyro_mcvae.evaluation.evidence import LogEvidence, estimate
from pyro_mcvae.evaluation.labellings import joined
from pyro_mcvae.evaluation.options import make_options, shows_options
from pyro_mcvae.evaluation.weights import Weights
from pyro_mcvae.evaluation.weights_of import make_weights
from pyro_mcvae.ops.checks import check_flag
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.progress import shown
from pyro_mcvae.programs.types import Program

__all__ = ["log_evidence_loader"]


@shows_options
def log_evidence_loader(
    model: Program,
    guide: Program,
    batches: Iterable[object],
    *,
    to_args: Callable[[Any], object] | None = None,
    device: torch.device | str | int | None = None,
    progress: bool | None = None,
    plate: str | None = None,
    keep_log_weight: bool = False,
    **options: Any,
) -> LogEvidence:
    r"""
    :func:`log_evidence` over the batches of a :class:`~torch.utils.data.DataLoader`, or any other
    iterable, side by side along the data's plate.

    The step size of chains adapts on the first batch and is the same for the others. ``total`` is
    the sum over the data that the loader gave, whatever N a plate declares.

    :param batches: tuples and lists are the programs' arguments, mappings their keyword arguments,
        anything else their only argument.
    :param to_args: maps a batch to one of these, as ``lambda batch: (batch[0],)`` to leave out the
        labels.
    :param device: where to move the tensors of each batch.
    :param model: a Pyro model.
    :param guide: its guide.
    :param str plate: along which plate the batches lie, where the programs nest several.
    :param bool keep_log_weight: keep all log weights, in memory that grows with K.
    {options}
    :returns: a :class:`LogEvidence`.
    :raises ValueError: where the latents are weighed over all data, whose evidence is not the sum
        of those of batches; for no batch at all; and as :func:`log_evidence`.

    Example::

        >>> def model(x):
        ...     with pyro.plate("data", len(x)):
        ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        >>> def guide(x):
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("z", dist.Normal(x / 2, 0.8))
        >>> loader = torch.utils.data.DataLoader(torch.randn(10), batch_size=4)
        >>> log_evidence_loader(model, guide, loader, progress=False).log_evidence.shape
        torch.Size([10])
    """
    given = make_options("log_evidence_loader", options)
    check_flag("keep_log_weight", keep_log_weight)
    check_function("to_args", to_args)
    target = as_device(device)
    _check_loader(batches)
    annealing = given.annealing()
    found = []
    with evaluation_mode(model, guide, seed=given.seed), torch.no_grad():
        for batch in shown(batches, "log evidence", progress):
            args, kwargs = as_arguments(batch if to_args is None else to_args(batch), target)
            programs = Programs(model, guide, args, kwargs)
            check_call(programs)
            with outside_inference_mode(programs) as programs:
                weights = make_weights(programs, given, annealing)
                _check_batches(weights)
                found.append(estimate(weights, given.num_particles, keep_log_weight))
    if not found:
        raise ValueError("there was no batch: the loader is empty, or was used up before")
    return _side_by_side(found, plate)


def _check_loader(batches: object) -> None:
    """
    :raises ValueError: for what is no iterable of batches, or would be taken apart in a wrong way.
    """
    if isinstance(batches, Tensor | Mapping | str):
        what = f"a tensor of shape {tuple(batches.shape)}" if isinstance(batches, Tensor) else None
        raise ValueError(
            f"batches must be a DataLoader or another iterable of batches, got "
            f"{what or type(batches).__name__}, whose entries would be taken for batches: pass "
            f"[data] for a single batch, or data.split(100)"
        )
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise ValueError(
            f"batches must be a DataLoader or another iterable of batches, got {batches!r}"
        )


def _check_batches(weights: Weights) -> None:
    if any(not block.plates for block in weights.reference.blocks):
        raise ValueError(
            "the latents of these programs are weighed over all data of a batch at once, and the "
            "evidence of several batches is not the sum of theirs: call log_evidence on the full "
            "data, or pass joint=False for the evidence given a draw of the globals for each batch"
        )


def _side_by_side(found: list[LogEvidence], plate: str | None) -> LogEvidence:
    first = found[0]
    if any(not torch.allclose(f.shared, first.shared, rtol=1e-4) for f in found):
        raise ValueError(
            "the batches have factors outside of the data's plates, and other ones in each: put "
            "these observations into the plate"
        )
    dim = _dim(first, plate)

    def cat(pick: Callable[[LogEvidence], Tensor], dim: int = dim) -> Tensor:
        return torch.cat([pick(f) for f in found], dim)

    acceptance = None
    if first.acceptance is not None:
        sizes = [f.log_evidence.numel() for f in found]
        parts = [
            n * f.acceptance for n, f in zip(sizes, found, strict=True) if f.acceptance is not None
        ]
        acceptance = torch.stack(parts).sum(0) / sum(sizes)
    kept = None
    if first.log_weight is not None:
        kept = torch.cat([f.log_weight for f in found if f.log_weight is not None], dim + 1)
    return replace(
        first,
        log_evidence=cat(lambda f: f.log_evidence),
        standard_error=cat(lambda f: f.standard_error),
        effective_sample_size=cat(lambda f: f.effective_sample_size),
        pareto_k=cat(lambda f: f.pareto_k),
        bound=cat(lambda f: f.bound),
        scale=1.0,
        acceptance=acceptance,
        log_weight=kept,
        labellings=joined([f.labellings for f in found], [f.log_evidence for f in found], dim),
    )


def _dim(first: LogEvidence, plate: str | None) -> int:
    plates = first.plates
    if plate is not None and plate not in plates:
        raise ValueError(f"plate='{plate}', but the weights' plates are {list(plates)}")
    if len(plates) < 2:
        return 0
    if plate is None:
        raise ValueError(
            f"each datum lies in the plates {list(plates)}: say along which of them the batches "
            f"lie, as in plate='{plates[-1]}'"
        )
    return plates.index(plate)
