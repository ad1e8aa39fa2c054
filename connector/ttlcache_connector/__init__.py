"""The vLLM side of ttlcache: on a server the only Python that sees vllm and torch."""
