"""From a configuration to a running engine's parts: device, weights, cache size, control plane."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo._core import ChatTemplate, EngineCore, Tokenizer
from octavo.config import EngineConfig
from octavo.defaults import SamplingDefaults, load_sampling_defaults
from octavo.engine import loop
from octavo.engine.plan import StepPlan
from octavo.errors import ParameterError
from octavo.memory import CachePlan, StepLimits, plan_cache
from octavo.models.catalog import resolve_model
from octavo.models.loader import LoadedModel, open_model
from octavo.ops.base import OpSet
from octavo.pooling import Pooling, model_pooling
from octavo.progress import tracked
from octavo.sampling.sampler import Sampler
from octavo.step_time import predict_step_seconds
from octavo.text import load_chat_template, load_tokenizer
from octavo.worker.model_runner import ModelRunner
from octavo.worker.slot_state import SlotState

# Whether there are graphs for decode steps whose rows share a long beginning, which then is read once for all.
_CASCADE = True


@dataclass(slots=True)
class Started:
    """Everything an engine is made of."""

    core: EngineCore
    runner: ModelRunner
    tokenizer: Tokenizer | None
    tokenizer_path: Path | None
    chat_template: ChatTemplate | None
    model: LoadedModel
    ops: OpSet
    cache: CachePlan
    vocab_size: int
    max_model_len: int
    max_in_flight: int
    max_num_batched_tokens: int
    eos_token_ids: list[int]
    sampling_defaults: SamplingDefaults
    pooling: Pooling
    """How a prompt becomes a vector where a request does not say."""

    def run_loop(self) -> None:
        """Runs steps on this thread until the core is shut down."""
        plans = [StepPlan(self.core, self.runner.plan_buffer) for _ in range(self.max_in_flight + 1)]
        loop.run(self.core, self.runner, plans, self.max_in_flight)

    def predict_step_seconds(self, threads: int) -> float:
        """An upper bound of the time of a step; `threads` are the CPU's."""
        on_gpu = self.ops.device.type == "cuda"
        return predict_step_seconds(
            self.model.stored_bytes, self.cache.total_bytes, self.max_num_batched_tokens, None if on_gpu else threads
        )

    def load_weights(self, model: str) -> None:
        """Takes the weights of another checkpoint of the same shape."""
        opened = open_model(resolve_model(model))
        if opened.spec != self.model.spec:
            raise ParameterError("model", model, "a checkpoint of the same architecture and shape as the one that runs")
        # As many positions as before: the slots and the cache groups are made for them.
        self.model = opened.load(self.ops, self.model.decoder.max_positions)
        self.runner.replace_decoder(self.model.decoder)


def start(config: EngineConfig, sharers: int = 1) -> Started:
    """Loads the model and makes its control plane; prints a summary on stderr unless the config says not to.

    Args:
        config: of the engine.
        sharers: engines that start alike and share this machine's memory.

    Raises:
        ParameterError: an argument does not fit the model or this machine.
        ModelNotFoundError: the model names nothing.
        WeightError: a file is missing or damaged.
    """
    began = time.perf_counter()
    dummy = config.load_format == "dummy"
    source = resolve_model(config.model, needs_weights=not dummy)
    opened = open_model(source, dummy=dummy)
    defaults = load_sampling_defaults(config.generation_config, config.override_generation_config, source.path)
    torch.set_num_threads(config.threads)
    ops = _ops(config)
    tokenizer_path = None if config.skip_tokenizer_init else Path(config.tokenizer or source.path)
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
    template = load_chat_template(config.chat_template, tokenizer)
    on_gpu = ops.device.type == "cuda"
    max_num_batched_tokens = config.max_num_batched_tokens or (8192 if on_gpu else 512)
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    if config.max_model_len is not None and config.max_model_len > opened.spec.max_positions:
        raise ParameterError(
            "max_model_len", config.max_model_len, f"at most {opened.spec.max_positions}, the model's own limit"
        )
    model = opened.load(ops, config.max_model_len)
    max_in_flight = config.max_in_flight or (2 if on_gpu else 1)
    # Before the cache is planned, which takes the memory that is left.
    sampler = _sampler(config, model, max_num_seqs)
    cache = plan_cache(
        config, model, ops.device, StepLimits(max_num_seqs, max_num_batched_tokens, max_in_flight), sharers
    )
    spec = opened.spec
    group_windows = tuple(group.window for group in model.decoder.cache_groups)
    eos = list(spec.eos_token_ids)
    if tokenizer is not None:
        eos += [token for token in tokenizer.eog_token_ids if token not in eos]
    core = EngineCore(
        block_size=config.block_size,
        num_blocks=cache.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=cache.max_model_len,
        max_in_flight=max_in_flight,
        vocab_size=spec.vocab_size,
        enable_prefix_caching=config.enable_prefix_caching,
        host_state=not on_gpu,
        group_windows=group_windows,
        bytes_per_block=cache.bytes_per_block,
        max_logprobs=config.max_logprobs,
        tokenizer=tokenizer,
        eos_token_ids=eos,
    )
    state = SlotState(
        max_num_seqs,
        cache.max_model_len,
        config.block_size,
        spec.vocab_size,
        ops.device,
        group_windows=group_windows,
        long_rope_above=model.decoder.long_rope_above,
        rope_rows=model.decoder.max_positions,
    )
    if on_gpu:
        runner = _gpu_runner(model, state, sampler, cache, max_num_batched_tokens)
        if ops.can_be_captured() and not config.enforce_eager:
            _capture(config, core, runner, max_num_batched_tokens)
        else:
            runner.compile_sampler()
    else:
        runner = ModelRunner(model.decoder, state, sampler, cache.num_blocks)
    started = Started(
        core=core,
        runner=runner,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        chat_template=template,
        model=model,
        ops=ops,
        cache=cache,
        vocab_size=spec.vocab_size,
        max_model_len=cache.max_model_len,
        max_in_flight=max_in_flight,
        max_num_batched_tokens=max_num_batched_tokens,
        eos_token_ids=eos,
        sampling_defaults=defaults,
        pooling=model_pooling(source.path),
    )
    if not config.disable_log_stats:
        _summary(config, started, time.perf_counter() - began)
    return started


