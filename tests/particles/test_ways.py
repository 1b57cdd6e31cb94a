"""Particles at once have the densities and gradients of particles one by one, in every way."""

import pytest

from pyro_mcvae.programs.mapping import Way
from tests.particles.ways import check_way, only
from tests.zoo import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("way", [Way.BATCHED, Way.MAPPED, Way.BOTH_MAPPED])
def test_ways(name, way, monkeypatch):
    only(monkeypatch, way)
    pair = EXAMPLES[name]()
    check_way(pair.model, pair.guide, pair.args, way)
