"""The arms of a comparison: what differs from plain vLLM, and gates and orders of other
systems."""
