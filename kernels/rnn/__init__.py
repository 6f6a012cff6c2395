"""Recurrent networks whose recurrent matrix is block-diagonal."""

#: Public names of the package, and the modules of this folder that define them.
PUBLIC = {
    "rnn": "op.function",
    "rnn_buffers": "op.buffers",
}
