"""The policy under half a million random signals, every answer drawn too: what must hold whatever happens."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any, get_args

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.runtime.policy import DWELL_STEPS, MAX_PROMOTIONS, NUM_PROBATION_STEPS, PROMOTION_STEPS, Policy
from autotune_amp.runtime.policy_state import Action, Finding, MoveKind, Signal

LADDERS: tuple[tuple[Precision, ...], ...] = (
    ("fp16",),
    ("fp16", "fp32"),
    ("fp16", "bf16", "fp32"),
    ("fp16", "bf16", "tf32", "fp32"),
    ("bf16", "fp32"),
    ("fp32",),
)
# How likely an update overflows, has a non-finite loss, brings a sample of what is lost; and how long that lasts.
REGIMES = {
    "clean": (0.0, 0.0, 0.0, 20_000),
    "clean, sampled": (0.0, 0.0, 0.01, 5000),
    "noise": (0.05, 0.02, 0.1, 300),
    "anything": (0.3, 0.3, 0.3, 100),
    "overflow": (1.0, 0.0, 0.0, 60),
    "bad losses": (0.0, 1.0, 0.0, 30),
    "bad losses and overflow": (0.5, 0.8, 0.0, 30),
}


class Driver:
    """Drives a policy and a twin that is saved and loaded anew now and then; both must do the same for ever."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.rungs = draw.choice(LADDERS)
        self.loss_scale = LossScale(
            init_scale=2.0 ** draw.randint(-4, 20),
            backoff_factor=draw.choice((0.5, 0.5, 0.25, 0.7)),
            growth_factor=draw.choice((2.0, 2.0, 1.3)),
            growth_interval=draw.choice((1, 2, 10, 100, 2000)),
            hysteresis=draw.randint(1, 3),
            min_scale=draw.choice((None, None, 2.0**-5)),
        )
        self.options = {"can_rerun": draw.random() < 0.7, "promotes": draw.random() < 0.7}
        self.unfit = [rung for rung in self.rungs[1:] if draw.random() < 0.15]
        self.refusal = draw.choice((0.0, 0.2))
        self.hand = draw.choice((0.0, 0.0, 0.0005))
        self.policy, self.twin = self.fresh(), self.fresh()
        self.picked_by_hand: set[int] = set()
        self.moved: Counter[str] = Counter()
        self.num_bad = 0  # in a row, since the last move
        self.num_undone = 0  # demotions taken back because it was not precision
        self.last_down = self.last_promotion = self.last_revert = -math.inf  # in updates

    def fresh(self) -> Policy:
        policy = Policy(self.rungs, self.loss_scale, **self.options)
        for rung in self.unfit:
            policy.withdraw(rung, "too slow")
        return policy

    def resume(self) -> None:
        saved = self.policy.state_dict()
        self.twin = self.fresh()
        self.twin.load_state_dict(json.loads(json.dumps(saved)))
        assert self.twin.state_dict() == saved

    def both(self, method: str, *args: Any, **more: Any) -> Action | None:
        result: Action | None = getattr(self.policy, method)(*args, **more)
        assert getattr(self.twin, method)(*args, **more) == result, f"{method} differs after a save and load"
        return result

    def live(self, regime: str, num_updates: int) -> None:
        draw = self.draw.random
        overflow, bad_loss, sampled, _ = REGIMES[regime]
        loss = self.draw.choice((None, None, None, -1.0, 0.1, 1.0, 10.0, math.inf)) if num_updates < 2000 else None
        clean = Signal(loss=loss)
        for _ in range(num_updates):
            signal = clean
            if overflow or bad_loss or sampled:
                share = draw() ** 4 if draw() < sampled else None
                signal = Signal(draw() < overflow, draw() < bad_loss, share, loss)
            self.num_bad = self.num_bad + 1 if signal.overflow or signal.loss_nonfinite else 0
            action = self.policy.observe(signal)
            assert self.twin.observe(signal) == action, "differs after a save and load"
            while action is not None:
                action = self.answer(action)
            self.check()
            if draw() < self.hand:
                self.move_by_hand()

    def check(self) -> None:
        policy = self.policy
        assert 0 <= policy.rung < len(self.rungs)
        assert policy.precision not in policy.withdrawn or policy.rung in self.picked_by_hand
        rule = policy.scale
        assert MIN_LOSS_SCALE <= rule.floor <= rule.scale <= rule.max_scale < math.inf

    def answer(self, action: Action) -> Action | None:
        draw = self.draw.random
        if action.kind in ("stop", "warn"):
            return None
        if action.kind == "demotion" and draw() < self.refusal:
            return self.both("decline") if draw() < 0.5 else self.both("refuse", action, "out of memory")
        if action.kind == "probe":
            assert all(self.options.values()), "promoted unasked"
            return self.both("probed", action, is_finite=draw() < 0.9)
        if action.kind == "diagnose":
            assert self.options["can_rerun"]
            finding = Finding(
                reproduced=draw() < 0.9,
                is_precision=self.draw.choice((True, True, True, False, None)),
                finite_in=tuple(rung for rung in self.rungs if draw() < 0.8),
                pins=("layer",) if draw() < 0.2 else (),
            )
            return self.both("judge", action.reason, finding)
        return self.confirm(action)

    def confirm(self, move: Action) -> Action | None:
        policy = self.policy
        before, now = policy.rung, policy.num_updates
        follows = self.both("confirm", move)
        self.moved[move.kind] += 1
        if move.kind == "demotion":
            # A promotion that failed is undone at once; after a revert nothing moves before the dwell is over.
            assert before < policy.rung == move.rung
            assert now - self.last_revert >= DWELL_STEPS
            self.last_down = now
        elif move.kind == "promotion":
            assert policy.rung == move.rung < before
            assert now - max(self.last_down, self.last_revert, self.last_promotion) >= PROMOTION_STEPS
            self.last_promotion = now
        elif move.kind == "revert":
            assert policy.rung < before
            assert now - self.last_down == self.num_bad == NUM_PROBATION_STEPS
            self.last_revert = now
        elif move.kind == "not_precision" and policy.rung != before:
            # The demotion was made in error, as a tentative one that is reverted.
            assert policy.rung < before
            assert now - self.last_down < DWELL_STEPS
            self.last_revert = now
            self.num_undone += 1
        else:
            assert policy.rung == before
        if move.kind != "rescale":
            self.num_bad = 0
        num_ups = self.moved["revert"] + self.moved["promotion"] + self.num_undone
        assert self.moved["promotion"] <= MAX_PROMOTIONS
        assert self.moved["pin"] <= 1
        assert self.moved["demotion"] <= (len(self.rungs) - 1) * (1 + num_ups) or self.picked_by_hand
        return follows

    def move_by_hand(self) -> None:
        rung = self.draw.choice(self.rungs)
        self.both("move_by_hand", rung)
        self.picked_by_hand.add(self.policy.rung)
        self.last_down = self.last_promotion = self.last_revert = -math.inf
        self.num_bad = 0


def test_nothing_random_breaks_the_policy() -> None:
    draw = random.Random(0)
    num_left = 500_000
    moved: Counter[str] = Counter()
    most_promotions = 0
    while num_left > 0:
        driver = Driver(draw)
        for _ in range(draw.randint(1, 60)):
            regime = draw.choice(list(REGIMES))
            num_updates = draw.randint(1, REGIMES[regime][3])
            driver.live(regime, num_updates)
            num_left -= num_updates
            if draw.random() < 0.7:
                driver.resume()
        moved += driver.moved
        most_promotions = max(most_promotions, driver.moved["promotion"])
    assert set(moved) == set(get_args(MoveKind)), "some move was never tried"
    assert most_promotions >= MAX_PROMOTIONS - 1, "the cap on promotions was never near"
