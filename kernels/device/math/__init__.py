"""Number formats, reductions in a warp and a cluster."""
