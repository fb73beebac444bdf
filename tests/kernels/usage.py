"""What a compiled kernel takes of a multiprocessor, for the scripts that compile kernels for sm_90."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from triton.backends import nvidia


def usage(kernel: Any, folder: str | Path) -> str:
    """`registers=… local=… stack=… shared=…` of what `triton.compile` made; the binary is left in the folder."""
    binary = Path(folder) / f"{kernel.metadata.name}.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, local, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "LOCAL", "STACK"))
    return f"registers={registers} local={local} stack={stack} shared={kernel.metadata.shared}"
