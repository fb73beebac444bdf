"""What transformers says of the built-in text with the built-in models' weights, kept in `tests/golden/quality-<model>.json`.

Made by `python -m tests.quality.golden` in a few minutes; the tests then need octavo alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.models.catalog import BUILT_IN, resolve_model
from octavo.quality.oracle import ModelOracle, TokenizerOracle, transformers_version
from octavo.quality.texts import sample_text
from octavo.quality.traces import Trace

MODELS = ("smollm2-135m", "gemma3-270m")
TOKENS = 200
PROMPT = "The capital city of France is called"
ANSWER = 10
_FOLDER = Path(__file__).parents[1] / "golden"


def golden_path(model: str) -> Path:
    return _FOLDER / f"quality-{model}.json"


def load_golden(model: str) -> dict[str, Any]:
    return json.loads(golden_path(model).read_text())


def make(model: str) -> dict[str, Any]:
    path = resolve_model(model).path
    tokenizer = TokenizerOracle(path)
    oracle = ModelOracle(path, threads=2)
    ids = tokenizer.encode(sample_text())[:TOKENS]
    nothing = np.zeros((len(ids) - 1, 1))
    trace = Trace(tuple(ids), 1, nothing[:, 0], nothing.astype(np.int64), nothing, answered=False)
    (truth,) = oracle.truths([trace], lambda _: None)
    prompt = tokenizer.encode(PROMPT)
    with torch.inference_mode():
        answer = oracle._model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False)
    return {
        "sha256": BUILT_IN[model].sha256,
        "transformers": transformers_version(gguf=True),
        "token_ids": ids,
        "logprobs": [round(float(x), 5) for x in truth.own],
        "likeliest": truth.best.tolist(),
        "prompt_ids": prompt,
        "answer_ids": answer[0, len(prompt) :].tolist(),
    }


def main() -> None:
    for model in MODELS:
        golden_path(model).write_text(json.dumps(make(model)) + "\n")


if __name__ == "__main__":
    main()
