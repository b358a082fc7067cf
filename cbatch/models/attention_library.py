"""Which attention runs, as the setting `attention` asks for it: our own, or a library's that gave what ours gives.

`choose_attention` is asked for the plan and needs no weights; `open_library` when the engine is built. Leaves out how a
library is called.
"""

from __future__ import annotations

import numpy as np
import torch
from cbatch_kernels import dispatch
from cbatch_kernels.attention_libraries import LIBRARIES, Attend
from cbatch_kernels.dispatch import AttentionChoice
from cbatch_kernels.metadata import PagedMetadata

from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.models.load import LoadedModel
from cbatch.models.outline import ModelOutline
from cbatch.units import ceil_div

OURS = "--attention cbatch"
LENS = ((1, 1), (1, 700), (1, 257), (5, 5), (40, 300))  # query tokens and context of each sequence that is compared
TOLERANCE = 3e-2  # for values of about one in 16 bits


def choose_attention(config: EngineConfig, outline: ModelOutline) -> AttentionChoice:
    """Say what attends. Raises UsageError where a library was asked for that cannot serve the model."""
    library = LIBRARIES.get(config.attention)
    head_dim = outline.shape.head_dim
    if library is None:
        fixed_order = bool(config.deterministic)
        return dispatch.choose_attention(outline.device, outline.dtype, head_dim, fixed_order=fixed_order)
    if (refused := library.refuses(outline.dtype, head_dim)) is not None:
        raise UsageError(f"{library.name} {refused}", hint=OURS)
    return AttentionChoice(
        library.name, "given, and compared with our own on a batch", gathers=False, reads_host=library.reads_host
    )


def open_library(config: EngineConfig, loaded: LoadedModel, page_size: int) -> Attend | None:
    """Import the library that was asked for and hold it to our own attention on a batch of random numbers.

    None where our own was asked for. Raises UsageError where it is not installed, cannot do what the model needs, or
    gives something else.
    """
    library = LIBRARIES.get(config.attention)
    if library is None:
        return None
    if page_size % library.page_multiple:
        multiple = library.page_multiple
        raise UsageError(
            f"{library.name} takes pages of a multiple of {multiple} tokens, not {page_size}",
            hint=f"--page-size {multiple}, or {OURS}",
        )
    if any(hasattr(module, "sinks") for module in loaded.model.modules()):
        raise UsageError(f"{library.name} has no attention sinks, which the model needs", hint=OURS)
    try:
        attend = library.open(loaded.device)
    except ImportError as error:
        raise UsageError(f"{library.name} is not installed: {error}", hint=library.install) from error
    try:
        difference = compare(attend, loaded, page_size)
    except (RuntimeError, TypeError, AttributeError) as error:  # of another version, or for another card
        raise UsageError(f"{library.name} cannot attend here: {error}", hint=OURS) from error
    if not difference <= TOLERANCE:
        raise UsageError(
            f"{library.name} does not give what our own attention gives: they differ by {difference:.2g}", hint=OURS
        )
    return attend


@torch.inference_mode()
def compare(attend: Attend, loaded: LoadedModel, page_size: int) -> float:
    """Give the largest difference from our own attention, over every window that the model has."""
    shape, device = loaded.shape, loaded.device
    width = max(ceil_div(context, page_size) for _, context in LENS)
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(device, loaded.dtype)

    num_pages = len(LENS) * width
    pages = draw(2, num_pages, shape.num_kv_heads, page_size, shape.head_dim)
    tables = torch.randperm(num_pages, generator=generator).view(len(LENS), width).to(device, torch.int32)
    lens = np.array(LENS, dtype=np.int32)
    metadata = PagedMetadata.build(lens[:, 0].copy(), lens[:, 1].copy(), tables)
    query = draw(metadata.num_query_tokens, shape.num_heads, shape.head_dim)
    softcap = getattr(loaded.model.config.get_text_config(), "attn_logit_softcapping", None)
    differences = []
    for window in sorted(set(shape.sliding_windows), key=lambda window: window or 0):
        theirs, ours = (
            way(
                query,
                pages[0],
                pages[1],
                metadata,
                scaling=shape.head_dim**-0.5,
                sliding_window=window,
                softcap=softcap,
            )
            for way in (attend, dispatch.paged_attention)
        )
        differences.append(float((theirs.float() - ours.float()).abs().max()))
    return float(np.max(differences))  # NaN where one is
