"""Programs as text: listings, comparisons, snapshots."""
