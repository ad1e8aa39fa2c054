"""Where KV goes when it leaves GPU memory: the contract of a lower tier, host memory
and LMCache."""
