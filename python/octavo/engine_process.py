"""`python -m octavo.engine_process FOLDER`: one engine, at the other end of a front's socket.

The front starts it, gives it requests and starts another one if it dies; nothing is in it that cannot be rebuilt. The folder
has the engine's arguments (`config.json`: those of every replica, which one this is, and how many there are) and the socket, and
gets the step journal.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from setproctitle import setproctitle

from octavo._core import EngineLink
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.replica import share_machine

if TYPE_CHECKING:
    from octavo.startup import Started


def main(folder: Path) -> int:
    """Runs the engine until the front is gone; returns the exit code."""
    # Before anything slow: from now on this process ends with its front.
    link = EngineLink(folder)
    try:
        arguments = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = EngineConfig.from_kwargs(**arguments["engine"])
        setproctitle(f"octavo engine {config.model}")
        config, sharers = share_machine(config, arguments["replica"], arguments["num_replicas"])
        from octavo.startup import start  # noqa: PLC0415  loads torch

        started = start(config, sharers)
        link.serve(started.core, json.dumps(describe(config, started)))
        started.run_loop()
    except OctavoError as error:
        link.fail(str(error))
        return 2
    except BaseException as error:
        traceback.print_exc()
        link.fail(f"the engine stopped: {type(error).__name__}: {error}")
        return 1
    return 0


def describe(config: EngineConfig, started: Started) -> dict[str, object]:
    """What the front must know of the model: the fields of `octavo_wire::ModelInfo`."""
    template = started.chat_template
    return {
        "vocab_size": started.vocab_size,
        "max_model_len": started.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "cache_tokens": started.cache.num_tokens,
        "step_seconds": started.predict_step_seconds(config.threads),
        "max_logprobs": started.vocab_size if config.max_logprobs < 0 else config.max_logprobs,
        "eos_token_ids": started.eos_token_ids,
        "tokenizer": None if started.tokenizer_path is None else str(started.tokenizer_path.absolute()),
        "chat_template": None if config.chat_template is None or template is None else template.source,
        "hidden_size": started.model.spec.hidden_size,
        "pooling": started.pooling,
        "defaults": dict(started.sampling_defaults.values),
        "long_rope_above": started.model.decoder.long_rope_above,
        "weight_bytes": None if _has_experts(started) else started.model.stored_bytes,
        "read_bandwidth": _read_bandwidth(started),
    }


def _has_experts(started: Started) -> bool:
    """Which weights a step reads depends on its tokens."""
    return any(hasattr(layer.mlp, "num_experts") for layer in started.model.spec.layers)


def _read_bandwidth(started: Started) -> float | None:
    """Bytes a second of the processor's memory, if a benchmark has measured it here."""
    if started.ops.device.type != "cpu":
        return None
    from octavo.analysis.bandwidth import remembered  # noqa: PLC0415  loads torch

    return remembered()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
