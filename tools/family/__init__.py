"""y = factor · x."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {"scale": "op.function"}
