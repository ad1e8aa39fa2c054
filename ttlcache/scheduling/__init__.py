"""In which order waiting requests are served, which of them may start, and which pins
give way for them."""
