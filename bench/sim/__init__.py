"""The neutral bench: vLLM's own scheduler and our connector in virtual time."""
