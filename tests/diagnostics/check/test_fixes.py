"""Lines rewritten: what is mended, and what is left to a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune_amp.diagnostics.check import fixes


def of_mask(code: str) -> str | None:
    return fixes.fix_constant(code, -1e9)


def of_guard(code: str) -> str | None:
    return fixes.fix_epsilon(code, 1e-8)


@pytest.mark.parametrize(
    ("mend", "code", "expected"),
    [
        (of_mask, "s.masked_fill(m == 0, -1e9)", "s.masked_fill(m == 0, torch.finfo(s.dtype).min)"),
        (lambda c: fixes.fix_constant(c, 1e9), "d[0].fill_(1e9)", "d[0].fill_(torch.finfo(d[0].dtype).max)"),
        (of_mask, "s = s.masked_fill(m, -LARGE)", None),
        (of_mask, "s = s.masked_fill(m,", None),
        (of_guard, "return x / (x.norm() + 1e-8)", "return x / (x.norm().float() + 1e-8)"),
        (of_guard, "y = (1e-8 + a * b).log()", "y = (1e-8 + (a * b).float()).log()"),
        (of_guard, "if x.clamp(min=1e-8) < 0:", "if x.float().clamp(min=1e-8) < 0:"),
        (fixes.cast_argument_to_fp32, "L = torch.linalg.cholesky(A @ B)", "L = torch.linalg.cholesky((A @ B).float())"),
        (fixes.cast_argument_to_fp32, "L = A.inverse()", None),
        (fixes.remove_cast, "y = x.half() + 1  # ü", "y = x + 1  # ü"),
        (fixes.remove_cast, "y = x.to(torch.float16)", "y = x"),
        (fixes.remove_cast, "y = x.to(self.dtype)", None),
        (fixes.use_fp32, "model = Net().double()", "model = Net().float()"),
        (fixes.disable_scaler, 'scaler = GradScaler("cuda")', 'scaler = GradScaler("cuda", enabled=False)'),
        (fixes.disable_scaler, "scaler = GradScaler(", None),
        (lambda c: fixes.fix_binary_cross_entropy(c, None), "return self.criterion(p, y)", None),
    ],
)  # fmt: skip
def test_a_line(mend: Callable[[str], str | None], code: str, expected: str | None) -> None:
    assert mend(code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("with torch.cuda.amp.autocast(amp):  # on", 'with torch.amp.autocast("cuda", enabled=amp):  # on'),
        ("@torch.cpu.amp.autocast(f(), t, **rest)", '@torch.amp.autocast("cpu", enabled=f(), dtype=t, **rest)'),
        (
            "with torch.cuda.amp.autocast(*given):",
            'with torch.amp.autocast("cuda", *given):  # and pass the device first, the rest by name: autocast("cuda")',
        ),
        (
            "with torch.cuda.amp.autocast(",
            'with torch.amp.autocast("cuda",  # and pass the device first, the rest by name: autocast("cuda")',
        ),
        ("scaler = torch.cuda.amp.GradScaler(2.0)", 'scaler = torch.amp.GradScaler("cuda", 2.0)'),
    ],
)
def test_arguments_of_the_old_interface(code: str, expected: str) -> None:
    assert fixes.fix_old_name(code) == expected


def test_a_sigmoid_is_named_by_its_line() -> None:
    mended = fixes.fix_binary_cross_entropy("return F.binary_cross_entropy(p, y)", 12) or ""
    assert mended.startswith("return F.binary_cross_entropy_with_logits(p, y)")
    assert "line 12" in mended


def test_sizes_are_rounded_up() -> None:
    assert "50257 up to 50264" in fixes.sizes_advice([50257], 8)
