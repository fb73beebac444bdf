"""Every engine benchmark that needs no GPU, one after the other; docs/performance.md holds their tables.

python -m benches.engine.run
"""

from __future__ import annotations

import subprocess
import sys

BENCHES = (
    "benches.engine.replay",
    "benches.engine.transformers_peer",
    "benches.engine.divergence",
    "benches.engine.grammar",
)


def main() -> None:
    for bench in BENCHES:
        print(f"== {bench}", flush=True)
        subprocess.run([sys.executable, "-m", bench], check=True)


if __name__ == "__main__":
    main()
