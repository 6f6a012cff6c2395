"""Build time: plan -> compile -> pack. The run-time JIT calls the same compile function."""

#: What wheels are compiled with, as pip's requirements. Pinned: other versions make other bytes.
COMPILERS = ("triton==3.6.0", "nvidia-cuda-nvrtc-cu12==12.9.86")
