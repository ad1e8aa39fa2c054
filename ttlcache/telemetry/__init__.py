"""Counts and records what happened; never fails or delays what it watches."""
