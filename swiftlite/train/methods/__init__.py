"""The training methods: what each needs of torch. Their records are in `swiftlite/methods`."""
