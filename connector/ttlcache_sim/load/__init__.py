"""What the simulated clients send: programs, arrivals, gaps, from traces or drawn."""
