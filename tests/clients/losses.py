"""Our losses, as clients are given them."""

from pyro_mcvae import (
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)

__all__ = ["LOSSES"]

LOSSES = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(3),
    "sis": lambda: TraceSIS_ELBO(2),
    "ais": lambda: TraceAIS_ELBO(2),
    "rb": TraceRaoBlackwell_ELBO,
    "renyi": lambda: TraceRenyi_ELBO(0.5, num_particles=3),
}
