"""CPU and disk tiers in virtual time."""
