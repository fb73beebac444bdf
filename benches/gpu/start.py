"""From the start of a process to its first token, random weights, with kernels to compile and with kernels on disk.

python -m benches.gpu.start [--model llama-3-8b]

Each start is a process of its own whose Triton cache is a folder of this run: empty for the first, what the first left there for
the second. Peers: SGLang 103 s, vLLM 60 to 90 s (docs/performance.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Final

from benches.gpu.models import SHAPES, random_llm
from benches.gpu.rows import Row, show
from benches.gpu.workload import prompts, timed

DEMANDED: Final = {"cold": 15.0, "kernels cached": 8.0}
PEER_SECONDS: Final = 60.0


def start_seconds(model: str, cache: str) -> float:
    """Of one process, until it says that a token is there."""
    command = [sys.executable, "-m", "benches.gpu.start", "--model", model, "--child"]
    began = time.perf_counter()
    with subprocess.Popen(
        command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for said in process.stdout:
            if said.startswith("first token"):
                return time.perf_counter() - began
    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} before its first token")


def rows(model: str = "llama-3-8b") -> Iterator[Row]:
    """Cold, then with what that left."""
    is_known = model == "llama-3-8b"
    with tempfile.TemporaryDirectory(prefix="octavo-triton-") as cache:
        for state, demanded in DEMANDED.items():
            yield Row(
                f"{model}, start to first token, {state}", start_seconds(model, cache), "s",
                demanded if is_known else None, PEER_SECONDS if is_known else None,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.child:
        show(rows(args.model))
        return
    with random_llm(args.model, enable_prefix_caching=True) as llm:
        timed(llm, prompts(1, 16, 0), 1)
        print("first token", flush=True)


if __name__ == "__main__":
    main()
