"""Sampling: counter-based random numbers, per-slot parameters, the batched sampler; no requests, queues or text."""

from octavo.sampling.logprobs import Logprobs, prompt_logprobs
from octavo.sampling.rows import RowFlag, SampleRows
from octavo.sampling.sampler import Sampler, SamplerOutput
from octavo.sampling.state import SlotParams

__all__ = ["Logprobs", "RowFlag", "SampleRows", "Sampler", "SamplerOutput", "SlotParams", "prompt_logprobs"]
