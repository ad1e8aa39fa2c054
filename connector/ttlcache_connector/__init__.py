"""The vLLM side of ttlcache: the only Python that sees vllm and torch."""
