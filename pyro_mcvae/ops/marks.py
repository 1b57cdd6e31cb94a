"""
Marks: which entries of a value depend on which entries of marked tensors, in one run.

Every storage that depends on a marked tensor has a shadow: a set of bits for each of its entries.
Operators run on the true values, and pass the bits on below autograd, so views, writes in place,
custom functions and inner gradients need no rules of their own. An operator is handled by the first
rule that fits:

1. pointwise operators: the union of the inputs' bits, for all values;
2. operators that move entries: the same operator on the bits;
3. reductions, products, scans, normalizations: the union along their dims;
4. a few operators on floating-point numbers: NaN in the entries of one bit at a time, on copies;
5. all others: every entry of the result has all bits of the inputs.

What Python reads (``item``, ``if``, a shape that depends on values) decides about everything that
follows. Its bits are in :attr:`Marks.control` from then on. The marks may have too many bits, but
never too few, unless a program uses the memory of a tensor behind PyTorch's back.

A value that is piecewise constant in a draw, such as its rounded value, also has its steps: the
operators whose jumps a gradient omits (:attr:`Marks.steps`). A value whose derivative jumps has its
corners (:attr:`Marks.corners`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyro_mcvae.ops import compat
from pyro_mcvae.ops.compat import TorchDispatchMode, schema_of, tree_map
from pyro_mcvae.ops.smoothing import SMOOTHED
from pyro_mcvae.ops.tensors import tensors_in
from pyro_mcvae.ops.vmap_dims import beneath, is_transformed

# Bits in each 64-bit word of a mask; the sign bit is not used.
WORD = 62

# Masks of bits: int64, shape [words, *shape of the tensor].


def union(mask: Tensor, dims: Iterable[int]) -> Tensor:
    """Return the union of bits along dims, which keep size 1."""
    for dim in dims:
        if mask.shape[dim] == 0:
            shape = list(mask.shape)
            shape[dim] = 1
            mask = mask.new_zeros(shape)
        while (size := mask.shape[dim]) > 1:
            half = (size + 1) // 2
            mask = mask.narrow(dim, 0, half) | mask.narrow(dim, size - half, half)
    return mask


def _inner(dim: int, ndim: int) -> int:
    """Return the dim of a mask for a dim of its tensor, which has ``ndim`` dims."""
    return dim % max(ndim, 1) + 1


def bits_of(mask: Tensor | None) -> int:
    """Return the union of all bits of a mask, as an int."""
    if mask is None or mask.numel() == 0:
        return 0
    words = union(mask.flatten(1), [1]).flatten().tolist() if mask.dim() > 1 else mask.tolist()
    return sum(word << (WORD * i) for i, word in enumerate(words))


def mask_of_bits(bits: int, words: int, like: Tensor) -> Tensor:
    """Return an int as a mask of one entry: shape ``[words, 1, ...]``, for ``like``'s dims."""
    parts = [(bits >> (WORD * i)) & ((1 << WORD) - 1) for i in range(words)]
    mask = torch.tensor(parts, dtype=torch.int64, device=like.device)
    return mask.reshape(words, *[1] * like.dim())


