"""One step of Mamba's selective scan."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {"selective_state_update": "op.function"}
