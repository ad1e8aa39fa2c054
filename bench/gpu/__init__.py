"""`make gpu`: what only a GPU can answer, in stages that can be resumed."""
