"""Linear recurrences whose gates the kernels compute."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {
    "gated_scan": "op.function",
    "hgrn": "op.kinds",
    "min_gru": "op.kinds",
    "min_lstm": "op.kinds",
    "rg_lru": "op.kinds",
}
#: The same of the names in ``scan_registry.distributed``.
DISTRIBUTED = {"gated_scan": "op.distributed"}
#: The same of the names in ``scan_registry.jax``.
JAX = {"gated_scan": "jax", "hgrn": "jax", "min_gru": "jax", "min_lstm": "jax", "rg_lru": "jax"}
