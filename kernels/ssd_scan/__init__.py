"""Mamba-2's state-space dual scan."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {"ssd_scan": "op.function"}
#: The same of the names in ``scan_registry.distributed``.
DISTRIBUTED = {"ssd_scan": "op.distributed"}
#: The same of the names in ``scan_registry.jax``.
JAX = {"ssd_scan": "jax"}
