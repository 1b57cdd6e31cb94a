"""Lines of a log that are said once."""

import logging

from pyro_mcvae.ops.checks import each_once


def test_each_line_is_logged_once_inside(caplog):
    own, other = logging.getLogger("pyro_mcvae.evaluation.report"), logging.getLogger("other")
    with caplog.at_level("INFO"):
        with each_once():
            for _ in range(3):
                own.info("particles are %s", "batched")
                other.info("not ours")
        own.info("particles are %s", "batched")
    lines = [r.getMessage() for r in caplog.records]
    assert lines.count("particles are batched") == 2
    assert lines.count("not ours") == 3
    assert not own.filters
