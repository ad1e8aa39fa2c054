"""Real servers: started, fed with programs, measured, stopped."""
