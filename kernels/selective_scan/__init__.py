"""Mamba's selective scan."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {"selective_scan": "op.function"}
#: The same of the names in ``scan_registry.distributed``.
DISTRIBUTED = {"selective_scan": "op.distributed"}
#: The same of the names in ``scan_registry.jax``.
JAX = {"selective_scan": "jax"}
