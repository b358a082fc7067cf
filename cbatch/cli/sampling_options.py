"""The settings of `cbatch run` that are sampling parameters, for rows which do not say otherwise. Used by `options`."""

from __future__ import annotations

from cbatch.cli.setting import Bounds, Setting
from cbatch.config import JobConfig, SamplingParams
from cbatch.jobs.params import SEED_MAX

SAMPLING = "Sampling: the defaults of rows that do not say otherwise"

SAMPLING_SETTINGS = (
    Setting(
        name="max_tokens",
        target=SamplingParams,
        panel=SAMPLING,
        help="Most tokens of a completion.",
        default="1024, cut to what the context leaves",
        metavar="TOKENS",
    ),
    Setting(
        name="min_tokens",
        target=SamplingParams,
        panel=SAMPLING,
        help="Let nothing but max-tokens end a completion before it has this many tokens.",
        metavar="TOKENS",
    ),
    Setting(
        name="temperature",
        target=SamplingParams,
        panel=SAMPLING,
        help="Randomness; 0 takes the likeliest token every time.",
        default="the model's, else 0",
        metavar="NUMBER",
    ),
    Setting(
        name="top_p",
        target=SamplingParams,
        panel=SAMPLING,
        help="Sample from the likeliest tokens that together have this probability.",
        default="the model's, else 1",
        metavar="FRACTION",
    ),
    Setting(
        name="top_k",
        target=SamplingParams,
        panel=SAMPLING,
        help="Sample from this many of the likeliest tokens; 0 takes all.",
        default="the model's, else 0",
        metavar="N",
    ),
    Setting(
        name="min_p",
        target=SamplingParams,
        panel=SAMPLING,
        help="Sample from tokens with at least this share of the likeliest one's probability; 0 takes all.",
        default="the model's, else 0",
        metavar="FRACTION",
    ),
    Setting(
        name="repetition_penalty",
        target=SamplingParams,
        panel=SAMPLING,
        help="Divide the logits of tokens that prompt or output have already; above 1 makes them less likely.",
        default="the model's, else 1",
        metavar="NUMBER",
    ),
    Setting(
        name="presence_penalty",
        target=SamplingParams,
        panel=SAMPLING,
        help="Take this off the logits of tokens that the output has already.",
        metavar="NUMBER",
    ),
    Setting(
        name="frequency_penalty",
        target=SamplingParams,
        panel=SAMPLING,
        help="Take this off the logits of tokens once for every time that the output has them.",
        metavar="NUMBER",
    ),
    Setting(
        name="logit_bias",
        target=SamplingParams,
        panel=SAMPLING,
        help="Add to the logits of tokens, by their ids.",
        metavar="JSON",
    ),
    Setting(
        name="seed",
        target=JobConfig,
        panel=SAMPLING,
        help="The job's seed; a row without a seed of its own gets one from this and its content.",
        bounds=Bounds(0, SEED_MAX),
        metavar="N",
    ),
    Setting(
        name="n",
        target=SamplingParams,
        panel=SAMPLING,
        help="Samples of each prompt, in the column completions.",
        metavar="N",
    ),
    Setting(
        name="stop",
        target=SamplingParams,
        panel=SAMPLING,
        help="End a completion before this text; may be repeated.",
        metavar="TEXT",
    ),
    Setting(
        name="include_stop_str_in_output",
        target=SamplingParams,
        panel=SAMPLING,
        help="Leave the stop text, or the text of the stop token, in the completion.",
    ),
    Setting(
        name="stop_token_ids",
        target=SamplingParams,
        panel=SAMPLING,
        help="End a completion at this token; may be repeated.",
        metavar="ID",
    ),
    Setting(
        name="ignore_eos",
        target=SamplingParams,
        panel=SAMPLING,
        help="Go on past the model's end-of-text token, to exactly max-tokens.",
    ),
    Setting(
        name="logprobs",
        target=SamplingParams,
        panel=SAMPLING,
        help="Add the columns token_logprobs and top_logprobs: each generated token's, and this many likeliest ones'.",
        default="off",
        metavar="N",
    ),
    Setting(
        name="prompt_logprobs",
        target=SamplingParams,
        panel=SAMPLING,
        help="The same for the prompt's tokens; with --max-tokens 0 prompts are scored and nothing is generated.",
        default="off",
        metavar="N",
    ),
    Setting(
        name="generation_config",
        target=JobConfig,
        panel=SAMPLING,
        help="Whether the model's own sampling defaults count.",
    ),
)
