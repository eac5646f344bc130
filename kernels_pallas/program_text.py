"""What the text of a compiled program (HLO) tells of it: which kernels are in it, and what is copied."""

import re
from collections import Counter

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
