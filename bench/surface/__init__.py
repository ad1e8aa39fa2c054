"""Which of vLLM's names and signatures ttlcache relies on, and who has them."""
