"""The joint density of a model as a function of its discrete states, everything else fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.ops.provenance import detach_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.util import check_site_shape
from torch import Tensor

from pyro_mcvae.tracing import runs, scout
from pyro_mcvae.tracing.checks import check_sites
from pyro_mcvae.tracing.handlers import LeadingPlate, Supply
from pyro_mcvae.tracing.layout import Layout, Rows, existing_entries, site_spec
from pyro_mcvae.tracing.runs import Programs, Run
from pyro_mcvae.tracing.sample import Sample
from pyro_mcvae.tracing.sites import is_latent, is_random, plate_frames, plate_key
from pyro_mcvae.tracing.structure import FactorKey, Structure
from pyro_mcvae.tracing.tracer import Tracer

__all__ = ["JointRuns", "Layouts", "StatesError", "find_layouts"]


# The values of a site in each run, as leaves of the graph.
Leaves = dict[tuple[str, int], Tensor]


class StatesError(ValueError):
    """The program and the states kept for its data do not fit together."""


class SearchGuide(Messenger):
    """
    A guide that draws the other latents as ``guide`` does, and the discrete ones from the model.

    It stands for the truncated posterior where only its sites and plates matter.
    """

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model, self.guide = model, guide
        self._traces = Trace(), Trace()
        self._searched: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SearchGuide) and (self.model, self.guide) == (
            other.model,
            other.guide,
        )

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        guide_trace = run_guide(self.guide, args, kwargs)
        self._searched = set()
        with poutine.trace() as tracer, self, poutine.replay(trace=guide_trace):
            self.model(*args, **kwargs)
        self._traces = tracer.trace, guide_trace

    def _pyro_sample(self, msg: Any) -> None:
        if msg["done"] or msg["is_observed"] or msg["value"] is not None or not is_random(msg):
            return
        if not msg["fn"].support.is_discrete:
            raise StatesError(
                f"site '{msg['name']}' ({type(msg['fn']).__name__}) is continuous, and a truncated "
                f"posterior has states of discrete sites only: pass guide=, a guide that draws the "
                f"continuous latents (a function, or an AutoGuide of poutine.block(model, "
                f"expose=['{msg['name']}']))"
            )
        self._searched.add(msg["name"])
        with torch.no_grad():
            msg["value"] = detach_provenance(msg["fn"].sample()).detach()
        msg["done"] = True

    def get_traces(self) -> tuple[Trace, Trace]:
        """The model's and the guide's trace of the last call."""
        model_trace, guide_trace = self._traces
        return model_trace, with_searched(guide_trace, model_trace, self._searched)


def run_guide(
    guide: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """The trace of a guide; an empty one where there is none."""
    with poutine.trace() as tracer:
        if guide is not None:
            guide(*args, **kwargs)
    return tracer.trace


def with_searched(guide_trace: Trace, model_trace: Trace, names: Any) -> Trace:
    """The guide's trace with the searched sites, which have no density of their own."""
    both = guide_trace.copy()
    for name, site in model_trace.nodes.items():
        if name in names:
            if name in both:
                raise StatesError(f"site '{name}' is drawn by guide= and searched: do one of both")
            fn = site["fn"].mask(False)
            both.add_node(name, **{**site, "fn": fn, "mask": None, "scale": 1.0, "infer": {}})
    return both


@dataclass
class Layouts:
    """
    What a pair of programs was found to be.

    :ivar nesting: how many batch dims belong to plates.
    :ivar blocks: for each block of the structure its layout, None where it has no discrete site.
    :ivar masked: whether some discrete site is masked.
    :ivar bank: draws of each block's states from the model, shape ``[states, D]``.
    """

    nesting: int
    structure: Structure
    blocks: list[Layout | None]
    masked: bool
    bank: list[Tensor | None]

    @property
    def searched(self) -> list[tuple[int, Layout]]:
        return [(b, layout) for b, layout in enumerate(self.blocks) if layout is not None]


