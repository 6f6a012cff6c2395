"""Causal convolutions of single channels."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {
    "causal_conv1d": "op.function",
    "causal_conv1d_update": "op.function",
}
#: The same of the names in ``scan_registry.distributed``.
DISTRIBUTED = {"causal_conv1d": "op.distributed"}
#: The same of the names in ``scan_registry.jax``.
JAX = {"causal_conv1d": "jax"}
