"""Options that are out of range: constructors refuse them with the value and the remedy."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    AdaptiveStepSize,
    LearnedMomentum,
    LearnedSchedule,
    LearnedStepSize,
    LeaveOneOut,
    LinearSchedule,
    RandomWalk,
    ScoreNetwork,
    SigmoidSchedule,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceRenyi_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.parameters import FixedStepSize, as_step_size
from pyro_mcvae.chains.schedules import FixedSchedule, as_schedule

NAN, INF = math.nan, math.inf
RB, SIS, AIS = TraceRaoBlackwell_ELBO, TraceSIS_ELBO, TraceAIS_ELBO
SHARE = "must be at least 0 and less than 1, .*got"
BOUNDS = "bounds must be two increasing positive numbers"
INITIAL = "initial must be more than 0 and less than 0.999"
REWEIGHTED = {"gradient_estimator": "reweighted"}
three = partial(ScoreNetwork, 3)

# The constructor, its options, the message.
CASES = [
    # Objectives.
    *(
        (cls, {"num_particles": n}, "num_particles must be an int of at least 1, got")
        for cls in (TraceSGVB_ELBO, TraceIWAE_ELBO)
        for n in (0, -1, 1.5, "2", True, None, np.bool_(True), torch.tensor([3]))
    ),
    *((RB, {"max_plate_nesting": n}, "max_plate_nesting must be") for n in (None, -1, 2.5, "1")),
    *(
        (cls, {name: "no"}, f"{name} must be True.* got 'no'")
        for cls, name in (
            *((TraceIWAE_ELBO, "joint"), (TraceSGVB_ELBO, "analytic_kl"), (SIS, "multi_sample")),
            *((TraceIWAE_ELBO, f) for f in ("vectorize_particles", "retain_graph")),
            (TraceIWAE_ELBO, "strict_enumeration_warning"),
        )
    ),
    *(
        (TraceRenyi_ELBO, {"alpha": a}, "of at least 0 other than 1, got")
        for a in (-0.5, 1, INF, NAN)
    ),
    (TraceTruncated_ELBO, {"num_gradient_states": 0}, "num_gradient_states must be an int of"),
    (TraceTruncated_ELBO, {"num_sampled_states": 0}, "num_sampled_states must be an int of"),
    # Discrete sites.
    *((cls, {"num_categories": -1}, "an int of at least 0 .* got -1") for cls in (RB, AIS)),
    *((cls, {"baseline": "nvil"}, "must be a Baseline.* got 'nvil'") for cls in (RB, AIS)),
    *((c, {"baseline": LeaveOneOut()}, "needs num_samples >= 2, got 1") for c in (RB, AIS)),
    (RB, {"num_categories": 1.5}, r"num_categories must be .* got 1\.5"),
    (RB, {"num_samples": -2}, "num_samples must be an int of at least 0, got -2"),
    (RB, {"num_categories": 0, "num_samples": 0}, "pass num_samples >= 1"),
    (RB, {"budget": 0}, "budget must be an int of at least 1, got 0"),
    (RB, {"budget": 1, "baseline": LeaveOneOut()}, "needs budget >= 2, got 1"),
    (RB, {"entropy": "none"}, "entropy must be 'sampled' or 'exact', got 'none'"),
    (AIS, {"budget": 2, "num_samples": 1}, "budget=2 is the number of evaluated values"),
    # Chains.
    (SIS, {"num_steps": 0}, "num_steps must be an int of at least 1, got 0"),
    (SIS, {"num_steps": 4, "schedule": SigmoidSchedule(3)}, "num_steps=4, but.* 3 steps"),
    (SIS, {"coordinates": "value"}, "noise, latent, got 'value'"),
    (SIS, {"kernel": "ula"}, "must be a Kernel.*'ula'"),
    (SIS, {"schedule": LearnedSchedule(3), **REWEIGHTED}, "schedule.logits would get no gradient"),
    *(
        (SIS, {"kernel": k(0.1)}, f"which the rejections of {k.__name__} do not have")
        for k in (MALA, HMC, RandomWalk)
    ),
    *(
        (AIS, {"kernel": k(0.1)}, f"leave their target invariant, which {k.__name__}")
        for k in (ULA, UnderdampedLangevin)
    ),
    *(
        (SIS, {"defensive": d}, "defensive must be a number from 0 to below 1, got")
        for d in (-0.1, 1.0, NAN, True, "0.1")
    ),
    (SIS, {"defensive": 0.1, **REWEIGHTED}, r"defensive=0\.1 limits the effect .*leave it"),
    (
        SIS,
        {"kernel": UnderdampedLangevin(0.1, full_mass=True), **REWEIGHTED},
        "the MassMatrix would get no gradient",
    ),
    (
        SIS,
        {"num_steps": 4, "kernel": UnderdampedLangevin(0.1, reverse=three())},
        "the reverse has num_transitions=3 values",
    ),
    *(
        (cls, {"num_steps": 5, "kernel": k}, rf"{name} has num_transitions=4 values")
        for cls, k, name in (
            (SIS, ULA(LearnedStepSize(0.1, 4)), "step_size"),
            (SIS, UnderdampedLangevin(0.1, momentum=LearnedMomentum(0.9, 4)), "momentum"),
            (AIS, HMC(LearnedStepSize(0.1, 4)), "step_size"),
        )
    ),
    # Kernels.
    *(
        (cls, {"step_size": value}, "step_size must be positive and finite")
        for cls, value in zip(
            (ULA, MALA, HMC, RandomWalk, UnderdampedLangevin),
            (0, -0.1, NAN, INF, torch.tensor([1.0, 0.0])),
            strict=True,
        )
    ),
    *((HMC, {name: v}, f"{name} {SHARE}") for name in ("jitter", "laziness") for v in (-0.1, 1.0)),
    *((HMC, {"num_leapfrog": n}, "an int of at least 1, got") for n in (0, -1, 2.0, True, None)),
    *((UnderdampedLangevin, {"momentum": m}, SHARE) for m in (-0.1, 1.0, NAN, True)),
    (UnderdampedLangevin, {"reverse": 64}, "reverse must be a module .* got 64"),
    (UnderdampedLangevin, {"full_mass": 1}, "full_mass must be True or False, got 1"),
    (three, {"width": 0}, "width must be an int of at least 1"),
    (ScoreNetwork, {"num_transitions": 0}, "num_transitions must be an int of at least 1"),
    # Step sizes and momenta.
    *(
        (cls, {name: value}, "must be positive and finite.*, got")
        for cls, name in (
            *((FixedStepSize, "value"), (LearnedStepSize, "initial")),
            (AdaptiveStepSize, "initial"),
        )
        for value in (0, -0.1, NAN, INF, torch.tensor([0.1, 0.0]))
    ),
    (LearnedStepSize, {"initial": torch.ones(2, 2)}, "one number or one per coordinate"),
    (LearnedStepSize, {"initial": 0.1, "num_transitions": 0}, "an int of at least 1"),
    (LearnedStepSize, {"initial": AdaptiveStepSize(), "warmup": 0}, "an int of at least 1"),
    *((AdaptiveStepSize, {"target_acceptance": a}, "between 0 and 1, got") for a in (0, 1, NAN)),
    *((AdaptiveStepSize, {"rate": r}, "rate must be between 0 and 1, got") for r in (0.0, 1.5)),
    *((AdaptiveStepSize, {"bounds": b}, BOUNDS) for b in ((0.0, 1.0), (2.0, 1.0), (1.0, INF))),
    *((as_step_size, {"value": v}, "a positive number or a StepSize") for v in ("0.1", [0.1])),
    *((LearnedMomentum, {"initial": v}, INITIAL) for v in (0.0, 1.0, torch.tensor([0.5, 1.0]))),
    (LearnedMomentum, {"initial": "0.9"}, "initial must be a number or a tensor, got '0.9'"),
    # Schedules.
    *(
        (cls, {"num_steps": n}, "num_steps must be an int of at least 1, got")
        for cls in (LinearSchedule, SigmoidSchedule, LearnedSchedule)
        for n in (0, -1, 2.0, True, None)
    ),
    *(
        (FixedSchedule, {"betas": torch.tensor(b)}, r"must increase from 0 to 1.*, got")
        for b in (
            *([0.0, 0.5, 0.5, 1.0], [0.0, 0.7, 0.3, 1.0], [0.1, 0.5, 1.0], [0.0, 0.5, 0.9]),
            *([0.0, 0.5, 1.1], [1.0, 0.0], [0.0], [], [0.0, NAN, 1.0], [[0.0, 1.0]]),
        )
    ),
    *((partial(SigmoidSchedule, 3), {"slope": s}, "slope must be positive") for s in (0.0, NAN)),
    *(
        (as_schedule, {"schedule": s}, "schedule must be a Schedule such as LinearSchedule")
        for s in ("linear", {"a": 1}, LinearSchedule)
    ),
]


@pytest.mark.parametrize(("make", "options", "message"), CASES)
def test_options_out_of_range_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
