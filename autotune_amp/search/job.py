"""The training to come in hours and money, from the throughput that was promised. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.core.evidence import Job

if TYPE_CHECKING:
    from autotune_amp.core.config import AmpConfig
    from autotune_amp.core.evidence import Evidence
    from autotune_amp.search.options import SearchOptions

_SECONDS_PER_HOUR = 3600


def job(config: AmpConfig, evidence: Evidence, options: SearchOptions) -> Job | None:
    """Hours and price of the training that the options name, None where they name none.

    Hours are samples / (samples per second of a rank * ranks); the interval is that of the throughput, inverted. Steps
    that fp16's loss scaler skips are among the steps and take as long as the others: they are not made up for. A number
    of steps is taken as steps of the recommended config, and the baseline is timed over the same number of samples.
    """
    effective = config.batch_size * config.accumulation_steps * options.num_ranks
    if options.num_samples is not None:
        num_samples, num_steps = options.num_samples, -(-options.num_samples // effective)
    elif options.num_steps is not None:
        num_samples, num_steps = options.num_steps * effective, options.num_steps
    else:
        return None

    def hours(samples_per_second: float) -> float:
        return num_samples / (samples_per_second * options.num_ranks) / _SECONDS_PER_HOUR

    slowest, fastest = evidence.samples_per_second_interval
    interval = hours(fastest), hours(slowest)
    todays, price = evidence.baseline.samples_per_second, options.price_per_hour
    return Job(
        num_steps=num_steps,
        num_samples=num_samples,
        hours=hours(evidence.samples_per_second),
        hours_interval=interval,
        baseline_hours=None if todays is None else hours(todays),
        price_per_hour=price,
        price=None if price is None else price * hours(evidence.samples_per_second),
        price_interval=None if price is None else (price * interval[0], price * interval[1]),
    )
