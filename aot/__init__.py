"""Build time: plan -> compile -> pack. The run-time JIT calls the same compile function."""