def _sampler(config: EngineConfig, model: LoadedModel, max_num_seqs: int) -> Sampler:
    """By kernels on a GPU, unless results are exact."""
    ops, vocab_size = model.decoder.ops, model.spec.vocab_size
    # The kernels leave some steps to torch, whole: which of the two draws a row's token would depend on the others.
    if ops.device.type != "cuda" or ops.dtype == torch.float32 or config.deterministic:
        return Sampler(vocab_size, config.logprobs_mode)
    from octavo.sampling.device import DeviceSampler  # noqa: PLC0415

    return DeviceSampler(vocab_size, config.logprobs_mode, max_rows=max_num_seqs, device=ops.device)


def _gpu_runner(
    model: LoadedModel, state: SlotState, sampler: Sampler, cache: CachePlan, max_num_batched_tokens: int
) -> ModelRunner:
    """A runner whose inputs are made by kernels."""
    from octavo.worker.device_inputs import DeviceInputs  # noqa: PLC0415

    inputs = DeviceInputs(state, max_num_batched_tokens)
    return ModelRunner(model.decoder, state, sampler, cache.num_blocks, inputs)


def _capture(config: EngineConfig, core: EngineCore, runner: ModelRunner, max_num_batched_tokens: int) -> None:
    """Makes the CUDA graphs, with a progress bar."""
    from octavo.worker.graphs import decode_sizes, mixed_sizes, sharing_sizes  # noqa: PLC0415

    most, shown = runner.state.max_num_seqs, not config.disable_log_stats
    sizes = decode_sizes(most) + mixed_sizes(most, max_num_batched_tokens)
    if _CASCADE and config.enable_prefix_caching and not config.deterministic:
        sizes += sharing_sizes(most)
    runner.capture(StepPlan(core), sizes, lambda items: tracked("CUDA graphs", items, shown))


def _ops(config: EngineConfig) -> Any:
    """The op set for `backend` and `dtype`."""
    has_gpu = torch.cuda.is_available()
    backend = config.backend
    if backend == "auto":
        backend = "cuda" if has_gpu else "cpu"
    if backend == "cuda" and not has_gpu:
        raise ParameterError("backend", "cuda", "'cpu' or 'auto' on this machine: torch sees no CUDA device")
    if backend == "cpu" and config.deterministic:
        raise ParameterError("deterministic", True, "False with backend='cpu', or backend='reference'")
    if backend == "cpu":
        from octavo.ops.cpu import CpuOps  # noqa: PLC0415

        return CpuOps(None if config.dtype == "auto" else getattr(torch, config.dtype))
    from octavo.ops.reference import ReferenceOps  # noqa: PLC0415

    if backend == "reference":
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        return ReferenceOps("cpu", dtype)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype == torch.float32:
        # The exact path: its numbers do not depend on what else is in the step.
        return ReferenceOps("cuda", dtype)
    from octavo.ops.cuda import CudaOps  # noqa: PLC0415

    return CudaOps("cuda", dtype, deterministic=config.deterministic)


def _summary(config: EngineConfig, started: Started, seconds: float) -> None:
    cache, spec = started.cache, started.model.spec
    lines = [
        f"octavo: {config.model} ({spec.family}, {spec.num_layers} layers, {started.model.stored_bytes / 1e6:,.0f} MB of weights) "
        f"on {started.ops.device} with {started.ops.name} ops, ready in {seconds:.1f} s",
        f"octavo: KV cache {cache.total_bytes / 2**20:,.0f} MiB = {cache.num_blocks - 1:,} blocks of {config.block_size} = "
        f"{cache.num_tokens:,} tokens; longest request {started.max_model_len:,} tokens",
    ]
    lines.append(f"octavo: sampling defaults: {started.sampling_defaults.describe()}")
    print("\n".join(lines), file=sys.stderr, flush=True)
