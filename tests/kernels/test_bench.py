"""The program that times the ops: it counts what each has to do, and times nothing that is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with a small machine to measure."""
    spec = importlib.util.spec_from_file_location("bench_of_kernels", ROOT / "kernels" / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name, value in (("REPEATS", 2), ("STREAMED_BYTES", 2**20), ("PRODUCT_SIZE", 16)):
        monkeypatch.setattr(module, name, value)
    return module


SMALL = ["--rows", "2", "--query", "3", "--context", "40", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
SMALL += ["--vocab", "100"]
DECODER_WEIGHTS = (256 + 128 + 3 * 341) * 128  # heads, output, gate, up and down


@pytest.mark.parametrize(
    ("op", "megabytes", "megaflops"),
    [
        ("paged_attention", (2 * 3 * 2 * 2 * 16 * 32 + 2 * 6 * 128) * 4 / 1e6, 4 * 2 * (38 + 39 + 40) * 128 / 1e6),
        ("draw_tokens", 2 * 100 * 4 / 1e6, 2 * 100 / 1e6),
        ("cache_write", 2 * 2 * 6 * 64 * 4 / 1e6, 0.0),
        ("rms_norm", 2 * 6 * 128 * 4 / 1e6, 4 * 6 * 128 / 1e6),
        ("rope_cache_write", (2 * 6 * 256 + 2 * 6 * 32) * 4 / 1e6, 3 * 6 * 192 / 1e6),
        ("packed_linear", 2 * 4 * 128 * 128 / 1e6 + 5 * 6 * 128 * 4 / 1e6, 2 * 6 * 4 * 128 * 128 / 1e6),
        (
            "decoder",
            (2 * DECODER_WEIGHTS + 2 * 6 * 128 * 4 + (2 * 3 * 2 * 2 * 16 * 32 + 2 * 6 * 128) * 4) / 1e6,
            (2 * 6 * DECODER_WEIGHTS + 4 * 2 * (38 + 39 + 40) * 128) / 1e6,
        ),
        ("linear", (4 * 128 * 128 + 5 * 6 * 128) * 4 / 1e6, 2 * 6 * 4 * 128 * 128 / 1e6),
    ],
)
def test_what_an_op_has_to_do_is_counted(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    op: str,
    megabytes: float,
    megaflops: float,
) -> None:
    tested = []
    monkeypatch.setattr(bench, "run_tests", tested.append)
    bench.main([op, *SMALL])
    out = capsys.readouterr().out
    assert f"to be done        {megabytes:8.2f} MB   {megaflops:10.2f} MFLOP\n" in out
    assert "x the floor" in out
    assert (bench.TESTS / tested[0]).is_file()


def test_pages_that_rows_share_are_read_once(bench: ModuleType) -> None:
    alone, sharing = (bench._paged_attention(bench.Sizes(rows=4, context=64, shared=shared)) for shared in (0, 48))
    page = 2 * 16 * 3 * 64 * 4
    assert alone.num_bytes - sharing.num_bytes == 3 * 3 * page
    assert alone.num_flops == sharing.num_flops


def test_with_a_red_test_nothing_is_timed(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "test_cache.py").write_text("def test_it():\n    assert False\n")
    monkeypatch.setattr(bench, "TESTS", tmp_path)
    monkeypatch.setitem(bench.OPS, "cache_write", bench.Op(None, "kernels/test_cache.py"))
    with pytest.raises(SystemExit, match=r"test_cache\.py fails: nothing is timed"):
        bench.main(["cache_write"])
