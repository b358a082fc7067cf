"""The kernel behind `triton_sampling`: a program draws the token of one row.

A row is walked block by block and never sorted. Tokens are told apart by how far they lie below the best one: the bits
of that float32, taken as an integer, order them. What top-k and top-p keep is found digit by digit of that integer,
with the tokens of a digit counted, or their weights added up, in one walk each.
"""

import triton
import triton.language as tl

DIGIT_BITS: tl.constexpr = tl.constexpr(4)
DIGITS: tl.constexpr = tl.constexpr(8)
VALUES: tl.constexpr = tl.constexpr(16)  # of a digit
FARTHEST: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def draw_tokens(
    logits_ptr,
    rules_ptr,  # float64 [5, rows]: temperature, top_p, top_k, min_p, uniform
    tokens_ptr,  # int64 [rows]
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    logits = logits_ptr + row * row_stride
    temperature = tl.load(rules_ptr + row).to(tl.float32)
    peak, token = find_best(logits, vocab, BLOCK)
    if temperature > 0:
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        scale = (peak, temperature)
        limit = tl.full((), FARTHEST, tl.int32)
        top_p = tl.load(rules_ptr + num_rows + row)
        top_k = tl.load(rules_ptr + 2 * num_rows + row)
        mass = tl.full((), 0.0, tl.float64)
        if (top_k > 0) & (top_k < vocab):
            limit, closer = find_limit(logits, vocab, scale, top_k, False, BLOCK)
            # Of those that equal the last one as many count as are among the best.
            equal = tl.exp(-limit.to(tl.float32, bitcast=True) / temperature)
            mass = add_up(logits, vocab, scale, limit - 1, 0.0, BLOCK) + (top_k - closer) * equal
        elif top_p < 1:
            mass = add_up(logits, vocab, scale, limit, 0.0, BLOCK)
        if top_p < 1:
            short_of, _ = find_limit(logits, vocab, scale, top_p * mass, True, BLOCK)
            limit = tl.minimum(limit, short_of)
        least = tl.load(rules_ptr + 3 * num_rows + row).to(tl.float32)
        total = add_up(logits, vocab, scale, limit, least, BLOCK)
        target = tl.load(rules_ptr + 4 * num_rows + row) * total
        token = invert(logits, vocab, scale, limit, least, target, token, BLOCK)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def find_best(logits, vocab, BLOCK: tl.constexpr):
    """Find the largest logit and the first token that has it."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        is_better = values > best
        best, best_at = tl.where(is_better, values, best), tl.where(is_better, tokens, best_at)
    peak = tl.max(best, 0)
    return peak, tl.min(tl.where(best == peak, best_at, FARTHEST), 0)


@triton.jit
def weigh(logits, vocab, start, scale, BLOCK: tl.constexpr):
    """Give a block's tokens, how far they lie below the best one as ordered bits, and their weights, its being 1."""
    peak, temperature = scale
    tokens = start + tl.arange(0, BLOCK)
    values = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    distance = tl.abs(values - peak)
    weights = tl.where(tokens < vocab, tl.exp(-distance / temperature), 0.0)
    return tokens, distance.to(tl.int32, bitcast=True), weights


@triton.jit
def add_up(logits, vocab, scale, limit, least, BLOCK: tl.constexpr):
    """Add up the weights of tokens no farther than `limit` with weights of at least `least`."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        _, distances, weights = weigh(logits, vocab, start, scale, BLOCK)
        kept = tl.where((distances <= limit) & (weights >= least), weights, 0.0)
        total += tl.sum(kept, 0).to(tl.float64)
    return total


@triton.jit
def find_limit(logits, vocab, scale, target, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest distance that the tokens closer than it do not reach `target` at, and what these come to."""
    values = tl.arange(0, VALUES)
    limit = tl.full((), 0, tl.int32)
    closer = tl.full((), 0.0, tl.float64)
    for digit in range(DIGITS):
        shift = (DIGITS - 1 - digit) * DIGIT_BITS
        sums = tl.zeros([BLOCK, VALUES], tl.float32)
        for start in range(0, vocab, BLOCK):
            tokens, distances, weights = weigh(logits, vocab, start, scale, BLOCK)
            leading = distances >> shift
            is_in = (tokens < vocab) & ((leading >> DIGIT_BITS) == limit)
            counted = tl.where(is_in, weights if BY_WEIGHT else 1.0, 0.0)
            has_value = (leading & (VALUES - 1))[:, None] == values[None, :]
            sums += tl.where(has_value, counted[:, None], 0.0)
        by_value = tl.sum(sums, 0).to(tl.float64)
        before = closer + tl.cumsum(by_value, 0) - by_value
        value = tl.maximum(tl.sum((before < target).to(tl.int32), 0) - 1, 0)
        closer = tl.sum(tl.where(values == value, before, 0.0), 0)
        limit = limit * VALUES + value
    return limit, closer


@triton.jit
def invert(logits, vocab, scale, limit, least, target, token, BLOCK: tl.constexpr):
    """Find the token that the weights of what is kept, added up, exceed `target` at; `token` where nothing weighs."""
    before = tl.full((), 0.0, tl.float64)
    is_found = before > target
    for start in range(0, vocab, BLOCK):
        tokens, distances, weights = weigh(logits, vocab, start, scale, BLOCK)
        kept = tl.where((distances <= limit) & (weights >= least), weights, 0.0)
        total = tl.sum(kept, 0)
        # Until it is found, the last token that weighs something: rounding may leave the end short of the target.
        if (total > 0) & (not is_found):
            reaches = (kept > 0) & (tl.cumsum(kept, 0) > (target - before).to(tl.float32))
            first = tl.min(tl.where(reaches, tokens, FARTHEST), 0)
            last = tl.max(tl.where(kept > 0, tokens, 0), 0)
            token = tl.minimum(first, last)
            is_found = before + total.to(tl.float64) > target
        before += total.to(tl.float64)
    return token
