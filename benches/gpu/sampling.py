"""Sampling on one GPU: the kernels, and the torch sampler on the same logits.

The goal is 150 us for 256 rows of 128,256 logits with everything: temperature, top-k, top-p, min-p, penalties, a mask, the draw and
log-probabilities (the row "all + logprobs"). Figures of the kernels are replays of a CUDA graph; the next column is of the calls of
the sampler as an engine's step makes them, with the host's share; that of torch is of its calls. "of the limit" is the time of one
read of the logits at 4.25 TB/s over the time measured. Tokens are compared with the torch sampler's in the same run.

    python -m benches.gpu.sampling
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benches.gpu.limits import BYTES_PER_SECOND
from benches.gpu.rows import Row, number, show
from octavo.kernels.sampling import MASKED, REPORTED, Rows, SamplingKernels, SlotTables
from octavo.sampling import RowFlag, Sampler, SampleRows, SlotParams
from octavo.sampling.device import DeviceSampler
from octavo.sampling.state import FLOATS, INTS

VOCAB_SIZE = 128_256
ROWS = (1, 16, 64, 256)
HISTORY = 1_024
GOAL_US = 150
FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
PENALTIES = {"presence": 0.2, "frequency": 0.1, "repetition": 1.1}
ALL = "all + logprobs"
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "k, p, min-p": FILTERED,
    "p, penalties": {"temperature": 0.8, "top_p": 0.9} | PENALTIES,
    "logprobs": {"temperature": 0.8, "num_logprobs": 20},
    ALL: FILTERED | PENALTIES | {"num_logprobs": 20, "masked": 1},
}


class Entry:
    """A `slot_init` entry with the given numbers."""

    bias_ids = stop_ids = allowed_ids = np.empty(0, dtype=np.int32)
    bias_values = np.empty(0, dtype=np.float32)
    bad_words: list[np.ndarray] = []  # noqa: RUF012

    def __init__(self, slot: int, values: dict[str, float]):
        self.values = dict.fromkeys((*FLOATS, *INTS), 0.0) | {"top_p": 1.0, "repetition": 1.0}
        self.values |= {"slot": slot, "seed_lo": slot * 7 + 1, "seed_hi": 5, "choice": 0}
        self.values |= {"num_prompt_tokens": HISTORY // 2, "num_logprobs": -1, "num_prompt_logprobs": -1} | values

    def integer(self, name: str) -> int:
        return int(self.values[name])

    def number(self, name: str) -> float:
        return float(self.values[name])


def flags_of(values: dict[str, float]) -> int:
    """Row flags as a plan sets them."""
    names = set(values)
    return int(
        RowFlag.RANDOM * (values["temperature"] > 0)
        | RowFlag.FILTER * bool({"top_k", "top_p", "min_p"} & names)
        | RowFlag.PENALTIES * ("presence" in names)
        | RowFlag.LOGPROBS * ("num_logprobs" in names)
        | RowFlag.GRAMMAR * ("masked" in names)
    )


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
        rows = SampleRows(
            slots=torch.arange(count, device="cuda"),
            host_slots=np.arange(count, dtype=np.int32),
            flags=np.full(count, flags_of(values), dtype=np.int32),
            num_tokens=torch.full((count,), HISTORY, device="cuda"),
            max_num_tokens=HISTORY,
            token_ids=torch.randint(VOCAB_SIZE, (count + 1, HISTORY + 1), device="cuda", dtype=torch.int32),
        )
        if "masked" in values:
            words = (count, (VOCAB_SIZE + 31) // 32)
            # Half of the tokens.
            mask = torch.randint(-(2**31), 2**31, words, device="cuda").int()
            rows = replace(rows, grammar_mask=mask)
        return cls(rows, params, logits[:count])


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


def by_kernels(case: Case, kernels: SamplingKernels, out: Tensor, num_sampled: Tensor) -> Callable[[], object]:
    """The launches for all rows of a case, without what the host does beside them."""
    count, rows, tables = len(case.rows.slots), case.rows, case.params.tables()
    flags = int(rows.flags[0])
    reported = bool(flags & RowFlag.LOGPROBS)
    bits = MASKED.value * bool(flags & RowFlag.GRAMMAR) | REPORTED.value * reported
    ready = Rows(
        rows.slots,
        rows.num_tokens,
        rows.token_ids,
        bits=torch.full((count,), bits, dtype=torch.int32, device="cuda") if bits else None,
        mask=rows.grammar_mask,
        has_penalties=bool(flags & RowFlag.PENALTIES),
    )
    slot_tables = SlotTables(tables.floats, tables.ints, tables.keys[:, 0])
    which = torch.arange(count, device="cuda")

    def run() -> None:
        kernels(case.logits, ready, slot_tables, out, num_sampled)
        if reported:
            kernels.report(case.logits, which, out, 20)

    return run


def measure(what: str, case: Case, sampler: DeviceSampler, plain: Sampler, wanted: float | None) -> Row:
    """Time of the kernels, and how their results differ from torch's."""
    count = len(case.rows.slots)
    out = torch.empty(count, dtype=torch.int64, device="cuda")
    num_sampled = torch.empty(count, dtype=torch.int32, device="cuda")
    run = by_kernels(case, sampler._kernels, out, num_sampled)
    us = median_us(run, graph=True)
    called = median_us(lambda: sampler(case.logits, case.rows, case.params), graph=False)
    theirs = median_us(lambda: plain(case.logits.float(), case.rows, case.params), graph=False, repeat=3)
    expected = plain(case.logits.float(), case.rows, case.params)
    found = sampler(case.logits, case.rows, case.params)
    run()
    different = int(((out != expected.token_ids[:, 0]) | (found.token_ids != expected.token_ids)[:, 0]).sum())
    tasks = torch.bincount(sampler._kernels.tasks[:count], minlength=4).tolist()
    limit = count * VOCAB_SIZE * case.logits.element_size() / BYTES_PER_SECOND * 1e6
    more = {
        "called, us": number(called),
        "torch, us": number(theirs),
        "done/filter/race/slow": "/".join(map(str, tasks)),
        "tokens that differ from torch's": str(different),
    }
    if expected.logprobs is not None and found.logprobs is not None:
        error = (found.logprobs.logprobs - expected.logprobs.logprobs).abs().max()
        ids = int((found.logprobs.token_ids != expected.logprobs.token_ids).sum())
        ranks = int((found.logprobs.ranks != expected.logprobs.ranks).sum())
        more["logprobs: error, ids, ranks that differ"] = f"{error:.0e}, {ids}, {ranks}"
    return Row(what, us, "us", wanted, limit=limit, more=more)


def rows(
    counts: Sequence[int] = ROWS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    spread: float = 2.5,
    kinds: Sequence[str] = tuple(KINDS),
) -> Iterator[Row]:
    """Every kind of request at each number of rows."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    sampler, plain = DeviceSampler(VOCAB_SIZE, max_rows=max(counts), device=device), Sampler(VOCAB_SIZE)
    for dtype in dtypes:
        logits = (torch.randn(max(counts), VOCAB_SIZE, device=device) * spread).to(dtype)
        for count, name in itertools.product(counts, kinds):
            what = f"sampling {count} x {VOCAB_SIZE}, {name}, {str(dtype)[6:]}"
            yield measure(what, Case.of(count, KINDS[name], logits), sampler, plain, GOAL_US if count == 256 else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--spread", type=float, default=2.5, help="standard deviation of the logits")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    show(rows(arguments.rows, (torch.bfloat16, torch.float32), arguments.spread, arguments.kinds))


if __name__ == "__main__":
    main()
