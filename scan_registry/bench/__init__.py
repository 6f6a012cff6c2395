"""How fast scans run here: beside installed baselines, and beside the time it takes to move the bytes."""
