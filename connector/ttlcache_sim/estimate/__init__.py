"""What ttlcache would change for the sessions of a log, in the simulator."""
