"""What runs inside LMCache's server, and how that server is started."""
