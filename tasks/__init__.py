"""One file per step: a thin Prefect skin over a plain function. Never imports torch."""
