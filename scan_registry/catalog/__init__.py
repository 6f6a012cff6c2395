"""What is installed: distributions, those that bring archives, and all that these hold."""
