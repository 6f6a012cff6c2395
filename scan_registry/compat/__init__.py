"""Other packages' functions, with their signatures and results, on this package's kernels.

``accelerated_scan``, ``sequential_scan`` and ``flashrnn`` stand in for the packages of these names: where
a program says ``from accelerated_scan.warp import scan``, put ``scan_registry.compat.`` before it. What
each function does differently from the one that it replaces is in its docstring; all of them also
take CPU tensors, sequences of any length and of any strides, and have derivatives of any order.
"""
