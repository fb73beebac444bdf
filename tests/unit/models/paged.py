"""A minimal stand-in for the worker: sequences with scattered blocks, stepped through a decoder in any grouping."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from octavo.models.decoder import Decoder
from octavo.ops.base import AttentionMetadata, Batch


@dataclass
class Sequence:
    blocks: list[int] = field(default_factory=list)
    length: int = 0


class PagedModel:
    """Runs steps of a decoder over a cache whose blocks are handed out in a scrambled order."""

    def __init__(self, decoder: Decoder, num_blocks: int = 512, block_size: int = 16, seed: int = 0):
        self.decoder = decoder
        self.block_size = block_size
        self.cache = decoder.allocate_kv_cache(num_blocks, block_size)
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)

    def sequence(self, shared: Sequence | None = None, shared_blocks: int = 0) -> Sequence:
        """A new sequence, optionally on top of another one's first blocks."""
        blocks = shared.blocks[:shared_blocks] if shared else []
        return Sequence(list(blocks), len(blocks) * self.block_size)

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        while len(sequence.blocks) < num_blocks:
            sequence.blocks.append(self.free.pop())

    def batch(self, rows: list[tuple[Sequence, list[int]]], *, padding: int = 0, all_logits: bool = False) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, last = [0], []
        for sequence, tokens in rows:
            for token in tokens:
                column, offset = divmod(sequence.length, self.block_size)
                self.reserve(sequence, column + 1)
                ids.append(token)
                positions.append(sequence.length)
                slots.append(sequence.blocks[column] * self.block_size + offset)
                sequence.length += 1
            starts.append(len(ids))
            last.append(len(ids) - 1)
        # Decode rows come first; a row of one query token counts as one.
        decode_rows = 0
        while decode_rows < len(rows) and len(rows[decode_rows][1]) == 1:
            decode_rows += 1
        width = max(len(sequence.blocks) for sequence, _ in rows)
        lengths = [sequence.length for sequence, _ in rows]
        total = len(ids)
        table = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in rows]
        for _ in range(padding):
            ids.append(0)
            positions.append(0)
            slots.append(0)
            starts.append(total)
            lengths.append(0)
            table.append([0] * width)
        return Batch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            logits_indices=torch.arange(total) if all_logits else torch.tensor(last),
            attention=AttentionMetadata(
                slot_mapping=torch.tensor(slots),
                query_start_loc=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.tensor(lengths, dtype=torch.int32),
                block_table=torch.tensor(table, dtype=torch.int32),
                block_size=self.block_size,
                max_query_len=max(len(tokens) for _, tokens in rows),
                max_seq_len=max(lengths),
                num_decode_rows=decode_rows,
            ),
        )

    def step(
        self, rows: list[tuple[Sequence, list[int]]], *, padding: int = 0, all_logits: bool = False
    ) -> torch.Tensor:
        """Logits `[n, V]` of each row's last token, or of every token."""
        return self.decoder.forward(self.batch(rows, padding=padding, all_logits=all_logits), self.cache)

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
