"""
Whether latents are collapsed: the data see the guide's parameters, and no draw.

Pyro's ``VariationalGP`` and ``VariationalSparseGP`` integrate over their latent in closed form: the
density of the data is that under the guide's mean and covariance, whatever was drawn. In a mean of
log weights this is the ELBO. In a log of mean weights the draw meets its prior alone, of which the
mean is 1: the divergence vanishes, and what remains is no bound.
"""

from __future__ import annotations

from pyro_mcvae.structure.blocks import Structure


def check_not_collapsed(structure: Structure) -> None:
    """
    Check that the draws may be weighed.

    :raises ValueError: naming the site that has the guide's parameters in the place of its draws.
    """
    if structure.collapsed is not None and structure.blocks:
        latent, data = structure.collapsed
        raise ValueError(
            f"site '{data}' of the model has the parameters of the guide's site '{latent}' in it "
            f"and not its draws, as where the latent is integrated in closed form (VariationalGP, "
            f"VariationalSparseGP). Weights of such draws are no bound on the evidence: use "
            f"TraceSGVB_ELBO, or a model that reads its latent, as in x = f({latent})"
        )
