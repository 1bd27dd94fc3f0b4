"""Rewrites a line of the user's code that fails under autocast. Pure functions of the line's text, without torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

# Function that returns the source text of a node.
GetSource: TypeAlias = Callable[[ast.AST], str]
# Function that returns the part of a node to replace and its new text, or None if the node needs no fix.
FindReplacement: TypeAlias = Callable[[ast.AST, GetSource], "tuple[ast.AST, str] | None"]
_OLD_PARAMETERS = ("enabled", "dtype", "cache_enabled")  # of torch.cuda.amp.autocast and torch.cpu.amp.autocast


def fix_constant(code: str, number: float) -> str | None:
    """Return the line with `number` replaced by the limit of the tensor's own dtype, or None if it cannot be."""

    def find_replacement(node: ast.AST, get_source: GetSource) -> tuple[ast.AST, str] | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return None
        constant = next((argument for argument in node.args if _number_value(argument) == number), None)
        if constant is None or node.func.attr.rstrip("_") not in ("masked_fill", "fill", "index_fill"):
            return None
        return constant, f"torch.finfo({get_source(node.func.value)}.dtype).{'min' if number < 0 else 'max'}"

    return _with_replacement(code, find_replacement)


def fix_epsilon(code: str, number: float) -> str | None:
    """Return the line with a cast to fp32 of the operand that the epsilon `number` is added to; None without one."""

    def find_replacement(node: ast.AST, get_source: GetSource) -> tuple[ast.AST, str] | None:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for operand, epsilon in ((node.left, node.right), (node.right, node.left)):
                if _number_value(epsilon) == number:
                    return operand, _cast_up(operand, get_source)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[:2] == "cl"):
            return None
        arguments = (*node.args, *(keyword.value for keyword in node.keywords))
        is_clamp = any(_number_value(argument) == number for argument in arguments)
        return (node.func.value, _cast_up(node.func.value, get_source)) if is_clamp else None

    return _with_replacement(code, find_replacement)


def fix_binary_cross_entropy(code: str, sigmoid_line: int | None) -> str | None:
    """Return the line with `binary_cross_entropy_with_logits` and a comment on the sigmoid to remove, or None if the
    line calls no `binary_cross_entropy`."""
    where = "the sigmoid before it" if sigmoid_line is None else f"the sigmoid of line {sigmoid_line}"
    line = re.sub(r"\bbinary_cross_entropy\(", "binary_cross_entropy_with_logits(", code)
    return f"{line}  # and remove {where}" if line != code else None


def cast_argument_to_fp32(code: str) -> str | None:
    """Return the line with the first argument of a torch function cast to fp32, or None if it calls none."""

    def find_replacement(node: ast.AST, get_source: GetSource) -> tuple[ast.AST, str] | None:
        if not (
            isinstance(node, ast.Call) and node.args and re.match(r"torch\.(linalg\.)?\w+$", get_source(node.func))
        ):
            return None
        return node.args[0], _cast_up(node.args[0], get_source)

    return _with_replacement(code, find_replacement)


def remove_cast(code: str) -> str | None:
    """Return the line without its cast to half precision, or None if it has none."""

    def find_replacement(node: ast.AST, get_source: GetSource) -> tuple[ast.AST, str] | None:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return None
        is_method = node.func.attr in ("half", "bfloat16") and not node.args
        is_to = node.func.attr in ("to", "type") and len(node.args) == 1 and not node.keywords
        if is_method or (is_to and re.fullmatch(r"torch\.(float16|half|bfloat16)", get_source(node.args[0]))):
            return node, get_source(node.func.value)
        return None

    return _with_replacement(code, find_replacement)


def use_fp32(code: str) -> str | None:
    """Return the line with fp32 in place of float64, fp16 or bf16, or None if it names none of them."""
    line = re.sub(r"\.(double|half|bfloat16)\(\)", ".float()", code)
    line = re.sub(r"\btorch\.(float64|double|float16|half|bfloat16)\b", "torch.float32", line)
    return line if line != code else None


