"""Runs steps on one device: plan in, sampled tokens out. Owns the KV cache and the slot state; knows no request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.engine.plan import LOGPROBS, POOL, Int32Array, PromptLogprobs, StepPlan, StepResult
from octavo.models.decoder import Decoder
from octavo.sampling.logprobs import Logprobs, prompt_logprobs
from octavo.sampling.sampler import Sampler, SamplerOutput, SampleRows
from octavo.sampling.state import uploaded
from octavo.worker.pooling import Pooler
from octavo.worker.shared_prefix import SharedPrefix
from octavo.worker.slot_state import PromptLogprobRow, SlotState, StepInputs

if TYPE_CHECKING:  # kernels are imported on a GPU alone
    from octavo.worker.device_inputs import DeviceInputs
    from octavo.worker.draws import HostResults, StepDraws
    from octavo.worker.graphs import Size, StepGraphs


class Inputs(Protocol):
    """Derives a step's tensors from the plan and the slots."""

    def inputs(self, plan: StepPlan, words: torch.Tensor) -> StepInputs:
        """Block writes, then the inputs of the plan whose words are on the device."""
        ...

    def append(self, step: StepInputs, tokens: torch.Tensor) -> None:
        """Puts the tokens `[n]` of the rows that are due behind their sequences."""
        ...


