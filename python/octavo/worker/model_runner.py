"""Runs steps on one device: plan in, sampled tokens out. Owns the KV cache and the slot state; knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.engine.plan import LOGPROBS, PromptLogprobs, StepPlan, StepResult
from octavo.models.decoder import Decoder
from octavo.sampling.logprobs import Logprobs, prompt_logprobs
from octavo.sampling.sampler import Sampler, SamplerOutput, SampleRows
from octavo.worker.slot_state import PromptLogprobRow, SlotState, StepInputs


@dataclass(slots=True)
class _PromptScores:
    row: PromptLogprobRow
    scores: Logprobs


class RunningStep:
    """A step whose forward pass has been enqueued; `sample`, then `wait`, once each."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> None:
        self.step_id = plan.step_id
        self.mask_after_step = plan.header("mask_after_step")
        self.sampled = False
        self._runner = runner
        self._num_rows = plan.num_rows
        self._inputs = inputs
        self._hidden = hidden
        # The plan's buffer may be written again before `wait`; what the draw needs of it is kept.
        self._sample_flags = plan.rows("flags")[inputs.host_sample_rows]
        self._sample_slots = plan.rows("slot")[inputs.host_sample_rows]
        self._max_seq_len = plan.header("max_seq_len")
        self._output: SamplerOutput | None = None
        self._prompt_scores: list[_PromptScores] = []

    def sample(self) -> None:
        """Draws the tokens of the rows that are due and appends them to the slot state."""
        self.sampled = True
        runner, inputs = self._runner, self._inputs
        count = len(inputs.host_sample_rows)
        if count:
            rows = SampleRows(
                slots=inputs.slots[inputs.sample_rows],
                host_slots=self._sample_slots,
                flags=self._sample_flags,
                num_tokens=inputs.next_positions,
                max_num_tokens=self._max_seq_len,
                token_ids=runner.state.token_ids,
            )
            logits = runner.decoder.logits(self._hidden[:count])
            self._output = runner.sampler(logits, rows, runner.state.params)
            runner.state.append(inputs, self._output.token_ids[:, 0])
        at = count
        for row in inputs.prompt_logprob_rows:
            hidden = self._hidden[at : at + row.count]
            at += row.count
            self._prompt_scores.append(_PromptScores(row, runner.score_prompt(row, hidden)))

    def wait(self) -> StepResult:
        """Waits for the device; rows that were not due have 0 sampled tokens."""
        tokens = np.zeros((self._num_rows, 1), dtype=np.int32)
        num_sampled = np.zeros(self._num_rows, dtype=np.int32)
        result = StepResult(tokens, num_sampled)
        if self._output is not None:
            rows = self._inputs.host_sample_rows
            tokens[rows] = self._output.token_ids.cpu().numpy()
            num_sampled[rows] = self._output.num_sampled.cpu().numpy()
            result = self._with_logprobs(result, rows)
        if self._prompt_scores:
            result = result._replace(prompt_logprobs=[_prompt_result(p) for p in self._prompt_scores])
        return result

    def _with_logprobs(self, result: StepResult, rows: np.ndarray) -> StepResult:
        assert self._output is not None
        found = self._output.logprobs
        if found is None:
            return result
        at = rows[(self._sample_flags & LOGPROBS) != 0]
        width = found.token_ids.shape[1]
        ids = np.zeros((self._num_rows, 1, width), dtype=np.int32)
        values = np.zeros((self._num_rows, 1, width), dtype=np.float32)
        ranks = np.zeros((self._num_rows, 1), dtype=np.int32)
        ids[at, 0] = found.token_ids.cpu().numpy()
        values[at, 0] = found.logprobs.cpu().numpy()
        ranks[at, 0] = found.ranks.cpu().numpy()
        return result._replace(logprob_ids=ids, logprobs=values, logprob_ranks=ranks)


class ModelRunner:
    """One device's model, KV cache, slot state and sampler."""

    def __init__(self, decoder: Decoder, state: SlotState, sampler: Sampler, num_blocks: int) -> None:
        self.decoder = decoder
        self.state = state
        self.sampler = sampler
        self.kv_cache: Sequence[torch.Tensor] = decoder.allocate_kv_cache(num_blocks, state.block_size)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> RunningStep:
        """Applies the plan to the slots and enqueues the forward pass."""
        self.state.apply(plan)
        inputs = self.state.inputs(plan)
        hidden = self.decoder.forward_hidden(inputs.batch, self.kv_cache)
        return RunningStep(self, plan, inputs, hidden)

    @torch.inference_mode()
    def score_prompt(self, row: PromptLogprobRow, hidden: torch.Tensor) -> Logprobs:
        """Log-probabilities of the prompt tokens that follow `hidden` `[count, D]`."""
        targets = self.state.token_ids[row.slot, row.start : row.start + row.count].long()
        wanted = int(self.state.params.num_prompt_logprobs[row.slot])
        return prompt_logprobs(
            lambda start, stop: self.decoder.logits(hidden[start:stop]), targets, wanted, self.sampler.vocab_size
        )


def _prompt_result(found: _PromptScores) -> PromptLogprobs:
    scores = found.scores
    return PromptLogprobs(
        found.row.row,
        found.row.start,
        scores.token_ids.cpu().numpy(),
        scores.logprobs.cpu().numpy(),
        scores.ranks.cpu().numpy(),
    )
