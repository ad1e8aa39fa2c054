"""Many engine steps in one call of `schedule()`, exactly."""
