"""Which latents share a weight: the blocks of programs that are written down by hand."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from pyro.poutine.indep_messenger import CondIndepStackFrame

from pyro_mcvae.programs.types import FactorKey, PlateKey
from pyro_mcvae.structure.blocks import Factor, derive_structure, needs_dependencies


def plate(name, dim, size=5, full_size=None, counter=0):
    return CondIndepStackFrame(name, dim, size, counter, full_size or size)


class Program:
    """Factors of both programs, added site by site, in the order of a trace."""

    def __init__(self):
        self.factors = {}
        self.latents = []

    def latent(self, name, *plates, guide=(), model=(), model_plates=None):
        """A guide's random site and the latents that its densities depend on besides itself."""
        self.latents.append(name)
        self._add("guide", name, plates, {*guide, name})
        self._add("model", name, plates if model_plates is None else model_plates, {*model, name})
        return self

    def observed(self, name, *plates, given=()):
        self._add("model", name, plates, given)
        return self

    def _add(self, program, name, plates, parents):
        parents = None if parents is None else frozenset(parents)
        self.factors[FactorKey(program, name)] = Factor(frozenset(plates), parents)

    def forget(self, *names):
        """Make the parents of these sites unknown."""
        for key, factor in self.factors.items():
            if key.name in names or not names:
                self.factors[key] = factor._replace(parents=None)
        return self

    def structure(self, joint=False):
        return derive_structure(self.factors, self.latents, joint)

    def blocks(self):
        """Each block as its plates' names, and the names of its sites by program."""
        structure = self.structure()
        assert set(structure.block_of) == set(self.factors)
        result = []
        for i, block in enumerate(structure.blocks):
            own = {k for k, b in structure.block_of.items() if b == i}
            result.append(
                (
                    [p.name for p in block.plates],
                    {k.name for k in own if k.program == "guide"},
                    {k.name for k in own if k.program == "model"},
                )
            )
        return result

    @property
    def asks(self):
        return needs_dependencies(self.factors, self.latents)


DATA = plate("data", -1)
SUBSAMPLED = plate("data", -1, size=5, full_size=20)


@dataclass
class Specialization:
    """
    A program and its blocks: of each the plates, and the sites by program.

    :ivar shared: the global sites of the guide, and of the model.
    :ivar asks: whether plates alone leave the blocks open.
    """

    program: Program
    blocks: list[Any]
    shared: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    asks: bool | None = None


def latent(*names):
    return set(names), set(names)


def of_data(data, label):
    """Programs whose data plate is whole, or a minibatch of it."""
    program = Program().latent("z", data).observed("x", data, given=["z"])
    yield f"vae, {label}", Specialization(program, [(["data"], {"z"}, {"z", "x"})], asks=False)
    program = Program().latent("a", data).latent("b", data).observed("x", data, given=["b"])
    blocks = [(["data"], {"a", "b"}, {"a", "b", "x"})]
    yield f"independent latents of a plate, {label}", Specialization(program, blocks, asks=False)
    program = Program().latent("theta").latent("z", data, guide=["theta"], model=["theta"])
    program.observed("x", data, given=["theta", "z"]).observed("y", given=["theta"])
    blocks, shared = [(["data"], {"z"}, {"z", "x"})], ({"theta"}, {"theta", "y"})
    yield f"a latent outside of the plate, {label}", Specialization(program, blocks, shared, True)


