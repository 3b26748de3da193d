"""Goodput of long runs: time lost to repeated work, checkpoints, restarts, and waits for repairs.

Failures come at random (exponentially), on average every M seconds of the whole machine. Work is cut by checkpoints
that take d seconds into segments of t seconds; after a failure the machine takes R seconds to restart, during which it
may fail again, and repeats its segment:

    expected seconds of a segment    M e^(R/M) (e^((t + d)/M) - 1)
    best segment                     (1 - t/M) e^((t + d)/M) = 1;  t is about sqrt(2 d M) where d is small

A failed part that takes G seconds to repair is replaced by a spare, if there is one. With k spares the machine stands
still while more than k are under repair, a share of the time given by Erlang's formula for a = G/M:

    (a^(k+1) / (k+1)!) / sum over i = 0 .. k+1 of a^i / i!

Sources: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006; Young,
CACM 17(9), 1974; Kleinrock, "Queueing Systems", 1975, section 3.6 (Erlang's loss formula).
"""

from __future__ import annotations

import math

from hardware.checks import HardwareError, amount, whole

MOST_SPARES = 1_000_000


def segment_seconds(
    work_seconds: float, checkpoint_seconds: float, restart_seconds: float, mean_time_between_failures: float
) -> float:
    """Expected time to finish one segment of work and its checkpoint, with all repetitions and restarts.

    Raises: HardwareError for negative or non-finite times, or where failures are so frequent that it never ends.
    Example:
      >>> f"{segment_seconds(3600, 60, 300, 86400):.0f} s"
      '3752 s'

    Source: Daly 2006, equation 18.
    """
    mean = amount("mean_time_between_failures", mean_time_between_failures, positive=True)
    attempt = amount("work_seconds", work_seconds) + amount("checkpoint_seconds", checkpoint_seconds)
    restart = amount("restart_seconds", restart_seconds)
    try:
        seconds = mean * math.exp(restart / mean) * math.expm1(attempt / mean)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise HardwareError(
            f"failures every {mean:g} s let no segment of {attempt:g} s end; make checkpoints more often"
        )
    return seconds


def best_segment_seconds(checkpoint_seconds: float, mean_time_between_failures: float) -> float:
    """The work between checkpoints that minimises the expected run time; it does not depend on restart time.

    Raises: HardwareError unless both are positive and finite.
    Example:
      >>> round(best_segment_seconds(60, 86400)), round(young_seconds(60, 86400))
      (3180, 3220)

    Source: module docstring; the root by bisection, a small one by its series.
    """
    checkpoint = amount("checkpoint_seconds", checkpoint_seconds, positive=True)
    mean = amount("mean_time_between_failures", mean_time_between_failures, positive=True)
    young = math.sqrt(2 * checkpoint) / math.sqrt(mean)
    if young < 1e-3:  # where the logarithm cancels, the first terms of the series
        return mean * young * (1 - young / 3 + young**2 / 36)
    low, high = 0.0, 1.0  # t / M
    for _ in range(50):
        middle = (low + high) / 2
        if math.log1p(-middle) + middle + checkpoint / mean > 0:
            low = middle
        else:
            high = middle
    return low * mean


def young_seconds(checkpoint_seconds: float, mean_time_between_failures: float) -> float:
    """Young's estimate of `best_segment_seconds`: sqrt(2 d M)."""
    amount("checkpoint_seconds", checkpoint_seconds)
    return math.sqrt(2 * checkpoint_seconds * amount("mean_time_between_failures", mean_time_between_failures))


def waiting_share(spares: int, repair_seconds: float, mean_time_between_failures: float) -> float:
    """Share of the time for which a machine stops because more parts are under repair than it has spares.

    Args:
      spares: number of spare parts.
      repair_seconds: time to repair a part; several are repaired at once.
      mean_time_between_failures: seconds between failures of any running part.
    Raises: HardwareError for negative or non-finite values.
    Example:
      >>> [f"{waiting_share(spares, 4 * 3600, 24 * 3600):.2%}" for spares in range(3)]
      ['14.29%', '1.18%', '0.07%']

    Source: module docstring.
    """
    repair = amount("repair_seconds", repair_seconds)
    mean = amount("mean_time_between_failures", mean_time_between_failures, positive=True)
    if whole("spares", spares) > MOST_SPARES:
        raise HardwareError(f"spares must be at most {MOST_SPARES:,}, not {spares:,}")
    if not repair / mean:
        return 0.0
    inverse = 1.0
    for servers in range(1, spares + 2):  # Erlang's recursion over servers
        inverse = 1 + inverse * servers / (repair / mean)
    return 1 / inverse
