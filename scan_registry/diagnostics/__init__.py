"""For people: why a call runs what it runs, what is wrong with an installation, and how large errors are."""
