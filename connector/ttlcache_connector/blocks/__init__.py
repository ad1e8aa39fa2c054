"""Our references on the blocks of vLLM's pool: of pins, and of ended turns that are
still cached."""
