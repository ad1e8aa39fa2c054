"""Moves KV blocks between vLLM's tensors and host memory, on a thread of its own."""
