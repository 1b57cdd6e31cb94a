"""Objectives by name: SGVB, IWAE-100, SIS-10; SIS-10x8 has eight chains inside the logarithm."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    LinearSchedule,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)

DEFAULT = ["SGVB", *(f"IWAE-{k}" for k in (10, 100, 1000)), "SIS-ULA-10"]
DEFAULT += [*(f"SIS-{k}" for k in (5, 10)), "SIS-10x8", "AIS-5", "AIS-10", "SIS-32"]
# "SIS-ULA-10": a kernel of the papers, or as it was, instead of the default.
KERNELS: dict[str, Callable[[int], dict[str, Any]]] = {
    "SIS-ULA": lambda k: {"kernel": ULA(), "schedule": LinearSchedule(k)},
    "SIS-fixed": lambda k: {"kernel": UnderdampedLangevin(), "schedule": LinearSchedule(k)},
    "AIS-MALA": lambda k: {"kernel": MALA(), "schedule": LinearSchedule(k)},
    "AIS-HMC": lambda k: {"kernel": HMC(), "schedule": LinearSchedule(k)},
}
_NAME = re.compile(r"(?P<family>[A-Za-z-]+?)(-(?P<size>\d+))?(x(?P<chains>\d+))?")


def objective(name: str) -> Any:
    """
    :raises ValueError: for a name that is none.
    """
    result = _NAME.fullmatch(name)
    family, size, chains = result.group("family", "size", "chains") if result else ("", None, None)
    if family == "SGVB":
        return TraceSGVB_ELBO()
    kind = {"IWAE": TraceIWAE_ELBO, "SIS": TraceSIS_ELBO, "AIS": TraceAIS_ELBO}.get(
        family.split("-")[0]
    )
    if kind is None or size is None or (kind is TraceIWAE_ELBO and family != "IWAE"):
        raise ValueError(f"no objective {name!r}: SGVB, IWAE-100, SIS-10, SIS-10x8, AIS-5, ...")
    if kind is TraceIWAE_ELBO:
        return TraceIWAE_ELBO(int(size), joint=True)
    options: dict[str, Any] = {"joint": True}
    if chains is not None:
        options |= {"num_particles": int(chains), "multi_sample": True}
    parts = KERNELS[family](int(size)) if family in KERNELS else {"num_steps": int(size)}
    return kind(**parts, **options)