def outside():
    program = Program().latent("a").latent("b", guide=["a"]).observed("x", DATA, given=["a", "b"])
    yield "no latent in a plate", Specialization(program, [([], {"a", "b"}, {"a", "b", "x"})])
    program = Program().latent("a").latent("b").observed("x", given=["a"])
    yield (
        "independent unplated latents",
        Specialization(program, [([], {"a", "b"}, {"a", "b", "x"})]),
    )
    program = Program().latent("z", DATA).observed("x", DATA, given=["z"])
    program.observed("w", DATA, plate("inner", -2)).observed("v")
    blocks = [(["data"], {"z"}, {"z", "x", "w"})]
    yield "observations without latents", Specialization(program, blocks, (set(), {"v"}))
    program = Program().latent("z", DATA).observed("x", DATA, given=["z"])
    program.observed("total", given=["z"])
    blocks = [([], {"z"}, {"z", "x", "total"})]
    yield "a factor outside of the plate", Specialization(program, blocks, asks=True)
    program = Program().latent("z", DATA, model_plates=()).observed("x", DATA, given=["z"])
    blocks = [([], {"z"}, {"z", "x"})]
    yield "a prior outside of the plate", Specialization(program, blocks, asks=True)
    program = Program().latent("z", DATA, model=["theta"]).latent("theta", guide=["z"])
    program.observed("x", DATA, given=["z"])
    blocks = [([], {"z", "theta"}, {"z", "theta", "x"})]
    yield "a global latent drawn from a local one", Specialization(program, blocks)
    pixels = plate("pixels", -2)
    program = Program().observed("x", DATA).observed("w", DATA, pixels).observed("v")
    blocks = [(["data"], set(), {"x", "w"})]
    yield "no latents", Specialization(program, blocks, (set(), {"v"}), False)


def several_plates():
    groups, members = plate("groups", -1), plate("members", -2)
    program = Program().latent("a", groups)
    program.latent("b", groups, members, guide=["a"], model=["a"])
    program.observed("x", groups, members, given=["b"])
    yield "nested", Specialization(program, [(["groups"], {"a", "b"}, {"a", "b", "x"})])
    outer, inner = plate("outer", -2), plate("inner", -1)
    program = Program().latent("z", outer, inner).observed("x", outer, inner, given=["z"])
    yield (
        "latents of two plates",
        Specialization(program, [(["outer", "inner"], {"z"}, {"z", "x"})]),
    )
    rows, columns = plate("rows", -1), plate("columns", -2)
    program = Program().latent("u", rows).latent("v", columns)
    program.observed("x", rows, columns, given=["u", "v"])
    yield "crossed", Specialization(program, [([], {"u", "v"}, {"u", "v", "x"})], asks=True)
    program = Program().latent("u", rows).latent("v", columns)
    program.observed("x", rows, given=["u"]).observed("y", columns, given=["v"])
    blocks = [(["rows"], {"u"}, {"u", "x"}), (["columns"], {"v"}, {"v", "y"})]
    yield "crossed, and nothing connects them", Specialization(program, blocks)
    for sizes in [(None, None), (20, None), (20, 30)]:
        # Also plates in the same batch dim, as two data sets one after the other.
        a, b = plate("a", -1, 5, sizes[0]), plate("b", -1, 7, sizes[1])
        program = Program().latent("za", a).latent("zb", b)
        program.observed("xa", a, given=["za"]).observed("xb", b, given=["zb"])
        blocks = [(["a"], {"za"}, {"za", "xa"}), (["b"], {"zb"}, {"zb", "xb"})]
        yield f"two data plates of {sizes}", Specialization(program, blocks, asks=True)
    a, b = plate("a", -1), plate("b", -1, 7)
    program = Program().latent("theta").latent("za", a, model=["theta"])
    program.latent("zb", b, model=["theta"], guide=["theta"])
    program.observed("xa", a, given=["za"]).observed("xb", b, given=["zb", "theta"])
    blocks = [(["a"], {"za"}, {"za", "xa"}), (["b"], {"zb"}, {"zb", "xb"})]
    yield "two data plates and a global latent", Specialization(program, blocks, latent("theta"))
    program = Program().latent("za", a).latent("zb", b)
    program.observed("xa", a, given=["za"]).observed("xb", b, given=["zb"])
    program.observed("y", given=["za", "zb"])
    blocks = [([], {"za", "zb"}, {"za", "zb", "xa", "xb", "y"})]
    yield "a factor of two data plates", Specialization(program, blocks)


