"""Where KV goes when it leaves GPU memory: the contract of a lower tier, and LMCache as
one."""
