"""From a system and a problem to a decision, by what there is, what fits and how far down a call may go."""