def turns():
    for full_size in (None, 9):
        program = Program()
        for i in range(3):
            turn = plate("data", None, 3, full_size, counter=i)
            program.latent(f"z_{i}", turn).observed(f"x_{i}", turn, given=[f"z_{i}"])
        blocks = [(["data"], {f"z_{i}"}, {f"z_{i}", f"x_{i}"}) for i in range(3)]
        yield f"turns of {full_size}", Specialization(program, blocks)
    for sizes in ((4, 4), (4, 2)):
        for name in ("inner", "inner_{}"):
            program, blocks = Program(), []
            for i, size in enumerate(sizes):
                turn, inner = plate("groups", None, 2, counter=i), plate(name.format(i), -1, size)
                program.latent(f"z_{i}", turn, inner)
                program.observed(f"x_{i}", turn, inner, given=[f"z_{i}"])
                blocks.append((["groups", name.format(i)], {f"z_{i}"}, {f"z_{i}", f"x_{i}"}))
            yield f"plates {name} of {sizes} in turns", Specialization(program, blocks)
    program, blocks = Program(), []
    for i, size in enumerate((4, 2)):
        turn, inner = plate("groups", None, 2, counter=i), plate("inner", -1, size)
        program.latent(f"a_{i}", turn)
        program.latent(f"b_{i}", turn, inner, guide=[f"a_{i}"], model=[f"a_{i}"])
        program.observed(f"x_{i}", turn, inner, given=[f"b_{i}"])
        sites = {f"a_{i}", f"b_{i}"}
        blocks.append((["groups"], sites, {*sites, f"x_{i}"}))
    yield "a latent of each turn above ragged plates", Specialization(program, blocks)
    program, sites = Program(), {"z_0", "z_1", "z_2"}
    for i in range(3):
        turn = plate("data", None, 3, counter=i)
        program.latent(f"z_{i}", turn, model=[f"z_{i - 1}"] if i else ())
    yield "turns that depend on each other", Specialization(program, [([], sites, sites)])


def minibatches():
    """N/B may stand inside no logarithm: what a block cannot hold is global."""
    program = Program().latent("w").latent("b").observed("x", SUBSAMPLED, given=["w", "b"])
    shared = {"w", "b"}, {"w", "b", "x"}
    yield "latents outside of a minibatch", Specialization(program, [], shared, True)
    groups = plate("groups", -2)
    program = Program().latent("a", groups).observed("x", groups, SUBSAMPLED, given=["a"])
    yield "a plate beside a minibatch", Specialization(program, [], ({"a"}, {"a", "x"}))
    rows, columns = plate("rows", -1, 5, 10), plate("columns", -2, 5, 10)
    program = Program().latent("u", rows).latent("v", columns)
    program.observed("x", rows, columns, given=["u", "v"])
    yield "crossed minibatches", Specialization(program, [], ({"u", "v"}, {"u", "v", "x"}))
    inner = plate("inner", -1, 3, 9)
    program = Program().latent("a", groups).latent("b", groups, inner, guide=["a"], model=["a"])
    program.observed("x", groups, inner, given=["a", "b"])
    blocks = [(["groups", "inner"], {"b"}, {"b", "x"})]
    yield "a minibatch inside of a plate", Specialization(program, blocks, latent("a"))
    groups, inner = plate("groups", -2, 5, 50), plate("inner", -1)
    program = Program().latent("a", groups).latent("b", groups, inner, model=["a"])
    program.observed("x", groups, inner, given=["b"])
    yield (
        "a minibatch around a plate",
        Specialization(program, [(["groups"], {"a", "b"}, {"a", "b", "x"})]),
    )
    inner = plate("inner", -2, 3, 9)
    program = Program().latent("theta").latent("z", DATA, model=["theta"])
    program.observed("x", DATA, given=["z"])
    program.observed("y", DATA, inner, given=["theta"]).observed("constant", DATA, inner)
    blocks, shared = [(["data"], {"z"}, {"z", "x"})], ({"theta"}, {"theta", "y", "constant"})
    yield "a factor in a minibatch of no block", Specialization(program, blocks, shared)
    program = Program().latent("z", SUBSAMPLED).observed("x", SUBSAMPLED, given=["z"])
    program.observed("total", given=["z"])
    yield (
        "a factor outside of a minibatch",
        Specialization(program, [], ({"z"}, {"z", "x", "total"})),
    )
    program = Program().latent("z", SUBSAMPLED, model=["theta"]).latent("theta", guide=["z"])
    program.observed("x", SUBSAMPLED, given=["z"])
    shared = {"z", "theta"}, {"z", "theta", "x"}
    yield "a global latent drawn from one of a minibatch", Specialization(program, [], shared)
    program = Program().observed("x", SUBSAMPLED).observed("w", plate("pixels", -2))
    # N/B of one is not that of the other.
    yield "no latents and two plates", Specialization(program, [], (set(), {"x", "w"}))


