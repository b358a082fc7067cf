"""What a model's own generation config says, under our names. Called by load.

Only what the file states counts: transformers' silent defaults, such as a top_k of 50, are not the model's.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig

# name → (lowest, highest) value that our sampling takes
TAKEN = {"temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "top_k": (0, 2**31), "min_p": (0.0, 1.0)}
TAKEN |= {"repetition_penalty": (1e-9, 100.0)}
ALWAYS_TAKEN = frozenset({"repetition_penalty"})  # greedy decoding heeds it, too
# Settings that say nothing about what is generated, and those at which the others do nothing.
NOT_SAMPLING = frozenset(
    {"use_cache", "output_attentions", "output_hidden_states", "return_dict_in_generate", "output_scores"}
    | {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "do_sample", "transformers_version"}
    | {"cache_implementation", "max_length", "output_logits", "remove_invalid_values", "trust_remote_code"}
)
NEUTRAL: dict[str, object] = {"num_beams": 1, "typical_p": 1.0, "length_penalty": 1.0}
NEUTRAL |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beam_groups": 1, "num_return_sequences": 1}
NEUTRAL |= {"diversity_penalty": 0.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of the model, and the names of the settings that have no counterpart here."""

    sampling: dict[str, object]
    not_taken: tuple[str, ...]


def generation_defaults(config: GenerationConfig | None) -> GenerationDefaults:
    """Translate a generation config; its sampling settings count only where it samples (`do_sample`)."""
    stated = {} if config is None else config.to_diff_dict()
    stated = {name: value for name, value in stated.items() if value is not None and not name.startswith("_")}
    samples = bool(stated.get("do_sample", False))
    sampling: dict[str, object] = {"temperature": 1.0} if samples else {}
    not_taken = []
    for name, value in stated.items():
        if name in TAKEN:
            low, high = TAKEN[name]
            if not (samples or name in ALWAYS_TAKEN):
                continue
            if isinstance(value, (int, float)) and low <= value <= high:
                sampling[name] = value
            else:
                not_taken.append(name)
        elif name not in NOT_SAMPLING and value != NEUTRAL.get(name):
            not_taken.append(name)
    return GenerationDefaults(sampling, tuple(sorted(not_taken)))


def end_token_ids(*sources: object) -> frozenset[int]:
    """Join the `eos_token_id` of every source: an id, a list of ids, or None."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(token, int) and token >= 0:
                ids.add(token)
    return frozenset(ids)
