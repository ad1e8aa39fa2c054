"""Whose request is this, and which turn does it continue? Holds no policy and no
memory."""
