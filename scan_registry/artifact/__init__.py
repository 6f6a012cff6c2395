"""What a build leaves: binaries, and the archives that hold them."""
