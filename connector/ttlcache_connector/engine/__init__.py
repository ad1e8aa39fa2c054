"""What we know of vLLM: versions, the objects that we extend, what is read off its
requests."""
