"""What must not break: hostile clients, faults, long runs, schedules at random."""
