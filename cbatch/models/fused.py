"""Fused stand-ins for a decoder's modules: fewer and larger operations that compute the same.

Built by cbatch/models/patch.py, which knows the families that they fit. Each takes the module that it stands for and
keeps its call, so that the rest of transformers' model runs as it is. Leaves out everything that is not a decoder
layer's: embeddings, rotary angles, the loop over layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from cbatch_kernels import dispatch
from cbatch_kernels.linear import Activation
from torch import Tensor, nn

from cbatch.models.attention import PagedStep, attend_paged
from cbatch.models.projections import Parameters, Projections

Taken = Any  # a module of transformers, whose attributes are known to the table alone
Half = Callable[[Tensor, Tensor | None], Tensor]  # attention or MLP, of what is normed, and what it is added to


class FusedLinear(nn.Module):
    """A linear layer by itself."""

    def __init__(self, module: nn.Linear, projections: Projections) -> None:
        super().__init__()
        self.layer = projections.project((module.weight, module.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class FusedRMSNorm(nn.Module):
    """A root-mean-square norm in one pass, with what it is added to; `offset` is what the family adds to its weight."""

    def __init__(self, module: Taken, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(module.weight.float() + offset, requires_grad=False)
        self.eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.flatten(0, -2) if x.ndim > 3 or x.shape[0] == 1 else x
        beside = None if residual is None else residual.view(rows.shape)
        return dispatch.rms_norm(rows, self.weight, self.eps, beside).view(x.shape)


class FusedMLP(nn.Module):
    """A gated MLP: activation, gate and residual are part of the products."""

    def __init__(self, module: Taken, projections: Projections, activation: Activation) -> None:
        super().__init__()
        self.gated = projections.gate(*_gate_and_up(module), activation)
        self.down = projections.project((module.down_proj.weight, module.down_proj.bias))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        gated = self.gated(x)
        return self.down(gated) if residual is None else self.down.add(gated, residual)


class FusedAttention(nn.Module):
    """Queries, keys and values in one product, rotated in place, written to the cache and attended over."""

    def __init__(self, module: Taken, projections: Projections) -> None:
        super().__init__()
        self.layer_idx: int = module.layer_idx
        self.head_dim: int = module.head_dim
        self.num_heads = module.o_proj.in_features // self.head_dim
        self.qkv = projections.project(_queries_keys_values(module))
        self.num_kv_heads = (self.qkv_features(module) // self.head_dim - self.num_heads) // 2
        self.output = projections.project((module.o_proj.weight, module.o_proj.bias))
        self.scaling: float = module.scaling
        self.is_causal: bool = module.is_causal
        # As the families pass them: some keep the layer's window on the module, some the model's in the config.
        own = getattr(module.config, "sliding_window", None)
        self.sliding_window: int | None = getattr(module, "sliding_window", own)
        self.softcap: float | None = getattr(module, "attn_logit_softcapping", None)
        self.rotates = bool(getattr(module, "use_rope", True))
        self.query_norm: nn.Module | None = getattr(module, "q_norm", None)
        self.key_norm: nn.Module | None = getattr(module, "k_norm", None)

    @staticmethod
    def qkv_features(module: Taken) -> int:
        """Count the outputs of the merged product."""
        parts = [module.qkv_proj] if hasattr(module, "qkv_proj") else [module.q_proj, module.k_proj, module.v_proj]
        return sum(int(part.out_features) for part in parts)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        *,
        paged: PagedStep,
        residual: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        heads = self.qkv(hidden_states).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        end_of_keys = self.num_heads + self.num_kv_heads
        query, key, value = heads[:, : self.num_heads], heads[:, self.num_heads : end_of_keys], heads[:, end_of_keys:]
        if self.query_norm is not None and self.key_norm is not None:
            _normalise(query, self.query_norm)
            _normalise(key, self.key_norm)
        angles = None
        if self.rotates:
            assert position_embeddings is not None
            cos, sin = position_embeddings
            angles = cos[0], sin[0]
        attended = attend_paged(
            self,
            self.layer_idx,
            query,
            key,
            value,
            paged,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            angles=angles,
        ).view(*hidden_states.shape[:-1], -1)
        if residual is None:
            return self.output(attended), None
        return self.output.add(attended, residual), None


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What a family calls the norms before a layer's two halves, and those after them, which the residual follows."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


class FusedLayer(nn.Module):
    """A decoder layer whose residuals are added by what comes last in each half: its norm, else its last product."""

    def __init__(self, module: Taken, norms: LayerNorms) -> None:
        super().__init__()
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else getattr(module, name) for name in astuple(norms)
        )
        self.self_attn = module.self_attn
        self.mlp = module.mlp
        if hasattr(module, "attention_type"):  # read by the loop over layers
            self.attention_type = module.attention_type

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        def attend(x: Tensor, residual: Tensor | None) -> Tensor:
            attended: Tensor = self.self_attn(x, residual=residual, **kwargs)[0]
            return attended

        hidden_states = _add(hidden_states, self.before_attention, attend, self.after_attention)
        return _add(hidden_states, self.before_mlp, self.mlp, self.after_mlp)


def _add(hidden: Tensor, before: nn.Module | None, half: Half, after: nn.Module | None) -> Tensor:
    """Add what half a layer makes of the hidden states to them, which may be written over."""
    x = hidden if before is None else before(hidden)
    if after is None:
        return half(x, hidden)
    added: Tensor = after(half(x, None), hidden)
    return added


def _normalise(heads: Tensor, norm: nn.Module) -> None:
    """Norm each head, or all of a token's at once where the weight is that long, in place."""
    assert isinstance(norm.weight, Tensor)
    if norm.weight.numel() == heads.shape[-1]:
        heads.copy_(norm(heads))
    else:
        heads.copy_(norm(heads.flatten(1)).view_as(heads))


def _gate_and_up(module: Taken) -> tuple[Parameters, Parameters]:
    if not hasattr(module, "gate_up_proj"):
        return (module.gate_proj.weight, module.gate_proj.bias), (module.up_proj.weight, module.up_proj.bias)
    gate, up = module.gate_up_proj.weight.chunk(2)
    assert module.gate_up_proj.bias is None
    return (gate.contiguous(), None), (up.contiguous(), None)


def _queries_keys_values(module: Taken) -> Parameters:
    """Merge the three projections' weights and biases; some families have them merged."""
    if hasattr(module, "qkv_proj"):
        return module.qkv_proj.weight, module.qkv_proj.bias
    parts = (module.q_proj, module.k_proj, module.v_proj)
    biases = [part.bias for part in parts]
    assert all(bias is None for bias in biases) or all(bias is not None for bias in biases)
    return torch.cat([part.weight for part in parts]), None if biases[0] is None else torch.cat(biases)
