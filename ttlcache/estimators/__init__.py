"""What the past says: gap lengths, seconds of a prefill or reload, the price of memory.
Arithmetic."""
