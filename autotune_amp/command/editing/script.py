"""Source text of a training script: find a call and the value of one of its arguments, and make splices. Pure.

Splices replace ranges of the text, so that the rest keeps its formatting.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import msgspec

_DTYPES = ("bfloat16", "float16", "half", "float32", "float")
MAX_NUM_NAMES = 3  # variables that are followed from an argument to its value
_LAYOUT_TOKENS = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_PLAIN_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_CALLS_AFTER_LOSS = ("backward", "manual_backward", "step")  # calls that stay outside of an autocast region


class Splice(msgspec.Struct, frozen=True, kw_only=True):
    """Replacement of the characters from `start` up to `end` of the file `path` by `text`; by `text_if_repeated`, if
    given, after another insertion at the same place.
    """

    path: str
    start: int
    end: int
    text: str
    text_if_repeated: str | None = None


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """Argument to set in the command: `option` with `value`, or without one if None; to remove if not `is_on`."""

    option: str
    value: str | None
    is_on: bool = True


def apply_splices(text: str, splices: Iterable[Splice]) -> str:
    """Return `text` with all splices applied; insertions at one place keep their order."""
    done, latest = 0, None
    parts: list[str] = []
    for each in sorted(dict.fromkeys(splices), key=lambda splice: (splice.start, splice.end)):
        is_again = latest is not None and latest.start == each.start == latest.end and each.text_if_repeated is not None
        parts += [text[done : each.start], each.text_if_repeated if is_again and each.text_if_repeated else each.text]
        done, latest = each.end, each
    return "".join([*parts, text[done:]])


class Script:
    """Source file of a training program. Raises SyntaxError if it is not Python."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.tree = ast.parse(text)
        self._lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        # End offset and text of each token that is not layout.
        self._tokens = [
            (self._starts[token.end[0] - 1] + token.end[1], token.string)
            for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline)
            if token.type not in _LAYOUT_TOKENS
        ]

    def source(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        return self.text[slice(*self._range(node))]

    def contains(self, node: ast.expr, splice: Splice) -> bool:
        """Whether the range that a splice replaces lies within an expression."""
        start, end = self._range(node)
        return start <= splice.start and splice.end <= end

    def call(self, line: int, end: tuple[int, int] | None, name: str) -> ast.Call | None:
        """Return the call that ends at `end` (line, column). If `end` is None, return the only call of `name` at the
        line, or if there is no call of `name`, the only call; None if there are several or none.
        """
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        if end is not None:
            return next((each for each in calls if (each.end_lineno, each.end_col_offset) == end), None)
        calls_at_line = [each for each in calls if each.lineno <= line <= (each.end_lineno or 0)]
        named = [each for each in calls_at_line if re.split(r"\W", self.source(each.func))[-1] == name]
        candidates = named if named else calls_at_line
        return candidates[0] if len(candidates) == 1 else None

    def change(
        self, call: ast.Call, name: str, value: str, parameters: Sequence[str], arguments: Sequence[str]
    ) -> list[Splice] | Flag | None:
        """Return the change that gives the argument `name` of `call` this value; None if it is unclear where that is
        set.

        `parameters` are the names of the call's positional arguments, `arguments` the command-line arguments of the
        process that ran it.
        """
        argument = self.argument_value(call, name, parameters)
        if argument is not None:
            return self._change_of_value(argument, value, arguments, MAX_NUM_NAMES)
        if any(keyword.arg is None for keyword in call.keywords):  # **options may contain it
            return None
        return [self._insertion(call, f"{name}={value}")]

    def argument_value(self, call: ast.Call, name: str, parameters: Sequence[str]) -> ast.expr | None:
        """Return the expression that a call gives as its argument `name`, None if it gives none. For ``*values``
        return the starred expression, for ``**options`` the entry of the dictionary that is assigned to `options`.
        """
        by_name = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
        options = [each.value.id for each in call.keywords if each.arg is None and isinstance(each.value, ast.Name)]
        for each in map(self._value_of_name, options):
            if by_name is None and isinstance(each, ast.Dict):
                by_name = _value_in_dict(each, name)
        place = parameters.index(name) if name in parameters else len(call.args)
        starred = [each for each in call.args[: place + 1] if isinstance(each, ast.Starred)]
        by_place = (starred or call.args[place:])[:1]
        return by_name or (by_place[0] if by_place else None)

    def put_in_block(self, line: int, end: tuple[int, int] | None, name: str, header: str) -> list[Splice] | None:
        """Return the splices that indent the statement with this call, and those up to the backward pass, below
        `header`; None if these are not simple statements of one block.
        """
        call = self.call(line, end, name)
        enclosing = None if call is None else self._enclosing_block(call)
        if enclosing is None:
            return None
        parent, block, first = enclosing
        last = _last_of_forward(parent, block, first)
        if last is None:
            return None
        start, stop = block[first].lineno - 1, block[last].end_lineno or 0
        indent = self._lines[start][: len(self._lines[start]) - len(self._lines[start].lstrip())]
        shares_line = last + 1 < len(block) and block[last + 1].lineno == block[last].end_lineno
        is_alone = len(indent.encode()) == block[first].col_offset and not shares_line
        nodes = (node for each in block[first : last + 1] for node in ast.walk(each))
        if not is_alone or any(map(_is_multiline_string, nodes)):
            return None
        unit, newline = "\t" if indent.startswith("\t") else "    ", "\r\n" if "\r\n" in self._lines[start] else "\n"
        at = self._starts[start]
        return [
            Splice(path=self.path, start=at, end=at, text=f"{indent}{header}{newline}"),
            *(
                Splice(path=self.path, start=self._starts[number], end=self._starts[number], text=unit)
                for number in range(start, stop)
                if self._lines[number].strip()
            ),
        ]

    @property
    def imports_torch(self) -> bool:
        """Whether the file imports torch under its own name."""
        return any(
            isinstance(node, ast.Import) and any(not name.asname and name.name == "torch" for name in node.names)
            for node in self.tree.body
        )

    def insert_below_imports(self, statement: str) -> list[Splice]:
        """Return the splices that put `statement` below the imports; empty if torch is not imported under its own
        name.
        """
        if not self.imports_torch:
            return []
        # Below all imports, since linters require them at the top.
        block = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        at = self._starts[(block[-1].end_lineno or 0)]
        return [Splice(path=self.path, start=at, end=at, text=f"\n{statement}\n")]

    def calls_of(self, name: str) -> list[ast.Call]:
        """Return the file's calls of functions with this name."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return [call for call in calls if re.split(r"\W", self.source(call.func))[-1] == name]

    def import_torch(self) -> list[Splice]:
        """Return the splices that import torch before the first import that names it, else before the first import;
        empty if the file imports it under its own name already.
        """
        if self.imports_torch:
            return []
        imports = [node for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imports = [node for node in imports if getattr(node, "module", None) != "__future__"]
        named = [node for node in imports if "torch" in ast.unparse(node)]
        if not imports:
            return []
        at = self._starts[(named or imports)[0].lineno - 1]
        return [Splice(path=self.path, start=at, end=at, text="import torch\n")]

    def _change_of_value(
        self, node: ast.expr, value: str, arguments: Sequence[str], num_left: int
    ) -> list[Splice] | Flag | None:
        """Return the change that replaces the literal that `node` is or refers to, or the command-line argument that
        sets it. None if neither is found by following at most `num_left` variables.
        """
        if _is_literal(node):
            if isinstance(node, ast.Attribute):  # keep the name by which this file knows torch
                value = f"{self.source(node.value)}.{value.rpartition('.')[2]}"
            start, end = self._range(node)
            return [Splice(path=self.path, start=start, end=end, text=value)]
        if not num_left:
            return None
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
        if name is not None and (declared := self._declaration_of(name)):
            return self._change_of_parser(declared, value, arguments)
        if isinstance(node, ast.Name):
            option = _first_option_in([f"--{name}"], arguments)  # a script that parses its arguments itself
            value_node = self._value_of_name(node.id)
            if option is not None and value_node is not None:
                return _literal_flag(option, value)
        elif isinstance(node, ast.Attribute):
            value_node = self._value_of_attribute(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            value_node = self._value_of_key(node.slice.value)
        elif isinstance(node, ast.Call) and len(node.args) == 1 and getattr(node.func, "id", "") in ("int", "bool"):
            value_node = node.args[0]
        else:
            value_node = None
        return None if value_node is None else self._change_of_value(value_node, value, arguments, num_left - 1)

    def _declaration_of(self, name: str) -> ast.Call | None:
        """Return the `add_argument` call whose value argparse stores under this name; None unless there is
        exactly one.
        """
        declarations = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "add_argument"
            and _argparse_name(node) == name
        ]
        return declarations[0] if len(declarations) == 1 else None

    def _change_of_parser(self, declared: ast.Call, value: str, arguments: Sequence[str]) -> list[Splice] | Flag | None:
        options = [each.value for each in declared.args if isinstance(each, ast.Constant)]
        keywords = {keyword.arg: keyword.value for keyword in declared.keywords}
        used_option = _first_option_in([str(option) for option in options], arguments)
        action = keywords.get("action")
        if action is not None:
            if not isinstance(action, ast.Constant) or action.value not in ("store_true", "store_false"):
                return None
            is_on = (value == "True") is (action.value == "store_true")
            return Flag(option=used_option or str(options[-1]), value=None, is_on=is_on)
        if used_option is not None:
            return _literal_flag(used_option, value)
        if "default" not in keywords:
            return [self._insertion(declared, f"default={value}")]
        default = keywords["default"]
        return self._change_of_value(default, value, arguments, 1) if _is_literal(default) else None

    def _value_of_name(self, name: str) -> ast.expr | None:
        """Return the value of a variable that is assigned exactly once in the file, else None."""
        stores = [
            node
            for node in ast.walk(self.tree)
            if (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
            or (isinstance(node, ast.arg) and node.arg == name)
            or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
        ]
        if len(stores) != 1:
            return None
        return next((value for target, value in _assignments(self.tree) if target is stores[0]), None)

    def _value_of_attribute(self, name: str) -> ast.expr | None:
        """Return the value of a class or object attribute that is assigned exactly once in the file, else None."""
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        values = [
            value
            for target, value in _assignments(self.tree)
            if isinstance(target, ast.Attribute) and target.attr == name
        ]
        values += [
            value
            for each in classes
            for target, value in _assignments(ast.Module(body=each.body, type_ignores=[]), is_deep=False)
            if isinstance(target, ast.Name) and target.id == name
        ]
        return values[0] if len(values) == 1 else None

    def _value_of_key(self, key: object) -> ast.expr | None:
        """Return the value of a key that exactly one dictionary display of the file has, else None."""
        entries = [_value_in_dict(node, key) for node in ast.walk(self.tree) if isinstance(node, ast.Dict)]
        values = [entry for entry in entries if entry is not None]
        return values[0] if len(values) == 1 else None

    def _insertion(self, call: ast.Call, argument: str) -> Splice:
        """Return the splice that adds an argument to a call, after the last: on a line of its own if the last one ends
        with a comma and a line break.
        """
        _, end = self._range(call)
        place = bisect_left(self._tokens, (end,)) - 1  # before the closing parenthesis
        at, last = self._tokens[place]
        newline = re.search(r"\r?\n", self.text[at:end])
        if last == "," and newline is not None:
            line = self.text[:at].rpartition("\n")[2]
            indent = line[: len(line) - len(line.lstrip())]
            at += newline.start()
            return Splice(path=self.path, start=at, end=at, text=f"{newline[0]}{indent}{argument},")
        before = {"(": "", ",": " "}.get(last, ", ")
        return Splice(
            path=self.path,
            start=at,
            end=at,
            text=before + argument,
            text_if_repeated=", " + argument if last in "(," else None,
        )

    def _enclosing_block(self, call: ast.Call) -> tuple[ast.AST, list[ast.stmt], int] | None:
        """Return the node whose block contains the call's statement, the block, and the statement's index in it; None
        if it is not a simple statement but, say, an `if` line.
        """
        enclosing = None
        for parent in ast.walk(self.tree):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(parent, name, None)
                if not isinstance(block, list):
                    continue
                for place, statement in enumerate(block):
                    if any(node is call for node in ast.walk(statement)):
                        enclosing = (parent, block, place)  # `walk` goes inwards: the last is the innermost
        if enclosing is None or not isinstance(enclosing[1][enclosing[2]], _PLAIN_STATEMENTS):
            return None
        return enclosing

    def _range(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno or 0, node.end_col_offset or 0),
        )

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _is_literal(node: ast.expr) -> bool:
    """Whether an expression is a literal, a sum or product of literals, or one of torch's dtypes."""
    if isinstance(node, ast.Attribute):
        return node.attr in _DTYPES
    allowed = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
    return all(isinstance(each, allowed) for each in ast.walk(node))


def _assignments(tree: ast.Module, *, is_deep: bool = True) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and values of ``name = value`` statements."""
    for node in ast.walk(tree) if is_deep else tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            yield node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _value_in_dict(node: ast.Dict, key: object) -> ast.expr | None:
    """Return the value of a key in a dictionary display, None if it is missing."""
    pairs = zip(node.keys, node.values, strict=True)
    return next((value for name, value in pairs if isinstance(name, ast.Constant) and name.value == key), None)


def _argparse_name(declared: ast.Call) -> str | None:
    """Return the name under which argparse stores the value of an `add_argument` call, None if it is not a literal."""
    destination = next((keyword.value for keyword in declared.keywords if keyword.arg == "dest"), None)
    if destination is not None:
        return str(destination.value) if isinstance(destination, ast.Constant) else None
    options = [str(each.value) for each in declared.args if isinstance(each, ast.Constant)]
    long = [option for option in options if option.startswith("--")]
    return (long or options or [""])[0].lstrip("-").replace("-", "_")


def _first_option_in(options: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the first of these options that is among a command's arguments, else None."""
    names = {argument.partition("=")[0] for argument in arguments}
    return next((option for option in options if option in names), None)


def _literal_flag(option: str, value: str) -> Flag | None:
    """Return an option with a literal as its value; None for a dtype, as the script may use other names for it."""
    return None if value.startswith("torch.") else Flag(option=option, value=str(ast.literal_eval(value)))


def _last_of_forward(parent: ast.AST, block: list[ast.stmt], first: int) -> int | None:
    """Return the index of the last statement from `first` on that belongs to the loss, None if there is none.

    It comes before the backward pass in this block; in a block without one, it is the last statement if the block is
    the body of a function that returns, or of a with statement.
    """
    for place in range(first, len(block)):
        if any(
            isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _CALLS_AFTER_LOSS
            for node in ast.walk(block[place])
        ):
            while place > first + 1 and isinstance(block[place - 1], ast.Expr):  # not part of the loss
                place -= 1
            return place - 1 if place > first else None
    is_function = isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(block[-1], ast.Return)
    return len(block) - 1 if is_function or isinstance(parent, ast.With) else None


def _is_multiline_string(node: ast.AST) -> bool:
    """Whether a node is a string over several lines, which indentation would change."""
    is_text = isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )
    return is_text and node.lineno != node.end_lineno  # type: ignore[attr-defined]
