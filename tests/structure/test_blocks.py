"""Which latents share a weight: the blocks of programs that are written down by hand."""

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
        found = []
        for i, block in enumerate(structure.blocks):
            own = {k for k, b in structure.block_of.items() if b == i}
            found.append(
                (
                    [p.name for p in block.plates],
                    {k.name for k in own if k.program == "guide"},
                    {k.name for k in own if k.program == "model"},
                )
            )
        return found

    @property
    def asks(self):
        return needs_dependencies(self.factors, self.latents)


DATA = plate("data", -1)
SUBSAMPLED = plate("data", -1, size=5, full_size=20)


@pytest.mark.parametrize("data", [DATA, SUBSAMPLED], ids=["full", "subsampled"])
def test_vae_has_one_weight_per_datum_and_needs_no_dependencies(data):
    program = Program().latent("z", data).observed("x", data, given=["z"])
    assert program.blocks() == [(["data"], {"z"}, {"z", "x"})]
    assert program.structure().blocks[0].dims == (-1,)
    assert program.structure().blocks[0].plates == (PlateKey("data", -1, 0),)
    assert not program.asks
    assert program.forget().blocks() == [(["data"], {"z"}, {"z", "x"})]


@pytest.mark.parametrize("data", [DATA, SUBSAMPLED], ids=["full", "subsampled"])
def test_latents_of_one_plate_share_a_weight_though_they_are_independent(data):
    program = Program().latent("a", data).latent("b", data).observed("x", data, given=["b"])
    assert program.blocks() == [(["data"], {"a", "b"}, {"a", "b", "x"})]
    assert not program.asks


@pytest.mark.parametrize("data", [DATA, SUBSAMPLED], ids=["full", "subsampled"])
def test_a_latent_outside_of_the_plate_is_global(data):
    program = Program().latent("theta").latent("z", data, guide=["theta"], model=["theta"])
    program.observed("x", data, given=["theta", "z"]).observed("y", given=["theta"])
    assert program.asks
    structure = program.structure()
    assert program.blocks() == [(["data"], {"z"}, {"z", "x"})]
    assert structure.global_sites.guide == {"theta"}
    assert structure.global_sites.model == {"theta", "y"}


def test_latents_outside_of_every_plate_share_one_weight_with_everything():
    program = Program().latent("a").latent("b", guide=["a"]).observed("x", DATA, given=["a", "b"])
    assert program.blocks() == [([], {"a", "b"}, {"a", "b", "x"})]
    assert program.structure().blocks[0].dims == ()
    assert program.structure().global_sites.guide == frozenset()


def test_independent_unplated_latents_still_share_one_weight():
    program = Program().latent("a").latent("b").observed("x", given=["a"])
    assert program.blocks() == [([], {"a", "b"}, {"a", "b", "x"})]


def test_an_observation_without_latents_joins_the_block_of_its_plates():
    program = Program().latent("z", DATA).observed("x", DATA, given=["z"])
    program.observed("w", DATA, plate("inner", -2)).observed("v")
    assert program.blocks() == [(["data"], {"z"}, {"z", "x", "w"})]
    assert program.structure().global_sites.model == {"v"}


def test_nested_latents_are_weighed_per_element_of_the_outer_plate():
    groups, individuals = plate("groups", -1), plate("individuals", -2)
    program = Program().latent("a", groups)
    program.latent("b", groups, individuals, guide=["a"], model=["a"])
    program.observed("x", groups, individuals, given=["b"])
    assert program.blocks() == [(["groups"], {"a", "b"}, {"a", "b", "x"})]


def test_latents_of_two_plates_are_weighed_per_element_of_both():
    outer, inner = plate("outer", -2), plate("inner", -1)
    program = Program().latent("z", outer, inner).observed("x", outer, inner, given=["z"])
    assert program.blocks() == [(["outer", "inner"], {"z"}, {"z", "x"})]
    assert program.structure().blocks[0].dims == (-2, -1)


def test_crossed_plates_share_one_weight():
    rows, columns = plate("rows", -1), plate("columns", -2)
    program = Program().latent("u", rows).latent("v", columns)
    program.observed("x", rows, columns, given=["u", "v"])
    assert program.asks
    assert program.blocks() == [([], {"u", "v"}, {"u", "v", "x"})]


def test_crossed_plates_that_nothing_connects_are_two_blocks():
    rows, columns = plate("rows", -1), plate("columns", -2)
    program = Program().latent("u", rows).latent("v", columns)
    program.observed("x", rows, given=["u"]).observed("y", columns, given=["v"])
    assert program.blocks() == [(["rows"], {"u"}, {"u", "x"}), (["columns"], {"v"}, {"v", "y"})]