CASES = dict(
    [
        *of_data(DATA, "full"),
        *of_data(SUBSAMPLED, "subsampled"),
        *outside(),
        *several_plates(),
        *turns(),
        *minibatches(),
    ]
)


def _by_names(block):
    return [sorted(names) for names in block]


@pytest.mark.parametrize("name", CASES)
def test_blocks_and_global_sites(name):
    case = CASES[name]
    program = case.program
    # Not by str, because equal sets may print their elements in different orders.
    assert sorted(program.blocks(), key=_by_names) == sorted(case.blocks, key=_by_names)
    result = program.structure()
    of_no_block = {key for key, block in result.block_of.items() if block is None}
    for which, expected in zip(("guide", "model"), case.shared, strict=True):
        assert {key.name for key in of_no_block if key.program == which} == expected
        if case.blocks:
            assert getattr(result.global_sites, which) == expected
    for block in result.blocks:
        assert block.dims == tuple(p.dim for p in block.plates if p.dim is not None)
    if case.asks is not None:
        assert program.asks == case.asks


def test_plates_of_blocks_are_told_apart_by_their_turns():
    blocks = CASES["turns of None"].program.structure().blocks
    assert [b.plates for b in blocks] == [(PlateKey("data", None, i),) for i in range(3)]
    assert all(b.dims == () for b in blocks)
    block = CASES["vae, full"].program.structure().blocks[0]
    assert (block.dims, block.plates) == ((-1,), (PlateKey("data", -1, 0),))


@pytest.mark.parametrize(
    ("data", "expected"),
    [(DATA, [([], {"theta", "z", "x"})]), (SUBSAMPLED, [])],
    ids=["full", "subsampled"],
)
def test_unknown_parents_count_as_all_local_latents(data, expected):
    # The prior of theta might depend on z, for all that is known.
    program = Program().latent("theta").latent("z", data).observed("x", data, given=["z"])
    result = program.forget().blocks()
    assert [(plates, model) for plates, _, model in result] == expected
    # Never per datum: that would be wrong where it does depend.
    assert all(not plates for plates, _, _ in result)
    alone = Program().latent("z", data).observed("x", data, given=["z"]).forget()
    assert alone.blocks() == [(["data"], {"z"}, {"z", "x"})]


def test_joint_weighs_everything_together_and_refuses_minibatches():
    program = Program().latent("theta").latent("z", DATA).observed("x", DATA, given=["z"])
    structure = program.structure(joint=True)
    assert [b.plates for b in structure.blocks] == [()]
    assert set(structure.block_of.values()) == {0}
    assert structure.global_sites.guide == frozenset()
    program = Program().latent("z", SUBSAMPLED).observed("x", SUBSAMPLED, given=["z"])
    with pytest.raises(ValueError, match=r"joint=True .*plate 'data' is subsampled \(5 of 20\)"):
        program.structure(joint=True)


@pytest.mark.parametrize(
    ("build", "asks"),
    [
        (lambda: Program().latent("z", DATA).observed("x", DATA), False),
        (lambda: Program().latent("z").observed("x", DATA), False),
        (lambda: Program().latent("z").observed("x", SUBSAMPLED), True),
        (lambda: Program().latent("z", DATA).observed("x"), True),
        (lambda: Program().latent("z", DATA, plate("i", -2)).observed("x", DATA), True),
        (lambda: Program().latent("z", DATA).observed("x", DATA, plate("i", -2)), False),
        (lambda: Program().latent("z", DATA).observed("x", DATA, plate("i", -2, 2, 4)), True),
    ],
)
def test_dependencies_are_asked_for_only_where_plates_do_not_tell(build, asks):
    assert build().asks == asks
