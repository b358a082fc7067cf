"""The rules: each looks at one thing that can hold a run back, and says so where it does. Called by `diagnose`.

A rule looks at what was observed first. Where that does not speak for it, it is silent; where it does, it asks the
simulation what a change would gain, and is silent again where that is nothing. Without a simulation the evidence alone
has to do, and must be stronger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from cbatch.diagnose.findings import Cause, Finding
from cbatch.diagnose.observed import ROOMY, SMALL_BATCH
from cbatch.diagnose.situation import Situation
from cbatch.engine.modes import CHUNKED, CONTINUOUS, NAIVE, STATIC
from cbatch.simulate.cost import CostModel

LEAST_GAIN = 0.03  # of the time that is worth a word
HINT = 0.1  # share of the time from which on something is looked into
PLAIN = 0.5  # share that speaks for itself
LEAST_ITL_FACTOR = 1.5
WASTEFUL = 0.1  # share of the cache without a token
FINE_PAGE = 16  # tokens
FACTORS = (2, 4, 8)
ENOUGH = 0.9  # of the best gain; the smallest change that has it is what is advised
HALF = 0.5  # of the drafts that are right, where nothing is known of them

Rule = Callable[[Situation], Finding | None]


def reading(situation: Situation) -> Finding | None:
    """Prompts that come slower than they are computed."""
    facts = situation.facts
    idle = facts.idle_s / facts.generate_s if facts.generate_s else 0.0
    if idle < LEAST_GAIN and facts.starved_share < HINT:
        return None
    gain: float | None = idle
    measured_s = situation.measured_s
    if measured_s and situation.can_predict and _is_whole(situation):
        gain = max(idle, 1 - situation.predict().duration_s / measured_s)
    elif facts.starved_share > PLAIN:
        gain = idle or None
    if gain is not None and gain < LEAST_GAIN:
        return None
    return Finding(
        cause="input",
        evidence=f"the engine had nothing to do for {idle:.0%} of the time, and in {facts.starved_share:.0%} of its "
        "steps it had room for requests whose prompts were not read and tokenised yet",
        advice="give prompt_token_ids instead of text, a local and uncompressed input, or more CPU to this process; no "
        "setting of the engine helps",
        gain=gain,
        assumption=situation.unpredictable if gain is None else "",
    )


def writing(situation: Situation) -> Finding | None:
    """Results that go slower than they are made."""
    facts = situation.facts
    waited = facts.output_wait_s / facts.generate_s if facts.generate_s else 0.0
    if waited < LEAST_GAIN:
        return None
    return Finding(
        cause="output",
        evidence=f"the engine stood still for {waited:.0%} of the time until finished rows were written",
        advice="write to a local disk, put the journal on one with --checkpoint-dir, ask for fewer log-probabilities",
        gain=waited,
    )


def request_limit(situation: Situation) -> Finding | None:
    """A batch that is always full while requests wait."""
    observed, limit = situation.observed, situation.engine.max_requests_per_batch
    if observed is None or observed.full < HINT:
        return None
    evidence = (
        f"the batch was full, with {limit} request{'s' * (limit > 1)}, for {observed.full:.0%} of the time while "
        f"others waited, and {observed.mean_usage:.0%} of the cache was in use"
    )
    return _enlarge(situation, "request limit", "max_requests_per_batch", evidence, strong=observed.full > PLAIN)


def token_budget(situation: Situation) -> Finding | None:
    """Steps that are full of tokens while prompts wait."""
    observed, budget = situation.observed, situation.engine.max_batch_tokens
    if observed is None or observed.at_budget < HINT:
        return None
    evidence = f"steps had all {budget} tokens that they may have for {observed.at_budget:.0%} of the time"
    return _enlarge(situation, "token budget", "max_batch_tokens", evidence, strong=observed.at_budget > PLAIN)


def memory(situation: Situation) -> Finding | None:
    """A cache that is too small for the batch, beyond what finer pages would free."""
    observed, facts = situation.observed, situation.facts
    if observed is None or (observed.short_of_cache < HINT and not facts.preemptions):
        return None
    evidence = f"requests waited for room in the cache for {observed.short_of_cache:.0%} of the time"
    evidence += f", which was {observed.mean_usage:.0%} full on average and {observed.max_usage:.0%} at most"
    evidence += _why_room_is_kept(situation) if observed.short_of_cache and observed.short_usage < ROOMY else ""
    if facts.preemptions:
        evidence += f"; {facts.preemptions} times one was moved out"
    if facts.recomputed_share:
        evidence += f"; {facts.recomputed_share:.0%} of all tokens were computed again"
    wastes = observed.waste >= WASTEFUL
    strong = observed.short_of_cache > PLAIN and not wastes
    base = _finer_pages(situation) if wastes else {}
    finding = _enlarge(situation, "memory", "num_blocks", evidence, strong=strong, base=base)
    if finding is None:
        return None
    advice = situation.options.get("memory", f"raise --max-memory-percent, until there is room for {finding.advice}")
    if situation.has_given_blocks:  # which hold, whatever memory there is
        advice = f"{finding.advice}, or leave it out and {advice}"
    if base:
        advice += f", with {situation.spell('page_size', FINE_PAGE)}"
    if facts.recomputed_share:
        advice += situation.options.get("offload", ", or give --cpu-offload-space, which keeps what is moved out")
    return replace(finding, advice=advice)


def paging(situation: Situation) -> Finding | None:
    """Pages so large that much of them stays empty."""
    observed, finer = situation.observed, _finer_pages(situation)
    if observed is None or not finer or observed.waste < WASTEFUL:
        return None
    evidence = f"{observed.waste:.0%} of the cache that requests took held no token: a page has "
    evidence += f"{situation.engine.page_size} tokens"
    advice = situation.spell("page_size", FINE_PAGE)
    if situation.has_given_blocks:
        advice += f" and {situation.spell('num_blocks', finer['num_blocks'])}, which is a cache of the same size"
    if not situation.can_predict:
        return Finding(cause="paging", evidence=evidence, advice=advice, assumption=situation.unpredictable)
    gain = situation.gain(situation.predict(**finer))
    return Finding(cause="paging", evidence=evidence, advice=advice, gain=gain) if gain >= LEAST_GAIN else None


def continuous_batching(situation: Situation) -> Finding | None:
    """A batch that is not refilled when requests leave it."""
    observed = situation.observed
    if observed is None or situation.mode not in (NAIVE, STATIC) or observed.unfilled < HINT:
        return None
    evidence = (
        f"for {observed.unfilled:.0%} of the time requests waited although the limits and the cache had room for them: "
        "the batch waits for its slowest request"
    )
    advice = "refill the batch at every step, as cbatch run does"
    if not situation.can_predict:
        return Finding(
            cause="continuous batching", evidence=evidence, advice=advice, assumption=situation.unpredictable
        )
    gain = situation.gain(situation.predict(mode=CHUNKED))
    if gain < LEAST_GAIN:
        return None
    return Finding(cause="continuous batching", evidence=evidence, advice=advice, gain=gain)


def chunked_prefill(situation: Situation) -> Finding | None:
    """Prompts that are computed in one piece, so that everybody waits for the longest."""
    observed, engine = situation.observed, situation.engine
    if observed is None or engine.max_requests_per_batch == 1 or not situation.can_predict:
        return None
    is_whole = situation.mode == CONTINUOUS
    if situation.mode in (NAIVE, STATIC) or not (is_whole or observed.longest_step > 2 * LEAST_ITL_FACTOR):
        return None  # in a waiting batch prompts come first, and nobody decodes meanwhile
    finer = min(engine.max_batch_tokens, max(engine.max_batch_tokens // 4, 2 * engine.max_requests_per_batch))
    budgets = [engine.max_batch_tokens, finer] if is_whole else [finer]
    now = situation.predict().itl_p99_s
    tried = [(budget, situation.predict(mode=CHUNKED, max_batch_tokens=budget)) for budget in budgets]
    budget, then = min(tried, key=lambda entry: entry[1].itl_p99_s if situation.gain(entry[1]) > -LEAST_GAIN else now)
    factor, gain = now / then.itl_p99_s if then.itl_p99_s else 1.0, situation.gain(then)
    if factor < LEAST_ITL_FACTOR or gain < -LEAST_GAIN:
        return None
    how = "prompts were computed in one piece" if is_whole else f"a step may have {engine.max_batch_tokens} tokens"
    advice = [situation.options.get("chunked_prefill", "let prompts be split, as cbatch run does")] if is_whole else []
    advice += [situation.spell("max_batch_tokens", budget)] if budget != engine.max_batch_tokens else []
    return Finding(
        cause="chunked prefill",
        evidence=f"{how}, and the longest step took {observed.longest_step:.1f} times as long as the median one",
        advice=" and ".join(advice),
        gain=max(gain, 0.0),
        itl_factor=factor,
    )


def prefix_sharing(situation: Situation) -> Finding | None:
    """Prompts that begin alike and are computed each by itself."""
    share = situation.shared_share
    if situation.engine.allow_block_sharing or share < HINT:
        return None
    evidence = f"{share:.0%} of what the prompts say stands at the start of an earlier one, and sharing is off"
    advice = situation.options.get("allow_block_sharing", "leave --no-allow-block-sharing out")
    if not situation.can_predict:
        return Finding(cause="prefix sharing", evidence=evidence, advice=advice, assumption=situation.unpredictable)
    gain = situation.gain(situation.predict(allow_block_sharing=True, shared_share=share))
    return Finding(cause="prefix sharing", evidence=evidence, advice=advice, gain=gain) if gain >= LEAST_GAIN else None


def speculation(situation: Situation) -> Finding | None:
    """Steps of a few requests without drafts, or drafts that are mostly wrong."""
    facts, observed, cost = situation.facts, situation.observed, situation.cost
    if situation.speculation is None or observed is None or cost is None:
        return None
    if facts.drafted_tokens > 2 * facts.accepted_tokens:
        return _wrong_drafts(situation, cost)
    if situation.speculation > 0 or observed.small < HINT or facts.starved_share > HINT:
        return None
    few = round(observed.small_requests)
    now, drafting = (cost.step_s(num_tokens, 0, few, 0) for num_tokens in (few, 2 * few))
    saved = observed.small * (1 - drafting / now / (1 + HALF)) if now > 0 else 0.0
    if saved < LEAST_GAIN:
        return None
    return Finding(
        cause="speculation",
        evidence=f"for {observed.small:.0%} of the time there were no more than {SMALL_BATCH} requests, and each step "
        "gave each of them one token",
        advice=situation.options.get("speculation", "leave --no-speculation out"),
        gain=saved,
        assumption="if one draft a step is right half of the time",
    )


def _wrong_drafts(situation: Situation, cost: CostModel) -> Finding | None:
    """Weigh what wrong drafts cost against the steps that the right ones saved."""
    facts, steps = situation.facts, situation.steps
    assert steps is not None
    wrong, right = facts.drafted_tokens - facts.accepted_tokens, facts.accepted_tokens
    tokens, decoding = steps.prefill_tokens + steps.decode_tokens, steps.decode_tokens > 0
    paid = float((tokens[decoding] > cost.hidden_tokens).mean()) if decoding.any() else 0.0  # else they came for free
    requests = float(steps.running[decoding].mean()) if decoding.any() else 1.0
    lost = wrong * cost.per_query_token_s * paid
    saved = right * (cost.per_step_s / max(1.0, requests) + cost.per_request_s)
    gain = (lost - saved) / facts.generate_s if facts.generate_s > 0 else 0.0
    if gain < LEAST_GAIN:
        return None
    return Finding(
        cause="speculation",
        evidence=f"{wrong} of {facts.drafted_tokens} drafted tokens were wrong, and were computed for nothing",
        advice=situation.options.get("no_speculation", "--no-speculation, or leave --speculation out"),
        gain=gain,
    )


RULES: tuple[Rule, ...] = (
    reading,
    writing,
    continuous_batching,
    paging,
    prefix_sharing,
    memory,
    token_budget,
    request_limit,
    chunked_prefill,
    speculation,
)


def apply_rules(situation: Situation) -> Iterator[Finding]:
    """Yield what holds a run back, the weightiest first."""
    findings = [finding for rule in RULES if (finding := rule(situation)) is not None]
    yield from sorted(findings, key=lambda finding: finding.weight, reverse=True)


def _enlarge(
    situation: Situation,
    cause: Cause,
    name: str,
    evidence: str,
    *,
    strong: bool,
    base: dict[str, Any] | None = None,
) -> Finding | None:
    """Ask what more of the setting `name` would gain; `base` are changes that come before it.

    `strong` says whether the evidence does without a prediction.
    """
    base = base or {}
    if not situation.can_predict:
        if not strong:
            return None
        return Finding(
            cause=cause,
            evidence=evidence,
            advice=f"raise {situation.spell(name, '').rstrip()}",
            assumption=situation.unpredictable,
        )
    start = situation.predict(**base).duration_s
    now = base.get(name, getattr(situation.engine, name))
    gains = [(now * f, 1 - situation.predict(**base | {name: now * f}).duration_s / start) for f in FACTORS]
    best = max(gain for _, gain in gains)
    if best < LEAST_GAIN:
        return None
    value, gain = next((value, gain) for value, gain in gains if gain >= ENOUGH * best)
    return Finding(cause=cause, evidence=evidence, advice=situation.spell(name, value), gain=gain)


def _finer_pages(situation: Situation) -> dict[str, Any]:
    """Give the changes that cut the same cache into finer pages; {} where they are fine."""
    engine = situation.engine
    if engine.page_size <= FINE_PAGE:
        return {}
    return {"page_size": FINE_PAGE, "num_blocks": engine.num_blocks * engine.page_size // FINE_PAGE}


def _is_whole(situation: Situation) -> bool:
    """Whether all of a run's requests are simulated, so that its time can be compared."""
    return situation.workload is not None and len(situation.sample) == len(situation.workload) > 0


def _why_room_is_kept(situation: Situation) -> str:
    """Say why requests wait for room in a cache that is not full."""
    if situation.engine.scheduler_type == "offline":
        return "; the offline scheduler keeps room for what requests grow to"
    if situation.workload is not None and situation.workload.shares:
        return "; a shared page is read once for each of its requests, and a step reads no more pages than there are"
    return ""
