"""One client that wants everything: sessions without end, TTLs for ever, huge ids."""
