"""What the recorder still has to run, and for how long it may."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import record
from landscape import Landscape, Process
from made_landscape import HEADER, failed, landscape, process
from record import to_record, whole_lines

from autotune_amp.core.setting import Setting

FP16 = Setting(precision="fp16", batch_size=8)


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


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    there = process(FP16, (0.1, 0.2))
    whole = msgspec.json.encode(HEADER) + b"\n" + msgspec.json.encode(there) + b"\n"
    path.write_bytes(whole + b'{"cell":["grid","fo')
    assert whole_lines(path).processes == (there,)
    assert path.read_bytes() == whole