class RunningStep:
    """A step whose forward pass has been enqueued; `sample`, then `wait`, once each."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        inputs: StepInputs,
        hidden: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        self.step_id = plan.step_id
        self.mask_after_step = plan.mask_after_step
        self.sampled = False
        self._runner = runner
        self.num_rows = plan.num_rows
        self._inputs = inputs
        self._hidden = hidden
        self._logits = logits
        # The plan's buffer may be written again before `wait`; what the draw needs of it is kept.
        self._flags = np.where(inputs.is_due, plan.rows("flags")[inputs.host_rows], 0)
        self._slots = plan.rows("slot")[inputs.host_rows]
        self._max_seq_len = plan.header("max_seq_len")
        # Copies on their way to the host: read when the step's event has passed.
        self._drawn: SamplerOutput | None = None
        self._results: HostResults | None = None
        self._prompt_scores: list[tuple[PromptLogprobRow, Logprobs]] = []
        self._pooled: list[tuple[int, torch.Tensor]] = []
        self._done: torch.cuda.Event | None = None

    @torch.inference_mode()
    def sample(self, masks: Int32Array | None = None) -> None:
        """Draws the tokens of the rows that are due, appends them to the slot state, and starts their way to the host.

        Args:
            masks: int32 `[R, ceil(V / 32)]`, the tokens that the rows of the step may draw; None: any.
        """
        self.sampled = True
        runner, inputs = self._runner, self._inputs
        count = len(inputs.host_rows)
        draws = runner.draws
        if not inputs.is_due.any():
            pass
        elif draws is not None and self._logits is not None and draws.can_draw(self._flags):
            self._results = draws.run(count)
        else:
            rows = SampleRows(
                slots=inputs.slots,
                host_slots=self._slots,
                flags=self._flags,
                num_tokens=inputs.next_positions,
                max_num_tokens=self._max_seq_len,
                token_ids=runner.state.token_ids,
                grammar_mask=None if masks is None else uploaded(masks[inputs.host_rows], runner.state.device),
            )
            drawn = runner.sampler(self._due_logits(count), rows, runner.state.params)
            runner.inputs.append(inputs, drawn.token_ids[:, 0])
            self._drawn = _to_host(drawn)
        at = count
        for row in inputs.prompt_logprob_rows:
            assert self._hidden is not None, "a graph scores no prompts"
            scores = runner.score_prompt(row, self._hidden[at : at + row.count])
            at += row.count
            self._prompt_scores.append((row, _copied(scores)))
        self._pool(at)
        if runner.state.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def _pool(self, at: int) -> None:
        """Takes the hidden states from `at` on, and those of rows that are due, into the vectors of prompts."""
        for row in self._inputs.pooling_rows:
            assert self._hidden is not None, "a graph pools no prompts"
            last = self._hidden[int(np.searchsorted(self._inputs.host_rows, row.row))] if row.ends else None
            vector = self._runner.pooler.add(row, last, self._hidden[at : at + row.count])
            at += row.count
            if vector is not None:
                self._pooled.append((row.row, _async_copy(vector)))

    def _due_logits(self, count: int) -> torch.Tensor:
        if self._logits is not None:
            return self._logits
        assert self._hidden is not None, "an eager step has hidden states"
        decoder, out = self._runner.decoder, None
        if self._runner.has_device_inputs:
            # As a graph leaves them.
            out = self._hidden.new_empty(count, decoder.spec.vocab_size, dtype=decoder.ops.dtype)
        logits: torch.Tensor = decoder.logits(self._hidden[:count], out)
        return logits

    def wait(self) -> StepResult:
        """Waits for this step, not for those behind it; rows that were not due have 0 sampled tokens."""
        if self._done is not None:
            self._done.synchronize()
        tokens = np.zeros((self.num_rows, 1), dtype=np.int32)
        num_sampled = np.zeros(self.num_rows, dtype=np.int32)
        result = StepResult(tokens, num_sampled)
        if self._results is not None:
            assert self._runner.draws is not None, "it has drawn"
            tokens[:, 0], drawn = self._runner.draws.read(self._results, self.num_rows)
            np.copyto(num_sampled, drawn, where=self._inputs.is_due)
        elif self._drawn is not None:
            rows = self._inputs.host_rows
            tokens[rows] = self._drawn.token_ids.numpy()
            num_sampled[rows] = np.where(self._inputs.is_due, self._drawn.num_sampled.numpy(), 0)
            result = self._with_logprobs(result, rows)
        if self._prompt_scores:
            result = result._replace(prompt_logprobs=[_prompt_result(*found) for found in self._prompt_scores])
        if self._pooled:
            result = result._replace(pooled=[(row, vector.numpy()) for row, vector in self._pooled])
        return result

    def _with_logprobs(self, result: StepResult, rows: np.ndarray) -> StepResult:
        found = None if self._drawn is None else self._drawn.logprobs
        if found is None:
            return result
        at = rows[(self._flags & LOGPROBS) != 0]
        width = found.token_ids.shape[1]
        ids = np.zeros((self.num_rows, 1, width), dtype=np.int32)
        values = np.zeros((self.num_rows, 1, width), dtype=np.float32)
        ranks = np.zeros((self.num_rows, 1), dtype=np.int32)
        ids[at, 0] = found.token_ids.numpy()
        values[at, 0] = found.logprobs.numpy()
        ranks[at, 0] = found.ranks.numpy()
        return result._replace(logprob_ids=ids, logprobs=values, logprob_ranks=ranks)


class ModelRunner:
    """One device's model, KV cache, slot state and sampler.

    Args:
        decoder: the model.
        state: of the slots.
        sampler: draws the tokens.
        num_blocks: of the KV cache, the null block among them.
        device_inputs: derives the inputs by kernels; None: by torch.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: SlotState,
        sampler: Sampler,
        num_blocks: int,
        device_inputs: DeviceInputs | None = None,
    ) -> None:
        self.decoder = decoder
        self.state = state
        self.sampler = sampler
        self.pooler = Pooler()
        self.inputs: Inputs = device_inputs or state
        self.kv_cache: Sequence[torch.Tensor] = decoder.allocate_kv_cache(num_blocks, state.block_size)
        self._device_inputs = device_inputs
        self.draws: StepDraws | None = None
        """Of captured steps, if the sampler's kernels can be captured."""
        self._capture: Callable[[], None] | None = None
        self._graphs: StepGraphs | None = None
        self._shared: SharedPrefix | None = None

    @property
    def has_device_inputs(self) -> bool:
        """Whether kernels derive a step's inputs."""
        return self._device_inputs is not None

    def plan_buffer(self, words: int) -> Int32Array:
        """Zeros that the device can copy while the host goes on."""
        pinned = self.state.device.type == "cuda"
        buffer: Int32Array = torch.zeros(words, dtype=torch.int32, pin_memory=pinned).numpy()
        return buffer

    @torch.inference_mode()
    def capture(
        self, plan: StepPlan, sizes: Sequence[Size], progress: Callable[[Sequence[Size]], Iterable[Size]] = iter
    ) -> None:
        """Makes the graphs of steps; see `StepGraphs`. `plan` is one without rows."""
        from octavo.sampling.device import DeviceSampler  # noqa: PLC0415
        from octavo.worker.draws import StepDraws  # noqa: PLC0415
        from octavo.worker.graphs import StepGraphs  # noqa: PLC0415

        inputs = self._device_inputs
        assert inputs is not None, "graphs read what kernels derive"

        def capture() -> None:
            # Their memory goes before that of the new ones comes.
            self._graphs = self.draws = None
            words = self.state.upload(plan)
            self._graphs = StepGraphs(
                self.decoder, self.kv_cache, inputs, plan, words, sizes, progress, self.compile_sampler
            )
            if isinstance(self.sampler, DeviceSampler):
                rows = sorted({size.rows for size in sizes})
                self.draws = StepDraws(self.sampler, inputs, inputs.layout(plan), self._graphs.logits, rows)

        self._capture = capture
        capture()
        if any(size.shares_keys for size in sizes):
            self._shared = SharedPrefix(self.state.max_num_seqs, self.state.block_size)

    def compile_sampler(self) -> None:
        """Compiles the sampler's kernels, if it has any, so that no step waits for that; `capture` does it too."""
        from octavo.sampling.device import DeviceSampler  # noqa: PLC0415

        if isinstance(self.sampler, DeviceSampler):
            assert self._device_inputs is not None, "they read what kernels derive"
            state, buffers = self.state, self._device_inputs.buffers
            dtype = self.decoder.ops.dtype
            self.sampler.compile(dtype, buffers.slots, buffers.next_positions, state.token_ids, state.params)

    @torch.inference_mode()
    def replace_decoder(self, decoder: Decoder) -> None:
        """Takes another decoder of the same shape; its graphs are made anew."""
        self.decoder = decoder
        if self._capture is not None:
            self._capture()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> RunningStep:
        """Applies the plan to the slots and enqueues the forward pass."""
        words = self.state.upload(plan)
        self.state.apply(plan, words)
        shares_keys = self._shared is not None and self._shared.update(plan).has(plan)
        pools = plan.header("flags") & POOL
        replayed = None if self._graphs is None or pools else self._graphs.run(plan, shares_keys=shares_keys)
        if replayed is not None:
            inputs, logits = replayed
            return RunningStep(self, plan, inputs, logits=logits)
        inputs = self.inputs.inputs(plan, words)
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


def _to_host(drawn: SamplerOutput) -> SamplerOutput:
    logprobs = None if drawn.logprobs is None else _copied(drawn.logprobs)
    return SamplerOutput(_async_copy(drawn.token_ids), _async_copy(drawn.num_sampled), None, logprobs)


def _copied(scores: Logprobs) -> Logprobs:
    return Logprobs(_async_copy(scores.token_ids), _async_copy(scores.logprobs), _async_copy(scores.ranks))


def _async_copy(tensor: torch.Tensor) -> torch.Tensor:
    """To pinned memory if it is on a device; the host does not wait."""
    return tensor.to("cpu", non_blocking=True)


def _prompt_result(row: PromptLogprobRow, scores: Logprobs) -> PromptLogprobs:
    return PromptLogprobs(row.row, row.start, scores.token_ids.numpy(), scores.logprobs.numpy(), scores.ranks.numpy())
