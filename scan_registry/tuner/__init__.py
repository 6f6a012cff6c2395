"""Which variants are the fastest on a GPU: time them all, problem by problem, and keep what was found."""
