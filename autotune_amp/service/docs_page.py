"""Page that lists the routes of the service from its OpenAPI document; unlike FastAPI's own, it loads no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = (
    "body { font-family: sans-serif; margin: 2em auto; max-width: 60em } table { border-collapse: collapse }"
    " td, th { text-align: left; vertical-align: top; padding: .2em 1em .2em 0 }"
)


def docs_page(openapi: Mapping[str, Any]) -> str:
    """Return the page with the methods, paths, descriptions and fields of all requests in an OpenAPI document."""
    title = escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    schemas = openapi.get("components", {}).get("schemas", {})
    routes = "".join(
        _section(method, path, operation, schemas)
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n"
        f'<p><a href="/openapi.json">OpenAPI document</a></p>\n{routes}</body>\n</html>\n'
    )


def _section(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [
        (each["name"], each["in"], _type(each["schema"]), each["schema"].get("description", ""))
        for each in operation.get("parameters", [])
    ]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        rows += [(name, "body", kind, text) for name, kind, text in _fields(content["schema"], schemas)]
    cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    head = "<tr><th>Field</th><th>In</th><th>Type</th><th></th></tr>"
    table = f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>" if cells else ""
    description = escape(operation.get("description", operation.get("summary", "")))
    return f"<h2>{escape(method.upper())} {escape(path)}</h2>\n<p>{description}</p>\n{table}\n"


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and description of the fields of a body, and of the objects in it."""
    for name, field in _resolved(schema, schemas).get("properties", {}).items():
        inner = _resolved(field.get("items", field), schemas)
        if "properties" in inner:
            yield prefix + name, "list of objects" if "items" in field else "object", inner.get("description", "")
            yield from _fields(inner, schemas, f"{prefix}{name}{'[]' if 'items' in field else ''}.")
        else:
            yield prefix + name, _type(field), field.get("description", "")


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    return found


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    return f"list of {_type(schema['items'])}" if "items" in schema else str(schema.get("type", "any"))
