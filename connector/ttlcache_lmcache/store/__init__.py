"""Objects on disk: files with a digest, an index of them, copies in CPU memory."""