def test_crossed_subsampled_plates_leave_nothing_to_weigh():
    rows, columns = plate("rows", -1, 5, 10), plate("columns", -2, 5, 10)
    program = Program().latent("u", rows).latent("v", columns)
    program.observed("x", rows, columns, given=["u", "v"])
    assert program.structure().blocks == ()
    assert set(program.structure().block_of.values()) == {None}


@pytest.mark.parametrize("sizes", [(None, None), (20, None), (20, 30)])
def test_two_data_plates_are_two_blocks(sizes):
    # Also plates in the same batch dim, as two data sets one after the other.
    a, b = plate("a", -1, 5, sizes[0]), plate("b", -1, 7, sizes[1])
    program = Program().latent("za", a).latent("zb", b)
    program.observed("xa", a, given=["za"]).observed("xb", b, given=["zb"])
    assert program.asks
    blocks = program.blocks()
    assert sorted(blocks, key=lambda b: b[0]) == [
        (["a"], {"za"}, {"za", "xa"}),
        (["b"], {"zb"}, {"zb", "xb"}),
    ]


def test_two_data_plates_that_share_a_global_latent_stay_two_blocks():
    a, b = plate("a", -1), plate("b", -1, 7)
    program = Program().latent("theta").latent("za", a, model=["theta"])
    program.latent("zb", b, model=["theta"], guide=["theta"])
    program.observed("xa", a, given=["za"]).observed("xb", b, given=["zb", "theta"])
    assert len(program.blocks()) == 2
    assert program.structure().global_sites.guide == {"theta"}


def test_a_factor_that_joins_two_data_plates_makes_one_joint_weight():
    a, b = plate("a", -1), plate("b", -1, 7)
    program = Program().latent("za", a).latent("zb", b)
    program.observed("xa", a, given=["za"]).observed("xb", b, given=["zb"])
    program.observed("y", given=["za", "zb"])
    assert program.blocks() == [([], {"za", "zb"}, {"za", "zb", "xa", "xb", "y"})]


@pytest.mark.parametrize("full_size", [None, 9])
def test_sequential_plates_have_a_block_per_turn(full_size):
    program = Program()
    for i in range(3):
        turn = plate("data", None, 3, full_size, counter=i)
        program.latent(f"z_{i}", turn).observed(f"x_{i}", turn, given=[f"z_{i}"])
    assert program.blocks() == [(["data"], {f"z_{i}"}, {f"z_{i}", f"x_{i}"}) for i in range(3)]
    blocks = program.structure().blocks
    assert [b.plates for b in blocks] == [(PlateKey("data", None, i),) for i in range(3)]
    assert all(b.dims == () for b in blocks)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 2)], ids=["equal", "ragged"])
@pytest.mark.parametrize("one_name", [True, False])
def test_inner_plates_of_sequential_turns_are_other_plates_in_each_turn(sizes, one_name):
    program = Program()
    for i, size in enumerate(sizes):
        turn = plate("groups", None, 2, counter=i)
        inner = plate("inner" if one_name else f"inner_{i}", -1, size)
        program.latent(f"z_{i}", turn, inner)
        program.observed(f"x_{i}", turn, inner, given=[f"z_{i}"])
    blocks = program.blocks()
    assert [(g, m) for _, g, m in blocks] == [({f"z_{i}"}, {f"z_{i}", f"x_{i}"}) for i in (0, 1)]
    assert all(b.dims == (-1,) for b in program.structure().blocks)


def test_a_latent_per_turn_above_ragged_inner_plates_is_weighed_per_turn():
    program = Program()
    for i, size in enumerate((4, 2)):
        turn, inner = plate("groups", None, 2, counter=i), plate("inner", -1, size)
        program.latent(f"a_{i}", turn)
        program.latent(f"b_{i}", turn, inner, guide=[f"a_{i}"], model=[f"a_{i}"])
        program.observed(f"x_{i}", turn, inner, given=[f"b_{i}"])
    assert program.blocks() == [
        (["groups"], {f"a_{i}", f"b_{i}"}, {f"a_{i}", f"b_{i}", f"x_{i}"}) for i in (0, 1)
    ]


def test_turns_that_depend_on_each_other_share_one_weight():
    program = Program()
    for i in range(3):
        turn = plate("data", None, 3, counter=i)
        program.latent(f"z_{i}", turn, model=[f"z_{i - 1}"] if i else ())
    assert program.blocks() == [([], {"z_0", "z_1", "z_2"}, {"z_0", "z_1", "z_2"})]


def test_latents_outside_of_a_subsampled_plate_are_all_global():
    program = Program().latent("w").latent("b").observed("x", SUBSAMPLED, given=["w", "b"])
    assert program.asks
    assert program.structure().blocks == ()
    assert set(program.structure().block_of.values()) == {None}


