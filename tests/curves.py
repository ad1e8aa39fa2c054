"""Survival curves of a few durations, for tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ttlcache.estimators.survival import SurvivalCurve, survival_of_sorted


def kaplan_meier(durations: npt.ArrayLike, observed: npt.ArrayLike) -> SurvivalCurve:
    """Survival of `durations`, where `observed` is false for right-censored ones.

    Unlike the curves of a gap history, ties are merged: one entry per event time.
    """
    values = np.asarray(durations, dtype=np.float64)
    flags = np.asarray(observed, dtype=bool)
    curve = survival_of_sorted(np.sort(values[flags]), np.sort(values[~flags]))
    if len(curve.times) == 0:
        return curve
    last_of_tie = np.append(np.diff(curve.times) > 0, True)
    return SurvivalCurve(
        curve.times[last_of_tie], curve.survival[last_of_tie], curve.held_s[last_of_tie]
    )
