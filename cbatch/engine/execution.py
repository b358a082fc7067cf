"""How steps run on a device: always to the same bits, captured as graphs, ahead of results. Called by the plan."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch_kernels.dispatch import AttentionChoice

from cbatch.config import EngineConfig
from cbatch.engine.determinism import decide_deterministic
from cbatch.models.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class Execution:
    """What was decided."""

    gathers: bool  # attention copies the context
    in_one_call: bool  # all layers are run by one kernel
    deterministic: bool
    captured: bool  # as graphs, where they only decode
    run_ahead: bool  # a step is launched before the results of the one before it are there


def decide_execution(
    config: EngineConfig, loaded: ModelOutline, attention: AttentionChoice
) -> tuple[Execution, dict[str, str]]:
    """Decide, and say of each setting why."""
    deterministic, why_deterministic = decide_deterministic(config, loaded, attention)
    reads_host = attention.gathers or attention.reads_host or deterministic
    captured, why_captured = _decide_graphs(config, loaded, reads_host=reads_host)
    run_ahead, why_run_ahead = _decide_async(config, captured)
    return Execution(attention.gathers, loaded.in_one_call, deterministic, captured, run_ahead), {
        "attention": attention.reason,
        "deterministic": why_deterministic,
        "use_cuda_graph": why_captured,
        "use_async_batching": why_run_ahead,
    }


def _decide_graphs(config: EngineConfig, loaded: ModelOutline, *, reads_host: bool) -> tuple[bool, str]:
    if loaded.device.type != "cuda":
        return False, "off: there is no CUDA device"
    if loaded.shape.has_experts:
        return False, "off: the shapes of a mixture of experts depend on the tokens"
    if reads_host:
        return False, "off: this attention reads lengths on the host"
    if config.use_cuda_graph is None:
        return True, "on by default: a decode step is one call for the host"
    return config.use_cuda_graph, "given"


def _decide_async(config: EngineConfig, captured: bool) -> tuple[bool, str]:
    """Decide whether a step is prepared, and launched, before the results of the one before it are there."""
    if not captured:
        return False, "off: it needs CUDA graphs"
    if config.speculation:
        return False, "off: speculation was asked for"
    if config.use_async_batching is None:
        return True, "on by default: the host prepares a step while the one before it computes"
    return config.use_async_batching, "given"
