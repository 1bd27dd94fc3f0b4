from __future__ import annotations

from typing import Any

import pytest
import typer
from msgspec.structs import replace

from autotune_amp.cli.app import app
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.search.options import _OPTIONS, DEFAULT_NUM_STEPS, SEED_LIMIT, SearchOptions


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *[("budget", value) for value in ("60", None, True, 0, -1.0, float("nan"), float("inf"))],
        *[("trials", value) for value in ("3", 2.0, True, 0)],
        *[("device", value) for value in (None, 0, "gpu")],
        *[("devices", value) for value in ("", "cuda:0", "0,-1", (), (True,), 3)],
        *[("memory_fraction", value) for value in ("x", None, True, 0.0, 1.1)],
        *[("memory_limit", value) for value in ("16 gigs", "", True, 0, -1, 1.5, "-1GiB")],
        *[("study", value) for value in (3, "", "..", "a/b")],
        *[("effective_batch_size", value) for value in ("64x", "", "0", 64.0, True, 0, "none")],
        *[("seed", value) for value in (None, "0", 1.0, False, -1, SEED_LIMIT, 2**32)],
        *[("out", value) for value in (None, 3)],
        *[("storage", value) for value in (3, b"sqlite://")],
        *[("batch_size", value) for value in (32, (8,), (8, 16, 32), ("a", "b"), (True, 8), {8: 16}, "16:8")],
        *[("baseline", value) for value in (32, ("fp32",), ("fp32", 0), ("fp32", 1.5), {"fp32": 32})],
        *[("precision", value) for value in (32, True, ["fp33"], [16], {"fp32"})],
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_option(name: str, given: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        SearchOptions.from_user(**{name: given})
    shown = given[0] if name == "precision" and isinstance(given, list) else given
    assert raised.value.message.startswith(f"--{name.replace('_', '-')} is {shown!r}; it must be ")
    assert raised.value.next_step


def test_what_makes_sense_is_taken() -> None:
    taken = {"memory_fraction": 1, "seed": SEED_LIMIT - 1, "batch_size": [8, 16], "baseline": ("bf16", 8)}
    assert isinstance(SearchOptions.from_user(precision=(), **taken), SearchOptions)  # type: ignore[arg-type]
    for given, meant in (("free", "free"), ("64", 64)):
        assert SearchOptions.from_user(effective_batch_size=given).effective_batch_size == meant
    limits: list[tuple[Any, int | None]] = [("16GiB", 2**34), (1000, 1000), ("1 kB", 1000), (None, None)]
    for limit, num_bytes in limits:
        assert SearchOptions.from_user(memory_limit=limit).memory_limit == num_bytes
    assert isinstance(SearchOptions.from_user(budget=60).budget_seconds, float), "the cache knows 60 and 60.0 as one"


@pytest.mark.parametrize(("limit", "expected"), [(None, 500), (700, 500), (400, 400)])
def test_a_trial_may_take_its_share_and_no_more_than_the_limit(limit: int | None, expected: int) -> None:
    options = SearchOptions.from_user(memory_fraction=0.5, memory_limit=limit)
    assert options.limit_bytes(1000) == expected


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({}, "auto"),
        ({"device": "cuda:1"}, "cuda:1"),
        ({"devices": "all"}, "cuda"),
        ({"devices": "3,1"}, "cuda:3"),
    ],
)
def test_the_first_of_several_devices_is_the_one_that_is_probed(given: dict[str, Any], first: str) -> None:
    assert SearchOptions.from_user(**given).first_device == first


def test_several_devices_are_cards() -> None:
    with pytest.raises(InvalidRequestError, match="devices"):
        SearchOptions.from_user(devices=(0, 1), device="cpu")


@pytest.mark.parametrize("given", [{"devices": "all"}, {"num_ranks": 2}, {"device": "cuda:1"}, {"device": "mps"}])
def test_several_ranks_are_ours_alone_on_the_first_devices(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="ranks"):
        SearchOptions.from_user(ranks=2, **given)


def test_ranks_share_the_effective_batch_evenly() -> None:
    assert SearchOptions.from_user(effective_batch_size=96, num_ranks=3).effective_batch_size == 96
    with pytest.raises(InvalidRequestError, match="a multiple of the 3 ranks"):
        SearchOptions.from_user(effective_batch_size=64, num_ranks=3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, DEFAULT_NUM_STEPS),
        ({"steps": 500}, 500),
        ({"samples": 64_000}, 1000),
        ({"samples": 64_001}, 1001),
        ({"samples": 64 * 10**12}, 10**12),
    ],
)
def test_the_training_to_come_in_optimizer_steps(given: dict[str, Any], expected: int) -> None:
    assert SearchOptions.from_user(**given).horizon_steps(effective_batch_size=64) == expected


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"budget": 30, "trials": 4, "device": "cuda:1", "seed": 7, "memory_fraction": 0.5},
        {"precision": ["fp32", "bf16"], "batch_size": "8:256", "effective_batch_size": 64, "baseline": "fp32:32"},
        {"memory_limit": "16GiB"},
        {"effective_batch_size": "free", "try_": "none", "objective": "memory"},
        {"devices": "all"},
        {"devices": "2,0", "device": "cuda"},
        {"try_": ["compile", "channels_last"], "steps": 1000, "price_per_hour": 2.5},
        {"samples": 10**6, "study": "mine", "out": "elsewhere", "storage": "sqlite://"},
    ],
)
def test_as_arguments_of_the_command_line_they_ask_for_the_same(given: dict[str, Any]) -> None:
    options = SearchOptions.from_user(**given)
    command: Any = typer.main.get_command(app)
    asked = command.commands["search"].make_context("search", options.arguments()).params
    again = SearchOptions.from_user(**{name: value for name, value in asked.items() if name in _OPTIONS})
    assert again == replace(options, study=None, out="studies", storage=None)
    assert ("try_" in given) == ("--try" in options.arguments())
