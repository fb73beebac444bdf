"""Sampling on one GPU: the kernels that share a row, the kernel of one program a row, and the torch sampler, on the same logits.

Every figure of the kernels is a replay of a CUDA graph, that of the torch sampler is of its launches. "of the limit" is the time
of one read of the logits at 4.25 TB/s over the time measured. Tokens are compared with the torch sampler's in the same run.

    python -m benches.gpu.sampling
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benches.gpu.limits import BYTES_PER_SECOND
from benches.gpu.rows import Row, number, show
from octavo.kernels import launch, sampling
from octavo.kernels.split_sampling import SlotTables, SplitSampler
from octavo.sampling import RowFlag, Sampler, SampleRows, SlotParams
from octavo.sampling.device import _COLUMNS
from octavo.sampling.state import FLOATS, GREEDY_TEMPERATURE, INTS

VOCAB_SIZE = 128_256
ROWS = (1, 16, 64, 256)
HISTORY = 1_024
DEMANDED_US = 150.0
FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
PENALTIES = {"presence": 0.2, "frequency": 0.1, "repetition": 1.1}
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "k, p, min-p": FILTERED,
    "all": FILTERED | PENALTIES,
    "p, penalties": {"temperature": 0.8, "top_p": 0.9} | PENALTIES,
}


class Entry:
    """A `slot_init` entry with the given numbers."""

    bias_ids = stop_ids = allowed_ids = np.empty(0, dtype=np.int32)
    bias_values = np.empty(0, dtype=np.float32)
    bad_words: list[np.ndarray] = []  # noqa: RUF012

    def __init__(self, slot: int, values: dict[str, float]):
        self.values = dict.fromkeys((*FLOATS, *INTS), 0.0) | {"top_p": 1.0, "repetition": 1.0}
        self.values |= {
            "slot": slot,
            "seed_lo": slot * 7 + 1,
            "seed_hi": 5,
            "choice": 0,
            "num_prompt_tokens": HISTORY // 2,
        }
        self.values |= {"num_logprobs": -1, "num_prompt_logprobs": -1} | values

    def integer(self, name: str) -> int:
        return int(self.values[name])

    def number(self, name: str) -> float:
        return float(self.values[name])


@dataclass
class Case:
    """Rows of one kind, ready for every sampler."""

    rows: SampleRows
    params: SlotParams
    logits: Tensor

    @classmethod
    def of(cls, count: int, values: dict[str, float], logits: Tensor) -> Case:
        params = SlotParams(count + 1, VOCAB_SIZE, torch.device("cuda"))
        for slot in range(count):
            params.set(Entry(slot, values))
        flags = RowFlag.RANDOM * (values["temperature"] > 0) | RowFlag.FILTER * bool(
            {"top_k", "top_p", "min_p"} & set(values)
        )
        flags |= RowFlag.PENALTIES * ("presence" in values)
        return cls(
            SampleRows(
                slots=torch.arange(count, device="cuda"),
                host_slots=np.arange(count, dtype=np.int32),
                flags=np.full(count, int(flags), dtype=np.int32),
                num_tokens=torch.full((count,), HISTORY, device="cuda"),
                max_num_tokens=HISTORY,
                token_ids=torch.randint(VOCAB_SIZE, (count + 1, HISTORY + 1), device="cuda", dtype=torch.int32),
            ),
            params,
            logits[:count],
        )


def median_us(run: Callable[[], object], *, graph: bool, repeat: int = 15) -> float:
    """Of replays, or of calls, after three."""
    run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 4)]
    for mark in marks:
        run()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks[3:]))
    return times[len(times) // 2] * 1e3


def measure(what: str, case: Case, sampler: SplitSampler, is_greedy: bool, has_penalties: bool) -> Row:
    count, rows, tables = len(case.rows.slots), case.rows, case.params.tables()
    out = torch.empty(count, dtype=torch.int64, device="cuda")
    num_sampled = torch.empty(count, dtype=torch.int32, device="cuda")
    slot_tables = SlotTables(tables.floats, tables.ints, tables.keys[:, 0])

    def ours() -> None:
        sampler(
            case.logits,
            rows.slots,
            rows.num_tokens,
            rows.token_ids,
            slot_tables,
            out,
            num_sampled,
            all_greedy=is_greedy,
        )

    def one_program() -> None:
        sampling.sample(
            case.logits, rows.slots, rows.num_tokens, tables.floats, tables.ints, tables.keys[:, 0], _COLUMNS, VOCAB_SIZE,
            GREEDY_TEMPERATURE,
        )  # fmt: skip

    def torch_sampler() -> Tensor:
        return Sampler(VOCAB_SIZE)(case.logits.float(), rows, case.params).token_ids[:, 0]

    launch.set_dependent_launch(False)
    plain = median_us(ours, graph=True)
    launch.set_dependent_launch(True)
    us = median_us(ours, graph=True)
    expected = torch_sampler()
    ours()
    different = int((out != expected).sum())
    limit = count * VOCAB_SIZE * case.logits.element_size() / BYTES_PER_SECOND * 1e6
    more = {"not dependent, us": number(plain)}
    if not has_penalties:
        more["one program a row, us"] = number(median_us(one_program, graph=True))
    more["torch, us"] = number(median_us(torch_sampler, graph=False, repeat=3))
    more["rows by bisection"] = str(int((sampler._state[:count] == 4).sum()))
    more["tokens that differ from torch's"] = str(different)
    demanded = DEMANDED_US if count == 256 and case.logits.dtype == torch.bfloat16 else None
    return Row(what, us, "us", demanded, limit=limit, more=more)


def rows(
    counts: Sequence[int] = ROWS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    spread: float = 2.5,
    chunk: int = 4096,
) -> Iterator[Row]:
    """Every kind of request at each number of rows."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    sampler = SplitSampler(VOCAB_SIZE, max(counts), device, GREEDY_TEMPERATURE, chunk)
    for dtype in dtypes:
        logits = (torch.randn(max(counts), VOCAB_SIZE, device=device) * spread).to(dtype)
        for count, (name, values) in itertools.product(counts, KINDS.items()):
            what = f"sampling {count} x {VOCAB_SIZE}, {name}, {str(dtype)[6:]}"
            yield measure(what, Case.of(count, values, logits), sampler, name == "greedy", "presence" in values)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--spread", type=float, default=2.5, help="standard deviation of the logits")
    parser.add_argument("--chunk", type=int, default=4096)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    show(rows(arguments.rows, (torch.bfloat16, torch.float32), arguments.spread, arguments.chunk))


if __name__ == "__main__":
    main()
