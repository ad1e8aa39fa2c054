"""Objects on disk: files with a digest, an index of them, moves between CPU memory and
disk."""
