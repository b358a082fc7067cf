"""One word per setting: fields, options, TOML keys and docs agree, and the same checks hold for all sources."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing

from cbatch.cli.app import app
from cbatch.cli.options import ALIASES, SETTINGS
from cbatch.cli.run_options import RunOptions, read_options
from cbatch.cli.setting import ConsoleConfig, Setting
from cbatch.config import EngineConfig, JobConfig, SamplingParams
from cbatch.engine.policies import SCHEDULERS
from cbatch.errors import UsageError
from tests.cli.clikit import ROOT

BY_OPTION = {setting.option: setting for setting in SETTINGS}
NEEDED = {"model": "m", "output": "out.jsonl"}


def parse(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    """Let the real parser read a command line, and stop before the job."""
    read: list[RunOptions] = []

    def keep(inputs: list[str], config: str | None, given: dict[str, Any]) -> int:
        read.append(read_options(inputs, config, given))
        return 0

    monkeypatch.setattr("cbatch.cli.app.run_command", keep)
    command = typer.main.get_command(app)
    command.main(["run", "in.jsonl", "--model", "m", "-o", "out.jsonl", *arguments], standalone_mode=False)
    return read[0]


def sample(setting: Setting) -> tuple[str, str, object]:
    """A value that is not the default: on the command line, in TOML, and as it arrives."""
    if setting.kind == "choice":
        return setting.choices[-1], f'"{setting.choices[-1]}"', setting.choices[-1]
    if setting.name == "json_schema":
        return "{}", '"{}"', "{}"
    samples: dict[str, tuple[str, str, object]] = {
        "int": ("7", "7", 7),
        "float": ("0.5", "0.5", 0.5),
        "text": ("word", '"word"', "word"),
        "texts": ("word", '["word"]', ("word",)),
        "ints": ("7", "[7]", (7,)),
        "json": ('{"7": 2}', "{7 = 2}", ((7, 2.0),)),
    }
    return samples[setting.kind]


def test_every_field_is_an_option_and_every_option_a_field() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names))
    for target, without in (
        (EngineConfig, set()),
        (JobConfig, {"inputs", "sampling"}),  # the arguments, and the sampling settings below
        (SamplingParams, {"seed"}),  # of one row; the option is the job's seed
        (ConsoleConfig, set()),
    ):
        have = {setting.name for setting in SETTINGS if setting.target is target}
        assert have == {field.name for field in fields(target)} - without


def test_help_lists_every_setting_and_nothing_else() -> None:
    text = typer.testing.CliRunner().invoke(app, ["run", "--help"]).stdout
    listed = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    flags = {s.option for s in SETTINGS if s.kind == "flag" and s.target is not ConsoleConfig}
    assert listed == {*BY_OPTION, *(f"--no-{flag[2:]}" for flag in flags), "--config", "--help"}
    assert text.isascii()


def test_nothing_given_leaves_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(monkeypatch=monkeypatch)
    assert options == RunOptions(
        EngineConfig(model="m"), JobConfig(inputs=("in.jsonl",), output="out.jsonl"), ConsoleConfig()
    )


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.kind != "flag"], ids=lambda setting: setting.name)
def test_option_and_toml_key_fill_the_field(setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, toml, value = sample(setting)
    by_option = parse(setting.option, text, monkeypatch=monkeypatch)
    assert value_of(by_option, setting) == value
    file = tmp_path / "job.toml"
    given = NEEDED | {setting.name: None}
    lines = [f'{name} = "{word}"' for name, word in given.items() if word and name != setting.name]
    file.write_text("\n".join(['inputs = "in.jsonl"', f"{setting.name} = {toml}", *lines]))
    assert read_options([], str(file), {}) == by_option


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.kind == "flag"], ids=lambda setting: setting.name)
def test_flags_go_on_and_off(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert value_of(parse(setting.option, monkeypatch=monkeypatch), setting) is True
    if setting.target is not ConsoleConfig:
        assert value_of(parse(f"--no-{setting.option[2:]}", monkeypatch=monkeypatch), setting) is False


def value_of(options: RunOptions, setting: Setting) -> object:
    if setting.target is SamplingParams:
        return options.job.sampling[setting.name]
    owner = {EngineConfig: options.engine, JobConfig: options.job, ConsoleConfig: options.console}[setting.target]
    return getattr(owner, setting.name)


@pytest.mark.parametrize("alias", ALIASES)
def test_other_engines_words_mean_the_same(alias: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = ALIASES[alias]
    ours = parse(setting.option, "7", monkeypatch=monkeypatch)
    assert parse("--" + alias.replace("_", "-"), "7", monkeypatch=monkeypatch) == ours
    (tmp_path / "job.toml").write_text(f"{alias} = 7")
    assert parse("--config", str(tmp_path / "job.toml"), monkeypatch=monkeypatch) == ours
    with pytest.raises(UsageError, match=r"given twice.*is another word"):
        parse(setting.option, "7", "--" + alias.replace("_", "-"), "7", monkeypatch=monkeypatch)


def test_the_schedulers_are_the_engines() -> None:
    assert BY_OPTION["--scheduler-type"].choices == tuple(SCHEDULERS)


def test_vllms_share_of_total_memory_is_not_taken_for_ours() -> None:
    assert "gpu_memory_utilization" not in ALIASES


def test_the_command_line_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('inputs = ["other.jsonl"]\nmodel = "other"\npage_size = 8\nmax_tokens = 3\nrow_params = false')
    options = parse("--config", str(file), "--page-size", "4", "--row-params", monkeypatch=monkeypatch)
    assert options.engine.page_size == 4
    assert options.engine.model == "m"
    assert options.job.inputs == ("in.jsonl",)
    assert options.job.row_params is True
    assert options.job.sampling == {"max_tokens": 3}


def test_stop_strings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse("--stop", "\n", "--stop", "END", monkeypatch=monkeypatch)
    assert options.job.sampling == {"stop": ("\n", "END")}


@pytest.mark.parametrize(
    ("option", "value", "range_named"),
    [
        ("--page-size", "0", "from 1 to"),
        ("--page-size", "2.5", "whole number"),
        ("--page-size", "", "whole number"),
        ("--num-blocks", "99999999999999999999", "to 2147483647"),
        ("--max-memory-percent", "0", "above 0 and at most 1"),
        ("--safety-margin", "1", "a number from 0 to below 1"),
        ("--max-memory-percent", "90", "above 0 and at most 1"),
        ("--max-memory-percent", "nan", "above 0 and at most 1"),
        ("--dtype", "fp16", "auto, float32, bfloat16, float16"),
        ("--device", "gpu", "auto, cpu, cuda"),
        ("--scheduler-type", "random", "fifo"),
        ("--on-overlong", "truncate", "error, truncate-left, truncate-right"),
        ("--order", "random", "input, completion"),
        ("--generation-config", "vllm", "auto, none"),
        ("--max-tokens", "-1", "from 0 to 2147483647"),
        ("--temperature", "-0.1", "from 0"),
        ("--temperature", "inf", "from 0"),
        ("--top-p", "1.1", "at most 1"),
        ("--top-k", "many", "whole number"),
        ("--seed", "-1", "from 0 to"),
        ("--stop", "", "none of them empty"),
        ("--limit", "-5", "from 1 to"),
        ("--error-tolerance", "1.5", "from 0 to 1"),
        ("--safety-margin", "-0.1", "from 0 to below 1"),
        ("--max-errors", "0", "from 1 to"),
        ("--grace", "-1", "from 0 to"),
        ("--interrupted-exit-code", "256", "from 0 to 255"),
        ("--model", "", "not empty"),
    ],
)
def test_a_wrong_value_names_option_value_and_what_would_do(
    option: str, value: str, range_named: str, tmp_path: Path
) -> None:
    setting = BY_OPTION[option]
    given: Any = [value] if setting.kind == "texts" else value
    with pytest.raises(UsageError) as caught:
        read_options(["in.jsonl"], None, NEEDED | {setting.name: given})
    assert option in str(caught.value)
    assert range_named in str(caught.value)
    assert repr(value) in str(caught.value) or value.lstrip("-").split(".")[0] in str(caught.value)
    number = setting.kind in ("int", "float") and re.fullmatch(r"-?[\d.]+|inf|nan", value)
    (tmp_path / "job.toml").write_text(f"{setting.name} = {value if number else repr(value)}")
    with pytest.raises(UsageError, match=rf"^{setting.name} in .*job\.toml must be"):
        read_options(["in.jsonl"], str(tmp_path / "job.toml"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise = 4", "did you mean page_size?"),
        ("page-size = 4", "did you mean page_size?"),
        ("max_num_seq = 4", "is no setting"),
        ("nonsense = 1", "cbatch run --help"),
        ("page_size = 4\nblock_size = 4", "page_size twice"),
        ('page_size = "4"', "whole number"),
        ("page_size = true", "whole number"),
        ("row_params = 1", "true or false"),
        ("[engine]\npage_size = 4", "engine, which is no setting"),
        ("model = 3", "text"),
        ("stop = [1]", "list of strings"),
        ("inputs = []", "path or a list of paths"),
        ("page_size = ", "not TOML"),
        ("page_size = 4\npage_size = 5", "not TOML"),
    ],
)
def test_a_wrong_config_file_says_where_and_what(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_options(["in.jsonl"], str(file), NEEDED)
    assert message in str(caught.value)
    assert "job.toml" in str(caught.value)


def test_a_config_file_may_begin_with_a_byte_order_mark_and_must_be_utf8(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"\xef\xbb\xbfpage_size = 4\r\n")
    assert read_options(["in.jsonl"], str(file), NEEDED).engine.page_size == 4
    file.write_bytes(b'stop = "\xff"')
    with pytest.raises(UsageError, match="not UTF-8"):
        read_options(["in.jsonl"], str(file), NEEDED)
    with pytest.raises(UsageError, match="No such file"):
        read_options(["in.jsonl"], str(tmp_path / "gone.toml"), NEEDED)
    with pytest.raises(UsageError, match="Is a directory"):
        read_options(["in.jsonl"], str(tmp_path), NEEDED)


@pytest.mark.parametrize("missing", ["inputs", "model", "output"])
def test_what_a_run_needs_is_asked_for(missing: str) -> None:
    given = {name: value for name, value in NEEDED.items() if name != missing}
    with pytest.raises(UsageError, match=rf"no {missing.removesuffix('s')} given"):
        read_options([] if missing == "inputs" else ["in.jsonl"], None, given)


def test_every_default_can_be_told() -> None:
    for setting in SETTINGS:
        default = setting.field.default
        shown = setting.default_words
        assert shown is not None or default in (None, ()) or default is MISSING
        assert default is not None or shown is not None or setting.name == "stop", f"{setting.name} says no default"


def test_the_reference_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "docs" / "write_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == module.render(), "run `make docs`"
    assert all(f"`{option}`" in module.render() for option in BY_OPTION)


@pytest.mark.parametrize("source", ["command line", "file"])
def test_a_tilde_is_the_home_folder_where_no_shell_expands_it(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--output=~/out.jsonl` reaches the program as it stands, and so does what a TOML file says."""
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["--output=~/mine.jsonl", "--checkpoint-dir=~/kept", "--stop=~"]
    if source == "file":
        (tmp_path / "job.toml").write_text('output = "~/mine.jsonl"\ncheckpoint_dir = "~/kept"\nstop = ["~"]\n')
        options = read_options(["in.jsonl"], str(tmp_path / "job.toml"), {"model": "m"})
    else:
        options = parse(*given, monkeypatch=monkeypatch)
    assert options.job.output == str(tmp_path / "mine.jsonl")
    assert options.job.checkpoint_dir == str(tmp_path / "kept")
    assert options.job.sampling["stop"] == ("~",), "a text that is not a path stays"
