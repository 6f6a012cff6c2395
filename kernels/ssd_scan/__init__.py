"""Mamba-2's state-space dual scan."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {"ssd_scan": "op.function"}