def test_a_plate_that_does_not_enclose_the_subsampled_one_is_global_too():
    groups = plate("groups", -2)
    program = Program().latent("a", groups).observed("x", groups, SUBSAMPLED, given=["a"])
    assert program.structure().blocks == ()


def test_over_a_subsampled_inner_plate_the_outer_latent_becomes_global():
    groups, inner = plate("groups", -2), plate("inner", -1, 3, 9)
    program = Program().latent("a", groups).latent("b", groups, inner, guide=["a"], model=["a"])
    program.observed("x", groups, inner, given=["a", "b"])
    assert program.blocks() == [(["groups", "inner"], {"b"}, {"b", "x"})]
    assert program.structure().global_sites.guide == {"a"}
    assert program.structure().global_sites.model == {"a"}


def test_a_subsampled_outer_plate_keeps_the_nested_latents_together():
    groups, inner = plate("groups", -2, 5, 50), plate("inner", -1)
    program = Program().latent("a", groups).latent("b", groups, inner, model=["a"])
    program.observed("x", groups, inner, given=["b"])
    assert program.blocks() == [(["groups"], {"a", "b"}, {"a", "b", "x"})]


def test_no_block_holds_a_factor_in_a_subsampled_plate_that_is_not_its_own():
    # Its N/B would land inside of the logarithm, or be lost.
    inner = plate("inner", -2, 3, 9)
    program = Program().latent("theta").latent("z", DATA, model=["theta"])
    program.observed("x", DATA, given=["z"])
    program.observed("y", DATA, inner, given=["theta"]).observed("constant", DATA, inner)
    structure = program.structure()
    assert program.blocks() == [(["data"], {"z"}, {"z", "x"})]
    assert structure.global_sites.model == {"theta", "y", "constant"}


def test_a_factor_outside_of_the_plate_joins_its_elements():
    program = Program().latent("z", DATA).observed("x", DATA, given=["z"])
    program.observed("total", given=["z"])
    assert program.asks
    assert program.blocks() == [([], {"z"}, {"z", "x", "total"})]


def test_a_factor_outside_of_a_subsampled_plate_makes_its_latents_global():
    program = Program().latent("z", SUBSAMPLED).observed("x", SUBSAMPLED, given=["z"])
    program.observed("total", given=["z"])
    assert program.structure().blocks == ()


@pytest.mark.parametrize(
    ("data", "expected"),
    [(DATA, [([], {"z", "theta"}, {"z", "theta", "x"})]), (SUBSAMPLED, [])],
    ids=["full", "subsampled"],
)
def test_a_global_drawn_from_a_local_latent_cannot_be_drawn_once(data, expected):
    program = Program().latent("z", data, model=["theta"]).latent("theta", guide=["z"])
    program.observed("x", data, given=["z"])
    assert program.blocks() == expected


def test_a_latent_whose_prior_stands_outside_of_the_plate_is_weighed_jointly():
    program = Program().latent("z", DATA, model_plates=()).observed("x", DATA, given=["z"])
    assert program.asks
    assert program.blocks() == [([], {"z"}, {"z", "x"})]


@pytest.mark.parametrize(
    ("data", "expected"),
    [(DATA, [([], {"z"}, {"theta", "z", "x"})]), (SUBSAMPLED, [])],
    ids=["full", "subsampled"],
)
def test_unknown_parents_count_as_all_local_latents(data, expected):
    # The prior of theta might depend on z, for all that is known.
    program = Program().latent("theta").latent("z", data).observed("x", data, given=["z"])
    program.forget()
    found = program.blocks()
    assert [(plates, model) for plates, _, model in found] == [(p, m) for p, _, m in expected]
    # Never per datum: that would be wrong where it does depend.
    assert all(not plates for plates, _, _ in found)


def test_joint_weighs_everything_together():
    program = Program().latent("theta").latent("z", DATA).observed("x", DATA, given=["z"])
    structure = program.structure(joint=True)
    assert [b.plates for b in structure.blocks] == [()]
    assert set(structure.block_of.values()) == {0}
    assert structure.global_sites.guide == frozenset()


def test_joint_is_refused_under_subsampling():
    program = Program().latent("z", SUBSAMPLED).observed("x", SUBSAMPLED, given=["z"])
    with pytest.raises(ValueError, match=r"joint=True .*plate 'data' is subsampled \(5 of 20\)"):
        program.structure(joint=True)


def test_a_program_without_latents_has_the_plates_that_its_factors_share():
    pixels = plate("pixels", -2)
    program = Program().observed("x", DATA).observed("w", DATA, pixels).observed("v")
    assert not program.asks
    assert program.blocks() == [(["data"], set(), {"x", "w"})]
    apart = Program().observed("x", SUBSAMPLED).observed("w", pixels)
    assert apart.structure().blocks == ()  # N/B of one is not that of the other


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
