"""Whole searches on landscapes whose best setting is known: by how much they miss it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from closed_form import LIMIT_BYTES, SHAPES, ClosedForm, Shape, landscapes
from msgspec.structs import replace
from search_replay import search_replay

from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.search.ranking import PLATEAU

NAMES = [shape.name for shape in SHAPES]


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_without_noise_a_search_ends_on_the_plateau_of_the_best(shape: Shape) -> None:
    landscape = ClosedForm(shape, 0.0)
    found = search_replay(landscape, seed=0)
    assert landscape.regret(found.trace[-1][1]) <= PLATEAU + 0.01
    num_trials = sum(record.purpose == "search" for _, record in found.records)
    assert num_trials < len(landscape.space().candidates), "the grid would have been as cheap"


@pytest.mark.slow
def test_with_noise_it_ends_near_it_in_the_mean() -> None:
    missed = [
        max(0.0, landscape.regret(search_replay(landscape, seed).trace[-1][1]) - PLATEAU)
        for name, landscape in landscapes().items()
        if name.endswith(", 5 %")
        for seed in range(3)
    ]
    assert sum(missed) / len(missed) < 0.03


def test_a_process_is_what_the_form_says() -> None:
    chance = random.Random(0)
    for name, landscape in landscapes(with_variants=True).items():
        for setting in chance.sample(list(landscape.rates), 10):
            outcome = landscape.draw(setting, chance).outcome
            if isinstance(outcome, Failure):
                assert landscape.rate(setting) == 0
                assert landscape.shape.memory_bytes(setting) > LIMIT_BYTES
                continue
            assert isinstance(outcome, Measurement)
            error = abs(outcome.samples_per_second / landscape.rate(setting) - 1)
            assert error <= 5 * landscape.noise + 1e-9, name
        best = max(landscape.rates, key=lambda s: landscape.rates[s])
        assert landscape.regret(best) == 0


def test_further_dimensions_workers_and_accumulation_change_what_they_are_said_to() -> None:
    found = {shape.name: ClosedForm(shape, 0.0, with_variants=True) for shape in SHAPES}
    plain = Setting(precision="bf16", batch_size=64)
    bound = found["loader-bound"]
    assert bound.rate(replace(plain, num_workers=4)) > 1.5 * bound.rate(plain)
    assert bound.shape.data_seconds(replace(plain, num_workers=4)) < bound.shape.data_seconds(plain)
    launched = found["launch-bound"]
    assert launched.rate(replace(plain, compile="default")) > 1.2 * launched.rate(plain)
    moved = found["wall that accumulation moves"]
    assert moved.rate(replace(plain, batch_size=192)) > 0
    assert moved.rate(replace(plain, precision="fp32", batch_size=192)) > 0
    assert moved.rate(replace(plain, precision="fp32", batch_size=96, accumulation_steps=2)) == 0


def test_a_wait_for_data_that_compiling_uncovers_is_looked_at() -> None:
    shape = changed("plateau", loading_seconds=1.8e-5, gains={"default": 0.3, "channels_last": 0.6})
    landscape = ClosedForm(shape, 0.0, with_variants=True)
    found = search_replay(landscape, 0, 300.0)
    assert landscape.regret(found.trace[-1][1]) <= PLATEAU + 0.01


def test_with_further_dimensions_what_the_choice_hangs_on_is_measured_again() -> None:
    found = search_replay(ClosedForm(SHAPES[0], 0.15, with_variants=True), 0, 300.0)
    tried = Counter(record.candidate for _, record in found.records if record.purpose == "search")
    assert max(num for setting, num in tried.items() if setting.active_variants) > 1


def changed(name: str, **changes: Any) -> Shape:
    return dataclasses.replace(next(shape for shape in SHAPES if shape.name == name), **changes)
