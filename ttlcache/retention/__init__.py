"""How long a finished turn is held, which pins give way under pressure, and where a pin
ends."""
