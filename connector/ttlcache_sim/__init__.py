"""vLLM's own scheduler and our connector in virtual time: no GPU, no model."""
