"""A minimal stand-in for the worker: sequences with scattered blocks, stepped through a decoder in any grouping."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from octavo.models.decoder import Decoder
from octavo.ops.base import AttentionMetadata, Batch


@dataclass
class Sequence:
    tables: list[dict[int, int]]
    """Of each cache group the block of each column that is still held."""
    length: int = 0
    shared: set[int] = field(default_factory=set)
    """Blocks that another sequence holds too."""


class PagedModel:
    """Runs steps of a decoder over a cache whose blocks are handed out in a scrambled order.

    Blocks that left the window of their group are filled with another content and handed out again.
    """

    def __init__(self, decoder: Decoder, num_blocks: int = 512, block_size: int = 16, seed: int = 0):
        self.decoder = decoder
        self.block_size = block_size
        self.cache = decoder.allocate_kv_cache(num_blocks, block_size)
        self.windows = tuple(group.window for group in decoder.cache_groups)
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)

    def sequence(self, shared: Sequence | None = None, shared_blocks: int = 0) -> Sequence:
        """A new sequence, optionally on top of another one's first blocks."""
        if shared is None:
            return Sequence([{} for _ in self.windows])
        tables = [{c: b for c, b in table.items() if c < shared_blocks} for table in shared.tables]
        used = {block for table in tables for block in table.values()}
        shared.shared |= used
        return Sequence(tables, shared_blocks * self.block_size, used)

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        for table in sequence.tables:
            for column in range(max(table, default=-1) + 1, num_blocks):
                table[column] = self.free.pop()

    def leave_window(self, sequence: Sequence) -> None:
        """Gives back what the next token cannot see."""
        for window, table in zip(self.windows, sequence.tables, strict=True):
            seen = 0 if window is None else max(0, sequence.length - window + 1) // self.block_size
            for column in [column for column in table if column < seen]:
                block = table.pop(column)
                if block not in sequence.shared:
                    self.free.insert(0, block)
                    for layer in self.cache:
                        layer[block] = 9.0

    def batch(self, rows: list[tuple[Sequence, list[int]]], *, padding: int = 0, all_logits: bool = False) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self.windows]
        starts, last = [0], []
        for sequence, tokens in rows:
            self.leave_window(sequence)
            for token in tokens:
                column, offset = divmod(sequence.length, self.block_size)
                self.reserve(sequence, column + 1)
                ids.append(token)
                positions.append(sequence.length)
                for group, table in zip(slots, sequence.tables, strict=True):
                    group.append(table[column] * self.block_size + offset)
                sequence.length += 1
            starts.append(len(ids))
            last.append(len(ids) - 1)
        # Decode rows come first; a row of one query token counts as one.
        decode_rows = 0
        while decode_rows < len(rows) and len(rows[decode_rows][1]) == 1:
            decode_rows += 1
        lengths = [sequence.length for sequence, _ in rows]
        width = -(-max(lengths) // self.block_size)
        total = len(ids)
        tables = [
            [[sequence.tables[group].get(column, 0) for column in range(width)] for sequence, _ in rows]
            for group in range(len(self.windows))
        ]
        for _ in range(padding):
            ids.append(0)
            positions.append(0)
            starts.append(total)
            lengths.append(0)
            for group, table in zip(slots, tables, strict=True):
                group.append(0)
                table.append([0] * width)
        device = self.decoder.ops.device
        return Batch(
            input_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            logits_indices=torch.arange(total, device=device) if all_logits else torch.tensor(last, device=device),
            attention=AttentionMetadata(
                slot_mapping=torch.tensor(slots, device=device),
                query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
                seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
                block_table=torch.tensor(tables, dtype=torch.int32, device=device),
                group_windows=self.windows,
                block_size=self.block_size,
                max_query_len=max(len(tokens) for _, tokens in rows),
                max_seq_len=max(lengths),
                num_decode_rows=decode_rows,
                max_decode_query_len=1,
            ),
        )

    def step(
        self, rows: list[tuple[Sequence, list[int]]], *, padding: int = 0, all_logits: bool = False
    ) -> torch.Tensor:
        """Logits `[n, V]` of each row's last token, or of every token."""
        return self.decoder.forward(self.batch(rows, padding=padding, all_logits=all_logits), self.cache).cpu()

    def prefill(self, sequence: Sequence, tokens: list[int], chunk: int) -> torch.Tensor:
        """Logits of every token, the prompt cut into chunks."""
        pieces = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return torch.cat([self.step([(sequence, piece)], all_logits=True) for piece in pieces])

    def greedy(self, prompt: list[int], count: int, stop: tuple[int, ...] = ()) -> list[int]:
        """`count` tokens by argmax, or fewer if one of `stop` comes."""
        sequence, tokens, out = self.sequence(), prompt, []
        while len(out) < count and not (out and out[-1] in stop):
            tokens = [int(self.step([(sequence, tokens)]).argmax())]
            out += tokens
        return out
