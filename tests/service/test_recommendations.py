"""Recommendations from what was measured, on routes that are called directly, with a saved study."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute

from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.search.answer.decide import rerank_with_options
from autotune_amp.service.app import Ranking, create_app
from autotune_amp.service.jobs import Queue, UnknownError
from autotune_amp.service.runs import RunStore
from autotune_amp.service.searching import SearchThread
from autotune_amp.service.settings import Settings, Target

STUDY = Path(__file__).parents[1] / "golden/study"


class Measured:
    """A service that measured the saved study for its target `mlp`, with the options of `saved`."""

    def __init__(self, folder: Path) -> None:
        self.targets = {"mlp": Target(workload="a.py:f", device="cpu")}
        self.queue = Queue(f"sqlite:///{folder / 'queue.db'}", "here", 10)
        self.folder = folder
        self.saved = Recommendation.load(STUDY / "recommendation.json")
        self.study = folder / "studies" / self.saved.search.study
        shutil.copytree(STUDY, self.study)
        self.searches = SearchThread(Settings(targets=self.targets, folder=str(folder)), self.queue)

    def measure(self, recommendation: Recommendation, measured: float, **options: Any) -> str:
        """Save a search with these options as done, and return its ID."""
        id_ = self.searches.submit("mlp", options, "ann").id
        recommendation.save(self.folder / f"searches/{id_}.json")
        self.queue.change(id_, state="done", measured=measured)
        return id_

    def recommend(self, **ranking: Any) -> dict[str, Any]:
        app = create_app(self.searches, cast("RunStore", None))
        route = next(route for route in app.routes if getattr(route, "name", "") == "recommend")
        answer = cast("APIRoute", route).endpoint("mlp", Ranking(**ranking))
        found: dict[str, Any] = json.loads(answer.body)
        return found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Measured]:
    measured = Measured(tmp_path)
    yield measured
    measured.queue.close()


def test_what_the_search_was_asked_with_is_kept_unless_asked_otherwise(service: Measured) -> None:
    path = service.study / "recommendation.json"
    asked = rerank_with_options(service.saved, path, objective="memory", steps=100, price_per_hour=2.0)
    service.measure(asked, 1.0)
    kept, other = service.recommend()["recommendation"], service.recommend(objective="speed")["recommendation"]
    assert (kept["objective"], kept["job"]["num_steps"], kept["job"]["price_per_hour"]) == ("memory", 100, 2.0)
    assert (other["objective"], other["job"]["num_steps"]) == ("speed", 100)
    limited = service.recommend(precision_allowed=["fp32"], memory_limit="1GiB")["recommendation"]
    assert (limited["config"]["precision"], limited["options"]["memory_limit"]) == ("fp32", 1 << 30)


def test_the_newest_search_of_this_program_that_covers_the_precisions_answers(service: Measured) -> None:
    every = service.measure(service.saved, 1.0, seed=1)
    few = service.measure(service.saved, 2.0, precision=["fp32", "bf16"])
    assert service.recommend()["search"] == every
    assert service.recommend(precision_allowed=["fp32"])["search"] == few
    assert service.recommend(precision_allowed=["fp16", "fp32"])["search"] == every
    service.measure(service.saved, 3.0, precision=list(PRECISIONS))
    assert service.recommend()["measured"] == 3.0
    service.targets["mlp"] = Target(workload="other.py:f", device="cpu")
    with pytest.raises(UnknownError):
        service.recommend()
    of_other = service.measure(service.saved, 0.5, precision="fp32")
    assert service.recommend()["search"] == of_other
