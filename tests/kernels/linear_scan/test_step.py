"""What the CUDA kernels of linear_scan compute at one position, compiled for the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

import pytest

from scan_registry.aot.nvrtc import Nvrtc
from scan_registry.kernels.linear_scan.spec import FAMILY

#: The affine maps that a position's elements and the padding give, of each direction: scale and shift; then the gradients.
MAPS = """
#include "../linear_scan/step.cuh"
extern "C" __global__ void maps(const float* in, float* out) {
    const auto put = [&](int at, Step step) { out[at] = step.scale, out[at + 1] = step.shift; };
    put(0, ForwardStep::map(in[0], in[1]));
    put(2, BackwardStep::map(in[0], in[2]));
    using F = ForwardStep::Padding;
    using B = BackwardStep::Padding;
    put(4, ForwardStep::map(GateElement::widen(F::GATE), Element::widen(F::TOKEN)));
    put(6, BackwardStep::map(GateElement::widen(B::GATE), Element::widen(B::GRAD)));
    const auto to = BackwardStep::gradients(in[0], in[2], in[3], in[4]);
    out[8] = to.gate, out[9] = to.token, out[10] = to.earlier;
    out[11] = __CUDA_ARCH__;
}
"""


@pytest.mark.parametrize("arch", [800, 1200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_position_is_the_recurrence_and_padding_the_identity(
    dtype: str, arch: int, cuda_emulator: ModuleType, tmp_path: Path
) -> None:
    kernel = FAMILY.kernel("time_last_forward", "cuda")
    texts = {**Nvrtc().sources(kernel), "maps.cu": MAPS}
    constants = {"ELEMENT": dtype, "GATE_ELEMENT": dtype, "MAY_RESET": 0}
    library = cuda_emulator.library_of("maps.cu", "maps", texts, constants, tmp_path, arch)
    gate, token, grad, earlier, h = given = (0.75, -3.0, 0.5, 2.0, 4.0)
    numbers, out = (ctypes.c_float * 5)(*given), (ctypes.c_float * 12)()
    pointers = [ctypes.c_void_p(ctypes.addressof(each)) for each in (numbers, out)]
    arguments = (ctypes.c_void_p * 2)(*map(ctypes.addressof, pointers))
    cuda_emulator.emulate(library, arguments, (1, 1, 1))
    forward, backward, forward_padding, backward_padding = (
        tuple(out[i : i + 2]) for i in (0, 2, 4, 6)
    )
    assert forward == (gate, token)
    assert backward == (gate, gate * grad)
    assert forward_padding == backward_padding == (1, 0)
    to_token = grad + h
    assert tuple(out[8:11]) == (to_token * earlier, to_token, gate * to_token)
    assert out[11] == arch
