"""Policies against recorded gaps: what each TTL costs, without an engine."""
