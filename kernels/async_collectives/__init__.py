"""All-gathers and reduce-scatters that run beside what follows them: copy engines send, no SM takes part."""
