"""Our references on the blocks of vLLM's pool: of pins; above a lower tier also of
ended turns that are still cached or being copied."""