def function_advice(device: str) -> str:
    """Return a sentence that names the decorators that an autograd.Function needs on `device`."""
    device = f'device_type="{device}"'
    return f"Write @torch.amp.custom_fwd({device}) over forward, and @torch.amp.custom_bwd({device}) over backward."


def autocast_advice(code: str) -> str | None:
    """Return a sentence that says to remove an autocast but not its body, or None if the line opens no autocast."""
    return f"Remove `{code}` and keep its body." if re.match(r"(with|@).*autocast\(", code) else None


def fix_old_name(code: str) -> str | None:
    """Return the line with the names of torch.amp in place of those of torch.cuda.amp or torch.cpu.amp."""

    def find_replacement(node: ast.AST, get_source: GetSource) -> tuple[ast.AST, str] | None:
        if not (isinstance(node, ast.Call) and node.args) or any(isinstance(each, ast.Starred) for each in node.args):
            return None
        function = get_source(node.func)
        if not re.fullmatch(r"torch\.(cuda|cpu)\.amp\.autocast", function):
            return None
        # torch.amp.autocast takes them in another order.
        named = [f"{name}={get_source(value)}" for name, value in zip(_OLD_PARAMETERS, node.args, strict=False)]
        return node, f"{function}({', '.join([*named, *map(get_source, node.keywords)])})"

    device = "cpu" if "torch.cpu" in code else "cuda"
    replaced = _with_replacement(code, find_replacement)
    line = replaced or code
    line = re.sub(r"torch\.(cuda|cpu)\.amp\.(autocast|GradScaler)\(", rf'torch.amp.\2("{device}", ', line)
    line = re.sub(r"torch\.(cuda|cpu)\.amp\.(custom_fwd|custom_bwd)\b", rf'torch.amp.\2(device_type="{device}")', line)
    line = re.sub(r"from torch\.(cuda|cpu) import amp", "from torch import amp", line)
    line = re.sub(r"torch\.(cuda|cpu)\.amp\b", "torch.amp", line).replace(", )", ")")
    has_more = replaced is None and re.search(r"autocast\([^()]*(\*\w|, $)", line)  # arguments that cannot be named
    if has_more or line.startswith(("from", "import")):
        return f'{line.rstrip()}  # and pass the device first, the rest by name: autocast("{device}")'
    return line


def disable_scaler(code: str) -> str | None:
    """Return the line with its GradScaler disabled, or None if it creates none."""
    line = re.sub(r"GradScaler\(([^()]*)\)", lambda m: f"GradScaler({m[1]}{', ' if m[1] else ''}enabled=False)", code)
    return line if line != code else None


def sizes_advice(sizes: Sequence[int], multiple: int) -> str:
    """Return a sentence that says to round each size up to the next multiple."""
    rounded = [f"{size} up to {-(-size // multiple) * multiple}" for size in sizes]
    return f"Round {', '.join(rounded)}."


def _number_value(node: ast.AST) -> float | None:
    """Return the value of a number literal with its sign, or None for another node."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number_value(node.operand)
        return None if value is None else -value
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    return float(node.value) if is_number else None  # type: ignore[attr-defined]  # it is a Constant


def _cast_up(node: ast.AST, get_source: GetSource) -> str:
    is_simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return f"{get_source(node)}.float()" if is_simple else f"({get_source(node)}).float()"


def _with_replacement(code: str, find_replacement: FindReplacement) -> str | None:
    """Return the line with the innermost node that `find_replacement` replaces in its new form.

    Return None if the line is no whole statement, or if no node is replaced.
    """
    for rest in ("", "\n pass", "\ndef f(): pass"):  # of a statement, below its first line, below a decorator
        with suppress(SyntaxError):
            tree = ast.parse(code + rest)
            break
    else:
        return None
    for node in reversed(list(ast.walk(tree))):
        replacement = find_replacement(node, lambda part: ast.get_source_segment(code, part) or "")
        if replacement is not None:
            part, new_text = replacement
            start, end = part.col_offset, part.end_col_offset  # type: ignore[attr-defined]  # expressions have them
            line = code.encode()
            return (line[:start] + new_text.encode() + line[end:]).decode()
    return None
