"""In which order waiting requests are served, and which of them may start."""
