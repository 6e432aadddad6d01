"""All-gathers and reduce-scatters that run concurrently with what follows them: copy engines send, no SM takes part."""
