"""Linear recurrences, ``x[t] = gates[t] * x[t - 1] + tokens[t]``."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {
    "linear_scan": "op.function",
    "linear_scan_step": "op.step",
    "linear_scan_summary": "op.summary",
}
#: The same of the names in ``scan_registry.distributed``.
DISTRIBUTED = {"linear_scan": "op.distributed", "scan_summary": "op.distributed_summary"}
#: The same of the names in ``scan_registry.jax``.
JAX = {"linear_scan": "jax"}
