"""Faults that tests plant in a source and have to find."""

from __future__ import annotations


def faults_of(text: str) -> dict[str, tuple[str, str]]:
    """By name, what stands there and what takes its place: `name: right -> wrong`."""
    found = {}
    for line in text.strip().splitlines():
        name, _, change = line.partition(": ")
        right, _, wrong = change.partition(" -> ")
        found[name] = (right, wrong)
    return found
