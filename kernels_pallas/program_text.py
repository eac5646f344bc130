"""What the text of a compiled program (HLO) tells of it: which kernels are in it, and what is copied."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kernels_pallas.chips import Chip

KERNELS = "mosaic_gpu", "tpu_custom_call"
"""How the names of Pallas kernels begin that GPUs and TPUs call."""


def kernel_names(text: str) -> list[tuple[str, str]]:
    """Kernels that a program calls, in order: the jitted function, or op, that each is in, and its name there."""
    called = rf'custom_call_target="(?:{"|".join(KERNELS)})[^\n]*op_name="[^"]*jit\((\w+)\)/([^"]*)/\w+"'
    return re.findall(called, text)


def kernels_in(text: str) -> dict[str, int]:
    """How many kernels a program calls, by the jitted function, or op, that they are in."""
    return dict(Counter(op for op, _ in kernel_names(text)))


def whole_copies(text: str, shape: tuple[int, ...]) -> int:
    """Instructions that write a whole array of this shape anew: copies, transpositions, conversions."""
    dims = ",".join(map(str, shape))
    plain = rf"= \w+\[{dims}\]\S* (?:copy|transpose|convert)\("
    begun = rf"= \(\w+\[{dims}\][^=\n]* copy-start\("
    return len(re.findall(plain, text)) + len(re.findall(begun, text))


class Cycles(NamedTuple):
    """Of one device: of XLA's own instructions, by the compiler's estimates, and of kernels, by their floors."""

    least: int  # the cheapest branches, no turn of a loop
    most: int  # the dearest branches, one turn of a loop
    kernels: int


UNKNOWN = 1 << 60  # an estimate above is the compiler's way to say that it has none
BODY = re.compile(r"^(?:ENTRY )?%([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)


def cycles(text: str, chip: Chip) -> Cycles:
    """What a program for a TPU takes, as far as its text tells.

    Left out: transfers between devices, asynchronous copies, SparseCores, and kernels without a `pl.CostEstimate`.
    """
    bodies = {found[1]: found[2].splitlines() for found in BODY.finditer(text)}
    [entry] = re.findall(r"^ENTRY %([\w.\-]+)", text, re.MULTILINE)

    @functools.cache
    def of(name: str) -> tuple[int, int]:
        """The least and the most of a computation."""
        inner = [[(own, own)] if (own := _estimate(line)) else _inner(line, of) for line in bodies[name]]
        return sum(min(a for a, _ in way) for way in inner), sum(max(b for _, b in way) for way in inner)

    return Cycles(*of(entry), round(sum(_floor(line, chip) for body in bodies.values() for line in body)))


def _estimate(line: str) -> int:
    found = re.search(r'"estimated_cycles":"(\d+)"', line)
    return int(found[1]) if found and int(found[1]) < UNKNOWN else 0


def _inner(line: str, of: Callable[[str], tuple[int, int]]) -> list[tuple[int, int]]:
    """The computations of which an instruction runs one."""
    if branches := re.search(r" conditional\(.*branch_computations=\{([^}]*)\}", line):
        return [of(branch) for branch in re.findall(r"%([\w.\-]+)", branches[1])]
    if turned := re.search(r" while\(.*body=%([\w.\-]+)", line):
        return [(0, 0), of(turned[1])]
    if called := re.search(r" call\(.*to_apply=%([\w.\-]+)", line):
        return [of(called[1])]
    return [(0, 0)]


def _floor(line: str, chip: Chip) -> float:
    """Cycles of a kernel at full bandwidth or with full matrix units. It moves what it says, but no more than it is
    given: JAX's megablox counts a weight once for every tile of rows."""
    said = re.search(r'"cost_estimate":\{"flops":"(\d+)"[^}]*"bytes_accessed":"(\d+)"', line)
    if said is None:
        return 0.0
    results, _, rest = line.partition(" custom-call(")
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", rest)
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", results + (operands[1] if operands else ""))
    given = sum(math.prod(map(int, filter(None, dims.split(",")))) * _bytes(dtype) for dtype, dims in shapes)
    return max(int(said[1]) / chip.matrix_flops, min(int(said[2]), given) / chip.bandwidth) * chip.clock


def _bytes(dtype: str) -> int:
    """Of one element of a type by HLO's name, such as bf16, s32, f8e4m3fn or pred."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return max(1, int(digits[1]) // 8) if digits else 1
