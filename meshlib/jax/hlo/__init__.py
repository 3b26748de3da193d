"""Compiled modules as XLA prints them: parsed, with the collectives that they run."""

from __future__ import annotations

from meshlib.core.errors import ProgramError
from meshlib.jax.hlo.collectives import collectives_of
from meshlib.jax.hlo.text import damage_as_error, parse


def sent_bytes(text: str) -> float:
    """Bytes that a device sends on rings in one run of a compiled module, loops included.

    Raises: ProgramError for a collective in a loop whose trips depend on data.

    >>> sent_bytes('''HloModule m, num_partitions=4
    ... ENTRY %main (p: f32[8]) -> f32[8] {
    ...   %p = f32[8]{0} parameter(0)
    ...   ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
    ... }''')
    32.0
    """
    total = 0.0
    with damage_as_error("sent_bytes"):
        for c in collectives_of(parse(text, "sent_bytes")):
            if c.count is None:
                raise ProgramError(f"sent_bytes: {c.kind} '{c.name}' runs in a loop whose trips depend on data")
            total += c.count * c.sent_bytes
    return total