def find_layouts(
    tracer: Tracer,
    model: Callable[..., Any],
    guide: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bank: int = 256,
) -> Layouts:
    """
    Find the discrete sites of a model, their data plates and their entries.

    :raises StatesError: naming what cannot have states of its own.
    """
    search = SearchGuide(model, guide)
    programs = Programs(model, search, args, kwargs)
    with scout._aside(), torch.no_grad():
        run = tracer._single(programs, Supply({}))
        names = sorted(search._searched, key=list(run.model_trace.nodes).index)
        draws = [run.model_trace]
        batch = max([run.model_trace.nodes[n]["fn"].batch_shape.numel() for n in names] or [1])
        for _ in range(min(bank, -(-bank // batch)) - 1):
            draws.append(runs.run_pair(programs, Supply(dict(run.subsamples)))[1])
    if not names:
        raise StatesError(
            "the model has no discrete site to search: every latent is continuous or drawn by "
            "guide=. Use TraceSGVB_ELBO or TraceIWAE_ELBO with a guide of their own"
        )
    structure = tracer.structures.of(programs, run)
    sites = [run.model_trace.nodes[n] for n in names]
    for site in sites:
        _check_home(site, structure)
    frames = {plate_key(f): f for t in run.terms for f in plate_frames(t.site)}
    blocks: list[Layout | None] = []
    banks: list[Tensor | None] = []
    for b, block in enumerate(structure.blocks):
        own = [s for s in sites if structure.block_of[FactorKey("model", s["name"])] == b]
        if not own:
            blocks.append(None)
            banks.append(None)
            continue
        full = tuple(frames[k].full_size or frames[k].size for k in block.plates)
        layout = Layout(block.plates, full, [site_spec(s, run.nesting) for s in own])
        sizes = tuple(frames[k].size for k in block.plates)
        rows = Rows(sizes, torch.zeros(0))
        drawn = [
            layout.states({n: trace.nodes[n]["value"] for n in layout.sites}, rows)
            for trace in draws
        ]
        blocks.append(layout)
        banks.append(torch.cat(drawn).flatten(0, 1)[: max(bank, 1)])
    masked = any(existing_entries(s) is not None for s in sites)
    return Layouts(run.nesting, structure, blocks, masked, banks)


def _check_home(site: Any, structure: Structure) -> None:
    name = site["name"]
    b = structure.block_of[FactorKey("guide", name)]
    frames = plate_frames(site)
    if not frames or (b is not None and not structure.blocks[b].plates):
        raise StatesError(
            f"site '{name}' has no data plate that separates it from the rest: states are kept per "
            f"datum. Put the data (the site and all that depends on it) in pyro.plate('data', N, "
            f"subsample=...), or draw the site in guide="
        )
    if b is None:
        raise StatesError(
            f"site '{name}' has no states of its own, because a subsampled plate around what "
            f"depends on it ({', '.join(sorted(f.name for f in frames))} is around the site) does "
            f"not enclose it: pass that plate's full data, or draw the site in guide="
        )
    if any(p.dim is None for p in structure.blocks[b].plates):
        names = ", ".join(repr(p.name) for p in structure.blocks[b].plates if p.dim is None)
        raise StatesError(
            f"site '{name}' lies in the sequential plate {names}: states are kept for vectorised "
            f"plates. Write `with pyro.plate(...) as index:` instead of the loop"
        )


class JointRuns:
    r"""
    :math:`\log p(x, z, w) - \log q(w)` of one step at any states z of its discrete sites.

    The minibatch and the other latents w, which ``guide`` draws, are the same in every run.

    :param tracer: knows how to vectorise, and keeps what was learned of the programs.
    :param layouts: from :func:`find_layouts`.
    :ivar rows: for each block the data of the minibatch; known after the first run.
    """

    def __init__(
        self,
        tracer: Tracer,
        layouts: Layouts,
        model: Callable[..., Any],
        guide: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._tracer, self.layouts = tracer, layouts
        self._programs = Programs(model, SearchGuide(model, guide), args, kwargs)
        self.subsamples: dict[str, Tensor] = {}
        with Supply(self.subsamples):
            self.guide_trace = run_guide(guide, args, kwargs)
        self._guide_terms = [runs._guide_term(s) for s in runs._scored(self.guide_trace)]
        self.rows: list[Rows | None] = [None] * len(layouts.blocks)
        #: How many passes through the model were made, and at how many states of a datum in all.
        self.num_runs, self.num_states = 0, 0

    def run(
        self,
        load: Callable[[int], Tensor] | list[Tensor | None],
        count: int,
        leaves: Leaves | None = None,
    ) -> Sample:
        """
        Run the model.

        :param load: for each block its states ``[E, C, D]``, or a function that gives them once
            the rows of the minibatch are known.
        :param count: C.
        :param leaves: filled with the sites' values, as leaves of the graph.
        """
        self.num_runs, self.num_states = self.num_runs + 1, self.num_states + count
        together = self._tracer.vectorize
        values: dict[str, Tensor] = {}

        def draw(at: int | None) -> Callable[[Any], Tensor | None]:
            def supply(msg: Any) -> Tensor | None:
                name = msg["name"]
                if name not in values:
                    self._load(msg, load, values)
                value = values[name] if at is None else values[name][at]
                value = value.reshape(msg["fn"].batch_shape + msg["fn"].event_shape)
                value = _inside(value, msg, self._spec(name))
                if leaves is not None and value.is_floating_point():
                    value = value.detach().requires_grad_()
                    leaves[name, at or 0] = value
                return value

            return supply

        if together:
            found = [self._vectorized(draw(None), count)]
        else:
            found = [self._once(draw(i), None) for i in range(count)]
        structures = [self._tracer.structures.of(self._programs, run) for run in found]
        if structures[0].blocks != self.layouts.structure.blocks:
            raise StatesError(
                f"the program shows other plates or sites than at its first call (then "
                f"{self.layouts.structure.blocks}, now {structures[0].blocks}): make another "
                f"TruncatedPosterior for a program of another structure"
            )
        return Sample(found, [s.block_of for s in structures], structures[0])

    def log_joint(self, sample: Sample) -> list[Tensor]:
        """
        For each block the log joint of its states, shape ``[E, C]``.

        Minus infinity where a state lies outside of the support, or differs from another one in
        entries only that are masked out: of such states one counts, that with zeros there.
        """
        parts = []
        total = self.mask_impossible(sample, sample.log_weight)
        for part in sample.split(total):
            parts.append(part.flatten(1).t())
        return parts

    def mask_impossible(self, sample: Sample, log_weight: Tensor) -> Tensor:
        """``log_weight``, minus infinity at the states that do not exist."""
        bad = self._impossible(sample)
        return log_weight if bad is None else log_weight.masked_fill(bad, -torch.inf)

    def frozen(self, sample: Sample, b: int) -> Tensor:
        """The entries of a block that are masked out in each state, ``[E, C, D]``."""
        layout, rows = self.layouts.blocks[b], self.rows[b]
        assert layout is not None
        assert rows is not None
        flags: dict[str, Tensor] = {}
        for name, spec in layout.sites.items():
            parts = []
            for run in sample.runs:
                site = run.model_trace.nodes[name]
                exists = existing_entries(site)
                value = site["value"][..., 0] if spec.one_hot else site["value"]
                missing = torch.zeros_like(value, dtype=torch.bool)
                if exists is not None:
                    missing = ~(exists[..., 0] if spec.one_hot else exists)
                parts.append(missing)
            flags[name] = parts[0] if len(parts) == 1 else torch.stack(parts)
        return layout.flags(flags, rows)

    def _spec(self, name: str) -> Any:
        return next(lay.sites[name] for _, lay in self.layouts.searched if name in lay.sites)

    def _load(
        self,
        msg: Any,
        load: Callable[[int], Tensor] | list[Tensor | None],
        values: dict[str, Tensor],
    ) -> None:
        for b, layout in self.layouts.searched:
            if msg["name"] in layout.sites:
                if self.rows[b] is None:
                    self.rows[b] = self._find_rows(layout, msg)
                rows = self.rows[b]
                states = load(b) if callable(load) else load[b]
                assert rows is not None
                assert states is not None
                values.update(layout.values(states, rows))
                return
        raise StatesError(
            f"site '{msg['name']}' was not in the model at its first call: make another "
            f"TruncatedPosterior for a program of another structure"
        )

    def _find_rows(self, layout: Layout, msg: Any) -> Rows:
        frames = {plate_key(f): f for f in msg["cond_indep_stack"]}
        index, sizes = None, []
        for key, full in zip(layout.plates, layout.full_sizes, strict=True):
            if key not in frames:
                raise StatesError(
                    f"site '{msg['name']}' has left plate '{key.name}', in which its states are "
                    f"kept: make another TruncatedPosterior for a program of another structure"
                )
            frame = frames[key]
            _check_size(key.name, full, frame)
            at = self.subsamples.get(key.name)
            at = torch.arange(frame.size) if at is None else torch.as_tensor(at)
            _check_range(key.name, full, at)
            sizes.append(frame.size)
            index = at if index is None else index.unsqueeze(-1) * full + at
        assert index is not None
        return Rows(tuple(sizes), index.flatten())

    def _vectorized(self, draw: Callable[[Any], Tensor | None], count: int) -> Run:
        try:
            return self._once(draw, count)
        except StatesError:
            raise
        except Exception as error:
            with scout._aside(), torch.no_grad():
                # Raises the program's own error, if it has one without states side by side too.
                self._tracer._single(self._programs, Supply({}))
            raise RuntimeError(
                f"the model cannot be run with {count} states side by side in batch dim "
                f"{-self.layouts.nesting - 1}, though it runs with one. Pass "
                f"vectorize_particles=False, or make it broadcast over leading dims (index from "
                f"the right, as in z[..., 0]). The error was: {type(error).__name__}: {error}"
            ) from error

    def _once(self, draw: Callable[[Any], Tensor | None], count: int | None) -> Run:
        nesting, structure = self.layouts.nesting, self.layouts.structure
        plate, guide_trace = None, self.guide_trace
        if count is not None:
            plate = LeadingPlate(count, -nesting - 1, structure.global_sites("model"))
            skip = structure.global_sites("guide")
            local = [t.site for t in self._guide_terms if t.key.name not in skip]
            guide_trace = runs.with_values(
                guide_trace, {s["name"]: _expanded(s, count, nesting) for s in local}
            )
        programs, supply = self._programs, Supply(self.subsamples, draw=draw)
        model_trace = runs.run_model(programs, guide_trace, supply, plate)
        names = {n for _, layout in self.layouts.searched for n in layout.sites}
        gone = [n for n in names if n not in model_trace or not is_latent(model_trace.nodes[n])]
        if gone:
            raise StatesError(
                f"site '{gone[0]}' is not drawn by the model, or observed, though it was a latent "
                f"at the first call: make another TruncatedPosterior for the other program"
            )
        both = with_searched(guide_trace, model_trace, names)
        terms = [runs._model_term(s) for s in runs._scored(model_trace)]
        # In the order of the first call, in which the blocks are numbered.
        searched = [runs._guide_term(s) for n, s in both.nodes.items() if n in names]
        run = Run(both, model_trace, terms + self._guide_terms + searched, nesting, count)
        run.subsamples = self.subsamples
        if plate is not None:
            run.unbatched = frozenset(FactorKey("model", n) for n in plate.unbatched)
        if is_validation_enabled():
            check_sites(both, model_trace, self._tracer.strict_enumeration)
            if runs.nesting_of(model_trace) > nesting:
                raise StatesError(
                    f"the program has plates in {runs.nesting_of(model_trace)} batch dims, and had "
                    f"{nesting} at its first call: make another TruncatedPosterior for it"
                )
            for term in terms:
                term.site["log_prob"] = term.log_prob
                check_site_shape(term.site, nesting + 1 if count is not None else nesting)
        if count is not None:
            for term in terms:
                runs._check_batch_dims(term, nesting)
        return run

    def gains(self, states: list[Tensor | None], count: int) -> list[Tensor | None]:
        """
        The linearised change of the log joint under each move of some states.

        :param states: for each block, shape ``[E, C, D]``.
        :returns: for each block, shape ``[E, C, M]``; None where the model passes no gradient.
        """
        leaves: Leaves = {}
        with torch.enable_grad():
            total = self.run(states, count, leaves).log_weight
            total = total.masked_fill(~total.detach().isfinite(), 0.0).sum()
        if not leaves or not total.requires_grad:
            return [None] * len(states)
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        by_site = dict(zip(leaves, found, strict=True))
        result: list[Tensor | None] = []
        for layout, at, rows in zip(self.layouts.blocks, states, self.rows, strict=True):
            if layout is None or at is None or rows is None:
                result.append(None)
                continue
            gradients: dict[str, Tensor | None] = {}
            for name in layout.sites:
                parts = [g for (n, _), g in by_site.items() if n == name]
                whole = [g for g in parts if g is not None]
                if parts and len(whole) == len(parts):
                    gradients[name] = torch.stack(whole) if len(whole) > 1 else whole[0]
            result.append(layout.gains(at, gradients, rows))
        return result

    def _impossible(self, sample: Sample) -> Tensor | None:
        """Which states lie outside of the support or have values at entries masked out."""
        looked = [
            spec.name
            for _, layout in self.layouts.searched
            for spec in layout.sites.values()
            if not spec.bounded or self.layouts.masked
        ]
        if not looked:
            return None

        def count(term: Any, i: int) -> Any:
            if term.in_guide or term.key.name not in looked:
                return 0
            site, spec = term.site, self._spec(term.key.name)
            bad = site["infer"].get("mcvae", {}).get("outside")
            exists = existing_entries(site)
            if exists is not None:
                value = site["value"]
                here = (value.argmax(-1) if spec.one_hot else value - spec.low) != 0
                astray = here & ~(exists[..., 0] if spec.one_hot else exists)
                bad = astray if bad is None else bad | astray
            if bad is None:
                return 0
            events = bad.dim() - len(site["fn"].batch_shape)
            return bad.sum(tuple(range(-events, 0))) if events else bad.long()

        return sample.local_sum(count) > 0


def _inside(value: Tensor, msg: Any, spec: Any) -> Tensor:
    """Values that the support allows; notes at the site where others had been asked for."""
    if spec.bounded:
        return value
    support = msg["fn"].support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    fine = support.check(value)
    own = {**msg["infer"].get("mcvae", {}), "outside": ~fine}
    msg["infer"] = {**msg["infer"], "mcvae": own}
    return torch.where(fine, value, torch.full_like(value, spec.low))


def _expanded(site: Any, count: int, nesting: int) -> Tensor:
    """A local draw of the guide, the same for all states."""
    value, events = site["value"], site["fn"].event_dim
    batch = value.shape[: value.dim() - events]
    padded = value.reshape((1,) * (nesting - len(batch)) + value.shape)
    return padded.unsqueeze(0).expand(count, *padded.shape)


def _check_size(name: str, full: int, frame: Any) -> None:
    now = frame.full_size or frame.size
    if now != full:
        raise StatesError(
            f"plate '{name}' has {now} data, and states are kept for {full}. For minibatches pass "
            f"their indices, pyro.plate('{name}', {full}, subsample=index); for other data (held "
            f"out, say) make another TruncatedPosterior"
        )


def _check_range(name: str, full: int, index: Tensor) -> None:
    if is_validation_enabled() and len(index):
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= full:
            raise StatesError(
                f"plate '{name}' was given index {low if low < 0 else high}, but states are kept "
                f"for data 0 to {full - 1}: pass indices into the full data"
            )
