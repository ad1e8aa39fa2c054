"""Several real vLLM replicas behind a real vllm-router, on this machine."""
