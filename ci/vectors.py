"""Whether the CPU kernels' machine code for aarch64 computes in NEON's vector registers.

Compilers do not report the loops that they cannot vectorise, so only the machine code shows them. x86-64
needs no such check: its kernels use intrinsics, and tests run both of its levels of vector instructions.

Needs capstone and pyelftools, which requirements.txt installs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO

from capstone import CS_ARCH_ARM64, CS_MODE_ARM, Cs
from elftools.elf.elffile import ELFFile

_MULTIPLY_ADD = r"fml[as]\.(4s|2d)"
_TYPES = "(float32|float64|complex64|complex128)"
#: By the pattern of functions of the C sources: how many of them, at least, have to have an instruction in a loop,
#: and the pattern of the instruction. Numbers are least ones, as a compiler may copy a function for a constant
#: argument, and may inline the convolution or not.
WANTED: Mapping[str, tuple[int, str]] = {
    f"(forward|backward|products)_{_TYPES}_portable": (12, _MULTIPLY_ADD),
    f"(add|fold)_{_TYPES}_portable": (8, r"fadd\.(4s|2d)"),
    "(forward|convolve)(_task)?_portable": (3, _MULTIPLY_ADD),
    "backward_task_portable": (3, _MULTIPLY_ADD),
    "(forward|backward)_(hgrn|min_gru|min_lstm|rg_lru)_portable": (8, _MULTIPLY_ADD),
    "multiply_portable": (1, _MULTIPLY_ADD),
    "widen_float16_portable": (1, r"fcvtl2?\.4s"),
    "narrow_float16_portable": (1, r"fcvtn2?\.(4h|8h)"),
    "widen_bfloat16_portable": (1, r"(shl|shll|ushll)2?\.4s"),
    "narrow_bfloat16_portable": (1, r"(usra|ushr|shrn)2?\.(4s|4h|8h)"),
    "transpose_4_portable": (1, r"(zip|uzp|trn)[12]\.(4s|2d)"),
}


@dataclass(frozen=True)
class Instruction:
    """``text`` is the mnemonic, with the first register's arrangement after a dot: fmla.4s."""

    address: int
    text: str
    target: int | None


@dataclass(frozen=True)
class Function:
    name: str
    instructions: tuple[Instruction, ...]

    def loops(self) -> Iterator[tuple[Instruction, ...]]:
        """The instructions of each loop: from the target of a backward branch to that branch."""
        for end, instruction in enumerate(self.instructions):
            if (
                instruction.target is not None
                and self.instructions[0].address <= instruction.target <= instruction.address
            ):
                start = (instruction.target - self.instructions[0].address) // 4
                yield self.instructions[start : end + 1]

    def computes(self, wanted: str) -> bool:
        pattern = re.compile(wanted)
        return any(pattern.fullmatch(line.text) for loop in self.loops() for line in loop)


def decoded(name: str, code: bytes, address: int) -> Function:
    return Function(name, tuple(_instructions(code, address)))


def _instructions(code: bytes, address: int) -> Iterator[Instruction]:
    engine = Cs(CS_ARCH_ARM64, CS_MODE_ARM)
    engine.skipdata = True
    for at, _, mnemonic, operands in engine.disasm_lite(code, address):
        arrangement = re.match(r"v\d+\.(\d+[bhsdq])", operands)
        text = f"{mnemonic}.{arrangement[1]}" if arrangement else mnemonic
        branch = re.search(r"#0x([0-9a-f]+)$", operands) if _BRANCH.match(mnemonic) else None
        yield Instruction(at, text, int(branch[1], 16) if branch else None)


_BRANCH = re.compile(r"b(\..+)?$|cbn?z$|tbn?z$")


def functions(library: bytes) -> list[Function]:
    """The functions in the symbol table of a shared library for aarch64. Raises ``ValueError`` if the library is
    for another machine, or if its symbols were stripped."""
    elf = ELFFile(BytesIO(library))
    if elf.get_machine_arch() != "AArch64":
        raise ValueError(f"is machine code for {elf.get_machine_arch()}, not for AArch64")
    table = elf.get_section_by_name(".symtab")
    if table is None:
        raise ValueError("has no table of symbols")
    listed = []
    for symbol in table.iter_symbols():
        index = symbol["st_shndx"]
        if symbol["st_info"]["type"] == "STT_FUNC" and isinstance(index, int) and symbol["st_size"]:
            section = elf.get_section(index)
            start = symbol["st_value"] - section["sh_addr"]
            code = section.data()[start : start + symbol["st_size"]]
            listed.append(decoded(symbol.name, code, symbol["st_value"]))
    return listed


def scalar(code: list[Function], wanted: Mapping[str, tuple[int, str]] = WANTED) -> Iterator[str]:
    """A line for each pattern of which too few functions have the instruction in a loop. A function that was
    renamed counts as missing, so that a check does not silently go out of use."""
    for pattern, (least, instruction) in wanted.items():
        named = ((function, function.name.partition(".")[0]) for function in code)
        meant = [function for function, name in named if re.fullmatch(pattern, name)]
        able = [function.name for function in meant if function.computes(instruction)]
        if len(able) < least:
            others = ", ".join(f.name for f in meant if f.name not in able) or "none"
            yield f"{instruction} is in loops of {len(able)} functions {pattern}, not {least}; without: {others}"
