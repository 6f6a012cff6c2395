"""What the operators of all families share: checks, calls, derivatives, and what commands ask of an operator."""