def _broadcast(masks: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """Return the union of masks that broadcast to a shape; None without masks."""
    total: Tensor | None = None
    for mask in masks:
        missing = len(shape) - (mask.dim() - 1)
        wide = mask.reshape(mask.shape[0], *[1] * missing, *mask.shape[1:])
        total = wide if total is None else total | wide
    return None if total is None else total.expand(total.shape[0], *shape)


class _Shadow:
    """The bits of the entries of one storage, ``[words, entries]`` of ``itemsize`` bytes each."""

    def __init__(self, tensor: Tensor, words: int) -> None:
        self.itemsize = tensor.element_size()
        count = -(-tensor.untyped_storage().nbytes() // self.itemsize)
        self.steps: frozenset[Step] = frozenset()
        self.corners: frozenset[Step] = frozenset()
        self.mask = torch.zeros(words, count, dtype=torch.int64, device=tensor.device)

    def view(self, tensor: Tensor) -> Tensor:
        """Return the mask of a tensor of this storage; writes to it are kept."""
        size = tensor.element_size()
        if size < self.itemsize:  # a view with another dtype: finer entries
            self.mask = self.mask.repeat_interleave(self.itemsize // size, 1)
            self.itemsize = size
        elif size > self.itemsize:
            parts = size // self.itemsize
            self.mask = union(self.mask.unflatten(1, (-1, parts)), [2]).squeeze(2)
            self.itemsize = size
        strides, offset = tensor.stride(), tensor.storage_offset()
        needed = 1 + offset + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
        if needed > self.mask.shape[1]:  # the storage was resized
            missing = int(needed) - self.mask.shape[1]
            self.mask = torch.nn.functional.pad(self.mask, (0, missing))
        shape = (self.mask.shape[0], *tensor.shape)
        return self.mask.as_strided(shape, (self.mask.stride(0), *strides), offset)


class Step(NamedTuple):
    """
    An operator whose result is piecewise constant in draws.

    :ivar operator: its name.
    :ivar line: the line of the program.
    :ivar bits: those of the draws.
    """

    operator: str
    line: str
    bits: int


class Draw(NamedTuple):
    """
    Random numbers drawn outside sample sites.

    :ivar value: the numbers; for dropout, which units it keeps.
    :ivar bit: the bit of the numbers.
    :ivar line: the line of the program.
    """

    value: Tensor
    bit: int
    line: str


class Read(NamedTuple):
    """
    A value that Python reads.

    :ivar bits: the bits that it depends on.
    :ivar line: the line of the program.
    :ivar is_branch: whether it is True or False.
    """

    bits: int
    line: str
    is_branch: bool


class Marks(TorchDispatchMode):
    """
    Passes marks through every operator that runs inside.

    :param line: returns the line of the program that is running, or None if the program only
        checks a value there, so that a read decides nothing.
    :param replayed: draws outside sample sites of a single run, whose numbers the last particle of
        this run uses.
    :param other_branch: called with the bits of a condition that Python reads: whether it reads the
        opposite.
    :ivar words: the number of 64-bit words of a mask.
    :ivar control: the bits of all values that Python has read.
    :ivar reads: these values.
    :ivar draws: random numbers drawn while :attr:`at_site` is False.
    :ivar batches: the lines that normalize marked values by the statistics of their batch.
    :ivar batch_bit: the bit of the normalized values.
    :ivar channels: for each batch normalization, the shape of its input from the channels' dim on,
        and the bit of its result.
    :ivar unknown: names of operators without a rule that received marks.
    :ivar smooth: the bits of draws that a gradient is taken through.
    :ivar generators: generators of PyTorch that programs use from one run to the next.
    :ivar masked: the bits of entries that a mask removes from a density. A result has them only if
        it changes with these entries; see :meth:`._Call.without_ignored`.
    :ivar masking: the bits of draws that decide these masks.
    """

    def __init__(
        self,
        line: Callable[[], str | None],
        replayed: Sequence[Draw] = (),
        other_branch: Callable[[int], bool] = lambda bits: False,
    ) -> None:
        super().__init__()
        self.line, self._replayed, self._other_branch = line, replayed, other_branch
        self._shadows: dict[int, tuple[Any, _Shadow]] = {}
        # Masks are not differentiated by torch.func.grad around the programs.
        self._apart = compat.without_transforms if is_transformed() else nullcontext
        self.words, self._next = 1, 0
        self._outside = _Outside(self)
        self.control = 0
        self.reads: list[Read] = []
        self.draws: list[Draw] = []
        self.unknown: set[str] = set()
        self.batches: list[str] = []
        self.batch_bit = self.new_bits()
        self.channels: list[tuple[tuple[int, ...], int]] = []
        self.smooth = 0
        self.masked = self.masking = 0
        self.generators: Sequence[torch.Generator] = ()
        self.at_site = False
        self.smoothed = False
        self.checking = False

    def __enter__(self) -> Marks:
        self._outside.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._outside.__exit__(*error)

    def paused(self) -> ExitStack:
        """Return a context in which operators of the package itself run without marks."""
        stack = ExitStack()
        stack.enter_context(self._apart())
        stack.enter_context(compat.without_torch_function())
        stack.enter_context(compat.without_dispatch_modes())
        return stack

    # Bits, and the marks of tensors.

    def new_bits(self, count: int = 1) -> int:
        """Reserve bits, and return the first one as an int; the others follow it."""
        first, self._next = 1 << self._next, self._next + count
        words = -(-self._next // WORD)
        if words > self.words:
            for _, shadow in self._shadows.values():
                grown = shadow.mask.new_zeros(words - self.words, shadow.mask.shape[1])
                shadow.mask = torch.cat([shadow.mask, grown])
            self.words = words
        return first

    def mask(self, tensor: Tensor) -> Tensor | None:
        """Return the mask of a tensor, ``[words, *shape]``; None if it has no marks."""
        tensor = beneath(tensor)
        key = compat.storage_key(tensor)
        found = None if key is None else self._shadows.get(key)
        with self._apart():
            return None if found is None else found[1].view(tensor)

    def bits(self, *values: object) -> int:
        """Return the union of the bits of all tensors in a structure, as an int."""
        total = 0
        for tensor in tensors_in(values):
            total |= bits_of(self.mask(tensor))
        return total

    def steps(self, value: object) -> frozenset[Step]:
        """Return the steps through which a tensor depends on draws, if on nothing else of them."""
        found = self._shadow(value)
        return frozenset() if found is None else found.steps

    def corners(self, value: object) -> frozenset[Step]:
        """
        Return the operators at which the derivative of a tensor jumps with draws.

        Those that chains smooth are left out; see :mod:`pyro_mcvae.ops.smoothing`.
        """
        found = self._shadow(value)
        return frozenset() if found is None else found.corners

    def _shadow(self, value: object) -> _Shadow | None:
        key = compat.storage_key(beneath(value)) if isinstance(value, Tensor) else None
        found = None if key is None else self._shadows.get(key)
        return None if found is None else found[1]

    def write(self, tensor: Tensor, mask: Tensor | int) -> None:
        """Set the mask of a tensor: of its shape, or one that broadcasts to it."""
        with self._apart():
            self._write(beneath(tensor), mask)

    def _write(self, tensor: Tensor, mask: Tensor | int) -> None:
        key = compat.storage_key(tensor)
        if isinstance(mask, int):
            mask = mask_of_bits(mask, self.words, tensor)
        if key is None:  # sparse tensors have no entries to mark
            self.control |= bits_of(mask)
            return
        if key not in self._shadows:
            storage = tensor.untyped_storage()
            dead = weakref.ref(storage, lambda _: self._shadows.pop(key, None))
            self._shadows[key] = dead, _Shadow(tensor, self.words)
        view = self._shadows[key][1].view(tensor)
        repeated = [d + 1 for d, s in enumerate(tensor.stride()) if s == 0 and tensor.shape[d] > 1]
        if repeated:  # an expanded tensor has one entry for many
            mask = union(mask.expand_as(view), repeated)
            for dim in repeated:
                view = view.narrow(dim, 0, 1)
        view.copy_(mask)

    def clear(self, value: object) -> None:
        """Remove the marks of new tensors."""
        for tensor in tensors_in(value):
            if self.mask(tensor) is not None:
                self.write(tensor, 0)

    def free(self) -> None:
        """Free the marks of all tensors; what was recorded about them stays."""
        self._shadows.clear()

    def read(self, bits: int, is_branch: bool = False) -> bool:
        """Record that Python reads a value with these bits, and return whether it decides."""
        line = None if self.checking or not bits else self.line()
        if line is None:
            return False
        self.control |= bits
        self.reads.append(Read(bits, line, is_branch))
        return True

    # Operators.

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # without autograd, which would take them apart
            super().__enter__()
            try:
                parts = func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
            if parts is not NotImplemented:
                return parts
        if _is_view(func):
            return func(*args, **kwargs)  # views share the shadow of their storage
        tensors = tensors_in((args, kwargs))
        masks = {}
        for tensor in tensors:
            if (mask := self.mask(tensor)) is not None:
                masks[id(tensor)] = mask.clone() if schema_of(func).is_mutable else mask
        is_draw = _is_seeded(func) and not self.at_site
        if is_draw:
            # A generator that a program makes gives the same numbers to each run.
            given = [g for g in (*args, kwargs.get("generator")) if isinstance(g, torch.Generator)]
            is_draw = _identities(given) <= _identities(self.generators)
        if not (masks or is_draw):
            return func(*args, **kwargs)
        call = _Call(self, func, args, kwargs, tensors, masks)
        if masks and call.is_read:
            bits = self.bits(*call.read_values)
            if self.read(bits, call.is_branch) and call.is_branch and self._other_branch(bits):
                return not func(*args, **kwargs)
        inputs, (steps, corners) = call.kept_inputs(), self._kept_steps(tensors, masks)
        result = func(*args, **kwargs)
        results = tensors_in(result)
        draw = self._record(call, result) if is_draw else 0
        if masks or draw:
            call.inputs = inputs
            result_masks = call.without_ignored(results, call.masks_of(results))
            for tensor, mask in zip(results, result_masks, strict=True):
                if mask is None and not draw:
                    if call.is_written(tensor):
                        self.write(tensor, 0)
                    continue
                if call.is_view(tensor):
                    continue
                if mask is None or draw:
                    extra = mask_of_bits(draw, self.words, tensor)
                    mask = extra if mask is None else mask | extra
                self.write(tensor, mask)
                if (shadow := self._shadow(tensor)) is not None:
                    new = self._new_steps(call, tensor)
                    is_corner = call.name in _CORNERS and tensor.is_floating_point()
                    shadow.steps = steps if is_corner else steps | new
                    shadow.corners = corners | new if is_corner else corners
        return result

    def _kept_steps(
        self, tensors: Sequence[Tensor], masks: Mapping[int, Tensor]
    ) -> tuple[frozenset[Step], frozenset[Step]]:
        """
        Return the steps of inputs that no input depends on otherwise, and the corners.

        The product of z and its sign, for example, has a gradient, which jumps.
        """
        none = frozenset[Step]()
        shadows = [s for t in tensors if (s := self._shadow(t)) is not None]
        all_steps = none.union(*(s.steps for s in shadows))
        corners = none.union(*(s.corners for s in shadows))
        if not all_steps:
            return none, corners
        smooth = 0
        for tensor in tensors:
            stepwise = 0
            for step in self.steps(tensor):
                stepwise |= step.bits
            smooth |= bits_of(masks.get(id(tensor))) & ~stepwise
        kept = frozenset(step for step in all_steps if not step.bits & smooth)
        return kept, corners | (all_steps - kept)

    def _new_steps(self, call: _Call, result: Tensor) -> frozenset[Step]:
        """Return the step or corner of an operator of the program."""
        floats = result.is_floating_point() or result.is_complex()
        is_corner = call.name in _CORNERS and not self.smoothed
        if (
            not self.smooth
            or self.at_site
            or (floats and call.name not in _STEPS and not is_corner)
        ):
            return frozenset()
        bits = 0
        for tensor in call.tensors:
            if tensor.requires_grad:
                bits |= bits_of(call.masks.get(id(tensor))) & self.smooth
        line = self.line() if bits else None
        return frozenset() if line is None else frozenset([Step(call.name, line, bits)])

    def _record(self, call: _Call, result: Any) -> int:
        """Record a draw outside sample sites, repeat a recorded one, and return its bit."""
        name = call.name
        drawn: Tensor = result[1] if name == "native_dropout" else tensors_in(result)[0]
        if len(self.draws) < len(self._replayed):
            before = self._replayed[len(self.draws)].value
            if before.numel() and drawn.numel() % before.numel() == 0:
                drawn.reshape(-1, *before.shape)[-1].copy_(before)  # new tensors are contiguous
                if name == "native_dropout" and call.args[1] < 1:
                    result[0].copy_(call.args[0] * drawn / (1 - call.args[1]))
        bit = self.new_bits()
        line = self.line() or ""
        self.draws.append(Draw(drawn.detach().clone(), bit, line))
        return bit


@cache
def _is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operator only returns a view, or changes the shape of a tensor in place."""
    aliases = [r.alias_info for r in schema_of(func).returns if r.alias_info is not None]
    return torch.Tag.inplace_view in func.tags or (
        bool(aliases) and not any(a.is_write for a in aliases)
    )


def _identities(generators: Iterable[Any]) -> set[int]:
    # An operator gets other Python objects for the same generators.
    return set(map(compat.generator_key, generators))


# Functions by which values leave PyTorch's operators, and functions that only check values.

_COPIES = frozenset({torch.tensor, Tensor.new_tensor})
_INDEXED = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_LEAVES = frozenset(
    {
        torch.Tensor.__array__,
        torch.Tensor.__contains__,
        torch.Tensor.__format__,
        torch.Tensor.data_ptr,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__dlpack__,
    }
)
_DISPLAY: Any = Tensor.__repr__
_CHECKED = frozenset({_DISPLAY, functional.one_hot})
_FINITE = frozenset(getattr(m, n) for m in (torch, Tensor) for n in ("isfinite", "isinf", "isnan"))


def _positions(index: object) -> list[Tensor]:
    """Return the integers without dims in an index."""
    parts = index if isinstance(index, tuple) else (index,)
    return [p for p in parts if isinstance(p, Tensor) and not p.dim() and p.dtype != torch.bool]


class _Outside(TorchFunctionMode):
    """Intercepts functions that do not reach the dispatcher, or that only check values."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs, marks = kwargs or {}, self._marks
        if func in _LEAVES:
            marks.read(marks.bits(args, kwargs))
        elif func in _COPIES:
            # The first argument of new_tensor only gives a dtype and a device.
            marks.read(marks.bits(args[func is Tensor.new_tensor :], kwargs))
        elif func in _CHECKED and (func is _DISPLAY or len(args) + len(kwargs) > 1):
            with self._set("checking"):
                return func(*args, **kwargs)
        elif func in _INDEXED and (bits := marks.bits(_positions(args[1]))):
            return self._index(func, args, bits)
        elif func in _FINITE:
            # A batch is finite if all entries are, and a program stops otherwise.
            marks.clear(result := func(*args, **kwargs))
            return result
        elif not marks.smoothed and _is_smoothed(func) and torch.is_grad_enabled():
            with self._set("smoothed"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _index(self, func: Callable[..., Any], args: tuple[Any, ...], bits: int) -> object:
        """Index by integers without dims, which PyTorch reads as numbers."""
        with self._set("checking"):
            result = func(*args)
            if func is not Tensor.__setitem__:
                # Any entry of the data may be chosen; marks of other indices stay in their places.
                chosen = result.clone()
                extra = mask_of_bits(bits | self._marks.bits(args[0]), self._marks.words, chosen)
                mask = self._marks.mask(chosen)
                self._marks.write(chosen, extra if mask is None else mask | extra)
                return chosen
        self._marks.write(args[0], bits | self._marks.bits(args))
        return None

    @contextmanager
    def _set(self, flag: str) -> Iterator[None]:
        before = getattr(self._marks, flag)
        setattr(self._marks, flag, True)
        try:
            yield
        finally:
            setattr(self._marks, flag, before)


@cache
def _is_smoothed(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "").strip("_") in SMOOTHED


# The rules of the operators.


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators whose floating-point results are piecewise constant.
_STEPS = _names("round floor ceil trunc fix sign sgn heaviside floor_divide")
# Operators whose derivative jumps.
_CORNERS = _names(
    "abs relu clamp clamp_min clamp_max maximum minimum fmax fmin max min amax amin sort topk "
    "median nanmedian mode kthvalue cummax cummin leaky_relu hardtanh hardsigmoid hardswish "
    "hardshrink softshrink threshold prelu _prelu_kernel rrelu_with_noise elu "
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d "
    "fractional_max_pool2d"
)
# Results depend on the shape, dtype or device of their inputs only.
_OPTIONS = _names(
    "zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros "
    "new_ones "
    "new_full new_empty new_empty_strided zero uniform exponential cauchy log_normal geometric "
    "random sym_size sym_stride sym_numel sym_storage_offset"
)
_POINTWISE = _names(
    "where _to_copy floor_divide clone hardswish log_sigmoid_forward prelu _prelu_kernel "
    "rrelu_with_noise polar complex bernoulli normal poisson binomial "
    "_standard_gamma _standard_gamma_grad real imag view_as_real view_as_complex elu_backward "
    "hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward "
    "log_sigmoid_backward mish_backward softplus_backward rrelu_with_noise_backward "
    "_prelu_kernel_backward huber_loss_backward mse_loss_backward smooth_l1_loss_backward "
    "binary_cross_entropy_backward lift_fresh detach alias _conj _neg_view lift"
)
# The inputs whose entries move, by position; others give positions.
_MOVED = {
    **dict.fromkeys(("cat", "stack", "hstack", "vstack", "_cat"), (0,)),
    **dict.fromkeys(("slice_scatter", "select_scatter", "diagonal_scatter"), (0, 1)),
    **dict.fromkeys(("as_strided_scatter",), (0, 1)),
    "index_copy": (0, 3),
    **dict.fromkeys(
        _names(
            "as_strided diag_embed diagonal_copy expand_copy flip permute_copy pixel_shuffle "
            "pixel_unshuffle repeat roll rot90 split_copy split_with_sizes_copy t_copy "
            "transpose_copy tril triu unfold_copy unsafe_chunk unsafe_split "
            "unsafe_split_with_sizes view_copy _unsafe_view _reshape_alias channel_shuffle "
            "native_channel_shuffle slice_backward select_backward diagonal_backward "
            "unfold_backward constant_pad_nd index_fill trace_copy squeeze_copy unsqueeze_copy "
            "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
            "replication_pad2d replication_pad3d alias_copy lift_fresh_copy as_strided_copy "
            "narrow_copy unbind_copy block_diag"
        ),
        (0,),
    ),
    **dict.fromkeys(("gather", "index_select", "index", "_unsafe_index", "take"), (0,)),
}
_REDUCTIONS = _names(
    "all amax amin aminmax any argmax argmin count_nonzero kthvalue linalg_vector_norm logsumexp "
    "max mean median min mode nanmedian nansum norm nuclear_norm prod std std_mean sum var "
    "var_mean trace hash_tensor dist"
)
_ALONG_DIMS = _names(
    "softmax _softmax log_softmax _log_softmax _safe_softmax sort topk argsort msort renorm cross "
    "linalg_cross _softmax_backward_data _log_softmax_backward_data _fft_r2c _fft_c2r _fft_c2c "
    "_sample_dirichlet multinomial glu _weight_norm_interface"
)
_SCANS = _names("cumsum cumprod logcumsumexp cummax cummin")
_PRODUCTS = _names("mm bmm addmm baddbmm mv addmv dot vdot linear _cdist_forward addbmm")
_PER_ITEM = ("conv", "max_pool", "avg_pool", "upsample", "grid_sampler", "native_group_norm")
_PER_ITEM_NAMES = _names(
    "im2col col2im affine_grid_generator max_unpool2d max_unpool3d nll_loss2d_forward "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell"
)
_BATCH_NORMS = _names(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm batch_norm_with_update "
    "_batch_norm_with_update miopen_batch_norm _native_batch_norm_legit_functional"
)
_FIXED_STATISTICS = _names("_native_batch_norm_legit_no_training _batch_norm_no_update")
_BATCH_NORMS |= _FIXED_STATISTICS
_MATRICES = ("linalg_", "_linalg_", "cholesky", "lu_", "logdet", "slogdet", "_cholesky")
_MATRIX_NAMES = _names(
    "inverse matrix_exp det qr geqrf ormqr lstsq svd _lu_with_info pinverse "
    "_det_lu_based_helper matrix_power"
)
_BY_NAN = _names(
    "_cudnn_rnn miopen_rnn _trilinear scatter_add index_add _pdist_forward "
    "scatter_reduce index_reduce masked_scatter embedding_dense_backward _segment_reduce "
    "segment_reduce convolution_backward addr"
)
_LOSSES = _names(
    "binary_cross_entropy binary_cross_entropy_with_logits mse_loss huber_loss smooth_l1_loss "
    "soft_margin_loss"
)
_ATTENTION = "_scaled_dot_product"
_READS = _names("_local_scalar_dense equal is_nonzero item")


def _moved(value: Tensor, sign: int) -> Tensor:
    """Return other values, far from the former ones where the dtype has such."""
    if value.dtype == torch.bool:
        return ~value
    return value + sign * (2.0**20 if value.is_floating_point() or value.is_complex() else 1)


@cache
def _is_pointwise(packet: Any) -> bool:
    """Return whether an operator is pointwise; not all overloads and forms in place are tagged."""
    base = getattr(torch.ops.aten, packet.__name__.rstrip("_"), packet)
    overloads = (getattr(p, name) for p in (packet, base) for name in p.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


class _Call:
    """
    One operator with its arguments, and the marks of its results.

    :param masks: the masks of the marked inputs, by the tensors' ids.
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __init__(
        self,
        marks: Marks,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        masks: dict[int, Tensor],
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self._marks, self.tensors, self.masks = marks, tensors, masks
        name = func.overloadpacket.__name__
        mutable = schema_of(func).is_mutable
        self.name = name[:-1] if mutable and name.endswith("_") else name
        self._words = next((m.shape[0] for m in masks.values()), 1)

    # Which arguments there are.

    @property
    def named(self) -> dict[str, Any]:
        """Return the arguments by name."""
        names = [a.name for a in schema_of(self.func).arguments]
        return dict(zip(names, self.args, strict=False)) | self.kwargs

    def is_marked(self, value: object) -> bool:
        return isinstance(value, Tensor) and bool(
            id(value) in self.masks and self.masks[id(value)].any()
        )

    def _mask(self, value: Tensor) -> Tensor:
        """Return the mask of an input, with zeros for an unmarked one."""
        found = self.masks.get(id(value))
        return self._zeros(value) if found is None else found

    def _zeros(self, value: Tensor) -> Tensor:
        shape = (self._words, *value.shape)
        return torch.zeros(shape, dtype=torch.int64, device=value.device)

    def _one(self, value: object) -> Tensor:
        """Return the union of all bits of a value: shape ``[words]``."""
        total = None
        for tensor in tensors_in(value):
            mask = self.masks.get(id(tensor))
            if mask is not None:
                one = union(mask.flatten(1), [1]).squeeze(1) if mask.dim() > 1 else mask
                total = one if total is None else total | one.to(total.device)
        return torch.zeros(self._words, dtype=torch.int64) if total is None else total

    def _everything(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        one = self._one(self.tensors)
        return [one.to(r.device).reshape(-1, *[1] * r.dim()).expand(-1, *r.shape) for r in results]

    @property
    def _bool_index(self) -> list[Tensor]:
        indices = self.named.get("indices") or []
        if not isinstance(indices, list | tuple):
            indices = [indices]
        return [
            i for i in indices if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)
        ]

    @property
    def is_read(self) -> bool:
        """Return whether Python reads values, or a shape depends on values."""
        tags = self.func.tags
        if self.name in ("index", "_unsafe_index"):
            return bool(self._bool_index)
        return self.name in _READS or bool(
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(tags)
        )

    @property
    def is_branch(self) -> bool:
        """Return whether Python reads True or False."""
        return self.func is compat.READ_NUMBER and self.args[0].dtype is torch.bool

    @property
    def read_values(self) -> list[Tensor]:
        return self._bool_index if self.name in ("index", "_unsafe_index") else self.tensors

    def is_written(self, result: Tensor) -> bool:
        return schema_of(self.func).is_mutable and any(result is t for t in self.tensors)

    def is_view(self, result: Tensor) -> bool:
        """Return whether a result shares the storage of an input that was not written."""
        if self.is_written(result):
            return False
        key = compat.storage_key(result)
        return any(compat.storage_key(t) == key for t in self.tensors)

    def kept_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return copies of the arguments before they are overwritten, if a rule needs them."""
        if self.name not in _BY_NAN and not self._may_ignore:
            return None
        if not schema_of(self.func).is_mutable:
            return self.args, self.kwargs
        copies = {id(t): t.clone() for t in self.tensors}
        for tensor in self.tensors:
            if id(tensor) in self.masks:
                self.masks[id(copies[id(tensor)])] = self.masks[id(tensor)]
        self._copies = copies
        return tree_map(lambda v: copies.get(id(v), v), (self.args, self.kwargs))

    # The marks of the results.

    def masks_of(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the mask of each result, or None for no marks."""
        if not self.masks or not results:
            return [None for _ in results]
        rule = self._rule()
        if rule is None:
            self._marks.unknown.add(self.name)
            return self._everything(results)
        try:
            masks = rule(results)
            shapes = [None if m is None else m.shape[1:] for m in masks]
            if all(s in (None, r.shape) for s, r in zip(shapes, results, strict=True)):
                return masks
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, KeyError):
            pass
        # Arguments that the rule does not cover.
        self._marks.unknown.add(self.name)
        return self._everything(results)

    @property
    def _may_ignore(self) -> bool:
        """
        Return whether the operator may leave masked entries out, for all values of other draws.

        Then no parameter, and no draw that does not decide the masks as well, decides what it
        selects, or by which zeros it multiplies.
        """
        marks = self._marks
        if not marks.masked or not marks.masked & bits_of(self._one(self.tensors)):
            return False
        free = [t for t in self.tensors if bits_of(self.masks.get(id(t))) & ~marks.masking]
        if self.name in ("where", "masked_fill"):
            chooses = self.args[self.name == "masked_fill"]
            return all(t is not chooses for t in free)
        if self.name.startswith(_ATTENTION):
            return all(any(t is a for a in self.args[:3]) for t in free)
        if self.name == "mul" or self.name in _PRODUCTS:
            others = (t for t in self.tensors if t is not free[0])
            return len(free) == 1 and not any(t.requires_grad for t in others)
        return False

    def without_ignored(
        self, results: Sequence[Tensor], masks: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """
        Remove the bits of masked entries from results that do not change with these entries.

        Programs select by a mask, or multiply by its zeros. The operator runs again with other
        values in the masked entries, on copies.
        """
        if self.inputs is None or not self._may_ignore:
            return masks
        field = mask_of_bits(self._marks.masked, self._words, torch.empty(()))
        changed = [torch.zeros_like(r, dtype=torch.bool) for r in results]

        def field_for(mask: Tensor) -> Tensor:
            return field.to(mask.device).reshape(-1, *[1] * (mask.dim() - 1))

        for sign in (1, -1):

            def moved(mask: Tensor, copy: Tensor, sign: int = sign) -> Tensor:
                return torch.where((mask & field_for(mask)).any(0), _moved(copy, sign), copy)

            for at, old, new in zip(changed, results, self._rerun(moved), strict=True):
                at |= (old != new) & ~(old.isnan() & new.isnan())
        return [
            None if mask is None else torch.where(at, mask, mask & ~field_for(mask))
            for mask, at in zip(masks, changed, strict=True)
        ]

    def _rerun(self, change: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """
        Run the operator on copies of its inputs.

        :param change: called with the mask and the copy of each marked input, which it replaces.
        """

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            mask, copy = self.masks.get(id(value)), value.detach().clone()
            return copy if mask is None else change(mask, copy)

        assert self.inputs is not None
        args, kwargs = tree_map(changed, self.inputs)
        with torch.no_grad():
            return tensors_in(self.func(*args, **kwargs))

    def _rule(self) -> Callable[[Sequence[Tensor]], list[Tensor | None]] | None:
        name, func = self.name, self.func
        special = getattr(self, f"_rule_{name}", None)
        if special is not None:
            return special
        for names, rule in (
            (_OPTIONS, self._nothing),
            (_POINTWISE, self._pointwise),
            (_MOVED, self._moved),
            (_REDUCTIONS, self._reduced),
            (_ALONG_DIMS, self._along),
            (_SCANS, self._scanned),
            (_PRODUCTS, self._product),
            (_BATCH_NORMS, self._batch_norm),
            (_BY_NAN, self._by_nan),
            (_LOSSES, self._loss),
        ):
            if name in names:
                return rule
        if _is_pointwise(func.overloadpacket):
            return self._pointwise
        if name.startswith(_ATTENTION) and not name.endswith("backward"):
            return self._attention
        if name in _MATRIX_NAMES or name.startswith(_MATRICES):
            return self._matrices
        backward = name.endswith("_backward")
        if name in _PER_ITEM_NAMES or (any(n in name for n in _PER_ITEM) and not backward):
            return self._per_item
        return None

    def _nothing(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        return [None for _ in results]

    def _pointwise(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        masks = [self.masks[id(t)] for t in self.tensors if id(t) in self.masks]
        return [_broadcast(masks, r.shape) for r in results]

    def _loss(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the marks of a loss: of each entry, if it has no reduction."""
        whole = self.named.get("reduction", 0)
        return self._everything(results) if whole else self._pointwise(results)

    def _rule_copy(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the marks of a tensor that is overwritten by another."""
        source = [self._mask(self.args[1])] if isinstance(self.args[1], Tensor) else []
        return [_broadcast(source, r.shape) for r in results]

    _rule_fill = _rule_copy

    def _rule_native_dropout(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        return [self._mask(self.args[0]), None]

    def _moved(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the moved marks; positions that depend on marks add theirs."""
        moving = [self.args[i] for i in _MOVED[self.name] if i < len(self.args)]
        data = set(map(id, tensors_in(moving)))
        steering = [t for t in self.tensors if id(t) not in data and self.is_marked(t)]
        if steering:
            return self._steered()
        names = [a.name for a in schema_of(self.func).arguments]
        args = [
            0 if names[i] == "value" and not isinstance(a, Tensor) else a
            for i, a in enumerate(self.args)
        ]
        kwargs = {k: v for k, v in self.kwargs.items() if k not in ("dtype", "value")}
        return self._of_words(args, kwargs, data)

    def _of_words(self, args: Any, kwargs: Any, data: set[int]) -> list[Tensor | None]:
        """Run the operator on each word of the marks of some arguments."""
        words = []
        for w in range(self._words):

            def of(value: Any, w: int = w) -> Any:
                if not isinstance(value, Tensor) or id(value) not in data:
                    return value
                word = self._mask(value)[w]
                return word.clone() if schema_of(self.func).is_mutable else word

            words.append(tensors_in(self.func(*tree_map(of, args), **tree_map(of, kwargs))))
        return [torch.stack(parts) for parts in zip(*words, strict=True)]

    def _steered(self) -> list[Tensor | None]:
        """Return the marks of entries at positions that depend on marks."""
        if self.name == "index_select":
            _, dim, index = self.args[:3]
            indices: list[Any] = [None] * self.args[0].dim()
            indices[dim % max(self.args[0].dim(), 1)] = index
            return [self._indexed(self.args[0], indices)]
        if self.name == "gather":
            return [self._gathered(self.args[0], self.args[1], self.args[2])]
        if self.name in ("index", "_unsafe_index") and not self._bool_index:
            return [self._indexed(self.args[0], list(self.args[1]))]
        raise ValueError

    def _indexed(self, data: Tensor, indices: list[Any]) -> Tensor:
        mask, positions = self._mask(data), []
        for dim, index in enumerate(indices):
            if self.is_marked(index):
                mask = union(mask, [dim + 1])
                index = torch.zeros_like(index)
            positions.append(index)
        aten = torch.ops.aten.index.Tensor
        moved = torch.stack([aten(mask[w], positions) for w in range(self._words)])
        # The result has the broadcast shape of the indices, which replaces the indexed dims.
        marked = [i for i in indices if self.is_marked(i)]
        shape = torch.broadcast_shapes(*(i.shape for i in indices if i is not None))
        wide = torch.broadcast_tensors(torch.empty(shape, device=data.device), *marked)[0].shape
        union_of = _broadcast([self.masks[id(i)] for i in marked], wide)
        assert union_of is not None
        at = [d for d, i in enumerate(indices) if i is not None]
        adjacent = at == list(range(at[0], at[-1] + 1))
        before = at[0] if adjacent else 0
        after = moved.dim() - 1 - before - len(wide)
        union_of = union_of.reshape(self._words, *[1] * before, *wide, *[1] * after)
        return moved | union_of

    def _gathered(self, data: Tensor, dim: int, index: Tensor) -> Tensor:
        mask = union(self._mask(data), [_inner(dim, data.dim())])
        zeros = torch.zeros_like(index)
        moved = torch.stack([mask[w].gather(dim, zeros) for w in range(self._words)])
        return moved | self._mask(index)

    def _rule_embedding(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        weight, index = self.args[:2]
        if self.is_marked(index):
            return [self._indexed(weight, [index])]
        return self._of_words((weight, index), {}, {id(weight)})

    def _rule_index_put(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        data, indices, values = self.args[:3]
        accumulates = len(self.args) > 3 and self.args[3]
        given = [i for i in indices if i is not None]
        if not any(map(self.is_marked, given)) and not accumulates:
            return self._of_words(self.args, self.kwargs, {id(data), id(values)})
        if len(self._bool_index) == len(indices) == 1 and values.numel() == 1:
            where = self._mask(given[0])
            where = where.reshape(*where.shape, *[1] * (data.dim() - given[0].dim()))
            one = self._one(values).reshape(-1, *[1] * data.dim())
            return [(self._mask(data) | where | one).expand(-1, *data.shape)]
        raise ValueError

    _rule__unsafe_index_put = _rule_index_put

    def _rule_scatter(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        data, dim, index = self.args[:3]
        source = self.args[3] if len(self.args) > 3 else self.named.get("src")
        sources = [source] if isinstance(source, Tensor) else []
        reduces = self.kwargs.get("reduce") is not None
        if not self.is_marked(index) and not reduces:
            args = self.args if sources else (*self.args[:3], 0)
            return self._of_words(args, {}, {id(data), *map(id, sources)})
        d = dim % max(data.dim(), 1)
        same = [n for n in range(data.dim()) if n != d and index.shape[n] != data.shape[n]]
        if same:
            raise ValueError
        mask = self._mask(data)
        for value in (index, *sources):
            part = self._mask(value)
            if value is not index:
                for n in range(index.dim()):
                    part = part.narrow(n + 1, 0, index.shape[n])
            mask = mask | union(part, [d + 1])
        return [mask]

    def _rule_searchsorted(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        order, values = self.named["sorted_sequence"], self.named["self"]
        if not isinstance(values, Tensor):
            return self._everything(results)
        part = union(self._mask(order), [order.dim()])
        return [_broadcast([part, self._mask(values)], results[0].shape)]

    def _rule_isin(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        elements, tested = self.named["elements"], self.named["test_elements"]
        if not isinstance(elements, Tensor):
            return self._everything(results)
        one = self._one(tested).reshape(-1, *[1] * elements.dim())
        return [_broadcast([self._mask(elements), one], results[0].shape)]

    def _rule_nll_loss_forward(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        value, target = self.args[:2]
        if self.args[3] or value.dim() != 2:  # with a reduction
            return self._everything(results)
        rows = union(self._mask(value), [2]).squeeze(2) | self._mask(target)
        return [rows, *self._everything(results[1:])]

    def _rule_bucketize(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        values, order = map(self._mask, self.args[:2])
        return [_broadcast([values, union(order, [1])], results[0].shape)]

    def _dims(self, ndim: int) -> list[int]:
        named = self.named
        dims = named.get("dim", named.get("axis"))
        if dims is None or (isinstance(dims, list | tuple) and not dims):
            return list(range(1, ndim + 1))
        return [_inner(d, ndim) for d in (dims if isinstance(dims, list | tuple) else [dims])]

    def _reduced(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        if self.name == "dist" or "other" in self.named:  # two inputs
            return self._everything(results)
        value = self.args[0]
        has_dim = any(a.name in ("dim", "axis") for a in schema_of(self.func).arguments)
        dims = self._dims(value.dim()) if has_dim else list(range(1, value.dim() + 1))
        if self.name in ("kthvalue", "mode", "median", "nanmedian") and has_dim:
            at = self.named.get("dim", -1)
            dims = [_inner(at, value.dim())]
        mask = union(self._mask(value), dims)
        return [mask.reshape(self._words, *r.shape) for r in results]

    def _along(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the union along the operator's dims, in every entry along them."""
        at = self.named.get("dim")
        if self.name in ("sort", "topk", "argsort", "glu", "cross", "linalg_cross") and at is None:
            at = -1
        if self.name in ("_sample_dirichlet", "multinomial"):
            at = -1
        if self.name in ("msort", "cross") and at is None:
            at = 0
        if self.name in ("renorm", "_weight_norm_interface"):
            return self._everything(results)
        inputs = [t for t in self.tensors if id(t) in self.masks]
        dims: Sequence[Any] = at if isinstance(at, list | tuple) else [at]
        parts = [union(self.masks[id(t)], [_inner(d, t.dim()) for d in dims]) for t in inputs]
        return [_broadcast(parts, r.shape) for r in results]

    def _scanned(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        value = self.args[0]
        mask, dim = self._mask(value).clone(), _inner(self.named["dim"], value.dim())
        shift, size = 1, mask.shape[dim] if value.dim() else 1
        while shift < size:
            mask = torch.cat(
                [
                    mask.narrow(dim, 0, shift),
                    mask.narrow(dim, shift, size - shift) | mask.narrow(dim, 0, size - shift),
                ],
                dim,
            )
            shift *= 2
        return [mask for _ in results]

    def _product(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the marks of a matrix product: a row's with a column's, and those added."""
        name, args, out = self.name, list(self.args), results[0].shape
        parts = []
        if name in ("addmm", "baddbmm", "addmv", "addbmm"):
            parts.append(self._mask(args.pop(0)))
        a, b = self._mask(args[0]), self._mask(args[1])
        if name in ("dot", "vdot", "addbmm"):
            ones = [self._one(v).reshape(-1, *[1] * len(out)) for v in args[:2]]
            return [_broadcast([*parts, *ones], out)]
        if name in ("mv", "addmv"):
            parts += [union(a, [2]).squeeze(2), union(b, [1])]
        elif name == "linear":
            parts += [union(a, [-1]), union(b, [2]).squeeze(2)]
            parts += [self._mask(v) for v in args[2:3] if isinstance(v, Tensor)]
        elif name == "_cdist_forward":
            parts += [union(a, [-1]), union(b, [-1]).transpose(-1, -2)]
        else:
            parts += [union(a, [-1]), union(b, [-2])]
        return [_broadcast(parts, out)]

    def _per_item(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the union for each item of a batch, which the first dim counts."""
        count = self.args[0].shape[0]
        total = torch.zeros(self._words, 1, dtype=torch.int64, device=self.args[0].device)
        for i, value in enumerate(self.args):
            for t in tensors_in(value):
                if id(t) not in self.masks:
                    continue
                batched = i == 0 or (
                    self.name.startswith(("grid_sampler", "_thnn", "nll_loss2d", "max_unpool"))
                    and t.shape[0] == count
                )
                mask = self.masks[id(t)]
                part = mask.flatten(2) if batched and mask.dim() > 2 else mask
                part = union(part, range(2, part.dim())) if batched else union(mask.flatten(1), [1])
                total = total | part.reshape(self._words, -1)
        whole = total if total.shape[1] == count else total.expand(-1, count)
        return [
            whole.reshape(self._words, count, *[1] * (r.dim() - 1)).expand(-1, *r.shape)
            if r.dim() and r.shape[0] == count
            else self._everything([r])[0]
            for r in results
        ]

    def _rule_native_layer_norm(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        value, shape, *affine = self.args[:4]
        core = union(self._mask(value), range(1 + value.dim() - len(shape), 1 + value.dim()))
        rest = [self._mask(t) for t in affine if isinstance(t, Tensor)]
        return [_broadcast([core, *(rest if r is results[0] else [])], r.shape) for r in results]

    _rule__fused_rms_norm = _rule_native_layer_norm

    def _batch_norm(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the marks of normalized batches: of a channel, if its statistics are used."""
        named, value = self.named, self.args[0]
        trains = named.get("training", named.get("use_input_stats", True))
        trains = trains or self.name in ("batch_norm_with_update", "_batch_norm_with_update")
        trains = trains and self.name not in _FIXED_STATISTICS
        mask = self._mask(value)
        channel = union(mask, [1, *range(3, mask.dim())])
        if trains:
            batch = mask_of_bits(self._marks.batch_bit, self._words, value)
            mask = channel.expand_as(mask) | batch
            self._marks.batches.append(self._marks.line() or "")
            for name in ("running_mean", "running_var"):
                buffer = named.get(name)
                if isinstance(buffer, Tensor):
                    old = self._mask(buffer)
                    self._marks.write(buffer, old | channel.reshape(self._words, -1))
        bit = self._marks.new_bits()
        self._marks.channels.append((tuple(value.shape[1:]), bit))
        if self._words == self._marks.words:
            mask = mask | mask_of_bits(bit, self._words, value)
        columns = [self._mask(t) for t in self.args[1:5] if isinstance(t, Tensor)]
        for column in columns:
            mask = mask | column.reshape(self._words, 1, -1, *[1] * (mask.dim() - 3))
        return [
            mask
            if r.shape == value.shape
            else channel.reshape(self._words, -1)
            if r.shape == (value.shape[1],)
            else self._everything([r])[0]
            for r in results
        ]

    def _solved(self, matrix: Tensor, right: Tensor, left: bool = True) -> list[Tensor | None]:
        """Return the marks of solutions: those of the matrix, and of their own right side."""
        whole = union(self._mask(matrix), [-1, -2])
        sides = union(self._mask(right), [-2 if left else -1])
        batch = torch.broadcast_shapes(whole.shape[1:-2], sides.shape[1:-2])
        return [_broadcast([whole, sides], torch.Size((*batch, *right.shape[-2:])))]

    def _rule_linalg_solve_triangular(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        return self._solved(self.args[0], self.args[1], self.kwargs.get("left", True))

    def _rule_triangular_solve(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        right, matrix = self.args[:2]
        return [*self._solved(matrix, right), *self._everything(results[1:])]

    def _rule_cholesky_solve(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        return self._solved(self.args[1], self.args[0])

    _rule__cholesky_solve_helper = _rule_cholesky_solve

    def _matrices(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the union for each matrix of a batch."""
        inputs = [t for t in self.tensors if id(t) in self.masks]
        deepest = max(t.dim() for t in self.tensors)
        parts = []
        for t in inputs:
            # A right side may be a batch of vectors.
            inner = 2 if t.dim() >= deepest or t.dim() >= 3 else t.dim()
            part = union(self.masks[id(t)], range(1 + max(t.dim() - inner, 0), 1 + t.dim()))
            parts.append(part.reshape(*part.shape[: part.dim() - inner], 1, 1))
        batch = torch.broadcast_shapes(*(p.shape[1:-2] for p in parts))
        whole = _broadcast(parts, torch.Size((*batch, 1, 1)))
        assert whole is not None
        masks: list[Tensor | None] = []
        for r in results:
            if r.shape[: len(batch)] != batch:
                masks += self._everything([r])
                continue
            mask = whole.reshape(self._words, *batch, *[1] * (r.dim() - len(batch)))
            masks.append(mask.expand(-1, *r.shape))
        return masks

    def _attention(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        query, key, value = self.args[:3]
        around = [union(self._mask(t), [-1, -2]) for t in (key, value)]
        others = self._one([t for t in self.tensors if all(t is not a for a in self.args[:3])])
        rows = union(self._mask(query), [-1])
        parts = [rows, *around, others.reshape(-1, *[1] * query.dim())]
        first = _broadcast(parts, results[0].shape)
        return [first, *self._everything(results[1:])]

    def _rule_mkldnn_rnn_layer(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the union for each sequence of a batch, the second last dim."""
        value, *others = self.args[:7]
        states = [t for t in others if t.dim() > 2 or t.shape[-2:-1] == value.shape[-2:-1]]
        weights = [t for t in others if all(t is not h for h in states)]
        total = self._one(weights).reshape(-1, 1)
        for t in (value, *states):
            mask = self._mask(t)
            dims = [d for d in range(1, mask.dim()) if d != mask.dim() - 2]
            total = total | union(mask, dims).reshape(self._words, -1)
        count = value.shape[-2]
        return [
            total.reshape(-1, *[1] * (r.dim() - 2), count, 1).expand(-1, *r.shape)
            if r.dim() > 1 and r.shape[-2] == count
            else self._everything([r])[0]
            for r in results
        ]

    def _by_nan(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the marks that NaN in the entries of each bit reaches."""
        if any(not t.is_floating_point() for t in self.tensors if self.is_marked(t)):
            raise ValueError
        every = bits_of(self._one(self.tensors))
        masks = [self._zeros(r) for r in results]
        for place in range(every.bit_length()):
            if not every >> place & 1:
                continue
            word, bit = divmod(place, WORD)

            def poisoned(mask: Tensor, copy: Tensor, word: int = word, bit: int = bit) -> Tensor:
                return copy.masked_fill((mask[word] >> bit & 1).bool(), math.nan)

            for mask, value in zip(masks, self._rerun(poisoned), strict=True):
                if not value.is_floating_point():
                    mask[word] |= 1 << bit
                else:
                    mask[word] |= value.isnan().long() << bit
        return list(masks)
