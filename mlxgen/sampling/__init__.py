"""Choosing the next token: parameters, randomness, filters, penalties, processors, log-probabilities."""

from mlxgen.sampling.keys import step_key
from mlxgen.sampling.logprobs import token_logprob, top_logprobs
from mlxgen.sampling.params import SamplingParams
from mlxgen.sampling.penalties import PenaltyState, build_penalties
from mlxgen.sampling.protocol import LogitsProcessor, ResumableProcessor, is_resumable
from mlxgen.sampling.sampler import Sampler, build_sampler

__all__ = [
    "LogitsProcessor",
    "PenaltyState",
    "ResumableProcessor",
    "Sampler",
    "SamplingParams",
    "build_penalties",
    "build_sampler",
    "is_resumable",
    "step_key",
    "token_logprob",
    "top_logprobs",
]
