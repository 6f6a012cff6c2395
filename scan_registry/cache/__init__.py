"""What was compiled and what was tuned on this machine."""
