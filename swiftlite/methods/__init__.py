"""Training methods: one record each, as families and engines have one. No torch."""
