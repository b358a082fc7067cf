"""Kernels over the rows of a batch: a program takes a token, or one of its heads. Launched by `triton_rows`."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x_ptr,
    weight_ptr,  # float32 [hidden]
    residual_ptr,  # contiguous, as the result; or none
    result_ptr,
    eps,
    token_stride,
    row_stride,
    dim_stride,
    HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HIDDEN_PAD)
    is_dim = dims < HIDDEN
    row_at = row // ROWS_PER_TOKEN * token_stride + row % ROWS_PER_TOKEN * row_stride
    x = tl.load(x_ptr + row_at + dims * dim_stride, mask=is_dim, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0)
    normed = x * scale * weight
    if HAS_RESIDUAL:
        normed += tl.load(residual_ptr + row * HIDDEN + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(result_ptr + row * HIDDEN + dims, normed.to(result_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def activate_and_multiply(
    x_ptr,  # [T, 2 * width]: what is activated, then what it is multiplied by
    result_ptr,  # [T, width], contiguous
    token_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < WIDTH
    gate = tl.load(x_ptr + token * token_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    factor = tl.load(x_ptr + token * token_stride + WIDTH + dims, mask=is_dim, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # gelu_pytorch_tanh
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        fall = tl.exp(-2.0 * tl.abs(inner))
        tanh = tl.where(inner < 0, -1.0, 1.0) * (1.0 - fall) / (1.0 + fall)
        active = 0.5 * gate * (1.0 + tanh)
    tl.store(result_ptr + token * WIDTH + dims, (active * factor).to(result_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def rope_cache_write(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    key_pages_ptr,
    value_pages_ptr,
    slot_mapping_ptr,
    query_strides,  # of token, head
    key_strides,
    value_strides,
    key_page_strides,  # of page, head, slot
    value_page_strides,
    angle_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # 0: nothing is rotated
    HALF_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """A program takes one query head, which is rotated in place, or one KV head, which goes into the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos_at, sin_at = cos_ptr + token * angle_stride, sin_ptr + token * angle_stride
    if head < NUM_QUERY_HEADS:
        query = query_ptr + token * query_strides[0] + head * query_strides[1]
        rotate(query, query, cos_at, sin_at, ROTARY_DIM, HALF_PAD)
    else:
        head -= NUM_QUERY_HEADS
        slot = tl.load(slot_mapping_ptr + token)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        key = key_ptr + token * key_strides[0] + head * key_strides[1]
        value = value_ptr + token * value_strides[0] + head * value_strides[1]
        key_to = key_pages_ptr + page * key_page_strides[0] + head * key_page_strides[1] + offset * key_page_strides[2]
        value_to = (
            value_pages_ptr
            + page * value_page_strides[0]
            + head * value_page_strides[1]
            + offset * value_page_strides[2]
        )
        dims = tl.arange(0, HEAD_PAD)
        tl.store(value_to + dims, tl.load(value + dims, mask=dims < HEAD_DIM), mask=dims < HEAD_DIM)
        is_kept = (dims >= ROTARY_DIM) & (dims < HEAD_DIM)
        tl.store(key_to + dims, tl.load(key + dims, mask=is_kept), mask=is_kept)
        rotate(key, key_to, cos_at, sin_at, ROTARY_DIM, HALF_PAD)


@triton.jit
def rotate(from_ptr, to_ptr, cos_ptr, sin_ptr, ROTARY_DIM: tl.constexpr, HALF_PAD: tl.constexpr):
    if ROTARY_DIM > 0:
        half: tl.constexpr = ROTARY_DIM // 2
        dims = tl.arange(0, HALF_PAD)
        is_dim = dims < half
        first = tl.load(from_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        second = tl.load(from_ptr + half + dims, mask=is_dim, other=0.0).to(tl.float32)
        cos_first = tl.load(cos_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        sin_first = tl.load(sin_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        cos_second = tl.load(cos_ptr + half + dims, mask=is_dim, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + half + dims, mask=is_dim, other=0.0).to(tl.float32)
        dtype = to_ptr.dtype.element_ty
        tl.store(to_ptr + dims, (first * cos_first - second * sin_first).to(dtype), mask=is_dim)
        tl.store(to_ptr + half + dims, (second * cos_second + first * sin_second).to(dtype), mask=is_dim)
