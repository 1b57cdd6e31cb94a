"""Marks never miss an entry that changes with a marked one, for operators of every kind."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_mcvae.ops.marks import Marks

N, D = 5, 4


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def module(layer, shape=None):
    torch.manual_seed(0)
    layer = layer().double()

    def call(x):
        out = layer(x if shape is None else x.reshape(shape))
        return out[0] if isinstance(out, tuple) else out

    return call


def written(x):
    out = torch.zeros(N, D)
    for i in range(N):
        out[i] = 2 * x[i]
    return out


def in_place(x):
    out = x.clone()
    out[1:].mul_(x[:-1])
    out[0, 1:3] = x[2, :2]
    return out


def inner_gradient(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad((y**3).sum(), y)
    return grad


def positive_definite(x):
    return torch.eye(D) * 5 + x.unsqueeze(-1) @ x.unsqueeze(-2)


WEIGHT = torch.randn(D, 3, generator=torch.Generator().manual_seed(1), dtype=torch.double)
INDEX = torch.tensor([2, 0, 1, 1, 4])
# Functions of x with shape [N, D], whose entries all differ.
OPERATORS = {
    # pointwise
    "zero times": lambda x: 0.0 * x,
    "where": lambda x: torch.where(x > 0.3, x, -x),
    "clamp": lambda x: x.clamp(0, 0.1),
    "gate": lambda x: torch.where(x.sum(-1, keepdim=True) > 0, 1.0, 2.0),
    "special functions": lambda x: torch.lgamma(x.exp()) + torch.digamma(x.exp()) + torch.erf(x),
    "logits": lambda x: F.binary_cross_entropy_with_logits(
        x, x.sigmoid().round(), reduction="none"
    ),
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.softplus(x) + F.elu(x) + F.mish(x),
    "hard activations": lambda x: F.hardswish(x) + F.hardtanh(x) + F.relu6(x) + F.leaky_relu(x),
    "integers": lambda x: (10 * x).long() // 3 % 2,
    "booleans": lambda x: (x > 0) & (x < 1) | (x == 0.5),
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "copysign": lambda x: torch.copysign(x, x.roll(1, 0)),
    "nan to num": lambda x: torch.nan_to_num(x),
    # moving
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x[2:], x[:2], torch.zeros(1, D)]),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "reflect": lambda x: F.pad(x.unsqueeze(0), (1, 2), mode="reflect"),
    "tril": torch.tril,
    "unfold": lambda x: x.unfold(1, 2, 1),
    "gather": lambda x: x.gather(0, INDEX.unsqueeze(-1)),
    "index": lambda x: x[INDEX, 1:],
    "index_put": lambda x: torch.zeros(N, D).index_put((INDEX,), x),
    "index_add": lambda x: torch.zeros(N, D).index_add(0, INDEX, x),
    "scatter": lambda x: torch.zeros(N, D).scatter(0, INDEX.unsqueeze(-1).expand(N, D), x),
    "scatter_add": lambda x: torch.zeros(N, D).scatter_add(0, INDEX.unsqueeze(-1).expand(N, D), x),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "diag": lambda x: torch.diag_embed(x),
    "pixel shuffle": lambda x: F.pixel_shuffle(x.reshape(N, D, 1, 1), 2),
    "written": written,
    "in place": in_place,
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "masked_fill_": lambda x: x.clone().masked_fill_(x > 1, 0.0),
    "in-place activations": lambda x: F.mish(F.gelu(x.clone().abs_()), inplace=True).ge_(0.3),
    "index_copy": lambda x: torch.zeros(N, D).index_copy(0, torch.arange(N).flip(0), x),
    "block_diag": lambda x: torch.block_diag(x[:2], x[2:]),
    "fold": lambda x: F.fold(F.unfold(x.reshape(N, 1, 2, 2), 2), (2, 2), 2),
    "losses of images": lambda x: F.cross_entropy(
        x.reshape(N, 2, 2, 1), torch.zeros(N, 2, 1, dtype=torch.long), reduction="none"
    ),
    "boolean assignment": lambda x: x.clone().masked_scatter_(x > 0, x.flip(0)),
    # positions that marked values decide
    "table": lambda x: torch.arange(7.0)[(3 + 2 * x.tanh()).long()],
    "gathered by draws": lambda x: WEIGHT.gather(1, (x[:D].abs() > 0.5).long()),
    "own column": lambda x: x[torch.arange(N), (x[:, 0] > 0).long()],
    "one hot": lambda x: F.one_hot((x > 0).long(), 2),
    "embedding": lambda x: F.embedding((x.abs() > 0.4).long(), WEIGHT),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    "searchsorted": lambda x: torch.searchsorted(x.sort(-1).values, x.flip(0)),
    # reductions, sorts, scans
    "sum": lambda x: x.sum(0),
    "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "var": lambda x: x.var(0),
    "norm": lambda x: F.normalize(x, dim=-1),
    "median": lambda x: x.median(-1).values,
    "any": lambda x: (x > 1).any(0),
    "prod": lambda x: x.prod(-1),
    "sort": lambda x: x.sort(0).values,
    "topk": lambda x: x.topk(2, -1).values,
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0).values,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    # products, linear algebra, transforms
    "matmul": lambda x: x @ WEIGHT,
    "from the left": lambda x: WEIGHT[:3, :3] @ x[:3],
    "linear": module(lambda: nn.Linear(D, 3)),
    "bmm": lambda x: x.unsqueeze(-1) @ x.unsqueeze(-2),
    "einsum": lambda x: torch.einsum("nd,md->nm", x, x),
    "cdist": lambda x: torch.cdist(x, x[:2] + 1),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "cholesky": lambda x: torch.linalg.cholesky(positive_definite(x)),
    "solve": lambda x: torch.linalg.solve(positive_definite(x), x),
    "inverse": lambda x: torch.linalg.inv(positive_definite(x)),
    "logdet": lambda x: torch.logdet(positive_definite(x)),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(positive_definite(x)),
    "triangular": lambda x: torch.linalg.solve_triangular(
        positive_definite(x).tril(), x.unsqueeze(-1), upper=False
    ),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "real fft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x.flip(0)).exp()),
    # modules
    "layer norm": module(lambda: nn.LayerNorm(D)),
    "batch norm": module(lambda: nn.BatchNorm1d(D)),
    "group norm": module(lambda: nn.GroupNorm(2, D)),
    "convolution": module(lambda: nn.Conv1d(1, 2, 3, padding=1), (N, 1, D)),
    "transposed": module(lambda: nn.ConvTranspose1d(1, 2, 2), (N, 1, D)),
    "image": module(lambda: nn.Conv2d(1, 2, 2), (N, 1, 2, 2)),
    "max pool": module(lambda: nn.MaxPool1d(2), (N, 1, D)),
    "mean pool": module(lambda: nn.AvgPool2d(2), (N, 1, 2, 2)),
    "upsample": module(lambda: nn.Upsample(scale_factor=2), (N, 1, D)),
    "LSTM": module(lambda: nn.LSTM(D, 3), (N, 1, D)),
    "GRU": module(lambda: nn.GRU(D, 3, batch_first=True), (N, 1, D)),
    "attention": module(
        lambda: nn.TransformerEncoderLayer(D, 2, 8, batch_first=True, dropout=0.0), (1, N, D)
    ),
    "weight norm": module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, 2))),
    # beside the dispatcher
    "custom function": Cube.apply,
    "gradient inside": inner_gradient,
    "checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "vmap": lambda x: torch.func.vmap(lambda v: v.cumsum(0))(x),
    "jacobian": lambda x: torch.func.vmap(torch.func.jacrev(lambda v: (v**2).sum()))(x),
}


def changes(function, x):
    """Which entries of the result change with each row of x, at random changes."""
    generator = torch.Generator().manual_seed(3)
    found = []
    before = function(x).detach().double()
    for row in range(N):
        hit = torch.zeros_like(before, dtype=torch.bool)
        for _ in range(6):
            moved = x.clone()
            moved[row] = 2 * torch.randn(D, generator=generator, dtype=x.dtype)
            after = function(moved).detach().double()
            hit |= (after - before).abs() > 1e-12
        found.append(hit)
    return torch.stack(found)


def marked(function, x):
    """Which entries of the result have the mark of each row of x, and the marks of what is read."""
    marks = Marks(lambda: "here")
    with marks:
        x = x.clone()
        first = marks.new_bits(N)
        rows = torch.tensor([first << i for i in range(N)])
        marks.write(x, rows.reshape(1, N, 1))
        result = function(x)
    mask = marks.mask(result)
    mask = torch.zeros(result.shape, dtype=torch.int64) if mask is None else mask[0]
    bits = torch.stack([(mask & int(r)) != 0 for r in rows])
    return bits, marks


@pytest.mark.parametrize("name", OPERATORS)
def test_every_entry_that_changes_has_the_mark(name):
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    bits, marks = marked(OPERATORS[name], x)
    assert not marks.control
    missing = changes(OPERATORS[name], x) & ~bits
    assert not bool(missing.any())


@pytest.mark.parametrize(
    "name",
    [
        "zero times",
        "clamp",
        "activations",
        "softmax",
        "masked_fill_",
        "in-place activations",
        "index_copy",
        "fold",
        "losses of images",
        "linear",
        "layer norm",
        "convolution",
    ]
    + ["image", "LSTM", "cholesky", "logdet", "gather", "written", "one hot", "own column"]
    + ["embedding", "vmap", "custom function", "checkpoint", "gradient inside", "table"],
)
def test_rows_that_an_operator_treats_alone_stay_apart(name):
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    bits, marks = marked(OPERATORS[name], x)
    assert not marks.unknown
    rows = bits.any(0).sum(), (bits.sum(0) > 1).sum()
    if name == "LSTM":  # the rows are one sequence
        assert rows[1] > 0
    elif name == "gather":
        assert int(bits.sum(0).max()) == 1
    else:
        assert int(bits.sum(0).max()) == 1
        assert rows[0] > 0


def last_words(x):
    return {i: float(v) for i, v in enumerate(x[:, 0].tolist())}


READS = {
    "if": lambda x: 1.0 if x[0, 0] > 0 else 2.0,
    "item": lambda x: x[1, 0].item(),
    "float": lambda x: float(x[1, 0]),
    "tolist": last_words,
    "numpy": lambda x: x.numpy(),
    "tensor": lambda x: torch.tensor([x[0, 0], x[1, 1]]),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 0),
    "format": lambda x: f"{x[0, 0]:.3f}",
}


@pytest.mark.parametrize("name", READS)
def test_what_python_reads_is_in_control(name):
    x = torch.randn(N, D, dtype=torch.double)
    marks = Marks(lambda: "here")
    with marks:
        first = marks.new_bits()
        marks.write(x, first)
        READS[name](x)
    assert marks.control & first
    assert marks.reads[0].line == "here"


def test_values_that_are_printed_or_only_checked_are_not_in_control():
    x = torch.randn(N, D)
    marks = Marks(lambda: "here")
    with marks:
        marks.write(x, marks.new_bits())
        assert repr(x)
        assert torch.isfinite(x).all()
        assert not x.isnan().any()
    assert not marks.control


def test_more_sites_than_bits_of_a_word():
    marks = Marks(lambda: "")
    with marks:
        xs = [torch.randn(3) for _ in range(200)]
        bits = []
        for x in xs:
            bits.append(marks.new_bits())
            marks.write(x, bits[-1])
        total = torch.stack(xs[150:]).sum(0)
    assert marks.words == math.ceil((200 + 200 + 1) / 62)  # also the draws have bits
    assert marks.bits(total) == sum(bits[150:])
    assert marks.bits(xs[3]) == bits[3]


def test_programs_get_plain_tensors_and_true_values():
    x = torch.randn(N, D)
    with Marks(lambda: "") as marks:
        marks.write(x, marks.new_bits())
        y = F.dropout(x, 0.0) + x.cumsum(0)
    assert type(y) is torch.Tensor
    assert torch.equal(y, x + x.cumsum(0))


def test_shadows_live_as_long_as_their_tensors():
    marks = Marks(lambda: "")
    with marks:
        x = torch.randn(N)
        marks.write(x, marks.new_bits())
        for _ in range(50):
            x = x + 1
    assert len(marks._shadows) <= 2


def test_an_index_without_dims_leaves_other_indices_in_their_places():
    table, rows = torch.randn(N, 2, 3), torch.arange(N)
    with Marks(lambda: "") as marks:
        number, states = torch.tensor(1), torch.randint(3, (N,))
        of_number, *of_states = (marks.new_bits() for _ in range(1 + N))
        marks.write(number, of_number)
        marks.write(states, torch.tensor(of_states).reshape(1, N))
        chosen = table[rows, number, states]
        of_data = states.reshape(1, N).expand(2, N)[number]
    assert marks.mask(chosen)[0].tolist() == [of_number | bits for bits in of_states]
    # Another number may choose any of the data.
    assert marks.bits(of_data) == of_number | sum(of_states)
    assert not marks.control
