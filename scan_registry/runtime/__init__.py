"""From a decision to a launch: what is loaded, and what is compiled here first."""
