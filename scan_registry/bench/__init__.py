"""How fast scans run here: beside installed peers, and beside the time it takes to move the bytes."""
