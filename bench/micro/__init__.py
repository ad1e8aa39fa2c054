"""Microseconds, bytes and GB/s of single parts."""
