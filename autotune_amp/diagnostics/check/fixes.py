"""Fixes for a line of the user's code that fails under autocast. Pure functions without torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

Text: TypeAlias = Callable[[ast.AST], str]
# Function that returns the part of a node to replace and its new text, or None if the node needs no fix.
Mend: TypeAlias = Callable[[ast.AST, Text], "tuple[ast.AST, str] | None"]


def of_constant(code: str, number: float) -> str | None:
    """Return the line with `number` replaced by the limit of the tensor's own dtype, or None if it cannot be."""

    def mend(node: ast.AST, text: Text) -> tuple[ast.AST, str] | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return None
        place = next((argument for argument in node.args if _value(argument) == number), None)
        if place is None or node.func.attr.rstrip("_") not in ("masked_fill", "fill", "index_fill"):
            return None
        return place, f"torch.finfo({text(node.func.value)}.dtype).{'min' if number < 0 else 'max'}"

    return _mended(code, mend)


def of_epsilon(code: str, number: float) -> str | None:
    """Return the line with the operand to which the epsilon `number` applies cast to fp32, or None if there is none."""

    def mend(node: ast.AST, text: Text) -> tuple[ast.AST, str] | None:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if _value(other) == number:
                    return one, _cast_up(one, text)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[:2] == "cl"):
            return None
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        is_clamp = any(_value(argument) == number for argument in given)
        return (node.func.value, _cast_up(node.func.value, text)) if is_clamp else None

    return _mended(code, mend)


def of_binary_cross_entropy(code: str, sigmoid_line: int | None) -> str | None:
    """Return the line with `binary_cross_entropy_with_logits`, and which sigmoid to remove; None if not possible."""
    where = "the sigmoid before it" if sigmoid_line is None else f"the sigmoid of line {sigmoid_line}"
    line = re.sub(r"\bbinary_cross_entropy\(", "binary_cross_entropy_with_logits(", code)
    return f"{line}  # and take out {where}" if line != code else None


def of_linear_algebra(code: str) -> str | None:
    """Return the line with the first argument of a torch function cast to fp32, or None if it calls none."""

    def mend(node: ast.AST, text: Text) -> tuple[ast.AST, str] | None:
        if not (isinstance(node, ast.Call) and node.args and re.match(r"torch\.(linalg\.)?\w+$", text(node.func))):
            return None
        return node.args[0], _cast_up(node.args[0], text)

    return _mended(code, mend)


def without_cast(code: str) -> str | None:
    """Return the line without its cast to half precision, or None if it has none."""

    def mend(node: ast.AST, text: Text) -> tuple[ast.AST, str] | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return None
        is_method = node.func.attr in ("half", "bfloat16") and not node.args
        is_to = node.func.attr in ("to", "type") and len(node.args) == 1 and not node.keywords
        if is_method or (is_to and re.fullmatch(r"torch\.(float16|half|bfloat16)", text(node.args[0]))):
            return node, text(node.func.value)
        return None

    return _mended(code, mend)


def in_fp32(code: str) -> str | None:
    """Return the line with fp32 in place of float64, fp16 or bf16, or None if it names none of them."""
    line = re.sub(r"\.(double|half|bfloat16)\(\)", ".float()", code)
    line = re.sub(r"\btorch\.(float64|double|float16|half|bfloat16)\b", "torch.float32", line)
    return line if line != code else None


def of_function(device: str) -> str:
    """Return a sentence that names the decorators that an autograd.Function needs on `device`."""
    device = f'device_type="{device}"'
    return f"Write @torch.amp.custom_fwd({device}) over forward, and @torch.amp.custom_bwd({device}) over backward."


def of_autocast(code: str) -> str | None:
    """Return a sentence that says to remove an autocast but not its body, or None if the line opens no autocast."""
    return f"Take out `{code}` and keep what is in it." if re.match(r"(with|@).*autocast\(", code) else None


def of_old_name(code: str) -> str | None:
    """Return the line with the names of torch.amp in place of those of torch.cuda.amp or torch.cpu.amp."""
    device = "cpu" if "torch.cpu" in code else "cuda"
    line = re.sub(r"torch\.(cuda|cpu)\.amp\.(autocast|GradScaler)\(", rf'torch.amp.\2("{device}", ', code)
    line = re.sub(r"torch\.(cuda|cpu)\.amp\.(custom_fwd|custom_bwd)\b", rf'torch.amp.\2(device_type="{device}")', line)
    line = re.sub(r"from torch\.(cuda|cpu) import amp", "from torch import amp", line)
    line = re.sub(r"torch\.(cuda|cpu)\.amp\b", "torch.amp", line).replace(", )", ")")
    is_import = line.startswith(("from", "import"))
    return f'{line}  # whose calls take the device first: autocast("{device}")' if is_import else line


def of_scaler(code: str) -> str | None:
    """Return the line with its GradScaler disabled, or None if it makes none."""
    line = re.sub(r"GradScaler\(([^()]*)\)", lambda m: f"GradScaler({m[1]}{', ' if m[1] else ''}enabled=False)", code)
    return line if line != code else None


def of_sizes(sizes: Sequence[int], multiple: int) -> str:
    """Return a sentence that says to round each size up to the next multiple."""
    rounded = [f"{size} up to {-(-size // multiple) * multiple}" for size in sizes]
    return f"Round {', '.join(rounded)}."


def _value(node: ast.AST) -> float | None:
    """Return the value of a number literal with its sign, or None for another node."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        return None if value is None else -value
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    return float(node.value) if is_number else None  # type: ignore[attr-defined]  # it is a Constant


def _cast_up(node: ast.AST, text: Text) -> str:
    is_simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return f"{text(node)}.float()" if is_simple else f"({text(node)}).float()"


def _mended(code: str, mend: Mend) -> str | None:
    """Return the line with the innermost node that `mend` fixes replaced.

    Return None if the line is no whole statement, or if `mend` fixes no node.
    """
    whole = f"{code} pass" if code.endswith(":") else code
    try:
        tree = ast.parse(whole)
    except SyntaxError:
        return None
    for node in reversed(list(ast.walk(tree))):
        mended = mend(node, lambda part: ast.get_source_segment(whole, part) or "")
        if mended is not None:
            part, text = mended
            start, end = part.col_offset, part.end_col_offset  # type: ignore[attr-defined]  # expressions have them
            line = whole.encode()
            return (line[:start] + text.encode() + line[end:]).decode().removesuffix(" pass")
    return None
