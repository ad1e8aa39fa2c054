"""In which order waiting requests are served, which of them may start, and what is
asked of pins for them."""
