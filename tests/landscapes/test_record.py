"""What the recorder still has to run, and for how long it may."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import record
from landscape import Cell, Landscape, Process, hardware_slug
from made_landscape import HEADER, IDENTITY, SIZES, failed, landscape, process
from record import deadline_seconds, to_record, whole_lines

from autotune_amp.core.setting import Setting

FP16 = Setting(precision="fp16", batch_size=8)


def test_fp32_comes_first_and_repetitions_follow_one_another() -> None:
    cells = to_record(Landscape(HEADER, []), num_processes=2)
    assert len(cells) == len(set(cells)) == 2 * len(HEADER.grid)
    assert {cell.precision for cell in cells[: len(SIZES)]} == {"fp32"}
    assert [cell.repetition for cell in cells] == [0] * len(HEADER.grid) + [1] * len(HEADER.grid)
    assert [c[3:] for c in cells[: len(HEADER.grid)]] != [c[3:] for c in cells[len(HEADER.grid) :]]


def test_what_is_there_is_not_run_again_and_pairs_follow_the_grid() -> None:
    whole = landscape(lambda c: 100.0 + c.batch_size, num_processes=2)
    rest = Landscape(HEADER, whole.processes[1:])
    assert to_record(rest, num_processes=2)[0] == whole.processes[0].cell
    pairs = to_record(whole, num_processes=2)
    assert {cell.stage for cell in pairs} == {"pair"}
    assert {cell.candidate for cell in pairs} == {whole.baseline, whole.best()}
    assert [cell.isolation for cell in pairs[:4]] == ["fork", "fresh", "fork", "fresh"]
    assert len(pairs) == 2 * 2 * record.NUM_PAIRS


@pytest.mark.parametrize(
    ("known", "num_left"),
    [
        ([failed(FP16, "timeout", 5.0)], 0),
        ([failed(FP16, "oom", 0.5)], 4),
        ([failed(FP16, "oom", 0.5), failed(FP16, "oom", 0.5)], 0),
        ([process(FP16, (2.0,))], 4),
        ([process(FP16, (2.0,)), process(FP16, (2.0,))], 0),
        ([process(FP16, (0.2,)), process(FP16, (0.2,))], 3),
    ],
)
def test_what_is_hopeless_is_not_repeated(known: list[Process], num_left: int) -> None:
    there = [msgspec.structs.replace(p, cell=p.cell._replace(repetition=number)) for number, p in enumerate(known)]
    fp32 = [process(Setting(precision="fp32", batch_size=8), (0.1,), repetition=number) for number in range(5)]
    cells = to_record(Landscape(HEADER, [*fp32, *there]), num_processes=5)
    assert sum(cell.candidate == FP16 and cell.stage == "grid" for cell in cells) == num_left


def test_deadlines_are_multiples_of_fp32() -> None:
    def fp32(size: int, step_seconds: float) -> Process:
        return process(Setting(precision="fp32", batch_size=size), (step_seconds,), warmup=(step_seconds,))

    known = Landscape(HEADER, [fp32(8, 0.5), fp32(8, 1.0), fp32(4, 0.01)])
    assert deadline_seconds(known, "bf16", 8) == pytest.approx(5 * (0.25 + 1.5))
    assert deadline_seconds(known, "bf16", 16) == pytest.approx(2 * 5 * (0.25 + 1.5))
    assert deadline_seconds(known, "bf16", 4) == pytest.approx(5 * 0.27)
    assert deadline_seconds(known, "fp32", 8) == record.FP32_DEADLINE_SECONDS


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    there = process(FP16, (0.1, 0.2))
    whole = msgspec.json.encode(HEADER) + b"\n" + msgspec.json.encode(there) + b"\n"
    path.write_bytes(whole + b'{"cell":["grid","fo')
    assert whole_lines(path).processes == (there,)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("kind", "name", "slug"),
    [
        ("cpu", "Intel(R) Xeon(R) Processor @ 2.50GHz", "xeon_2.5ghz_2cpu"),
        ("cpu", "AMD EPYC 7B13", "epyc_7b13_2cpu"),
        ("cuda", "NVIDIA H100 80GB HBM3", "h100_80gb_hbm3"),
    ],
)
def test_a_device_in_a_file_name(kind: str, name: str, slug: str) -> None:
    assert hardware_slug(msgspec.structs.replace(IDENTITY, type=kind, name=name)) == slug


def test_a_cell_is_written_as_a_list() -> None:
    cell = Cell("grid", "fork", 0, "bf16", 8)
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell) == cell
